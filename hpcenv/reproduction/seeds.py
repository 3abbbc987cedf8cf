"""Compare two sweeps over seeds: the mean of the last value of each metric, with its confidence interval.

Runs on: LOGIN NODE. If both sweeps have the same parameter values (the same seeds), the runs are compared in pairs. A
mean inside the interval cannot be distinguished from the reference. This does not mean that the two are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcenv.errors import NotComparable
from hpcenv.reproduction.closeness import FEWEST_SEEDS, Interval, interval
from hpcenv.reproduction.comparison import is_of_machine, means_of
from hpcenv.reproduction.measured import HOW_RECORDED, read_measured
from hpcenv.runs.entries import Sweep
from hpcenv.runs.find import find_submitted
from hpcenv.text import Shown

SeedVerdict = Literal["not-distinguishable", "different", "too-few-seeds"]


@dataclass(frozen=True, kw_only=True)
class SeedComparison:
    """The last values of one metric in two sweeps.

    Attributes:
        paired: whether both sweeps have the same parameter values. If so, `difference` compares the runs in pairs.
        difference: confidence interval (95 %) of the mean of the paired differences; None if not paired.
    """

    name: str
    source: str
    reference: Interval | None
    other: Interval | None
    difference: Interval | None
    paired: bool
    verdict: SeedVerdict
    text: str


@dataclass(frozen=True, kw_only=True, repr=False)
class SweepComparison(Shown):
    """Two sweeps over seeds, metric by metric."""

    reference: str
    other: str
    metrics: tuple[SeedComparison, ...]

    @property
    def worst(self) -> SeedVerdict:
        """The verdict of all metrics together."""
        found = {one.verdict for one in self.metrics}
        order: tuple[SeedVerdict, ...] = ("different", "too-few-seeds", "not-distinguishable")
        return next(one for one in order if one in found)


_Values = dict[tuple[str, str], dict[str, float]]


def are_sweeps(start: Path, words: Sequence[str], *, runs: str | None = None) -> bool:
    """Return whether all names are names of sweeps."""
    return all(isinstance(find_submitted(start, word, runs=runs), Sweep) for word in words)


def compare_sweeps(
    start: Path, reference: str, other: str, *, runs: str | None = None, metrics: Sequence[str] = ()
) -> SweepComparison:
    """Compare the runs of two sweeps.

    Args:
        start, reference, other, runs, metrics: as for `hpcenv.reproduction.compare.compare_runs`.

    Raises:
        RunNotFound, RecordInvalid: a sweep cannot be found or read.
        NotComparable: the sweeps have no metric in common.
    """
    left, right = (_last_values(find_submitted(start, word, runs=runs), metrics) for word in (reference, other))
    found = tuple(_compare(key, left[key], right[key]) for key in sorted(left.keys() & right.keys()))
    if not found:
        raise NotComparable(
            f"the runs of `{reference}` and `{other}` have no metric in common",
            hint=HOW_RECORDED,
        )
    return SweepComparison(reference=reference, other=other, metrics=found)


def _last_values(sweep: object, metrics: Sequence[str]) -> _Values:
    """Return (source, metric) -> parameter values of a run as text -> last value of the metric in this run."""
    found: _Values = {}
    if not isinstance(sweep, Sweep):
        return found
    for element in sweep.elements:
        folder = element.folder.path.name
        label = ", ".join(f"{name}={value}" for name, value in sweep.values.get(folder, {}).items()) or folder
        for key, series in means_of(read_measured(element.folder).series).items():
            if (not metrics or series.name in metrics) and not is_of_machine(series.name):
                found.setdefault(key, {})[label] = series.values[-1]
    return found


def _compare(key: tuple[str, str], left: dict[str, float], right: dict[str, float]) -> SeedComparison:
    paired = left.keys() == right.keys()
    before, now = interval(list(left.values())), interval(list(right.values()))
    difference = interval([right[label] - left[label] for label in left]) if paired else None
    verdict: SeedVerdict
    if before is None or now is None:
        count = min(len(left), len(right))
        few = count < FEWEST_SEEDS
        verdict = "too-few-seeds"
        text = f"too few seeds: {count}, at least {FEWEST_SEEDS} are needed" if few else "a last value is not finite"
    elif difference is not None:
        inside = difference.low <= 0 <= difference.high
        verdict = "not-distinguishable" if inside else "different"
        text = f"mean difference {difference.mean:.4g}, 95 % interval {difference.low:.4g} to {difference.high:.4g}"
    else:
        apart = now.low > before.high or before.low > now.high
        verdict = "different" if apart else "not-distinguishable"
        text = " and ".join(f"{one.mean:.4g} ({one.low:.4g} to {one.high:.4g})" for one in (before, now))
    return SeedComparison(
        name=key[1], source=key[0], reference=before, other=now, difference=difference, paired=paired, verdict=verdict,
        text=text,
    )  # fmt: skip
