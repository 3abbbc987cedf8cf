"""Find unusual values in the samples of one attempt, and describe them in sentences. A table has the rules. Pure.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only. docs/reference/use.md is written from the table.

The weight of a sample is its `seconds`. If a value is unknown, no rule gives a sentence about the value. Instead, one
line says that the value is unknown.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from statistics import median, median_low

from hpcenv import size
from hpcenv.hostlist import fold_hostlist
from hpcenv.judge.hang import ranks_in_words
from hpcenv.records.samples import GpuUse, NodeSamples, NodeUse, RankUse, Sample
from hpcenv.text import plural

# A GPU with a mean use below this value, in percent, counts as idle. One short kernel does not make a minute busy.
_IDLE = 1.0
# In seconds. A rule draws no conclusion from a shorter time, so a run of 20 s never gets a sentence.
_SHORTEST = 120.0
_SHORTEST_IDLE = 300.0
# While no rank has made a step, loading, compiling and tuning may leave all GPUs idle for this time.
_LONGEST_START = 1800.0
# A value may be unknown for a short time without a line about it. The limits are the longest time in seconds without a
# sample, and the largest share of the time without a value.
_LATE = 300.0
_MOST_UNKNOWN = 0.1
# The part of the time, in percent, in which a process waits for memory.
_PRESSURE = 10.0
# For memory that grows: the seconds after the first step that do not count, the least growth in bytes, and the largest
# number of points.
_WARM_UP = 300.0
_LEAST_GROWTH = 256e6
_MOST_POINTS = 20
# The largest number of sentences of one rule. If a rule finds more, it gives one sentence, which names the others too.
_MOST_SENTENCES = 3


@dataclass(frozen=True, kw_only=True)
class AskedShape:
    """The resources that a run requested.

    Attributes:
        nodes: the nodes that started ranks.
        number: how many nodes the run requested; 0 if this is not known.
        gpus, cpus: number of GPUs and CPUs of each node. 0 means no GPUs, or an unknown number of CPUs.
        until: when the ranks ended, or now if the ranks still run, in seconds since the epoch; None if not known.
    """

    nodes: tuple[str, ...] = ()
    number: int = 0
    gpus: int = 0
    cpus: int = 0
    until: float | None = None


@dataclass(frozen=True, kw_only=True)
class UseSentence:
    """A sentence about something unusual.

    Attributes:
        rule: id of the rule in the table.
        nodes, ranks: the nodes and ranks that the sentence names.
    """

    rule: str
    text: str
    hint: str
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class UseJudgement:
    """The judgement of the samples of an attempt.

    Attributes:
        samples: number of samples of all nodes.
        figures: means over the whole time, as text; empty if nothing is known.
        sentences: what is unusual; empty if nothing is unusual.
        unknown: the values that no sample shows, and why.
    """

    nodes: int
    gpus: int
    samples: int
    figures: str
    sentences: tuple[UseSentence, ...] = ()
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Odd:
    """Something unusual on one node or rank, and how bad it is. The GPUs in `gpus` then need no second sentence."""

    weight: float
    text: str
    node: str
    rank: int | None = None
    gpus: frozenset[_Gpu] = frozenset()


_Gpu = tuple[str, int]
_GpuLooks = list[tuple[Sample, GpuUse]]


class _Seen:
    """The samples by GPU and by rank.

    Attributes:
        told: GPUs and ranks that have a sentence already.
        began: when the attempt began. The samples may begin later, because `hpcenv top` reads only the newest ones.
        steps: rank -> the typical time of its steps. Ranks that were seen for too short a time are left out.
        waits: rank -> the part of a step in which the rank typically waits for data, in percent.
    """

    def __init__(self, nodes: Sequence[NodeSamples], asked: AskedShape) -> None:
        self.nodes = [node for node in nodes if node.samples]
        self.asked = asked
        self.told: set[_Gpu | int | None] = set()
        self.gpus: dict[_Gpu, _GpuLooks] = defaultdict(list)
        self.ranks: dict[int, list[tuple[str, Sample, RankUse]]] = defaultdict(list)
        for node in self.nodes:
            for sample in node.samples:
                for gpu in sample.gpus:
                    self.gpus[node.node, gpu.index].append((sample, gpu))
                for rank in sample.ranks:
                    self.ranks[rank.rank].append((node.node, sample, rank))
        self.began = min((_begin(node) if node.began is None else node.began for node in self.nodes), default=0.0)
        self.steps = self._typical(lambda one: one.step_seconds)
        self.waits = self._typical(lambda one: one.wait_percent)
        self.first_step = self._first_step()

    def _typical(self, value: Callable[[RankUse], float | None]) -> dict[int, float]:
        found = {rank: _typical((value(one), s.seconds) for _, s, one in looks) for rank, looks in self.ranks.items()}
        return {rank: known for rank, known in found.items() if known is not None}

    def _first_step(self) -> float | None:
        """Return when the first step ended.

        If no sample is from that time, the number of steps so far gives an estimate.
        """
        newest_only = self.began < min(map(_begin, self.nodes), default=0.0)
        found = []
        for rank, looks in self.ranks.items():
            first = next(((s.at, one.step) for _, s, one in looks if one.step), None)
            if first is not None:
                earlier = first[1] * self.steps.get(rank, 0.0) if newest_only else 0.0
                found.append(max(self.began, first[0] - earlier))
        return min(found, default=None)

    def untold(self, node: NodeSamples) -> Iterator[tuple[int, _GpuLooks]]:
        """Yield the GPUs of a node that have no sentence yet."""
        gpus = (gpu for gpu in self.gpus if gpu[0] == node.node and gpu not in self.told)
        yield from ((gpu[1], self.gpus[gpu]) for gpu in gpus)

    def of_gpus(self, node: NodeSamples, gpus: Collection[int], text: str) -> _Odd:
        """Return something unusual about some GPUs of a node."""
        total = max(self.asked.gpus, sum(name == node.node for name, _ in self.gpus))
        whole = f"{len(gpus)} of {plural(total, 'GPU')} of {node.node} {text}"
        return _Odd(len(gpus), whole, node.node, gpus=frozenset((node.node, index) for index in gpus))

    def is_start(self, sample: Sample) -> bool:
        """Whether idle GPUs in a sample are normal: no rank has made a step yet, or a rank saves its state."""
        until = self.began + _LONGEST_START
        until = until if self.first_step is None else min(self.first_step, until)
        idle = all(gpu.use is None or gpu.use < _IDLE for gpu in sample.gpus)
        return idle and (sample.at <= until or any(rank.saving for rank in sample.ranks))

    def gpu_of(self, rank: int) -> _GpuLooks:
        return [(s, gpu) for _, s, _ in self.ranks[rank] for gpu in s.gpus if rank in gpu.ranks]

    def of_rank(self, rank: int, weight: float, text: str) -> _Odd:
        """Return something unusual about a rank. The GPU of the rank then needs no other sentence."""
        node = self.ranks[rank][-1][0]
        gpus = frozenset((node, gpu.index) for _, gpu in self.gpu_of(rank))
        return _Odd(weight, text, node, rank, gpus)


def _begin(node: NodeSamples) -> float:
    return node.samples[0].at - node.samples[0].seconds


def _seconds(samples: Iterable[Sample]) -> float:
    return sum(sample.seconds for sample in samples)


def _mean(pairs: Iterable[tuple[float | None, float]]) -> float | None:
    """Return the weighted mean of the known values; None if no value is known."""
    known = [(value, weight) for value, weight in pairs if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def _typical(pairs: Iterable[tuple[float | None, float]]) -> float | None:
    """Return the weighted median; None if the time is too short. A long compilation does not change the median."""
    known = sorted((value, weight) for value, weight in pairs if value is not None)
    total = sum(weight for _, weight in known)
    if total < _SHORTEST:
        return None
    half = 0.0
    for value, weight in known:
        half += weight
        if half >= total / 2:
            return value
    return None


def _most(sample: Sample) -> Sample:
    return sample.most or sample


def _share(pairs: Iterable[tuple[bool, float]]) -> float:
    """Return the share of the time in which something was true, in percent; 0 if the whole time is too short."""
    known = list(pairs)
    total = sum(weight for _, weight in known)
    return 100 * sum(weight for true, weight in known if true) / total if total >= _SHORTEST else 0.0


def _amounts(used: float, total: float) -> str:
    """Return two amounts of memory as text, such as `71 of 80 GB`."""
    return f"{used / 1e9:.0f} of {total / 1e9:.0f} GB" if total >= 10e9 else f"{used / 1e9:.1f} of {total / 1e9:.1f} GB"


# -- the rules ----------------------------------------------------------------------------


def _no_process(seen: _Seen, limit: float) -> Iterator[_Odd]:
    # If no sample shows a process on any GPU, the node hides processes.
    if not any(gpu.ranks or gpu.others for looks in seen.gpus.values() for _, gpu in looks):
        return
    for node in seen.nodes:
        empty: dict[int, float] = {}
        for index, looks in seen.untold(node):
            last = max((sample.at for sample, gpu in looks if gpu.ranks or gpu.others), default=seen.began)
            after = [(sample, gpu) for sample, gpu in looks if sample.at > last]
            seconds = sum(sample.seconds for sample, _ in after)
            quiet = all(gpu.others == 0 and (gpu.use or 0) < _IDLE for _, gpu in after)
            share = 100 * seconds / max(1.0, sum(sample.seconds for sample, _ in looks))
            if quiet and seconds >= _SHORTEST_IDLE and share >= limit:
                empty[index] = last
        if empty:
            minute = (max(empty.values()) - seen.began) / 60
            when = f" after minute {minute:.0f}" if minute >= 1 else ""
            yield seen.of_gpus(node, empty, f"had no process{when}")


def _idle(seen: _Seen, limit: float) -> Iterator[_Odd]:
    for node in seen.nodes:
        idle: dict[int, tuple[float, float]] = {}
        for index, looks in seen.untold(node):
            known = [(s, gpu.use) for s, gpu in looks if gpu.use is not None]
            counted = [(use < _IDLE, s.seconds) for s, use in known if not seen.is_start(s)]
            seconds = sum(weight for quiet, weight in counted if quiet)
            if seconds >= _SHORTEST_IDLE and _share(counted) >= limit:
                whole = sum(s.seconds for s, _ in known)
                idle[index] = (sum(s.seconds for s, use in known if use < _IDLE), whole)
        if idle:
            seconds, whole = min(idle.values())
            were = "was" if len(idle) == 1 else "were"
            minutes = f"{seconds / 60:.0f} of {whole / 60:.0f} minutes"
            yield seen.of_gpus(node, idle, f"{were} idle (0 % use) for {minutes}")


def _data_wait(seen: _Seen, limit: float) -> Iterator[_Odd]:
    if not seen.waits or (wait := median(seen.waits.values())) < limit:
        return
    node, sample = next((node.node, s) for node in seen.nodes for s in reversed(node.samples) if s.ranks)
    workers, cpus = [rank.workers for rank in sample.ranks], sample.node.cpus or seen.asked.cpus
    known = [count for count in workers if count is not None]
    why = ""
    if len(known) == len(workers) and cpus:
        where = f" of {node}" if len(seen.nodes) > 1 else ""
        why = f": {plural(round(sum(known)), 'worker')} for {plural(cpus, 'CPU')}{where}"
    yield _Odd(wait, f"the ranks waited for data {wait:.0f} % of each step{why}", node)


def _slow_rank(seen: _Seen, limit: float) -> Iterator[_Odd]:
    steps = seen.steps
    if len(steps) < 2:
        return
    # If there are two ranks, both are compared with the faster rank.
    usual = median_low(steps.values())
    slow = sorted((rank for rank in steps if steps[rank] >= limit * usual > 0), key=lambda rank: -steps[rank])
    others = [rank for rank in steps if rank not in slow]
    for number, rank in enumerate(slow):
        # If many ranks are slow, only the slowest ranks have a sentence, so only their causes are needed.
        signals = _why_slow(seen, rank, others, steps[rank] - usual) if number < _MOST_SENTENCES else iter(())
        why = next(signals, "no signal that was read explains it")
        text = f"rank {rank} is {steps[rank] / usual:.1f} times slower than the median; {why}"
        yield seen.of_rank(rank, steps[rank] / usual, text)


def _holding_rank(seen: _Seen, limit: float) -> Iterator[_Odd]:
    """Yield a rank for which the other ranks wait. All ranks have the same step time, because they train together."""
    usual = median_low(seen.waits.values()) if len(seen.waits) > 1 else math.inf
    for rank, looks in seen.ranks.items():
        if rank in seen.told or len(seen.ranks) < 2:
            continue
        stopped = _share((one.state == "T", s.seconds) for _, s, one in looks)
        wait, head = seen.waits.get(rank, 0.0), f"rank {rank} holds the others back:"
        if stopped >= limit:
            yield seen.of_rank(rank, stopped, f"{head} its process is stopped {stopped:.0f} % of the time (state T)")
        elif wait - usual >= limit:
            yield seen.of_rank(rank, wait, f"{head} it waits for data {wait:.0f} % of each step, they {usual:.0f} %")


def _why_slow(seen: _Seen, rank: int, others: Sequence[int], lost: float) -> Iterator[str]:
    """Yield the signals that can explain why a rank is slow, the most certain signal first.

    Args:
        lost: how many seconds longer each step is than the usual step.
    """
    looks = seen.ranks[rank]
    for state, words in (("T", "is stopped"), ("D", "waits for a device or a file system")):
        if _share((one.state == state, s.seconds) for _, s, one in looks) >= 10:
            yield f"its process {words} at times (state {state})"
    if reason := _slow_reason(seen.gpu_of(rank), 10):
        yield f"its GPU reports {reason}"
    own, their = _both(lambda r: seen.waits[r] / 100 * seen.steps[r] if r in seen.waits else None, rank, others)
    if own - their >= lost / 2:
        yield f"it waits for data {seen.waits[rank]:.0f} % of each step"
    own, their = _both(lambda r: _mean((gpu.clock, s.seconds) for s, gpu in seen.gpu_of(r)), rank, others)
    if own < 0.9 * their:
        yield f"its GPU runs at {own:.0f} MHz, those of the others at {their:.0f} MHz"
    node = looks[-1][0]
    busy = _mean((s.node.pressure_cpu, s.seconds) for _, s, _ in looks)
    if busy is not None and busy >= 20:
        yield f"processes of {node} wait for a CPU {busy:.0f} % of the time"
    own, their = _both(lambda r: _mean((one.cpu, s.seconds) for _, s, one in seen.ranks[r]), rank, others)
    if own < their / 2:
        yield f"it gets {own:.1f} CPUs, the others {their:.1f}"
    short = _mean((s.node.pressure_memory, s.seconds) for _, s, _ in looks)
    if short is not None and short >= _PRESSURE:
        yield f"processes of {node} wait for memory {short:.0f} % of the time"
    own, their = _both(lambda r: _growth_of(s.node.rdma_errors for _, s, _ in seen.ranks[r]), rank, others)
    if own > 2 * their:
        yield f"the RDMA ports of {node} had {plural(round(own), 'error')}"


def _both(value: Callable[[int], float | None], rank: int, others: Sequence[int]) -> tuple[float, float]:
    """Return a value of a rank, and the median of this value over the other ranks.

    An unknown value is NaN, so every comparison with an unknown value is false.
    """
    own, their = value(rank), [one for other in others if (one := value(other)) is not None]
    return math.nan if own is None else own, median(their) if their else math.nan


def _growth_of(counts: Iterable[float | None]) -> float | None:
    """Return by how much a counter grew; None if the result is unknown.

    If the counter was reset, the decrease is ignored.
    """
    known = [count for count in counts if count is not None]
    return sum(max(0.0, later - earlier) for earlier, later in pairwise(known)) if known else None


# Words in the name of a reason -> text for a sentence. A power limit and clocks that were set by hand are normal, so
# these two have no entry.
_REASONS = {
    "hw-thermal": "a hardware slowdown for heat",
    "thermal": "a slowdown for heat",
    "brake": "a slowdown by the power brake",
    "hw-slowdown": "a hardware slowdown",
}


def _slow_reason(looks: Sequence[tuple[Sample, GpuUse]], limit: float) -> str:
    """Return why the clock of a GPU was low for at least `limit` percent of the time; empty if it was not low."""
    for word, text in _REASONS.items():
        if _share((any(word in name for name in gpu.slow), s.seconds) for s, gpu in looks) >= limit:
            return text
    return ""


def _slow_gpu(seen: _Seen, limit: float) -> Iterator[_Odd]:
    for node in seen.nodes:
        by_reason: dict[str, list[int]] = defaultdict(list)
        for index, looks in seen.untold(node):
            if reason := _slow_reason(looks, limit):
                by_reason[reason].append(index)
        for reason, gpus in by_reason.items():
            yield seen.of_gpus(node, gpus, f"{'reports' if len(gpus) == 1 else 'report'} {reason}")


def _ecc(seen: _Seen, limit: float) -> Iterator[_Odd]:
    for (node, index), looks in seen.gpus.items():
        # A sample may be the mean of a minute. Then use the highest value, because the mean of a counter is not a
        # count.
        grown = _growth_of(one.ecc for s, _ in looks for one in _most(s).gpus if one.index == index)
        if grown is not None and grown >= limit:
            text = f"GPU {index} of {node} had {plural(round(grown), 'uncorrected memory error')} (ECC)"
            yield _Odd(grown, text, node)


def _node_memory(seen: _Seen, limit: float) -> Iterator[_Odd]:
    for node in seen.nodes:
        uses = [_most(sample).node for sample in node.samples]
        peak = max((v for use in uses for v in (use.memory, use.memory_peak) if v is not None), default=None)
        total = min((use.memory_limit for use in uses if use.memory_limit), default=None)
        if peak is not None and total is not None and 100 * peak / total >= limit:
            yield _Odd(peak / total, f"peak memory {_amounts(peak, total)} of {node.node}", node.node)


def _gpu_memory(seen: _Seen, limit: float) -> Iterator[_Odd]:
    for node in seen.nodes:
        gpus = [gpu for sample in node.samples for gpu in _most(sample).gpus]
        known = [(gpu.memory / gpu.memory_total, gpu) for gpu in gpus if gpu.memory is not None and gpu.memory_total]
        share, gpu = max(known, key=lambda pair: pair[0], default=(0.0, GpuUse(index=0)))
        if gpu.memory is not None and gpu.memory_total is not None and 100 * share >= limit:
            text = f"peak memory {_amounts(gpu.memory, gpu.memory_total)} of GPU {gpu.index} of {node.node}"
            yield _Odd(share, text, node.node)


def _leak(seen: _Seen, limit: float) -> Iterator[_Odd]:
    for node in seen.nodes:
        points = [(s.at, max((rank.step or 0 for rank in s.ranks), default=0), s.node.memory) for s in node.samples]
        yield from _growth(seen, points, limit, "memory", node.node)
    for number, looks in seen.ranks.items():
        points = [(s.at, rank.step or 0, rank.torch_memory) for _, s, rank in looks]
        yield from _growth(seen, points, limit, f"memory of torch in rank {number}", looks[-1][0], rank=number)


def _growth(
    seen: _Seen,
    points: Sequence[tuple[float, int, float | None]],
    limit: float,
    what: str,
    node: str,
    rank: int | None = None,
) -> Iterator[_Odd]:
    """Yield memory that grows steadily with the steps until the end.

    Args:
        limit: the smallest growth to report, in percent of the memory at the beginning.
    """
    since = (seen.first_step or 0.0) + _WARM_UP
    known = [(at, step, memory) for at, step, memory in points if step and memory is not None and at >= since]
    if len(known) < 12 or known[-1][0] - known[0][0] < 2 * _WARM_UP:
        return
    # The minimum of each part is used, because a sawtooth, for example from evaluations or saves, is not growth.
    length = -(-len(known) // _MOST_POINTS)
    parts = [known[n : n + length] for n in range(0, len(known) - length + 1, length)]
    line = [(part[0][1], min(memory for _, _, memory in part)) for part in parts]
    base, end = min(memory for _, memory in line), line[-1][1]
    begin = max(n for n, (_, memory) in enumerate(line) if memory <= base + 0.05 * (end - base))
    first, line = line[0][0], line[begin:]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(line, 2) if b[0] > a[0]]
    if len(line) < 6 or not slopes or end - base < max(_LEAST_GROWTH, limit / 100 * base):
        return
    # A cache grows more slowly when it becomes full, but a leak does not.
    middle = len(line) // 2
    steady = end - line[middle][1] >= 0.3 * (end - base)
    if steady and sum(slope > 0 for slope in slopes) >= 0.9 * len(slopes):
        amount = size.shown(round(100 * median(slopes))).replace(".0 ", " ")
        # The step at which a straight line of this slope has the value that the memory had at the beginning.
        since_step = max(first, round(line[-1][0] - (end - base) / median(slopes)))
        where = f" of {node}" if rank is None and len(seen.nodes) > 1 else ""
        yield _Odd(median(slopes), f"{what}{where} grows by {amount} in 100 steps since step {since_step}", node, rank)


def _pressure(seen: _Seen, limit: float) -> Iterator[_Odd]:
    for node in seen.nodes:
        long_enough = _seconds(node.samples) >= _SHORTEST
        short = _mean((sample.node.pressure_memory, sample.seconds) for sample in node.samples)
        if long_enough and short is not None and short >= limit:
            yield _Odd(short, f"processes of {node.node} waited for memory {short:.0f} % of the time", node.node)


# -- the table ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class UseRule:
    """A rule, which gives one kind of sentence.

    Attributes:
        example: an example of the sentence.
        limit: the least number for which the sentence is given.
        means: the meaning of this number, with its unit.
        why: the damage for the run.
        source: the source of the rule or of its limit, with a date.
    """

    id: str
    example: str
    limit: float
    means: str
    why: str
    hint: str
    source: str
    find: Callable[[_Seen, float], Iterator[_Odd]]


_OURS = "the limit is hpcenv's (2026-11)"

RULES: tuple[UseRule, ...] = (
    UseRule(
        id="gpu.no-process",
        example="3 of 4 GPUs of n2 had no process after minute 2",
        limit=50,
        means="% of the time of the node, up to its end and at least 5 minutes; the GPU does nothing either",
        why="GPUs that no rank uses cost as much as GPUs in use",
        hint="start one rank for each GPU (--nproc), or ask for fewer GPUs (--gpus)",
        source=f"slurm-job-exporter#65 (most wasted GPUs have no process); {_OURS}",
        find=_no_process,
    ),
    UseRule(
        id="gpu.idle",
        example="1 of 4 GPUs of n1 was idle (0 % use) for 55 of 60 minutes",
        limit=50,
        means="% of the time below 1 % use, at least 5 minutes; not before the first step (at most 30 minutes), nor "
        "while a rank saves, if all GPUs of the node are idle",
        why="a mean over all GPUs hides the GPU that does nothing",
        hint="look at what its rank does: hpcenv logs RUN; does the script move its model to this GPU?",
        source=f"mila-docs#414, gnn_tracking#95, jobstats#28 (means hide it); {_OURS}",
        find=_idle,
    ),
    UseRule(
        id="gpu.ecc",
        example="GPU 3 of n1 had 2 uncorrected memory errors (ECC)",
        limit=1,
        means="new errors while the run used the GPU",
        why="the values in this memory are lost, and often more errors follow",
        hint="tell the site's support; until the GPU is repaired, submit with --exclude NODE",
        source="NVIDIA, Xid errors (2026-11); the check gpu.ecc.uncorrected looks at the same counters before the run",
        find=_ecc,
    ),
    UseRule(
        id="rank.slow",
        example="rank 17 is 1.6 times slower than the median; its GPU reports a hardware slowdown for heat",
        limit=1.3,
        means="times the median step of the ranks (if there are two: of the faster rank), for at least 2 minutes",
        why="all ranks wait for the slowest rank",
        hint="if the cause is on one node only: submit with --exclude NODE, and tell the site's support",
        source=f"hpcfund#19, open_clip#703 (power brake), azurehpc PR#591; {_OURS}",
        find=_slow_rank,
    ),
    UseRule(
        id="rank.holds",
        example="rank 3 holds the others back: it waits for data 40 % of each step, they 2 %",
        limit=30,
        means="% of a step by which its wait for data is longer than the median of the ranks (if there are two, "
        "than the shorter wait), or % of the time in which its process is stopped; for at least 2 minutes",
        why="ranks that train together all need the step time of the slowest rank",
        hint="look at the data and the node of this rank; if the cause is on one node only: submit with --exclude NODE",
        source=f"hpcfund#19, marin#7681; {_OURS}",
        find=_holding_rank,
    ),
    UseRule(
        id="gpu.slow",
        example="1 of 4 GPUs of n1 reports a hardware slowdown for heat",
        limit=10,
        means="% of the time with a slowdown for heat, by the power brake or by the hardware; a power limit is normal",
        why="the GPU computes at a lower clock",
        hint="tell the site's support; until the node is repaired, submit with --exclude NODE",
        source=f"open_clip#703, Azure/azurehpc PR#591; nvml.h, nvmlClocksEventReasons; {_OURS}",
        find=_slow_gpu,
    ),
    UseRule(
        id="data.wait",
        example="the ranks waited for data 61 % of each step: 2 workers for 16 CPUs",
        limit=30,
        means="% of a typical step in which ranks wait for data (median of the ranks), for at least 2 minutes",
        why="the GPUs wait for the same time",
        hint="use more workers of the DataLoader (num_workers), up to the CPUs of the rank, or a faster disk",
        source=f"nnUNet#680, prmon#105, jean-zay-doc#36; {_OURS}",
        find=_data_wait,
    ),
    UseRule(
        id="memory.node",
        example="peak memory 71 of 80 GB of n1",
        limit=85,
        means="% of the memory limit of the job on the node",
        why="the kernel ends processes that go beyond the limit",
        hint="ask for more memory (--mem), or use fewer workers of the DataLoader",
        source=f"slurm.conf(5), memory limits of a job; {_OURS}",
        find=_node_memory,
    ),
    UseRule(
        id="memory.gpu",
        example="peak memory 78 of 80 GB of GPU 0 of n1",
        limit=97,
        means="% of the memory of the GPU",
        why="the next allocation can fail: CUDA out of memory",
        hint="use a smaller batch, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragments",
        source=f"PyTorch, CUDA semantics, memory management (2.13): torch keeps what it freed; {_OURS}",
        find=_gpu_memory,
    ),
    UseRule(
        id="memory.leak",
        example="memory grows by 40 MB in 100 steps since step 900",
        limit=5,
        means="% of growth, and at least 256 MB: steadily, up to the end, for 10 minutes or more; the first 5 minutes "
        "after the first step do not count",
        why="after some time the run ends for lack of memory",
        hint="keep no tensors with their graph (use loss.item()), and no lists that grow with each step",
        source=f"prmon#105; PyTorch FAQ (2.13), memory that is not freed; {_OURS}",
        find=_leak,
    ),
    UseRule(
        id="memory.pressure",
        example="processes of n1 waited for memory 14 % of the time",
        limit=_PRESSURE,
        means="mean % of the time in which processes waited for memory (pressure stall information of the kernel)",
        why="the kernel frees memory and reads its content again, so each step is slower",
        hint="ask for more memory (--mem), or use fewer workers of the DataLoader",
        source=f"kernel.org, Documentation/accounting/psi; {_OURS}",
        find=_pressure,
    ),
)


# -- the judgement ------------------------------------------------------------------------


def judge_use(nodes: Sequence[NodeSamples], asked: AskedShape) -> UseJudgement:
    """Return the judgement of the samples of an attempt."""
    seen = _Seen(nodes, asked)
    sentences = tuple(_judged(seen, RULES))
    return UseJudgement(
        nodes=len(seen.nodes),
        gpus=len(seen.gpus),
        samples=sum(len(node.samples) for node in seen.nodes),
        figures=_figures(seen),
        sentences=sentences,
        unknown=tuple(_unknown(seen, nodes)),
    )


def judge_speed(nodes: Sequence[NodeSamples], asked: AskedShape) -> tuple[UseSentence, ...]:
    """Return which ranks are slow or delay the other ranks, and which GPUs are slowed down most of the time.

    GPUs that are slowed down for a shorter time are left out. Such a GPU may soon make its rank slow, and then a
    sentence about the rank says more.
    """
    ranks = [rule for rule in RULES if rule.id in ("rank.slow", "rank.holds")]
    gpus = [replace(rule, limit=60) for rule in RULES if rule.id == "gpu.slow"]
    return tuple(_judged(_Seen(nodes, asked), (*ranks, *gpus)))


def _judged(seen: _Seen, rules: Iterable[UseRule]) -> Iterator[UseSentence]:
    for rule in rules:
        found = sorted(rule.find(seen, rule.limit), key=lambda one: -one.weight)
        seen.told |= {told for one in found for told in (one.rank, *one.gpus)}
        yield from _sentences(rule, found)


def _sentences(rule: UseRule, found: Sequence[_Odd]) -> Iterator[UseSentence]:
    """Yield the sentences of a rule.

    If there are too many sentences, yield only the worst one. It also names the other GPUs or ranks.
    """
    shown = found if len(found) <= _MOST_SENTENCES else found[:1]
    for one in shown:
        rest = found[1:] if len(shown) < len(found) else ()
        ranks = tuple(other.rank for other in (one, *rest) if other.rank is not None)
        nodes = dict.fromkeys(other.node for other in (one, *rest))
        whom = ranks_in_words(ranks[1:]) if ranks else fold_hostlist(other.node for other in rest)
        more = f"; {len(rest)} more are like this: {whom}" if rest else ""
        yield UseSentence(rule=rule.id, text=one.text + more, hint=rule.hint, nodes=tuple(nodes), ranks=ranks)


def _figures(seen: _Seen) -> str:
    gpus = [(sample, gpu) for looks in seen.gpus.values() for sample, gpu in looks]
    use = _mean((gpu.use, sample.seconds) for sample, gpu in gpus)
    power = _mean((gpu.power, sample.seconds) for sample, gpu in gpus)
    cpu = _mean((sample.node.cpu, sample.seconds) for node in seen.nodes for sample in node.samples)
    parts = (
        "" if use is None else f"GPUs {use:.0f} % used",
        "" if power is None else f"{power:.0f} W each",
        "" if cpu is None else f"{cpu:.1f} CPUs a node",
        f"{median(seen.steps.values()):.3g} s a step" if seen.steps else "",
        f"data wait {median(seen.waits.values()):.0f} %" if seen.waits else "",
    )
    return ", ".join(filter(None, parts))


def _unknown(seen: _Seen, nodes: Sequence[NodeSamples]) -> Iterator[str]:
    """Yield the values that no sample shows. Each value is yielded once, with the reason if it is known."""
    yield from _together((node.node, f": {node.problem}") for node in nodes if node.problem)
    missing = sorted(set(seen.asked.nodes) - {node.node for node in seen.nodes})
    if missing:
        yield f"no samples of {fold_hostlist(missing)}"
    elif 0 < len(seen.nodes) < seen.asked.number:
        yield f"samples of {len(seen.nodes)} of {plural(seen.asked.number, 'node')} only"
    if not seen.nodes:
        return
    yield from _without_samples(seen)
    yield from _unknown_of_gpus(seen)
    blind = {node.node: [sample.node for sample in node.samples] for node in seen.nodes}
    blind = {
        name: uses
        for name, uses in blind.items()
        if all(use.memory is None and use.memory_peak is None for use in uses)
    }
    if blind:
        whose = "the nodes" if len(blind) == len(seen.nodes) else fold_hostlist(blind)
        yield f"memory of {whose} unknown{_reason([use for uses in blind.values() for use in uses], 'memory')}"
    yield from _unknown_of_ranks(seen)


def _together(items: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield each text once, after the names of the nodes that have this text."""
    named: dict[str, list[str]] = defaultdict(list)
    for node, text in items:
        named[text].append(node)
    yield from (f"{fold_hostlist(names)}{text}" for text, names in named.items())


