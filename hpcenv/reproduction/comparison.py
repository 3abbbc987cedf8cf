"""Compare the measured values of two runs, metric by metric and step by step. Pure. Runs on: LOGIN NODE.

The first run is the reference. Every metric gets a level: `equal` to the last bit, `within` the tolerance, or
`differs`. Hashes of the parameters are compared too, because losses can be equal to the last bit although the weights
differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hpcenv.reproduction.closeness import Tolerance, coarser, same_bits, ulps
from hpcenv.reproduction.measured import OF_RANKS
from hpcenv.reproduction.series import PRINTED, Series

Nearness = Literal["equal", "within", "differs"]
LEVELS: tuple[Nearness, ...] = ("equal", "within", "differs")

# Metrics that measure the machine and not the training. They are never equal, and do not count for the verdict.
_OF_MACHINE = re.compile(
    r"(?:^|[_/. -])(?:time|timestamp|seconds|secs?|ms|duration|elapsed|runtime|eta|throughput|speed|tflops|mfu|flops|"
    r"memory|mem|(?:tokens|samples|steps|images|it|iter|examples)[_/. -]?(?:per|/)[_/. -]?s(?:ec(?:ond)?)?)"
    r"(?:$|[_/. -])",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Two different values of the same step.

    Attributes:
        reference, value: the exact values (`float.hex`), or two sha256.
        reference_decimal, value_decimal: the values as decimal numbers for people; empty for a hash.
        ulp: distance of the two values in units in the last place; None if they have no such distance.
    """

    step: int
    rank: int | None
    name: str
    reference: str
    value: str
    reference_decimal: str = ""
    value_decimal: str = ""
    ulp: int | None = None


