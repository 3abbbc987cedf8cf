"""The exact values of one metric over the steps of a run. Pure. Runs on: LOGIN NODE."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

# The dtype of numbers that are known only as decimal text with too few digits.
PRINTED = "printed"


@dataclass(frozen=True, kw_only=True)
class Series:
    """The values of one metric.

    Attributes:
        name: name of the metric, for example `loss` or `val/acc`.
        rank: the rank that recorded the values; None if the source names no rank.
        part: for a loss, its place among the calls of `backward` for one step.
        source: what recorded the values: `backward` (for the loss), `log_metrics`, `tensorboard`, `csv`, `jsonl`.
        file: path of the file in the run folder; for `tensorboard`, the folder of the event files.
        dtype: the type of the recorded values; `printed` if digits are missing.
        steps: the steps in ascending order, each once.
        values: one value for each step.
        notes: sentences that a reader must know, for example that a file was cut.
    """

    name: str
    source: str
    file: str
    dtype: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    rank: int | None = None
    part: int = 0
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name. For the second and later losses of a step, the place is added: `loss[1]`."""
        return f"{self.name}[{self.part}]" if self.part else self.name

    @property
    def exact(self) -> bool:
        """Whether the values are the exact numbers. Numbers that were printed with few digits are not exact."""
        return self.dtype != PRINTED

    @property
    def digest(self) -> str:
        """sha256 over one line for each step: `STEP HEX`, where HEX is the exact value."""
        lines = (f"{step} {exact(value)}\n" for step, value in zip(self.steps, self.values, strict=True))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def between(self, first: int, last: int) -> Series:
        """Return the part of the series from one step to another step, both included."""
        start, end = bisect_left(self.steps, first), bisect_right(self.steps, last)
        return replace(self, steps=self.steps[start:end], values=self.values[start:end])


def exact(value: float) -> str:
    """Return a float as text that keeps every bit: `0x1.8p+1`, `nan`, `inf`, `-inf`."""
    return value.hex()


def by_step(pairs: Sequence[tuple[int, float]]) -> tuple[tuple[int, ...], tuple[float, ...], int]:
    """Return the steps in order, their values, and how many values were replaced by a later value of the same step."""
    found = dict(pairs)
    steps = tuple(sorted(found))
    return steps, tuple(found[step] for step in steps), len(pairs) - len(found)