def _without_samples(seen: _Seen) -> Iterator[str]:
    """Yield the nodes whose samples leave out a part of the time, and say if the whole time is too short."""
    until = max(seen.asked.until or 0.0, *(node.samples[-1].at for node in seen.nodes))
    gaps, longest = [], 0.0
    for node in seen.nodes:
        covered = _seconds(node.samples)
        whole = until - (seen.began if node.began is None else _begin(node))
        if whole - covered > max(_LATE, 2 * node.samples[-1].seconds):
            gaps.append((node.node, f": samples of {_of_time(covered, whole)} only"))
        longest = max(longest, covered)
    yield from _together(gaps)
    if longest < _SHORTEST_IDLE:
        slow = "slow ranks, waits for data and " if longest < _SHORTEST else ""
        yield f"{longest:.0f} s of samples are too few to find {slow}idle GPUs"


def _of_time(part: float, whole: float) -> str:
    unit, word = (3600, "hours") if whole >= 4 * 3600 else (60, "minutes")
    return f"{part / unit:.0f} of {whole / unit:.0f} {word}"


def _unknown_of_gpus(seen: _Seen) -> Iterator[str]:
    """Yield the values that are unknown for some or all GPUs, and the nodes that show fewer GPUs than the run has."""
    if not seen.gpus:
        if seen.asked.gpus:
            yield from (f"{what} of GPUs unknown: no sample shows a GPU" for what in ("use", "processes", "memory"))
        return
    names = {"use": "use", "processes": "others", "memory": "memory", "slowdowns": "slow"}
    for what, name in names.items():
        if blind := _blind(seen, name):
            all_of_them = len(blind) == len(seen.gpus)
            whose = "GPUs" if all_of_them else f"{plural(len(blind), 'GPU')} of {fold_hostlist({n for n, _ in blind})}"
            when = "" if all(len(looks) == len(seen.gpus[gpu]) for gpu, looks in blind.items()) else " at times"
            why = _reason([one for looks in blind.values() for one in looks], name)
            yield f"{what} of {whose} unknown{when}{why}"
    shown = {node.node: max(len(sample.gpus) for sample in node.samples) for node in seen.nodes}
    asked = seen.asked.gpus
    yield from _together((n, f": samples show {k} of {plural(asked, 'GPU')}") for n, k in shown.items() if k < asked)


