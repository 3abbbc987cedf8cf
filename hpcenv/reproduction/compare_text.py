"""The comparison of two runs as text, at most 80 columns wide. Pure. Runs on: LOGIN NODE."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hpcenv.judge.verdict_table import shorten
from hpcenv.reproduction.causes import Cause, Likelihood
from hpcenv.reproduction.compare import Question, RunComparison
from hpcenv.reproduction.comparison import Divergence, MetricComparison
from hpcenv.text import columns, cut, visible, wrap

# The largest numbers of metrics, of differences in one group, and of lines about missing data that are printed.
# `--json` has all of them.
_METRICS, _CHANGES, _NOT_COMPARED = 12, 4, 8

QUESTIONS: dict[Question, str] = {
    "repeats-here": "Does it repeat here?",
    "equals-reference": "Is it equal to the reference?",
    "restart-replays": "Does a restart replay?",
}
LIKELIHOODS: dict[Likelihood, str] = {
    "another-experiment": "another experiment",
    "changes-results": "changes results",
    "may-change-results": "may change results",
    "unlikely": "unlikely to change results",
}


def render(result: RunComparison) -> str:
    """Return the comparison as text, without control characters."""
    return "\n".join(_lines(result))


def _lines(result: RunComparison) -> Iterator[str]:
    yield from wrapped(result.headline)
    yield f"  reference  {visible(result.reference)}"
    yield f"  run        {visible(result.other)}"
    if result.global_batch != (None, None):
        sizes = dict.fromkeys("unknown" if size is None else str(size) for size in result.global_batch)
        yield f"  batch      {', '.join(sizes)} samples in a step of all ranks"
    yield ""
    for one in result.answers:
        yield from wrapped(f"{QUESTIONS[one.question]} {one.text}")
    yield ""
    yield from _metric_lines(result.metrics)
    yield from parameter_lines(result)
    if result.first is not None:
        yield ""
        yield from divergence_lines(result.first)
    if result.causes:
        yield ""
        yield f"differences between the runs ({meaning_of_causes(result)}):"
        yield from cause_lines(result.causes, explain=result.verdict != "equal")
    if result.findings:
        yield ""
        yield from some_lines("the ranks report", result.findings)
    if result.not_compared:
        yield ""
        yield from some_lines("not compared", result.not_compared)


def wrapped(text: str, *, indent: int = 2, first: str = "") -> list[str]:
    """Return a text in lines of at most 80 columns, without control characters."""
    return wrap(visible(text), first=first, indent=indent, whole_words=False).splitlines()


def some_lines(title: str, rows: Sequence[str]) -> Iterator[str]:
    """Yield a title and the first rows below it."""
    yield f"{title}:"
    for row in rows[:_NOT_COMPARED]:
        yield from wrapped(row, first="  ", indent=4)
    if len(rows) > _NOT_COMPARED:
        yield f"  and {len(rows) - _NOT_COMPARED} more"


def _metric_lines(metrics: Sequence[MetricComparison]) -> Iterator[str]:
    header, *rows = metric_rows(metrics[:_METRICS])
    yield from columns([tuple(map(str.upper, header)), *((cut(visible(row[0]), 24), *row[1:]) for row in rows)])
    if len(metrics) > _METRICS:
        yield f"and {len(metrics) - _METRICS} more metrics"
    for one in metrics[:_METRICS]:
        for note in one.notes:
            yield from wrapped(f"{cut(visible(one.name), 24)}: {note}", first="  ", indent=4)
        if one.level != "equal" and one.judged:
            yield from wrapped(f"{cut(visible(one.name), 24)}: the tolerance is {one.rule}", first="  ", indent=4)


def metric_rows(metrics: Sequence[MetricComparison]) -> list[tuple[str, ...]]:
    """Return a header, and a row for each metric."""
    return [
        ("metric", "source", "pairs", "equal", "largest difference", "level"),
        *(
            (
                one.name,
                one.source,
                str(one.compared),
                str(one.equal),
                _largest(one),
                one.level if one.judged else "not judged",
            )
            for one in metrics
        ),
    ]


def _largest(one: MetricComparison) -> str:
    """Return the largest difference of a metric: in ULP below 1000 ULP, otherwise as a relative difference."""
    if one.first is None:
        return "-"
    if one.largest_ulp is not None and one.largest_ulp < 1000:
        return f"{one.largest_ulp} ULP"
    if one.largest_relative is not None:
        return f"relative {one.largest_relative:.1e}"
    return "no distance" if one.largest_absolute is None else f"absolute {one.largest_absolute:.1e}"


def parameter_lines(result: RunComparison) -> Iterator[str]:
    """Yield the line about the hashes of the parameters."""
    found = result.parameters
    if not found.compared:
        yield "parameters: no hash of the same rank and step in both runs"
    elif found.first is None:
        yield f"parameters: {found.compared} hashes, all equal"
    else:
        until = "" if found.last_equal_step is None else f", equal up to step {found.last_equal_step}"
        yield f"parameters: {found.compared} hashes, {found.compared - found.equal} differ{until}"


def divergence_lines(pair: Divergence) -> Iterator[str]:
    """Yield the first pair of values that differs."""
    rank = "" if pair.rank is None else f", rank {pair.rank}"
    distance = "" if pair.ulp is None else f" ({pair.ulp} ULP apart)"
    yield f"first difference: step {pair.step}{rank}, {cut(visible(pair.name), 30)}{distance}"
    for word, decimal, bits in (
        ("reference", pair.reference_decimal, pair.reference),
        ("run", pair.value_decimal, pair.value),
    ):
        yield f"  {word:9}  {decimal}  {bits}" if decimal else f"  {word:9}  {bits}"


def meaning_of_causes(result: RunComparison) -> str:
    """Return the words that follow the title of the list of differences, according to the verdict."""
    return "the results are equal" if result.verdict == "equal" else "the most likely cause first"


def how_it_changes(cause: Cause) -> str:
    """Return how likely a group of differences changes results, and how. The text follows the name of the group."""
    return f" ({LIKELIHOODS[cause.likelihood]}): {cause.why}"


def cause_lines(causes: Iterable[Cause], *, first: int = 1, explain: bool = True) -> Iterator[str]:
    """Yield numbered differences between two runs, each with its first changes.

    Args:
        explain: whether to say how each difference changes results.
    """
    for number, cause in enumerate(causes, start=first):
        yield from wrapped(f"{number}. {cause.group}{how_it_changes(cause) if explain else ''}", indent=3)
        for field, left, right in cause.changes[:_CHANGES]:
            values = f"{cut(shorten(left), 160)} -> {cut(shorten(right), 160)}"
            yield from wrapped(f"{field}: {values}", first="     ", indent=7)
        if len(cause.changes) > _CHANGES:
            yield f"     and {len(cause.changes) - _CHANGES} more"
