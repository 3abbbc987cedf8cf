"""Find a run by its folder, its name or its job id.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path

from hpcenv.errors import Command, FileUnusable, HpcenvError, RunNotFound, UsageError
from hpcenv.project import toml_files
from hpcenv.runs.entries import (
    SWEEP_RECORD,
    Damaged,
    Entry,
    Run,
    Submitted,
    Sweep,
    Unrecorded,
    is_element,
    is_interrupted_submission,
    may_have_been_submitted,
    not_submitted,
    open_entry,
    open_folder,
    open_run,
    open_submitted,
    runs_of,
)


def find_run(start: Path, word: str | None, *, runs: str | None = None) -> Run:
    """Find a run by its folder, its name or its job id, or find the latest run.

    Args:
        start: current directory. The project is in this folder or in a folder above.
        word: run folder, run name or job id; None or `latest` for the latest run. `NAME/0003`
            is one run of the sweep NAME.
        runs: folder of runs, if it is not the project's folder of runs.

    Raises:
        RunNotFound: no run matches. The error names the folder that was searched.
        RecordInvalid: the matching run is damaged. No other run is returned instead.
        UsageError: `word` is a sweep of several runs.
    """
    run = find_one(start, word, runs=runs)
    # If the manifest could not be read, read it again, to raise the error.
    return run if isinstance(run, Run) else open_run(run.folder.path)


def find_one(start: Path, word: str | None, *, runs: str | None = None) -> Submitted:
    """Find a run like `find_run`, even if its manifest cannot be read. Cancel and wait need only the job id."""
    entry = find_submitted(start, word, runs=runs)
    if isinstance(entry, Sweep):
        name = entry.folder.name
        raise UsageError(
            f"`{name}` is a sweep of {len(entry.elements)} runs",
            why="this command needs one run",
            hint=(
                f"name one of them: {name}/{entry.elements[0].folder.path.name}; ",
                Command("hpcenv", "list", f"{name}"),
                " lists them",
            ),
        )
    return entry


def find(start: Path, word: str | None, *, runs: str | None = None) -> Run | Sweep:
    """Find a run like `find_run`, or a sweep by its folder or name."""
    entry = find_submitted(start, word, runs=runs)
    return entry if isinstance(entry, (Run, Sweep)) else open_run(entry.folder.path)


def find_submitted(start: Path, word: str | None, *, runs: str | None = None) -> Submitted | Sweep:
    """Find a run like `find_one`, or a sweep."""
    entry = find_any(start, word, runs=runs)
    if isinstance(entry, Unrecorded):
        raise not_submitted(entry.folder.path)
    return entry


def find_any(start: Path, word: str | None, *, runs: str | None = None) -> Submitted | Sweep | Unrecorded:
    """Find a run or sweep like `find_submitted`, even if its submission was not recorded."""
    if word not in (None, "latest"):
        assert word is not None
        candidate = Path(os.path.abspath(start / word))
        if "/" in word:
            _require_access(candidate)
        known = any(
            os.path.lexists(candidate / record) for record in (SWEEP_RECORD, "manifest.json", "submission.json")
        )
        if known or is_interrupted_submission(candidate):
            return open_entry(candidate)
    parent = runs_folder(start, runs, word=word)
    folders = sorted(_entry_paths(parent), key=_time_submitted, reverse=True)
    if word in (None, "latest"):
        if not folders:
            raise RunNotFound(
                f"no runs in `{parent}`", hint=Command("hpcenv", "submit", "SCRIPT", "--nodes", "N", "--gpus", "G")
            )
        # "Latest" means the latest training. A job of `hpcenv verify --nodes` or a session is the latest run only if
        # there is no training.
        return open_entry(next((folder for folder in folders if _may_be_meant(folder)), folders[0]))
    assert word is not None
    # A name has priority over a job id. Slurm may reuse a job id after years. Then the newest run is used.
    for folder in folders:
        if word == folder.name:
            return open_entry(folder)
    element = parent / word
    if "/" in word and is_element(element) and element.parent.parent == parent:
        return open_submitted(element)
    for folder in folders:
        run = _find_job(folder, word)
        if run is not None:
            return run
    why = f"`{word}` is not a run folder, and it is not a run name or job id in {parent}"
    listed = Command("hpcenv", "list", *(() if runs is None else ("--runs-dir", runs)))
    names = [folder.name for folder in folders]
    near = next((name for name in names if name.startswith(word)), None)
    near = near or next(iter(difflib.get_close_matches(word, names, n=1)), None)
    perhaps = "" if near is None else f"perhaps you meant `{near}`; "
    missing = RunNotFound(f"no run `{word}`", why=why, hint=(perhaps, listed, " lists the runs"))
    missing.word = word
    raise missing


def _require_access(path: Path) -> None:
    """Report a folder as not accessible, rather than as missing, if the user has no permission to read it.

    Raises:
        FileUnusable: permission denied.
    """
    try:
        os.lstat(path / "manifest.json")
    except PermissionError as error:
        raise FileUnusable(
            f"cannot look into `{path}`", why=error.strerror, hint=Command("ls", "-ld", str(path))
        ) from error
    except (OSError, ValueError):
        return


def find_all(start: Path, words: Sequence[str], *, runs: str | None = None) -> list[Submitted]:
    """Find several runs, each once. A sweep means all runs of the sweep. No words mean the latest run.

    Raises:
        RunNotFound, RecordInvalid: as for `find_submitted`, if any of the runs is missing or damaged.
    """
    result: dict[Path, Submitted] = {}
    for word in words or (None,):
        for run in runs_of(find_submitted(start, word, runs=runs)):
            result[run.folder.path] = run
    return list(result.values())


def runs_folder(start: Path, runs: str | None = None, *, word: str | None = None) -> Path:
    """Return the folder of runs: `runs`, or the project's folder of runs.

    Only one key of hpcenv.toml is read, and the file is not validated. So runs are found even if the
    rest of that file is invalid.

    Args:
        start: current directory.
        runs: folder of runs, if it is not the project's folder of runs.
        word: name of the run, for the error message.

    Raises:
        RunNotFound: no project contains `start`, or its hpcenv.toml cannot be read, or `runs` does not exist.
        FileUnusable: `runs` cannot be read.
    """
    start = Path(os.path.abspath(start))
    if runs is not None:
        folder = Path(os.path.abspath(start / runs))
        _require_folder(folder)
        return folder
    spec = next((path for folder in (start, *start.parents) if (path := folder / _SPEC).is_file()), None)
    what = f"no run `{word}`" if word else "no runs: this is not a project"
    if spec is None:
        raise RunNotFound(
            what, why=f"no `{_SPEC}` in `{start}` or above it", hint="name a run folder, or --runs-dir DIR"
        )
    try:
        paths = toml_files.read(spec, error=RunNotFound).get("paths")
    except RunNotFound as error:
        raise RunNotFound(what, why=f"{error.what}: {error.why}", hint="name a run folder") from error
    named = paths.get("runs") if isinstance(paths, dict) else None
    return spec.parent / (named if isinstance(named, str) and named else "runs")


_SPEC = "hpcenv.toml"


def _require_folder(folder: Path) -> None:
    try:
        os.scandir(folder).close()
    except (FileNotFoundError, NotADirectoryError) as error:
        hint = "--runs-dir takes the folder that contains the run folders"
        raise RunNotFound(f"the folder of runs `{folder}` does not exist", why=error.strerror, hint=hint) from error
    except OSError as error:
        raise FileUnusable(f"cannot read the folder of runs `{folder}`", why=error.strerror) from error


def list_runs(parent: Path) -> list[Entry]:
    """Return the entries of a folder of runs, the newest first. Slurm is not asked."""
    dated: list[tuple[float, Entry]] = []
    for folder in _entry_paths(parent):
        entry = open_folder(folder)
        if isinstance(entry, (Unrecorded, Damaged)):
            moment = entry.changed
        elif isinstance(entry, Sweep):
            moment = max((element.submission.submitted for element in entry.elements), default=0.0)
        else:
            moment = entry.submission.submitted
        dated.append((moment, entry))
    dated.sort(key=lambda pair: pair[0], reverse=True)
    return [entry for _, entry in dated]


def _entry_paths(parent: Path) -> list[Path]:
    """Return the run folders and sweeps in a folder of runs. Hidden folders, which are being removed, are left out."""
    try:
        with os.scandir(parent) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".")]
    except OSError:
        return []
    return [
        parent / name
        for name in names
        if any(os.path.lexists(parent / name / record) for record in ("submission.json", SWEEP_RECORD))
        or may_have_been_submitted(parent / name)
    ]


def _time_submitted(folder: Path) -> float:
    """Return when a run was submitted. If this time is unknown, return when the run's folder was changed last."""
    entry = open_folder(folder)
    if isinstance(entry, Submitted):
        return entry.submission.submitted
    if isinstance(entry, Sweep):
        return max((element.submission.submitted for element in entry.elements), default=0.0)
    return entry.changed


def _find_job(folder: Path, word: str) -> Submitted | Sweep | None:
    """Return the run in a folder if it has this job id or run name; None for a different or a damaged run."""
    entry = open_folder(folder)
    if isinstance(entry, (Damaged, Unrecorded)):
        return None
    if isinstance(entry, Sweep):
        for element in entry.elements:
            if word in element.job_ids:
                return _try_open(element.folder.path)
        array_ids = {job_id.partition("_")[0] for element in entry.elements for job_id in element.job_ids}
        return entry if word in array_ids else None
    # If several users keep their runs in one folder, the name of a session means the session of this user.
    own = entry.submission.session if os.stat(folder).st_uid == os.geteuid() else None
    return _try_open(folder) if word in (*entry.job_ids, entry.submission.run, own) else None


def _may_be_meant(folder: Path) -> bool:
    entry = open_folder(folder)
    return not (isinstance(entry, Submitted) and (entry.submission.verifies or entry.submission.session))


def _try_open(folder: Path) -> Submitted | None:
    try:
        return open_submitted(folder)
    except HpcenvError:
        return None
