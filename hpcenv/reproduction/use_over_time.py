"""What a run used over time, from its samples. A report shows these values as pictures.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hpcenv.records.run_folder import RunFolder
from hpcenv.records.samples import NodeSamples, Sample, read_attempt
from hpcenv.reproduction.attempt_record import AttemptRecord
from hpcenv.reproduction.comparison import means_of
from hpcenv.reproduction.measured import OF_RANKS, Measured

# The number of columns of the time axis. A column is 5 pixels wide on a large screen, and 2 pixels on a phone.
COLUMNS = 120


@dataclass(frozen=True, kw_only=True)
class Track:
    """The mean values of one GPU or rank in each column of the time axis; None where a value is unknown."""

    name: str
    values: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class UseOverTime:
    """What a run used. Use, memory and waiting are in percent, times in seconds.

    Attributes:
        seconds: length of the time axis; it begins with the first attempt.
        use, memory: use and memory of each GPU, by node and index.
        step_time, waiting: for each rank, the time of a step, and the part of this time in which the rank waited for
            data.
        loss: the mean loss of the ranks; empty if the samples do not show when the steps were made.
        unread: what could not be read, and why.
    """

    seconds: float
    use: tuple[Track, ...]
    memory: tuple[Track, ...]
    step_time: tuple[Track, ...]
    waiting: tuple[Track, ...]
    loss: tuple[Track, ...]
    unread: tuple[str, ...] = ()


@dataclass
class _Columns:
    """Sums and counts of the values in each column of one track."""

    sums: list[float] = field(default_factory=lambda: [0.0] * COLUMNS)
    counts: list[int] = field(default_factory=lambda: [0] * COLUMNS)

    def add(self, first: int, last: int, value: float | None) -> None:
        if value is not None:
            for column in range(first, last + 1):
                self.sums[column] += value
                self.counts[column] += 1

    def track(self, name: str) -> Track:
        pairs = zip(self.sums, self.counts, strict=True)
        return Track(name=name, values=tuple(total / count if count else None for total, count in pairs))


def read_use(run: RunFolder, attempts: Sequence[AttemptRecord], measured: Measured) -> UseOverTime | None:
    """Return what a run used; None without samples."""
    begin = min((one.began for one in attempts), default=0.0)
    end = max((one.ended or _newest(run, one.attempt) for one in attempts), default=0.0)
    numbers = sorted({one.attempt for one in attempts})
    return make_use((one for number in numbers for one in read_attempt(run, number)), measured, begin=begin, end=end)


def _newest(run: RunFolder, attempt: int) -> float:
    """Return when the samples of an attempt were last written. This time replaces an end that is not recorded."""
    return max((path.lstat().st_mtime for path in run.samples_of(attempt, "x").parent.glob("*.jsonl")), default=0.0)


def make_use(nodes: Iterable[NodeSamples], measured: Measured, *, begin: float, end: float) -> UseOverTime | None:
    """Return the columns of all samples. The nodes are read one by one, so that 64 nodes need little memory."""
    kinds = ("use", "memory", "step_time", "waiting")
    found: dict[str, dict[tuple[str, int], _Columns]] = {kind: {} for kind in kinds}
    times: dict[int, list[tuple[int, float]]] = {}
    unread = []
    for node in nodes:
        unread += [f"samples of {node.node}: {node.problem}"] if node.problem else []
        for sample in node.samples:
            first, last = (_column(at, begin, end) for at in (sample.at - sample.seconds, sample.at))
            for kind, key, value in _values(sample, node.node):
                found[kind].setdefault(key, _Columns()).add(first, last, value)
            for rank in sample.ranks if node.attempt == 0 else ():
                if rank.step is not None:
                    times.setdefault(rank.rank, []).append((rank.step, sample.at))
    if not found["use"] and not found["step_time"]:
        return None
    tracks = {kind: tuple(one.track(_name(*key)) for key, one in sorted(found[kind].items())) for kind in kinds}
    steps = times.get(min(times, default=0), [])
    return UseOverTime(
        seconds=end - begin, **tracks, loss=tuple(_loss(measured, steps, begin, end)), unread=tuple(unread)
    )


def _column(at: float, begin: float, end: float) -> int:
    return min(COLUMNS - 1, max(0, int((at - begin) / max(end - begin, 1e-9) * COLUMNS)))


def _values(sample: Sample, node: str) -> Iterator[tuple[str, tuple[str, int], float | None]]:
    for gpu in sample.gpus:
        yield "use", (node, gpu.index), gpu.use
        yield "memory", (node, gpu.index), _percent(gpu.memory, gpu.memory_total)
    for rank in sample.ranks:
        yield "step_time", ("", rank.rank), rank.step_seconds
        yield "waiting", ("", rank.rank), rank.wait_percent


def _percent(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else 100 * part / whole


def _name(node: str, number: int) -> str:
    return f"{node} GPU {number}" if node else f"rank {number}"


def _loss(measured: Measured, steps: Sequence[tuple[int, float]], begin: float, end: float) -> Iterator[Track]:
    """Yield the loss over time. The samples of the first attempt show when a step was made.

    Later attempts are not used, because their count of steps begins at 0 again.
    """
    means = means_of(measured.series)
    key = min(
        means, key=lambda key: (OF_RANKS.index(key[0]) if key[0] in OF_RANKS else len(OF_RANKS), key), default=None
    )
    if key is None or not steps:
        return
    columns, counts, before = _Columns(), [step for step, _ in steps], None
    for step, value in zip(means[key].steps, means[key].values, strict=True):
        place = bisect_left(counts, step)
        if place < len(steps):
            column = _column(steps[place][1], begin, end)
            # All steps up to the next sample have the time of that sample, so they also fill the columns before that
            # sample.
            columns.add(column if before in (None, column) else before + 1, column, value)
            before = column
    yield columns.track(key[1])
