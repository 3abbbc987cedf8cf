"""`--resume-from`: find the checkpoint from which a run continues, and compare the new run with the checkpoint.

Runs on: LOGIN NODE. In the job, `hpcenv.training.resume_path` gives the path of the checkpoint to the script, and
compares the run with the checkpoint again.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hpcenv.errors import FileUnusable, RunNotFound
from hpcenv.incontainer import provenance
from hpcenv.incontainer.provenance import CHECKPOINTS
from hpcenv.launch.run_variables import commit_of
from hpcenv.project.context import Context
from hpcenv.project.lockfile import Lockfile
from hpcenv.records.manifest import WITHOUT_RANKS, Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.runs.find import find_run
from hpcenv.submission.plan import EarlierRuns, Request
from hpcenv.submission.request import SubmitOptions


def find_checkpoint(options: SubmitOptions, context: Context, earlier: EarlierRuns) -> Path | None:
    """Return the absolute path of the checkpoint that `--resume-from` names; None without the option.

    If the option names a run or a folder with checkpoints, the newest checkpoint is returned. If the new run waits for
    the named run (`--after`), the folder of checkpoints is returned. The ranks then use the newest checkpoint when they
    start.

    Raises:
        RunNotFound: there is no path and no run with this name.
        FileUnusable: the run or the folder has no checkpoint.
    """
    word = options.resume_from
    if word is None:
        return None
    path = Path(os.path.abspath(context.cwd / os.path.expanduser(word)))
    if not os.path.lexists(path) or RunFolder(path).manifest.is_file():
        run = _run_of(word, options, context)
        if run.path in earlier.going:
            return run.checkpoints
        path = run.checkpoints
    if path.is_dir() and provenance.step_of(path) is None:
        newest = provenance.newest_checkpoint(path)
        # A checkpoint may be a folder that another library wrote. This folder may have any name.
        if newest is None and (path.name == CHECKPOINTS or not _has_content(path)):
            raise _no_checkpoint(word, path)
        path = newest or path
    if not path.exists():
        raise _no_checkpoint(word, path)
    if not os.access(path, os.R_OK):
        raise FileUnusable(f"cannot read the checkpoint `{path}`", why="--resume-from names it; you may not read it")
    return path


def _run_of(word: str, options: SubmitOptions, context: Context) -> RunFolder:
    try:
        return find_run(context.cwd, word, runs=options.runs_dir).folder
    except RunNotFound as error:
        why = "\n".join(filter(None, ("--resume-from takes a run, or the path of a checkpoint", error.why)))
        raise error.changed(why=why) from error


def _has_content(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except OSError as error:
        raise FileUnusable(f"cannot read the checkpoint `{folder}`", why=error.strerror) from error


def _no_checkpoint(word: str, folder: Path) -> FileUnusable:
    return FileUnusable(
        f"`--resume-from {word}`: there is no checkpoint",
        why=f"looked in {folder} for step-N.pt and step-N, as `hpcenv.training.save` names them",
        hint="name the file or folder of a checkpoint: --resume-from PATH",
    )


def compare(checkpoint: Path | None, locked: Lockfile, request: Request, manifest: Manifest) -> list[str]:
    """Return a note for each value that was different when the checkpoint was written, for example the world size.

    With `--launcher none` and `--launcher ray`, the program itself decides how many ranks there are. So the world size
    is not compared.
    """
    if checkpoint is None:
        return []
    if checkpoint.name == CHECKPOINTS:
        return [f"--resume-from {checkpoint.parent.name}: its newest checkpoint is compared when the ranks start"]
    torch = str(locked.facts.get("torch.version", ""))
    now: dict[str, Any] = {
        "torch": torch if re.match("[0-9]", torch) else None,
        "world_size": None if manifest.launch.launcher in WITHOUT_RANKS else request.nodes * request.nproc_per_node,
        "fingerprint": request.fingerprint or None,
        "commit": commit_of(manifest.source) or None,
    }
    return [f"--resume-from {line}" for line in provenance.judge(checkpoint, now)]
