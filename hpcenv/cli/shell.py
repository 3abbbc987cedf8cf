"""`hpcenv shell`: start a session, and open a shell in it. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import click

from hpcenv.cli import _accept, _render, _session
from hpcenv.cli._help_all import GroupedCommand
from hpcenv.errors import HpcenvError, Interrupted, UsageError
from hpcenv.records.session import SessionFolder
from hpcenv.runs.attach import attach, plan_attach
from hpcenv.runs.cancel import cancel
from hpcenv.runs.entries import open_run

# If the connection is lost, the job ends after this time. Until then, the user can come back with `hpcenv attach`.
_SECONDS_UNUSED = 600


@click.command("shell", cls=GroupedCommand)
@click.option(
    "--keep",
    is_flag=True,
    help="Keep the job when you leave the shell, so that hpcenv attach can open a shell in this job again.",
)
@_session.session_options
@_accept.option
def command(keep: bool, accept: str | None, **params: Any) -> int:
    """Open a shell in the locked environment, in a new job.

    The job ends when you leave the shell, or ten minutes after the connection was lost. hpcenv ends with the status
    of the shell, or with 90 if the node differs from the lockfile.

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
    except Interrupted as stop:
        raise stop if keep else Interrupted("interrupted; the job is cancelled") from stop
    finally:
        if not keep:
            _end(result.run_folder)


def _end(folder: Path) -> None:
    """Cancel the job, and remove the session's folder, because no later shell uses it.

    If Slurm does not answer, this function raises no error, because the command ends with the exit status of the shell.
    """
    try:
        session = open_run(folder).manifest.session
        cancel(_render.cwd(), str(folder), environ=os.environ, pause=time.sleep)
    except HpcenvError as error:
        _render.tell(f"the job may still run: {error.what}")
        return
    assert session is not None
    lasting = SessionFolder(Path(session.folder))
    if any(not path.name.startswith(".") for path in lasting.home.iterdir()):
        _render.tell(f"note: you have left files in the home of this session: {lasting.home}")
    else:
        shutil.rmtree(lasting.path, ignore_errors=True)
