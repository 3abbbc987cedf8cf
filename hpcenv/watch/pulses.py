"""The pulses of this node's ranks. The start hook of a rank writes a pulse after each step (start_hook/pulse.py).

Runs on: COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcenv.incontainer import proc
from hpcenv.incontainer.start_hook.pulse import LAYOUT

_LOOKS = 5


@dataclass(frozen=True, kw_only=True)
class RankPulse:
    """The values that one rank wrote last.

    Attributes:
        pid: its process id, as processes of this node see it.
        steps: number of optimizer steps of this process.
        last_step: when the last step ended, in seconds since the epoch; 0 before the first step.
        seconds: time of all steps but the first.
        waited: how long the rank waited for its data loaders in these steps.
        saving: whether the rank is inside `hpcenv.training.saving`.
        torch_memory, torch_peak: bytes that torch uses on the GPU, now and at most; None if unknown.
    """

    rank: int
    pid: int
    steps: int
    last_step: float
    seconds: float
    waited: float
    saving: bool
    torch_memory: int | None
    torch_peak: int | None


def read_pulses(folders: Iterable[Path]) -> tuple[RankPulse, ...]:
    """Return the pulses of the running ranks, in the order of the ranks.

    Args:
        folders: folders in which the start hooks of this node's ranks write.
    """
    found = (_read(path) for folder in folders for path in folder.glob("pulse-*") if path.suffix != ".part")
    alive = {pulse.rank: pulse for pulse in found if pulse is not None}
    return tuple(alive[rank] for rank in sorted(alive))


def _read(path: Path) -> RankPulse | None:
    """Return a pulse; None if the file is not complete, or if the process has ended."""
    for _ in range(_LOOKS):
        try:
            raw = path.read_bytes()
            first, rank, pid, start, steps, last, seconds, waited, saves, now, peak, behind = LAYOUT.unpack(raw)
        except (OSError, struct.error):
            return None
        if first == behind:
            break
    else:
        return None
    if not proc.runs(pid, start):
        return None
    return RankPulse(
        rank=rank, pid=pid, steps=steps, last_step=last, seconds=seconds, waited=waited, saving=saves > 0,
        torch_memory=None if now < 0 else now, torch_peak=None if peak < 0 else peak,
    )  # fmt: skip


def processes(pulses: Iterable[RankPulse]) -> Iterator[tuple[int, int]]:
    """Yield the process of each rank and all processes below it, each with the number of the rank."""
    for pulse in pulses:
        yield pulse.pid, pulse.rank
        for child, _ in proc.descendants(pulse.pid):
            yield child, pulse.rank
