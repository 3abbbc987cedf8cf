"""The lines that `hpcenv` without arguments prints below the help: lockfile, latest run, and next command."""

from __future__ import annotations

import os

from hpcenv.cli import _render
from hpcenv.cli._terminal import escape_control
from hpcenv.cli.lock import submission_of
from hpcenv.cli.submit import context_of
from hpcenv.cluster.queue import in_words
from hpcenv.errors import HpcenvError
from hpcenv.locking.lock import LockOptions, check_locks, problem_of
from hpcenv.project.spec import DEFAULT_LOCK
from hpcenv.project.workspace import read_lockfile
from hpcenv.runs.run_line import RunLine
from hpcenv.runs.run_list import list_lines
from hpcenv.text import cut

_GOING = ("pending", "requeued", "running", "completing", "suspended")
_WIDEST = 160
_AS_ASKED = "lockfiles are as hpcenv.toml asks; the environment was not looked at: hpcenv lock --check"


def show() -> None:
    """Print the three lines. No program of the project is started, and the SIF is not read."""
    problem, run = _problem_of_lockfile(), _latest_run()
    lockfile = _AS_ASKED if problem is None else problem.what
    if problem is not None and problem.why:
        lockfile = f"{lockfile}: {problem.why}"
    status = "" if run is None or run.exit_status is None else f", exit status {run.exit_status}"
    detail = "" if run is None or not run.detail else f" ({in_words(run.detail)})"
    _render.say("\nThis folder:")
    _render.say(f"  lockfile    {cut(escape_control(lockfile), _WIDEST)}")
    _render.say(f"  latest run  {'none' if run is None else escape_control(f'{run.run}: {run.state}{detail}{status}')}")
    _render.say(f"  next        {escape_control(_next(problem, run))}")


def _problem_of_lockfile() -> HpcenvError | None:
    """Return the problem of the lockfile, for example that it is stale; None if hpcenv.toml and lockfile agree."""
    try:
        return problem_of(check_locks(_render.open_project(), LockOptions(), context_of(), spec_only=True))
    except HpcenvError as problem:
        return problem


def _latest_run() -> RunLine | None:
    try:
        return next(iter(list_lines(_render.cwd(), environ=os.environ, limit=1).runs), None)
    except HpcenvError:
        return None


def _next(problem: HpcenvError | None, run: RunLine | None) -> str:
    """Return the next command. It is about a run that has not ended, a problem of the lockfile, or the last run."""
    if run is not None and run.state in _GOING:
        return f"hpcenv logs -f {run.run}"
    if problem is not None:
        return problem.hint or "edit hpcenv.toml"
    if run is None or run.state == "completed":
        return submission_of(read_lockfile(_render.open_project().lockfile_path(DEFAULT_LOCK)))
    return f"hpcenv clean {run.run}" if run.state == "not-queued" else f"hpcenv report {run.run}"
