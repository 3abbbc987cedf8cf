"""Wait for torchrun, and end the training in order when the job must end.

Runs on: COMPUTE NODE. Standard library only.

Signals go to the ranks and not to torchrun, because torchrun would end its ranks at once and then itself. Slurm may
send signals to every process of a step (proctrack/linuxproc). incontainer/agent.py makes torchrun ignore these signals,
so that torchrun ends after its ranks. The ranks also ignore USR1 and USR2 until they set a handler, because they
inherit this from torchrun. Every wait has a limit. Ranks that do not end get TERM and then KILL, before Slurm kills the
job.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hpcenv import process
from hpcenv.container.start_gate import StartGate
from hpcenv.launch import processes
from hpcenv.launch.current_attempt import AttemptWatch
from hpcenv.launch.stopping import WARNING, Stop

# Signals that the user may send with `scancel --signal`. They are forwarded unchanged.
_FOR_RANKS = (signal.SIGUSR1,)

# Slurm sends CONT before every other signal, and submitit prints a warning for each CONT.
_SILENT = (signal.SIGCONT,)

# Pause between two checks that the container still runs while it waits at its start gate.
_SECONDS_AT_GATE = 0.05
_SECONDS_BETWEEN_LOOKS = 0.2

# Seconds from TERM to KILL, unless Slurm gives a later end. Slurm's KILL comes after KillWait,
# 30 s by default. This node must write its record before that.
SECONDS_AFTER_TERM = 25.0

# Seconds from TERM to KILL at the end of the grace period, and the delay with which Slurm may end a job.
_SECONDS_TO_KILL = 5.0
_SECONDS_FOR_SLURM = 10.0

# If there are no ranks after this time, the container is not running yet and has nothing to save.
_SECONDS_WITHOUT_RANKS = 3.0


class Signals:
    """Records the signals of this process for `supervise`, and forwards signals for the ranks at once.

    Attributes:
        child: torchrun; None before it was started.
        asked_to_end: number of the first signal that asks this process to end; None without one.
        since: when that signal arrived, in seconds of the monotonic clock.
        warned: whether Slurm's warning signal has arrived.
    """

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.asked_to_end: int | None = None
        self.since = 0.0
        self.warned = False

    def watch(self, child: subprocess.Popen[bytes]) -> None:
        """Forward signals to the ranks of `child` from now on."""
        self.child = child

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Handle one signal. This object is the handler that signal.signal gets."""
        if number in process.END_SIGNALS and self.asked_to_end is None:
            self.asked_to_end, self.since = number, time.monotonic()
        elif number == WARNING:
            self.warned = True
        elif number in _FOR_RANKS and self.child is not None:
            processes.send(processes.ranks_below(self.child.pid), number)


@contextmanager
def caught_signals() -> Iterator[Signals]:
    """Catch the signals of this process inside the block."""
    signals = Signals()
    caught = (*process.END_SIGNALS, *_FOR_RANKS, WARNING, *_SILENT)
    before = {number: signal.signal(number, signals) for number in caught}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def supervise(
    child: subprocess.Popen[bytes],
    signals: Signals,
    *,
    gate: StartGate | None = None,
    stop: Stop | None = None,
    watch: AttemptWatch | None = None,
    seconds_after_term: float = SECONDS_AFTER_TERM,
) -> int:
    """Wait for torchrun; return its exit status, 128 + N for signal N.

    Args:
        child: torchrun.
        signals: the signals of this process.
        gate: start gate where the agent waits before the training starts; None if the agent does not wait.
        stop: finds out why and when the job must end; None if the reason cannot be found out.
        watch: checks whether the attempt has ended. After the end of the attempt, torchrun is ended as after TERM.
        seconds_after_term: seconds from the request to end until torchrun and all its descendants
            are killed, unless Slurm gives a later end.
    """
    signals.watch(child)
    ending = _Ending(child, signals, stop, seconds_after_term)
    while True:
        waits_at_gate = gate is not None and not gate.is_open
        try:
            if gate is not None and waits_at_gate:
                gate.wait(_SECONDS_AT_GATE)
            status = child.wait(timeout=0 if waits_at_gate else _SECONDS_BETWEEN_LOOKS)
        except subprocess.TimeoutExpired:
            if watch is not None and watch.ended:
                ending.give_up()
            ending.attend()
        else:
            ending.conclude()
            return status if status >= 0 else 128 - status


