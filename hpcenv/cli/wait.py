"""`hpcenv wait`, and how `submit --wait` tells the end of a run."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import click

from hpcenv.cli import _duration, _render
from hpcenv.cli._terminal import harmless
from hpcenv.errors import Interrupted

if TYPE_CHECKING:
    from hpcenv.steps.runs import RunStatus


@click.command("wait")
@click.argument("run", nargs=-1)
@click.option("--runs", metavar="DIR", help="Folder of runs, if not the project's.")
@click.option("--timeout", metavar="TIME", callback=_duration.parse_seconds, help="At most 30min, 12h, 2d; then 124.")
@_render.json_option
def command(run: tuple[str, ...], runs: str | None, timeout: float | None, as_json: bool) -> int:
    """Wait until runs have ended; end with the run's own exit status.

    RUN as in `hpcenv status`, or a sweep. Of several runs it is the status of the first
    one, in the order given, that did not end well.
    """
    from hpcenv.steps.runs import find_all
    from hpcenv.steps.wait import exit_status_of, wait_for

    found = find_all(_render.cwd(), run, runs=runs)

    def on_status(status: RunStatus) -> None:
        if not as_json:
            tell_state(status)

    try:
        ended = wait_for(found, environ=os.environ, pause=time.sleep, on_status=on_status, timeout=timeout)
    except KeyboardInterrupt as stop:
        raise Interrupted("interrupted; the runs go on", hint=_render.quoted(("hpcenv", "cancel", *run))) from stop
    code = next((code for one in ended if (code := exit_status_of(one)) != 0), 0)
    if as_json:
        _render.verdict_on("wait", ended[0] if len(ended) == 1 else {"runs": ended}, ok=code == 0)
        return code
    for status in ended:
        say_end(status, alone=len(ended) == 1)
    return code


def tell_state(status: RunStatus) -> None:
    """Say that a run's state changed (stderr)."""
    detail = f" ({harmless(status.detail)})" if status.detail else ""
    _render.tell(f"{status.run}: {status.state}{detail}")


def say_end(status: RunStatus, *, alone: bool) -> None:
    """Say how a run ended, its first failure first; of one among several without its traceback."""
    if alone:
        say_failure(status)
    elif status.failure is not None:
        _render.say(f"first failure: {status.failure.headline}")
    ended = f", exit status {status.exit_status}" if status.exit_status is not None else ""
    _render.say(f"{status.run}: {status.state}{ended}")
    if status.state != "completed":
        _render.tell("hint: " + _render.quoted(("hpcenv", "report", str(status.run_folder))))


def say_failure(status: RunStatus) -> None:
    """Say what went wrong first, if something did."""
    if status.failure is not None:
        from hpcenv.model import failure

        _render.say(failure.render(status.failure, folder=str(status.run_folder)))
