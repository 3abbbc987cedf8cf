"""The activity of the ranks of this node: their steps from their pulses, and their processes from /proc.

Runs on: COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hpcenv.incontainer import proc
from hpcenv.records.samples import RankUse
from hpcenv.watch.pulses import RankPulse

# The name that torch gives to the main thread of a DataLoader's worker process (torch 2.2 and newer).
_WORKER = "pt_data_worker"


class RankLook:
    """Reads the figures of the ranks repeatedly. The figures are for the time since the last call."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, float, RankPulse]] = {}

    def look(self, pulses: Sequence[RankPulse], processes: Mapping[int, int], now: float) -> tuple[RankUse, ...]:
        """Return the activity of each rank.

        Args:
            pulses: the newest pulse (steps, times, memory) of each running rank.
            processes: process id -> rank, of the ranks and of the processes below them.
            now: seconds of any clock.
        """
        found, before = [], self._before
        self._before = {}
        for pulse in pulses:
            own = [pid for pid, rank in processes.items() if rank == pulse.rank]
            seconds = sum(map(proc.cpu_seconds, own))
            self._before[pulse.pid] = (now, seconds, pulse)
            use = _use(pulse, before.get(pulse.pid), (now, seconds))
            found.append(replace(use, workers=sum(map(_is_worker, own)) or None))
        return tuple(found)


def _use(pulse: RankPulse, before: tuple[float, float, RankPulse] | None, now: tuple[float, float]) -> RankUse:
    step_seconds = wait_seconds = cpu = None
    if before is not None:
        earlier = before[2]
        steps = pulse.steps - max(earlier.steps, 1)  # the first step is left out: its time includes the time before it
        if steps > 0:
            step_seconds = (pulse.seconds - earlier.seconds) / steps
            # A rank that never waited for a DataLoader of torch has no wait time, and may read its data in another way.
            wait_seconds = max(0.0, pulse.waited - earlier.waited) / steps if pulse.waited else None
        if now[0] > before[0]:
            # The CPU time of an ended child is lost if no process has waited for the child.
            cpu = max(0.0, now[1] - before[1]) / (now[0] - before[0])
    return RankUse(
        rank=pulse.rank, pid=pulse.pid, step=pulse.steps or None, step_seconds=step_seconds, wait_seconds=wait_seconds,
        last_step=pulse.last_step or None, saving=pulse.saving, state=proc.state(pulse.pid)[0], cpu=cpu,
        torch_memory=pulse.torch_memory, torch_peak=pulse.torch_peak,
    )  # fmt: skip


def _is_worker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip() == _WORKER
    except OSError:
        return False