@dataclass(frozen=True, kw_only=True)
class MetricComparison:
    """One metric of two runs.

    Attributes:
        ranks: how many ranks were compared; 0 if the metric describes the whole run.
        dtype: the type of the values; the coarser type if the types of the two runs differ.
        compared: number of pairs of values.
        equal: how many pairs are equal to the last bit.
        level: `equal`, `within` or `differs`.
        first: the first pair that differs; None if all pairs are equal.
        first_beyond: the first pair whose difference is larger than the tolerance; None without such a pair.
        largest_ulp, largest_absolute, largest_relative: the largest difference of all pairs; None without such a value.
        only_reference, only_other: numbers of values that only the reference, or only the other run, has.
        judged: whether the metric counts for the verdict.
        rule: the tolerance, as text.
    """

    name: str
    source: str
    ranks: int
    dtype: str
    compared: int
    equal: int
    level: Nearness
    first: Divergence | None
    first_beyond: Divergence | None
    largest_ulp: int | None
    largest_absolute: float | None
    largest_relative: float | None
    only_reference: int
    only_other: int
    judged: bool
    rule: str
    notes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether both runs have values of the metric for the same steps."""
        return not self.only_reference and not self.only_other


@dataclass(frozen=True, kw_only=True)
class ParameterComparison:
    """The hashes of the parameters of two runs.

    Attributes:
        compared: number of pairs; 0 if the runs have no hash of the same rank and step.
        first: the first pair that differs; None if all pairs are equal.
        last_equal_step: the last compared step before the first difference; None if there is no such step.
    """

    compared: int
    equal: int
    first: Divergence | None
    last_equal_step: int | None

    @property
    def same(self) -> bool | None:
        """Whether all hashes are equal; None if nothing was compared."""
        return None if not self.compared else self.first is None


def is_of_machine(name: str) -> bool:
    """Return whether a metric measures the machine and not the training: a time, a speed, memory."""
    return _OF_MACHINE.search(name) is not None


def compare_metrics(
    reference: Sequence[Series], other: Sequence[Series], tolerance: Tolerance, *, same_ranks: bool
) -> tuple[MetricComparison, ...]:
    """Return the comparison of every metric that both runs have, losses first.

    Args:
        same_ranks: whether both runs have the same number of ranks. With different numbers of ranks, the data are split
            differently, so only the mean over all ranks is compared. Two such means are equal to the last bit only by
            chance.
    """
    left, right = _grouped(reference), _grouped(other)
    if not same_ranks:
        left, right = ({key: _means(group) for key, group in side.items()} for side in (left, right))
    found = [
        _compare(key, left[key], right[key], tolerance, mean=not same_ranks and key[0] in OF_RANKS)
        for key in sorted(left.keys() & right.keys(), key=_order)
    ]
    return tuple(one for one in found if one.compared)


_SeriesKey = tuple[str, str]
_SeriesPlace = tuple[int, int]  # rank, part


def _order(key: _SeriesKey) -> tuple[int, str, str]:
    source, name = key
    return (OF_RANKS.index(source) if source in OF_RANKS else len(OF_RANKS), source, name)


def _grouped(series: Iterable[Series]) -> dict[_SeriesKey, dict[_SeriesPlace, Series]]:
    """Return the series by source and name. If several files contain the same series, the first file by path counts."""
    found: dict[_SeriesKey, dict[_SeriesPlace, Series]] = {}
    for one in sorted(series, key=lambda each: each.file):
        place = -1 if one.rank is None else one.rank, one.part
        found.setdefault((one.source, one.name), {}).setdefault(place, one)
    return found


def means_of(series: Iterable[Series]) -> dict[tuple[str, str], Series]:
    """Return one series for each source and name: the values of `_means`, which are averaged over the ranks."""
    found = {key: next(iter(_means(group).values())) for key, group in _grouped(series).items()}
    return {key: one for key, one in found.items() if one.steps}


def _means(group: Mapping[_SeriesPlace, Series]) -> dict[_SeriesPlace, Series]:
    """For each step that all ranks have, return the sum of the losses of its `backward` calls, averaged over the ranks.

    Between two optimizer steps, the gradients of several calls add up. So the optimizer uses the sum of these losses,
    averaged over the ranks. This value does not depend on how the batch is split into ranks and calls, because a script
    divides each loss by the number of calls.
    """
    if len(group) < 2:
        return dict(zip([(-1, 0)], group.values(), strict=False))
    sums: dict[int, dict[int, list[float]]] = {}
    for (rank, _), one in group.items():
        for step, value in zip(one.steps, one.values, strict=True):
            sums.setdefault(step, {}).setdefault(rank, []).append(value)
    everyone = {rank for rank, _ in group}
    steps = tuple(sorted(step for step, of_ranks in sums.items() if of_ranks.keys() == everyone))
    first = next(iter(group.values()))
    values = tuple(_sum([_sum(parts) for parts in sums[step].values()]) / len(everyone) for step in steps)
    return {
        (-1, 0): Series(
            name=first.name, source=first.source, file=first.file, dtype=first.dtype, steps=steps, values=values
        )
    }


def _sum(values: Sequence[float]) -> float:
    return math.fsum(values) if all(math.isfinite(value) for value in values) else math.nan


@dataclass
class _Tally:
    """The pairs of one metric so far."""

    compared: int = 0
    equal: int = 0
    close: int = 0
    ulp: int | None = None
    absolute: float | None = None
    relative: float | None = None
    first: Divergence | None = None
    beyond: Divergence | None = None

    def add(self, name: str, rank: int, step: int, pair: tuple[float, float], dtype: str, rule: Tolerance) -> None:
        reference, value = pair
        self.compared += 1
        if same_bits(reference, value):
            self.equal += 1
            return
        distance = ulps(reference, value, dtype)
        found = Divergence(
            step=step, rank=None if rank < 0 else rank, name=name, reference=reference.hex(), value=value.hex(),
            reference_decimal=repr(reference), value_decimal=repr(value), ulp=distance,
        )  # fmt: skip
        self.first = _earlier(self.first, found)
        if distance is not None:
            self.ulp = max(self.ulp or 0, distance)
        gap = abs(value - reference)
        if math.isfinite(gap):
            self.absolute = max(self.absolute or 0.0, gap)
            if reference:
                self.relative = max(self.relative or 0.0, gap / abs(reference))
        if rule.holds(reference, value, dtype):
            self.close += 1
        else:
            self.beyond = _earlier(self.beyond, found)


def _earlier(known: Divergence | None, found: Divergence) -> Divergence:
    return found if known is None or found.step < known.step else known


def _compare(
    key: _SeriesKey,
    left: Mapping[_SeriesPlace, Series],
    right: Mapping[_SeriesPlace, Series],
    tolerance: Tolerance,
    *,
    mean: bool,
) -> MetricComparison:
    source, name = key
    tally, only_left, only_right = _Tally(), 0, 0
    dtypes = {one.dtype for side in (left, right) for one in side.values()}
    dtype = "float64"
    for one in sorted(dtypes):
        dtype = coarser(dtype, one)
    for place in sorted(left.keys() | right.keys()):
        first, second = left.get(place), right.get(place)
        values = {} if first is None else dict(zip(first.steps, first.values, strict=True))
        others = {} if second is None else dict(zip(second.steps, second.values, strict=True))
        label = name if place[1] == 0 else f"{name}[{place[1]}]"
        common = values.keys() & others.keys()
        for step in sorted(common):
            tally.add(label, place[0], step, (values[step], others[step]), dtype, tolerance)
        only_left += len(values) - len(common)
        only_right += len(others) - len(common)
    level: Nearness = "equal" if tally.equal == tally.compared else "within" if tally.beyond is None else "differs"
    if level == "equal" and mean:
        level = "within"  # the sums were computed in a different order, and are equal by chance
    return MetricComparison(
        name=name, source=source, ranks=len({rank for rank, _ in left if rank >= 0}), dtype=dtype,
        compared=tally.compared, equal=tally.equal, level=level, first=tally.first, first_beyond=tally.beyond,
        largest_ulp=tally.ulp, largest_absolute=tally.absolute, largest_relative=tally.relative,
        only_reference=only_left, only_other=only_right, judged=not is_of_machine(name),
        rule=tolerance.in_words(dtype), notes=tuple(_notes(left, right, dtypes, mean=mean)),
    )  # fmt: skip


def _notes(
    left: Mapping[_SeriesPlace, Series], right: Mapping[_SeriesPlace, Series], dtypes: set[str], *, mean: bool
) -> Iterable[str]:
    if mean:
        yield "the numbers of ranks differ: the mean over ranks was compared, and never counts as equal to the last bit"
    if PRINTED in dtypes:
        yield "printed with few digits: equal texts do not show that the numbers were equal"
    elif len(dtypes) > 1:
        yield f"recorded as {' and '.join(sorted(dtypes))}"
    missing = {rank for rank, _ in left} ^ {rank for rank, _ in right}
    if missing:
        yield f"only one of the runs has ranks {', '.join(map(str, sorted(missing)))}"


def compare_parameters(
    reference: Mapping[int, Mapping[int, str]], other: Mapping[int, Mapping[int, str]]
) -> ParameterComparison:
    """Return the comparison of the hashes of the parameters, by rank and step."""
    pairs = sorted(
        (step, rank, hashes[step], other[rank][step])
        for rank, hashes in reference.items()
        if rank in other
        for step in hashes.keys() & other[rank].keys()
    )
    unequal = [pair for pair in pairs if pair[2] != pair[3]]
    first = None
    if unequal:
        step, rank, left, right = unequal[0]
        first = Divergence(step=step, rank=rank, name="parameters", reference=left, value=right)
    before = [step for step, *_ in pairs if first is None or step < first.step]
    return ParameterComparison(
        compared=len(pairs), equal=len(pairs) - len(unequal), first=first, last_equal_step=max(before, default=None)
    )


def overall(metrics: Sequence[MetricComparison]) -> Nearness | None:
    """Return the level of two runs: the worst level of all judged metrics; None if no metric is judged.

    If a metric was printed with few digits, only its text can be equal, not its exact numbers. Such a metric does not
    lower the level from `equal` to `within` if another metric is exact.
    """
    judged = [one for one in metrics if one.judged]
    exact = [one for one in judged if one.dtype != PRINTED]
    levels = [one.level for one in judged if one in exact or one.level == "differs"]
    if not exact:
        levels += ["within" if one.level == "equal" else one.level for one in judged]
    return max(levels, key=LEVELS.index) if levels else None
