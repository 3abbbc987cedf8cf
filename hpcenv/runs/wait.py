"""`hpcenv wait` and `submit --wait`: wait until runs have ended. Runs on: LOGIN NODE."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpcenv.cluster.queue import can_never_start, in_words
from hpcenv.errors import CannotStart, Command, RunEndUnknown, WaitTimeout
from hpcenv.runs.entries import Submitted, open_run
from hpcenv.runs.status import RunStatus, read_statuses, with_queue
from hpcenv.text import listed

# The number of further queries if squeue no longer lists a job: sacct may show the end of the job some seconds later.
_LOOKS_AFTER_GONE = 5

# The seconds after which Slurm's reason counts as a reason that the job cannot start. Slurm also gives such a reason
# for a moment, for example after a change of its nodes.
_NO_START_SECONDS = 30.0

# Shortest and longest pause in seconds between two queries. Pauses grow, to spare slurmctld.
_PAUSES = (0.5, 10.0)


def wait_for(
    runs: Sequence[Submitted],
    *,
    environ: Mapping[str, str],
    pause: Callable[[float], None],
    on_status: Callable[[RunStatus], None],
    timeout: float | None = None,
) -> tuple[RunStatus, ...]:
    """Wait until each run has ended, or Slurm no longer knows the job of the run. Return the last statuses.

    A run has not ended if it is requeued, or if its state is unknown for a moment.

    Args:
        runs: the runs to wait for.
        environ: environment variables, for the Slurm commands.
        pause: called with the seconds to sleep between two queries.
        on_status: called when the state of a run or its reason has changed.
        timeout: maximum seconds to wait; None for no limit.

    Raises:
        CannotStart: Slurm does not start any of the runs that have not ended.
        WaitTimeout: a run has not ended within `timeout`.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    last: dict[int, RunStatus] = {}
    no_start, waited = NoStart(environ), 0.0
    looks_gone = dict.fromkeys(range(len(runs)), 0)
    seconds = _PAUSES[0]
    going = list(range(len(runs)))
    while True:
        stuck: list[CannotStart] = []
        for number, current in zip(going, read_statuses([runs[n] for n in going], environ), strict=True):
            before = last.get(number)
            if before is None or (current.state, current.detail) != (before.state, before.detail):
                on_status(current)
                seconds = _PAUSES[0]
            if (error := no_start.see(runs[number], current, waited)) is not None:
                stuck.append(error)
            looks_gone[number] = looks_gone[number] + 1 if current.gone else 0
            last[number] = current
        going = [n for n in going if not last[n].ended and looks_gone[n] <= _LOOKS_AFTER_GONE]
        if not going:
            return tuple(last[number] for number in range(len(runs)))
        if len(stuck) == len(going):
            raise stuck[0]
        if deadline is not None and (left := deadline - time.monotonic()) <= seconds:
            if left <= 0:
                raise _wait_timeout([last[number] for number in going])
            seconds = max(left, 0.05)
        pause(seconds)
        waited += seconds
        seconds = min(_PAUSES[1], seconds * 1.3)


class NoStart:
    """Finds waiting runs that Slurm does not start without a change of the job or of a limit."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._since: dict[str, float] = {}

    def see(self, run: Submitted, status: RunStatus, now: float) -> CannotStart | None:
        """Return the error for a run that cannot start; None if it may start, or if it has not waited for 30 s.

        Args:
            run: the run.
            status: its state now.
            now: seconds since the first query.
        """
        word = can_never_start(status.detail) if status.waits_on_slurm else ""
        if not word or (word == "DependencyNeverSatisfied" and not _stays_without_dependency(run)):
            self._since.pop(status.run, None)
            return None
        waits = now - self._since.setdefault(status.run, now)
        return _no_start(status, word, self._environ) if waits >= _NO_START_SECONDS else None


def _no_start(status: RunStatus, word: str, environ: Mapping[str, str]) -> CannotStart | None:
    """Return the error for a run that Slurm does not start; None if another partition may start the run.

    The job is not cancelled, because an administrator can raise a limit.
    """
    queue = with_queue(status, environ).queue
    # If a job may run in several partitions, Slurm shows the reason of one partition, and another partition may start
    # it.
    if queue is None or "," in queue.partition:
        return None
    return CannotStart(
        f"`{status.run}` does not start as it is",
        why=in_words(word),
        hint=(
            Command("hpcenv", "cancel", status.run),
            "; if the site raises the limit, the job starts without a change",
        ),
    )


def _stays_without_dependency(run: Submitted) -> bool:
    """Whether the user told Slurm to keep a job if its dependency fails. Otherwise Slurm cancels the job soon."""
    try:
        return "--kill-on-invalid-dep=no" in run.folder.script.read_text(errors="replace")
    except OSError:
        return False


def _wait_timeout(statuses: Sequence[RunStatus]) -> WaitTimeout:
    return WaitTimeout(
        f"{len(statuses)} {'run has' if len(statuses) == 1 else 'runs have'} not ended in time",
        why=listed([f"`{status.run}` is {status.state}" for status in statuses], 5),
        hint=Command("hpcenv", "logs", "-f", f"{statuses[0].run}"),
    )


def exit_status_of(status: RunStatus) -> int:
    """Return the exit status of `wait` and `submit --wait`: the run's status.

    If the run's status is unknown, return the status of `RunEndUnknown`.
    """
    if status.exit_status is not None:
        return status.exit_status
    return 0 if status.state == "completed" else RunEndUnknown.exit_status


def wait(
    run_folder: Path,
    *,
    environ: Mapping[str, str],
    pause: Callable[[float], None],
    on_status: Callable[[RunStatus], None],
    timeout: float | None = None,
) -> RunStatus:
    """Wait until the run in `run_folder` has ended, or Slurm no longer knows the run's job; see `wait_for`."""
    run = open_run(run_folder)
    return wait_for([run], environ=environ, pause=pause, on_status=on_status, timeout=timeout)[0]