def _blind(seen: _Seen, name: str) -> dict[_Gpu, list[GpuUse]]:
    """Return the GPUs for which a value is unknown for too large a part of the time, with the samples without it."""
    found = {}
    for gpu, looks in seen.gpus.items():
        # An empty tuple can be a known value: a clock that is not low has no reason to be low.
        unknown = [
            (s, one)
            for s, one in looks
            if (value := getattr(one, name)) is None or (value == () and _reason([one], name))
        ]
        if _seconds(s for s, _ in unknown) > _MOST_UNKNOWN * _seconds(s for s, _ in looks):
            found[gpu] = [one for _, one in unknown]
    return found


def _unknown_of_ranks(seen: _Seen) -> Iterator[str]:
    """Yield the values that are unknown because a rank reports no steps, or no wait for data."""
    blind = [rank for rank, looks in seen.ranks.items() if all(one.step is None for _, _, one in looks)]
    if len(blind) == len(seen.ranks):
        early = ", and GPUs that are idle in the first 30 minutes" if seen.gpus else ""
        yield f"no optimizer step was seen: slow ranks, waits for data and memory that grows are unknown{early}"
    elif blind:
        yield f"no optimizer step of {ranks_in_words(blind)} was seen"
    elif seen.steps and not seen.waits:
        yield "the wait for data is unknown: no DataLoader of torch was seen"


