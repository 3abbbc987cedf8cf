"""`hpcenv top`: what the nodes of a run do now, read from the ends of their sample files.

Runs on: LOGIN NODE. The state of a run is read from its files, without a request to Slurm or to a node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from hpcenv.errors import HpcenvError
from hpcenv.hostlist import fold_hostlist
from hpcenv.judge.use import UseJudgement, judge_use, nothing_odd
from hpcenv.records.samples import NewSamples, RankUse, Sample
from hpcenv.runs.entries import Run, Submitted, Sweep, open_run, runs_of
from hpcenv.runs.find import find_run, list_runs, runs_folder
from hpcenv.runs.state import read_states
from hpcenv.runs.use import asked_shape, newest_attempt
from hpcenv.text import Shown, columns, plural, visible, wrap

# Only samples of this many last seconds are evaluated.
_SECONDS = 900.0
# Up to this number, each node or rank has its own line. If there are more, several of them share a line.
_MOST_LINES = 8


@dataclass(frozen=True, kw_only=True)
class NodeNow:
    """The present state of one node.

    Attributes:
        last: the newest sample of the node.
        odd: whether the node is unusual: a sentence of the judgement names it.
    """

    node: str
    last: Sample
    odd: bool


@dataclass(frozen=True, kw_only=True)
class RankNow:
    """The present state of one rank. If the steps of ranks differ, `slowest` marks the rank with the longest step."""

    node: str
    last: RankUse
    slowest: bool = False


@dataclass(frozen=True, kw_only=True, repr=False)
class RunTop(Shown):
    """The present state of a run.

    Attributes:
        attempt: the attempt with the newest samples; None without samples.
        age: seconds since the newest sample of any node; None without samples.
        oldest: seconds since the newest sample of the node that is furthest behind; None without samples.
        judgement: the judgement of the samples of the last 15 minutes.
    """

    run: str
    run_folder: Path
    attempt: int | None
    age: float | None
    oldest: float | None
    nodes: tuple[NodeNow, ...]
    ranks: tuple[RankNow, ...]
    judgement: UseJudgement

    def __str__(self) -> str:
        """Return the text that `hpcenv top` prints."""
        return "\n".join(lines(self))


def find_watched(
    start: Path, word: str | None, *, environ: Mapping[str, str], runs: str | None = None
) -> tuple[Run, ...]:
    """Return the run that `word` names. If `word` is None, return the runs of the project that run now.

    If `word` is None, a run with a damaged manifest is left out.

    Raises:
        RunNotFound, RecordInvalid, UsageError: see `hpcenv.runs.find.find_run`.
    """
    if word is not None:
        return (find_run(start, word, runs=runs),)
    entries = list_runs(runs_folder(start, runs))
    submitted = [run for entry in entries if isinstance(entry, (Submitted, Sweep)) for run in runs_of(entry)]
    found = []
    for run, state in zip(submitted, read_states(submitted, environ), strict=True):
        with contextlib.suppress(HpcenvError):
            found += [open_run(run.folder.path)] if state.state == "running" else []
    return tuple(found)


class TopReader:
    """Reads a run repeatedly. Each time, only the new part of each file is read."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._samples = NewSamples(_SECONDS)

    def read(self, now: float) -> RunTop:
        """Return the state of the run at this time, in seconds since the epoch."""
        run, attempt = self._run, newest_attempt(self._run.folder)
        asked = asked_shape(run.folder, run.manifest, -1 if attempt is None else attempt, now)
        nodes = [] if attempt is None else self._samples.read(run.folder, attempt)
        judgement = judge_use(nodes, asked)
        named = {node for sentence in judgement.sentences for node in sentence.nodes}
        lasts = [(node.node, node.samples[-1]) for node in nodes if node.samples]
        ages = [max(0.0, now - last.at) for _, last in lasts]
        return RunTop(
            run=run.submission.run,
            run_folder=run.folder.path,
            attempt=attempt,
            age=min(ages, default=None),
            oldest=max(ages, default=None),
            nodes=tuple(NodeNow(node=name, last=last, odd=name in named) for name, last in lasts),
            ranks=_ranks(lasts),
            judgement=judgement,
        )


def _ranks(lasts: Sequence[tuple[str, Sample]]) -> tuple[RankNow, ...]:
    ranks = sorted(((node, rank) for node, last in lasts for rank in last.ranks), key=lambda pair: pair[1].rank)
    steps = [rank.step_seconds for _, rank in ranks if rank.step_seconds]
    slowest = max(steps, default=0.0)
    # The times of steps normally differ by up to 5 % from rank to rank.
    at = next((rank.rank for _, rank in ranks if rank.step_seconds == slowest), -1)
    marked = at if len(steps) > 1 and slowest > 1.05 * median_low(steps) else -1
    return tuple(RankNow(node=node, last=rank, slowest=rank.rank == marked) for node, rank in ranks)


# -- the text -----------------------------------------------------------------------------


def one_line(top: RunTop) -> str:
    """Return the state of a run as one line of text. Pure."""
    if top.age is None:
        return f"{visible(top.run)}: no samples"
    odd = [sentence.text for sentence in top.judgement.sentences]
    words = (
        nothing_odd(top.judgement)
        if not odd
        else visible(odd[0]) + (f" (and {len(odd) - 1} more)" if len(odd) > 1 else "")
    )
    figures = f" ({top.judgement.figures})" if top.judgement.figures else ""
    return wrap(f"{visible(top.run)}: {_counts(top)}, {top.age:.0f} s ago: {words}{figures}", indent=4)


