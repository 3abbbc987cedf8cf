"""The name and the folder of a run. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from hpcenv.errors import UsageError, WouldOverwrite
from hpcenv.project.context import Context
from hpcenv.project.workspace import Workspace
from hpcenv.submission.request import Cluster, SubmitOptions

# A run must not have the form of a job id as its name, because `hpcenv cancel 34` accepts run names and job ids.
_JOB_ID = re.compile(r"[0-9]+(_[0-9]+)?\Z")
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")


def run_folder(
    workspace: Workspace, options: SubmitOptions, context: Context, cluster: Cluster, script: Path | None
) -> Path:
    """Return the folder of the run. Refuse a name or a place that cannot be used.

    Args:
        script: the file that the ranks start; None if it is not known.
    """
    run = options.name or _run_name(script, options, context)
    means = "the newest run" if run == "latest" else "a job id" if _JOB_ID.match(run) and not options.handover else None
    if not _RUN_NAME.match(run) or means:
        raise UsageError(
            f"{run!r} is not a run name",
            why=f"`{run}` means {means}" if means else None,
            hint="use letters, digits, '.', '_' and '-', at most 100, a letter or digit first",
        )
    parent = workspace.runs if options.runs_dir is None else Path(os.path.abspath(context.cwd / options.runs_dir))
    # submitit replaces %j in the path of its folder, and Slurm replaces %j in the path of the log.
    misread = r"[\"'\\%]" if cluster == "slurm" else r"[\"'\\]"
    if not str(parent).isprintable() or re.search(misread, str(parent)):
        raise UsageError(
            f"runs cannot be kept in {str(parent)!r}",
            why="Slurm would misread quotes, backslashes, `%` and control characters in the log's path",
            hint="choose another place: --runs-dir DIR, or `runs` under [paths] in hpcenv.toml",
        )
    folder = parent / run
    if os.path.lexists(folder):
        raise WouldOverwrite(f"the run folder `{folder}` exists", hint="choose another name: --name NAME")
    return folder


def _run_name(script: Path | None, options: SubmitOptions, context: Context) -> str:
    # This name is used if the run does not start a file of the project, but a console script or a module of the
    # environment.
    named = (options.script or "verify") if options.call is None else options.call.name
    named = named if options.session is None else options.session.name
    stem = named if script is None else script.stem
    word = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.") or "run"
    return f"{word}-{time.strftime('%Y%m%d-%H%M%S', context.now)}-{context.token}"
