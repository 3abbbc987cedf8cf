"""`hpcenv wait`, `submit --wait`: until runs have ended. Runs on: LOGIN NODE."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from hpcenv.errors import StillGoing
from hpcenv.steps.runs import RunStatus, Submitted, read_statuses

# Accounting may need some seconds more than squeue to know how a job ended.
_LOOKS_AFTER_GONE = 5

# Seconds between two looks; they grow from the first to the second, to spare slurmctld.
_PAUSES = (0.5, 10.0)


def wait_for(
    runs: Sequence[Submitted],
    *,
    environ: Mapping[str, str],
    pause: Callable[[float], None],
    on_status: Callable[[RunStatus], None],
    timeout: float | None = None,
) -> tuple[RunStatus, ...]:
    """Wait until all of some runs have ended, or Slurm has forgotten them; return their last statuses.

    A run that is requeued, or whose state cannot be told now, goes on.

    Args:
        pause: called with seconds to sleep between two looks; it may follow the log
            meanwhile.
        on_status: called when the state of a run or its reason changed.
        timeout: seconds to wait at most; None for as long as it takes.

    Raises:
        StillGoing: the time is over.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    last: dict[int, RunStatus] = {}
    looks_gone = dict.fromkeys(range(len(runs)), 0)
    seconds = _PAUSES[0]
    going = list(range(len(runs)))
    while True:
        for number, current in zip(going, read_statuses([runs[n] for n in going], environ), strict=True):
            before = last.get(number)
            if before is None or (current.state, current.detail) != (before.state, before.detail):
                on_status(current)
                seconds = _PAUSES[0]
            looks_gone[number] = looks_gone[number] + 1 if current.gone else 0
            last[number] = current
        going = [n for n in going if not last[n].ended and looks_gone[n] <= _LOOKS_AFTER_GONE]
        if not going:
            return tuple(last[number] for number in range(len(runs)))
        if deadline is not None and (left := deadline - time.monotonic()) <= seconds:
            if left <= 0:
                raise _still_going([last[number] for number in going])
            seconds = max(left, 0.05)
        pause(seconds)
        seconds = min(_PAUSES[1], seconds * 1.3)


def _still_going(statuses: Sequence[RunStatus]) -> StillGoing:
    told = ", ".join(f"{status.run} is {status.state}" for status in statuses[:5])
    more = f" and {len(statuses) - 5} more" if len(statuses) > 5 else ""
    return StillGoing(
        f"{len(statuses)} {'run has' if len(statuses) == 1 else 'runs have'} not ended in time",
        why=told + more,
        hint=f"hpcenv logs -f {statuses[0].run}",
    )


def exit_status_of(status: RunStatus) -> int:
    """Return what `wait` and `submit --wait` end with: the run's own exit status, 1 where nobody knows it."""
    if status.exit_status is not None:
        return status.exit_status
    return 0 if status.state == "completed" else 1
