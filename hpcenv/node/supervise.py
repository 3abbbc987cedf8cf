"""Wait for torchrun, and see to it that a job which must end does so in order.

Runs on: COMPUTE NODE. Standard library only.

Signals go to the ranks, not to torchrun: it would end them at once and then itself. Inside,
incontainer/agent.py lets torchrun outlive what Slurm may send to every process of a step
(proctrack/linuxproc), so that it ends when its ranks have; ranks inherit that USR1 and USR2
are ignored until they set a handler: who does not listen is not killed. Nothing here waits for ever:
ranks that do not end get TERM and then KILL before Slurm kills the job.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hpcenv.node import processes
from hpcenv.node.attempt import Watch
from hpcenv.node.door import Door
from hpcenv.node.stopping import WARNING, Stop

# What a batch system sends to a job that shall end.
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# Free for the user, who may send it with `scancel --signal`: passed on as it is.
_FOR_RANKS = (signal.SIGUSR1,)

# Slurm sends CONT before every other signal, and submitit would print a warning for each.
_SILENT = (signal.SIGCONT,)

# How often to look whether the container is there: it takes a tenth of a second at best.
_SECONDS_AT_DOOR = 0.01
_SECONDS_BETWEEN_LOOKS = 0.2

# From TERM to our KILL where Slurm gives no later end: its own KILL comes after KillWait,
# 30 s by default, and the record of this node must be written before.
SECONDS_AFTER_TERM = 25.0

# From TERM to KILL at the end of the grace period, and how late Slurm may be to end a job.
_SECONDS_TO_KILL = 5.0
_SECONDS_FOR_SLURM = 10.0

# A container that is still being made has nothing to save.
_SECONDS_WITHOUT_RANKS = 3.0


class Signals:
    """Remembers what came, for the loop that waits; passes on at once what is only for the ranks.

    Attributes:
        asked_to_end: number of the first signal that asks for the end.
        since: when that was, by the monotonic clock.
        warned: Slurm's warning came.
    """

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.asked_to_end: int | None = None
        self.since = 0.0
        self.warned = False

    def watch(self, child: subprocess.Popen[bytes]) -> None:
        """Pass signals on to the ranks below `child` from now on."""
        self.child = child

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Handle one signal: as signal.signal calls it."""
        if number in _ENDING and self.asked_to_end is None:
            self.asked_to_end, self.since = number, time.monotonic()
        elif number == WARNING:
            self.warned = True
        elif number in _FOR_RANKS and self.child is not None:
            processes.send(processes.ranks_below(self.child.pid), number)


@contextmanager
def caught_signals() -> Iterator[Signals]:
    """Catch signals from before the child exists until after it has ended."""
    signals = Signals()
    before = {number: signal.signal(number, signals) for number in (*_ENDING, *_FOR_RANKS, WARNING, *_SILENT)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def supervise(
    child: subprocess.Popen[bytes],
    signals: Signals,
    *,
    door: Door | None = None,
    stop: Stop | None = None,
    watch: Watch | None = None,
    seconds_after_term: float = SECONDS_AFTER_TERM,
) -> int:
    """Wait for the child; return its status, 128 + N for signal N.

    Args:
        door: where the child waits before the training starts.
        stop: knows why and until when; None where nobody can tell.
        watch: knows when nobody waits for this node any more; it is then ended like one that got TERM.
        seconds_after_term: how long after it was asked to end it is killed, with all that
            it started, where Slurm gives no later end.
    """
    signals.watch(child)
    ending = _Ending(child, signals, stop, seconds_after_term)
    while True:
        waits_at_door = door is not None and not door.is_open
        try:
            status = child.wait(timeout=_SECONDS_AT_DOOR if waits_at_door else _SECONDS_BETWEEN_LOOKS)
        except subprocess.TimeoutExpired:
            if door is not None:
                door.attend()
            if watch is not None and watch.over:
                ending.give_up()
            ending.attend()
        else:
            return status if status >= 0 else 128 - status


class _Ending:
    """The steps from the first signal to the last kill, taken one at a time by `attend`."""

    def __init__(
        self, child: subprocess.Popen[bytes], signals: Signals, stop: Stop | None, seconds_after_term: float
    ) -> None:
        self._child = child
        self._signals = signals
        self._stop = stop
        self._seconds_after_term = seconds_after_term
        self._begun_by: int | None = None
        self._told: dict[int, set[int]] = {}
        self._passed_on = False

    def give_up(self) -> None:
        """End without asking Slurm, which has given up this node."""
        self._stop = None
        if self._signals.asked_to_end is None:
            self._signals(signal.SIGTERM, None)

    def attend(self) -> None:
        asked = self._signals.asked_to_end
        if self._begun_by is None:
            if asked is None and not self._signals.warned:
                return
            self._begun_by = int(WARNING) if self._signals.warned or asked is None else asked
            if self._stop is not None:
                self._stop.begin(self._begun_by)
        if self._stop is not None and not self._stop.attend():
            return  # TERM came: Slurm is asked whether that is a cancel or a preemption
        if self._is_stop():
            self._attend_stop()
        elif asked is not None:
            self._attend_end(asked)

    def _is_stop(self) -> bool:
        return self._stop is not None and (self._begun_by == WARNING or self._stop.stopped != "")

    def _attend_stop(self) -> None:
        """Let the ranks save themselves; TERM, then KILL when the end that Slurm set is there."""
        assert self._stop is not None
        left = self._stop.ends - time.time()
        asked_at_end = self._signals.asked_to_end is not None and self._begun_by == WARNING
        if asked_at_end:
            left = min(left, _SECONDS_TO_KILL - (time.monotonic() - self._signals.since))
        # Slurm queues a preempted job again at that end; one that had failed before would be lost to it.
        margin = -_SECONDS_FOR_SLURM if self._stop.is_preemption and not asked_at_end else 1.0
        if left <= margin:
            self._kill()
        elif asked_at_end or left <= margin + min(_SECONDS_TO_KILL, self._stop.grace / 5):
            self._tell(signal.SIGTERM)
        else:
            self._tell(self._stop.signal_for_ranks)

    def _attend_end(self, number: int) -> None:
        """Pass on what asked for the end."""
        after = time.monotonic() - self._signals.since
        if after > self._seconds_after_term:
            self._kill()
        elif not self._tell(number):
            if not self._passed_on:
                self._passed_on = True
                self._child.send_signal(number)
            elif after > _SECONDS_WITHOUT_RANKS and not any(self._told.values()):
                self._kill()

    def _tell(self, number: int) -> bool:
        """Send a signal to every rank once, also to those that come later; return whether there are any."""
        ranks = set(processes.ranks_below(self._child.pid))
        told = self._told.setdefault(number, set())
        processes.send(sorted(ranks - told), number)
        told |= ranks
        return bool(ranks)

    def _kill(self) -> None:
        processes.send((*processes.below(self._child.pid), self._child.pid), signal.SIGKILL)
