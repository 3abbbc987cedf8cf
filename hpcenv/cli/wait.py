"""`hpcenv wait`, and the text that `submit --wait` prints at the end of a run. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import click

from hpcenv.cli import _duration, _render
from hpcenv.cli._complete import run_names
from hpcenv.cli._pending import PendingLine
from hpcenv.cli._terminal import escape_control
from hpcenv.cli._wait import interruptible
from hpcenv.errors import RunEndUnknown
from hpcenv.judge import first_failure
from hpcenv.runs.diagnose.diagnose import AT_END, diagnose_run
from hpcenv.runs.diagnose.text import next_lines
from hpcenv.runs.entries import Submitted
from hpcenv.runs.find import find_all
from hpcenv.runs.status import RunStatus
from hpcenv.runs.wait import exit_status_of, wait_for


@click.command("wait")
@click.argument("run", nargs=-1, shell_complete=run_names)
@_render.runs_option
@click.option(
    "--timeout",
    metavar="TIME",
    callback=_duration.parse_seconds,
    help="Wait at most this long, for example 90 (seconds), 30m, 2h, 1d or HH:MM:SS, and then end with exit status "
    "124.",
)
@_render.json_option
def command(run: tuple[str, ...], runs: str | None, timeout: float | None, as_json: bool) -> int:
    """Wait until the given runs have ended.

    RUN is a run folder, a run name, a job id or a sweep; the default is the latest run. hpcenv ends with the exit
    status of the run. With several runs, hpcenv goes through them in the given order, and ends with the exit status
    of the first run that did not end well. The last printed line names the run that gave the exit status.
    """
    entries = find_all(_render.cwd(), run, runs=runs)

    with interruptible("the runs continue", *run):
        statuses = wait_telling(entries, timeout, as_json=as_json)
    decisive = decisive_status(statuses)
    code = exit_status_of(decisive)
    if as_json:
        _render.verdict_on("wait", statuses[0] if len(statuses) == 1 else {"runs": statuses}, ok=code == 0)
        return code
    for entry, status in zip(entries, statuses, strict=True):
        _show_end(entry, status, alone=len(statuses) == 1)
    tell_exit_status(decisive)
    return code


def wait_telling(runs: Sequence[Submitted], timeout: float | None, *, as_json: bool) -> tuple[RunStatus, ...]:
    """Wait until runs have ended, and print each new state.

    Raises:
        WaitTimeout: a run has not ended within `timeout` seconds. The run continues.
    """
    line = PendingLine(os.environ)

    def on_status(status: RunStatus) -> None:
        if not as_json and not line.see(status):
            tell_state(status)

    def pause(seconds: float) -> None:
        line.renew()
        time.sleep(seconds)

    with line:
        return wait_for(runs, environ=os.environ, pause=pause, on_status=on_status, timeout=timeout)


def decisive_status(statuses: Sequence[RunStatus]) -> RunStatus:
    """Return the status of the first run that did not end well; the first status if all runs ended well."""
    return next((status for status in statuses if exit_status_of(status) != 0), statuses[0])


def tell_state(status: RunStatus) -> None:
    """Print the new state of a run to stderr."""
    detail = f" ({escape_control(status.detail)})" if status.detail else ""
    _render.tell(f"{status.run}: {status.state}{detail}")


def tell_exit_status(status: RunStatus) -> None:
    """Print to stderr which run gave the exit status of hpcenv. Commands that wait print this as their last line."""
    code = exit_status_of(status)
    if code == RunEndUnknown.exit_status and status.exit_status is None:
        why = "was cancelled" if status.state == "cancelled" else "ended, and its exit status is unknown"
        _render.tell(f"exit status {code}: run {status.run} {why}")
    else:
        _render.tell(f"exit status {code}: from run {status.run}")


def _show_end(run: Submitted, status: RunStatus, *, alone: bool) -> None:
    """Print the first failure of a run, then how the run ended. The traceback is printed only if there is one run."""
    if alone:
        say_failure(run, status)
    elif status.failure is not None:
        _render.say(f"first failure: {status.failure.headline}")
    exit_status = f", exit status {status.exit_status}" if status.exit_status is not None else ""
    _render.say(f"{status.run}: {status.state}{exit_status}")
    if status.state != "completed":
        _render.tell("hint: " + _render.quoted(("hpcenv", "report", str(status.run_folder))))


def say_failure(run: Submitted, status: RunStatus) -> None:
    """Print the first failure of a run, if there is one, and the cause of the failure that the run's logs show."""
    if status.failure is not None:
        _render.say(first_failure.render(status.failure, folder=str(status.run_folder)))
    if status.has_failed:
        for line in next_lines(diagnose_run(run, status, most=AT_END)):
            _render.say(line)