class _Ending:
    """The steps from the first signal to the last kill. Each call of `attend` takes one step."""

    def __init__(
        self, child: subprocess.Popen[bytes], signals: Signals, stop: Stop | None, seconds_after_term: float
    ) -> None:
        self._child = child
        self._signals = signals
        self._stop = stop
        self._seconds_after_term = seconds_after_term
        self._begun_by: int | None = None
        self._signalled: dict[int, set[int]] = {}
        self._forwarded = False

    def give_up(self) -> None:
        """End the ranks without asking Slurm, because the attempt of this node has already ended."""
        self._stop = None
        if self._signals.asked_to_end is None:
            self._signals(signal.SIGTERM, None)

    def attend(self) -> None:
        if not self._has_begun():
            return
        asked = self._signals.asked_to_end
        if self._stop is not None and not self._stop.attend():
            return  # after TERM, wait until Slurm answers whether the job is cancelled or preempted
        if self._is_stop():
            self._attend_stop()
        elif asked is not None:
            self._attend_end(asked)

    def conclude(self) -> None:
        """After the ranks have ended, find out why they were asked to end.

        With proctrack/linuxproc Slurm's signal reaches the ranks directly. The ranks may have saved their state and
        ended before the next check here, or before Slurm's answer. If the reason of the end stays unknown, the job
        counts as completed.
        """
        if self._has_begun() and self._stop is not None:
            self._stop.settle()

    def _has_begun(self) -> bool:
        """Begin the ending if a signal has arrived; return whether the ending has begun."""
        asked = self._signals.asked_to_end
        if self._begun_by is None and (asked is not None or self._signals.warned):
            self._begun_by = int(WARNING) if self._signals.warned or asked is None else asked
            if self._stop is not None:
                self._stop.begin(self._begun_by)
        return self._begun_by is not None

    def _is_stop(self) -> bool:
        return self._stop is not None and (self._begun_by == WARNING or self._stop.stopped != "")

    def _attend_stop(self) -> None:
        """Let the ranks save their state; send TERM and then KILL when Slurm's end time comes."""
        assert self._stop is not None
        left = self._stop.ends - time.time()
        asked_at_end = self._signals.asked_to_end is not None and self._begun_by == WARNING
        if asked_at_end:
            left = min(left, _SECONDS_TO_KILL - (time.monotonic() - self._signals.since))
        # Slurm requeues a preempted job at its end time. It does not requeue a job that has failed before that time.
        margin = -_SECONDS_FOR_SLURM if self._stop.is_preemption and not asked_at_end else 1.0
        if left <= margin:
            self._kill()
        elif asked_at_end or left <= margin + min(_SECONDS_TO_KILL, self._stop.grace / 5):
            self._signal_ranks(signal.SIGTERM)
        else:
            self._signal_ranks(self._stop.signal_for_ranks)

    def _attend_end(self, number: int) -> None:
        """Forward the signal that asks for the end to the ranks; after the time limit, kill them."""
        after = time.monotonic() - self._signals.since
        if after > self._seconds_after_term:
            self._kill()
        elif not self._signal_ranks(number):
            if not self._forwarded:
                self._forwarded = True
                self._child.send_signal(number)
            elif after > _SECONDS_WITHOUT_RANKS and not any(self._signalled.values()):
                self._kill()

    def _signal_ranks(self, number: int) -> bool:
        """Send a signal once to every rank, also to ranks that start later; return whether there are ranks."""
        ranks = set(processes.ranks_below(self._child.pid))
        signalled = self._signalled.setdefault(number, set())
        processes.send(sorted(ranks - signalled), number)
        signalled |= ranks
        return bool(ranks)

    def _kill(self) -> None:
        processes.send((*process.below(self._child.pid), self._child.pid), signal.SIGKILL)