def _reason(looks: Sequence[GpuUse | NodeUse], name: str) -> str:
    """Return a colon and the reason why a value is unknown. In `unknown`, one key names all values with this reason."""
    wanted = {"ranks" if name == "others" else name, "all"}
    reasons = (why for one in looks for key, why in one.unknown.items() if wanted & set(key.split(", ")))
    return next((f": {why}" for why in reasons if why), "")


def nothing_odd(judgement: UseJudgement) -> str:
    """Return the words for a judgement without a sentence. They say nothing about values that are unknown."""
    return "nothing odd in what is known" if judgement.unknown else "nothing odd"


def in_words(judgement: UseJudgement) -> list[str]:
    """Return a judgement as lines: the head, and, if something is unusual, sentences, unknown values and hints."""
    gpus = plural(judgement.gpus, "GPU") if judgement.gpus else "no GPU"
    head = f"{plural(judgement.nodes, 'node')}, {gpus}, {plural(judgement.samples, 'sample')}"
    figures = f" ({judgement.figures})" if judgement.figures else ""
    if not judgement.sentences:
        return [f"{head}: " + "; ".join((nothing_odd(judgement) + figures, *judgement.unknown))]
    hints = dict.fromkeys(f"hint: {sentence.hint}" for sentence in judgement.sentences)
    return [head + figures, *(sentence.text for sentence in judgement.sentences), *judgement.unknown, *hints]
