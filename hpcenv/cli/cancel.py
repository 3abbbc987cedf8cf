"""`hpcenv cancel`: end runs. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
import sys
import time

import click

from hpcenv.cli import _render
from hpcenv.cli._complete import run_names
from hpcenv.cli.status import show, show_lost
from hpcenv.errors import Command, Interrupted, RunNotFound, UsageError
from hpcenv.runs.cancel import cancel_all
from hpcenv.runs.find import find_one
from hpcenv.runs.lost import cancel_lost, find_lost


@click.command("cancel")
@click.argument("run", nargs=-1, shell_complete=run_names)
@_render.runs_option
@_render.json_option
def command(run: tuple[str, ...], runs: str | None, as_json: bool) -> None:
    """Cancel runs, and wait until they have ended.

    RUN is a run folder, a run name or a job id. Without RUN, hpcenv asks whether to cancel the
    latest run. The name of a sweep cancels all of its runs. A chain is cancelled with all of
    its jobs. Processes that do not end within the cluster's time limit (KillWait) are killed.
    """
    if not run:
        run = (_latest(runs, as_json=as_json),)
    try:
        statuses = cancel_all(_render.cwd(), run, environ=os.environ, pause=time.sleep, runs=runs)
    except RunNotFound:
        lost = find_lost(run[0], os.environ) if len(run) == 1 else None
        if lost is None:
            raise
        show_lost(cancel_lost(lost, os.environ, time.sleep), "cancel", as_json=as_json)
        return
    if as_json:
        _render.success("cancel", statuses[0] if len(statuses) == 1 else {"runs": statuses})
        return
    if len(statuses) == 1:
        show(statuses[0])
        return
    for status in statuses:
        exit_status = f", exit status {status.exit_status}" if status.exit_status is not None else ""
        _render.say(f"{status.run}: {status.state}{exit_status}")


def _latest(runs: str | None, *, as_json: bool) -> str:
    """Return the folder of the latest run, after the user has agreed to cancel it.

    Raises:
        RunNotFound: there is no run.
        UsageError: hpcenv cannot ask the user.
        Interrupted: the answer is no.
    """
    latest = find_one(_render.cwd(), None, runs=runs)
    name, job = latest.submission.run, ", ".join(latest.job_ids)
    if as_json or not sys.stdin.isatty():
        raise UsageError(
            "no run is named",
            why=f"the latest one is {name} (job {job}); without a terminal, hpcenv cannot ask whether you mean it",
            hint=Command("hpcenv", "cancel", name if runs is None else str(latest.folder.path)),
        )
    if not click.confirm(f"Cancel {name} (job {job})?", err=True):
        raise Interrupted("nothing was cancelled")
    return str(latest.folder.path)
