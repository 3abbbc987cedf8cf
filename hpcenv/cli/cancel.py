"""`hpcenv cancel`."""

from __future__ import annotations

import os
import time

import click

from hpcenv.cli import _render


@click.command("cancel")
@click.argument("run", nargs=-1)
@click.option("--runs", metavar="DIR", help="Folder of runs, if not the project's.")
@_render.json_option
def command(run: tuple[str, ...], runs: str | None, as_json: bool) -> None:
    """End runs and wait until they have ended.

    RUN as in `hpcenv status`; a sweep's name ends all of its runs, and a chain ends with
    all of its jobs. What does not end by itself in the time that the cluster gives
    (KillWait) is killed.
    """
    from hpcenv.cli.status import show
    from hpcenv.steps.cancel import cancel_all

    found = cancel_all(_render.cwd(), run, environ=os.environ, pause=time.sleep, runs=runs)
    if as_json:
        _render.success("cancel", found[0] if len(found) == 1 else {"runs": found})
        return
    if len(found) == 1:
        show(found[0])
        return
    for status in found:
        ended = f", exit status {status.exit_status}" if status.exit_status is not None else ""
        _render.say(f"{status.run}: {status.state}{ended}")