def lines(top: RunTop) -> Iterator[str]:
    """Yield the text of `hpcenv top`, at most 80 columns wide. Pure."""
    yield from _head(top)
    if top.nodes:
        yield from (*_tables(top), *_odd(top))


def page_of(top: RunTop, height: int) -> list[str]:
    """Return the text for a terminal of `height` lines. If it is too long, unusual facts are above the tables. Pure."""
    whole = "\n".join(lines(top)).split("\n")
    if len(whole) <= height:
        return whole
    if top.nodes:
        whole = "\n".join((*_head(top), *_odd(top), *_tables(top))).split("\n")
    shown = whole[: max(1, height - 1)]
    return [*shown, f"{plural(len(whole) - len(shown), 'more line')}: the terminal has only {height} lines"]


def _head(top: RunTop) -> Iterator[str]:
    if top.age is None or top.oldest is None:
        yield f"{visible(top.run)}: no samples"
        yield from (wrap(visible(line), indent=2) for line in top.judgement.unknown)
        return
    late = f", of the node that is furthest behind {top.oldest:.0f} s" if top.oldest > top.age + 30 else ""
    attempt = f", attempt {top.attempt}" if top.attempt else ""
    yield wrap(f"{visible(top.run)}{attempt}: {_counts(top)}; newest sample {top.age:.0f} s old{late}")


def _tables(top: RunTop) -> Iterator[str]:
    yield ""
    yield from columns([("NODE", "GPU USE %", "GPU GB", "W", "CPUS", "GB"), *map(_node_row, _grouped(top.nodes))])
    if top.ranks:
        yield ""
        yield from columns([("RANK", "NODE", "STEP", "S/STEP", "DATA WAIT", ""), *map(_rank_row, _shown(top.ranks))])


def _odd(top: RunTop) -> Iterator[str]:
    yield ""
    if not top.judgement.sentences:
        yield nothing_odd(top.judgement)
    for line in (*(one.text for one in top.judgement.sentences), *top.judgement.unknown):
        yield wrap(f"- {visible(line)}")


def _counts(top: RunTop) -> str:
    gpus = sum(len(node.last.gpus) for node in top.nodes)
    return ", ".join(
        (plural(len(top.nodes), "node"), plural(gpus, "GPU") if gpus else "no GPU", plural(len(top.ranks), "rank"))
    )


def _grouped(nodes: Sequence[NodeNow]) -> list[list[NodeNow]]:
    """Return groups of nodes, one for each line: each node alone, or unusual nodes alone and usual nodes together."""
    if len(nodes) <= _MOST_LINES:
        return [[node] for node in nodes]
    odd = [node for node in nodes if node.odd]
    alone, rest = odd[:_MOST_LINES], odd[_MOST_LINES:]
    groups = ([node for node in nodes if not node.odd], rest)
    return [*(group for group in groups if group), *([node] for node in alone)]


def _node_row(group: Sequence[NodeNow]) -> tuple[str, ...]:
    lasts = [node.last for node in group]
    gpus = [gpu for last in lasts for gpu in last.gpus]
    each = len(gpus) <= 8
    uses = " ".join("?" if gpu.use is None else f"{gpu.use:.0f}" for gpu in gpus) if each else ""
    total = max((gpu.memory_total for gpu in gpus if gpu.memory_total), default=0)
    limit = max((last.node.memory_limit for last in lasts if last.node.memory_limit), default=0)
    cpus = max((last.node.cpus for last in lasts if last.node.cpus), default=0)
    return (
        _names([node.node for node in group]),
        uses or (_range([gpu.use for gpu in gpus]) if gpus else "-"),
        (_range([gpu.memory for gpu in gpus], 1e9) + (f"/{total / 1e9:.0f}" if total else "")) if gpus else "-",
        _range([gpu.power for gpu in gpus]) if gpus else "-",
        _range([last.node.cpu for last in lasts]) + (f"/{cpus}" if cpus else ""),
        _range([last.node.memory for last in lasts], 1e9) + (f"/{limit / 1e9:.0f}" if limit else ""),
    )


def _names(nodes: Sequence[str]) -> str:
    text = visible(fold_hostlist(nodes))
    return text if len(text) <= 16 else plural(len(nodes), "node")


def _shown(ranks: Sequence[RankNow]) -> list[list[RankNow]]:
    if len(ranks) <= _MOST_LINES:
        return [[rank] for rank in ranks]
    return [[rank for rank in ranks if not rank.slowest], *([rank] for rank in ranks if rank.slowest)]


def _rank_row(group: Sequence[RankNow]) -> tuple[str, ...]:
    ranks = [rank.last for rank in group]
    seconds = [one.step_seconds for one in ranks if one.step_seconds is not None]
    low, high = min(seconds, default=0.0), max(seconds, default=0.0)
    speed = f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g}-{high:.3g}"
    notes = ["slowest"] if any(one.slowest for one in group) else []
    notes += ["saving"] if any(one.saving for one in ranks) else []
    return (
        str(ranks[0].rank) if len(ranks) == 1 else plural(len(ranks), "rank"),
        _names(list(dict.fromkeys(one.node for one in group))),
        _range([one.step for one in ranks]),
        speed if seconds else "?",
        f"{_range([one.wait_percent for one in ranks])} %",
        ", ".join(notes),
    )


def _range(values: Sequence[float | None], unit: float = 1) -> str:
    """Return smallest and largest value as text; if they are equal, one value; if no value is known, `?`."""
    known = [f"{value / unit:.0f}" for value in sorted(one for one in values if one is not None)]
    if not known:
        return "?"
    return known[0] if known[0] == known[-1] else f"{known[0]}-{known[-1]}"
