"""The measured values of a run: losses, metrics, parameter hashes and determinism switches of every rank.

Runs on: LOGIN NODE. The values come from the files of the ranks (`records/metrics.py`, `records/determinism.py`), and
from files that the training itself wrote (`metric_files.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hpcenv.records.determinism import RankDeterminism, read_run_determinism
from hpcenv.records.manifest import Value
from hpcenv.records.metrics import RankMetrics, Recorded, number, read_run_metrics
from hpcenv.records.run_folder import RunFolder
from hpcenv.reproduction.metric_files import read_metric_files
from hpcenv.reproduction.series import Series, by_step

# A hint for errors about two runs without values in common.
HOW_RECORDED = (
    "hpcenv records the values of torch's loss functions by itself; "
    "record other values with hpcenv.training.log_metrics"
)

# Sources of values that hpcenv itself recorded for each rank.
OF_RANKS = ("backward", "log_metrics")

_MeasuredKey = tuple[str, str, int, int]  # source, name, part, rank


@dataclass(frozen=True, kw_only=True)
class Start:
    """What the ranks recorded from one start to its end. A start is an attempt of the job, or a restart by torchrun.

    Attributes:
        attempt: number of the attempt of the job.
        process: how often torchrun had started the ranks before, in this attempt.
        parameters: rank -> step -> sha256 of the parameters.
    """

    attempt: int
    process: int
    series: tuple[Series, ...]
    parameters: dict[int, dict[int, str]]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measured values of a run.

    Attributes:
        series: all metrics; if a step was computed again after a restart, the last value counts.
        parameters: rank -> step -> sha256 of the parameters; the last value counts, as for `series`.
        starts: the same values, separately for each start, in order.
        effective: rank -> name of the switch -> the newest value that the rank read in the last attempt.
        global_batch: samples of all ranks together in an optimizer step of the last attempt. The number is right only
            if each rank has different samples. `global_batch` is None if a rank did not record its samples.
        findings: what the ranks report about their switches, in words.
        problems: what could not be read.
    """

    series: tuple[Series, ...] = ()
    parameters: dict[int, dict[int, str]] = field(default_factory=dict)
    starts: tuple[Start, ...] = ()
    effective: dict[str, dict[str, Value | None]] = field(default_factory=dict)
    global_batch: int | None = None
    findings: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def read_measured(run: RunFolder) -> Measured:
    """Return the measured values of a run. A file that cannot be read raises no error, but is named in `problems`."""
    ranks = read_run_metrics(run)
    switches, unreadable = read_run_determinism(run)
    files = read_metric_files(run)
    starts = _starts(ranks)
    of_ranks, parameters = _merged(starts)
    problems = [f"determinism of attempt {one.attempt}, rank {one.rank}: {one.why}" for one in unreadable]
    return Measured(
        series=(*of_ranks, *files.series),
        parameters=parameters,
        starts=starts,
        effective=_effective(switches),
        global_batch=_global_batch(switches),
        findings=tuple(dict.fromkeys(_findings(switches))),
        problems=(*_problems(ranks), *problems, *files.problems),
    )


def _starts(ranks: Sequence[RankMetrics]) -> tuple[Start, ...]:
    values: dict[tuple[int, int], dict[_MeasuredKey, list[tuple[int, float]]]] = {}
    dtypes: dict[_MeasuredKey, str] = {}
    hashes: dict[tuple[int, int], dict[int, dict[int, str]]] = {}
    for one in ranks:
        for record in one.records:
            place = one.attempt, record.process
            if record.kind == "parameters":
                hashes.setdefault(place, {}).setdefault(one.rank, {})[record.step] = record.value
            elif record.used:
                key = _key(record, one.rank)
                values.setdefault(place, {}).setdefault(key, []).append((record.step, number(record)))
                dtypes[key] = "float64" if record.dtype == "int" else record.dtype
    return tuple(
        Start(
            attempt=place[0],
            process=place[1],
            series=tuple(_series(key, pairs, dtypes[key]) for key, pairs in sorted(values.get(place, {}).items())),
            parameters=hashes.get(place, {}),
        )
        for place in sorted({*values, *hashes})
    )


def _key(record: Recorded, rank: int) -> _MeasuredKey:
    source = "backward" if record.kind == "loss" else "log_metrics"
    return source, record.name, record.index if record.kind == "loss" else 0, rank


def _series(key: _MeasuredKey, pairs: Sequence[tuple[int, float]], dtype: str) -> Series:
    source, name, part, rank = key
    steps, values, _ = by_step(pairs)
    return Series(
        name=name, source=source, file="metrics", dtype=dtype, steps=steps, values=values, rank=rank, part=part
    )


def _merged(starts: Iterable[Start]) -> tuple[tuple[Series, ...], dict[int, dict[int, str]]]:
    """Merge the series of all starts. If a later start computed a step again, its value replaces the earlier value."""
    pairs: dict[_MeasuredKey, list[tuple[int, float]]] = {}
    dtypes: dict[_MeasuredKey, str] = {}
    parameters: dict[int, dict[int, str]] = {}
    for start in starts:
        for one in start.series:
            key = one.source, one.name, one.part, one.rank or 0
            pairs.setdefault(key, []).extend(zip(one.steps, one.values, strict=True))
            dtypes[key] = one.dtype
        for rank, hashes in start.parameters.items():
            parameters.setdefault(rank, {}).update(hashes)
    return tuple(_series(key, found, dtypes[key]) for key, found in sorted(pairs.items())), parameters


def _effective(switches: Sequence[RankDeterminism]) -> dict[str, dict[str, Value | None]]:
    """Return what each rank read in its last attempt. `switches` must be in the order of the attempts."""
    found: dict[str, dict[str, Value | None]] = {}
    for one in switches:
        values: dict[str, Value | None] = {switch.name: switch.effective for switch in one.switches}
        values |= {f"version.{name}": version for name, version in one.versions.items()}
        values |= {"profile": one.profile, "seed": one.seed, "rank-seed": one.rank_seed}
        found[str(one.rank)] = values
    return found


def _global_batch(switches: Sequence[RankDeterminism]) -> int | None:
    newest = max((one.attempt for one in switches), default=0)
    found = {one.rank: one.samples for one in switches if one.attempt == newest}
    known = [samples for samples in found.values() if samples is not None]
    complete = bool(known) and len(known) == len(found) == max(one.world_size for one in switches)
    return sum(known) if complete else None


def _findings(switches: Sequence[RankDeterminism]) -> Iterable[str]:
    for one in switches:
        for switch in one.switches:
            if switch.overridden:
                place = f" at {switch.changed_at}" if switch.changed_at else ""
                yield f"rank {one.rank}: the script set {switch.name} to {switch.effective}{place}, not {switch.asked}"
        for count in one.without_deterministic_kernel:
            yield f"rank {one.rank}: {count.operation} ran {count.count} times without a deterministic kernel"
        yield from (f"rank {one.rank}: {problem}" for problem in one.problems)


def _problems(ranks: Sequence[RankMetrics]) -> Iterable[str]:
    for one in ranks:
        where = f"metrics of attempt {one.attempt}, rank {one.rank}"
        yield from (f"{where}: {problem}" for problem in one.problems)
        yield from (f"{where}: {note}" for note in one.notes)
        if one.cut:
            yield f"{where}: the last line is cut: the rank was killed while it wrote"
