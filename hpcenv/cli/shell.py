"""`hpcenv shell`: a session, and a shell in it at once. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import click

from hpcenv.cli import _accept, _render, _session
from hpcenv.cli._help_all import GroupedCommand
from hpcenv.errors import HpcenvError, UsageError
from hpcenv.runs.attach import attach, plan_attach
from hpcenv.runs.cancel import cancel

# A connection that was lost ends the job after it: time to come back with `hpcenv attach`.
_SECONDS_UNUSED = 600


@click.command("shell", cls=GroupedCommand)
@click.option("--keep", is_flag=True, help="Let the job go on when the shell is left: hpcenv attach enters it again.")
@_session.session_options
@_accept.option
def command(keep: bool, accept: str | None, **params: Any) -> int:
    """Open a shell in the locked environment, in a new job.

    The job ends when you leave the shell, or ten minutes after the connection was lost. hpcenv ends
    with the status of the shell; with 90 if the node differs from the lockfile.

    \b
        hpcenv shell --gpus 1 --time 2:00:00
    """  # noqa: D301  (click's mark for "do not wrap")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "a shell needs a terminal",
            why="standard input and output are not a terminal",
            hint="hpcenv session start NAME, then hpcenv attach NAME -- COMMAND",
        )
    name = f"shell-{_render.token()}"
    unused = 0 if keep else _SECONDS_UNUSED
    result = _session.begin(name, params, key=None, accept=accept, as_json=False, ends_unused=unused)
    for note in result.notes:
        _render.tell(f"note: {note}")
    folder = str(result.run_folder)
    try:
        status, door = _session.wait_open(result, folder, as_json=False)
        if door is None:
            return status
        _render.tell(
            f"{result.run}, node {door.node}; the job {'goes on' if keep else 'ends'} when you leave this shell"
        )
        return attach(plan_attach(_render.cwd(), folder, environ=os.environ, tty=True))
    finally:
        if not keep:
            _end(folder)


def _end(folder: str) -> None:
    """Cancel the job. The status of the shell counts, not whether Slurm answers at once."""
    try:
        cancel(_render.cwd(), folder, environ=os.environ, pause=time.sleep)
    except HpcenvError as error:
        _render.tell(f"the job may still run: {error.what}")
