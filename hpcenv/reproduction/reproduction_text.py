"""A reproduction as one page of text, at most 80 columns wide. Pure. Runs on: LOGIN NODE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcenv import size
from hpcenv.reproduction import compare_text
from hpcenv.reproduction.attainable import Best
from hpcenv.reproduction.compare_text import wrapped
from hpcenv.reproduction.cost import Cost
from hpcenv.reproduction.proofs import StatementProof
from hpcenv.reproduction.reproduction import Reproduction
from hpcenv.reproduction.rungs import RUNGS
from hpcenv.text import visible

_BEST: dict[Best, str] = {
    "equal": "equal to the last bit",
    "within": "within the tolerance",
    "nothing": "no agreement, it is another experiment",
}
_MARKS = {"proved": "proved ", "differs": "DIFFERS", "unknown": "unknown"}


def render(page: Reproduction) -> str:
    """Return the page as text, without control characters."""
    return "\n".join(_lines(page))


def _lines(page: Reproduction) -> Iterator[str]:
    yield from wrapped(page.headline)
    yield f"  target  {visible(page.target)}"
    yield f"  rung    {page.rung}: {RUNGS[page.rung]}"
    if page.image:
        yield from wrapped(f"image   {page.image}", first="  ", indent=10)
    if page.run:
        yield f"  run     {visible(page.run)}: {visible(page.outcome)}"
    if page.rung and page.comparison is None:
        yield ""
        yield from before_lines(page)
    yield ""
    yield "proofs from the files:"
    yield from proof_lines(page.proofs)
    if page.comparison is not None:
        if page.expected is not None:
            yield ""
            yield from _expected_lines(page)
        yield ""
        yield from wrapped(f"results of {page.comparison.other} against {page.comparison.reference}:")
        yield ""
        yield compare_text.render(page.comparison)
    if page.notes:
        yield ""
        for note in page.notes:
            yield from wrapped(f"note: {note}")


def before_lines(page: Reproduction) -> Iterator[str]:
    """Yield the lines about the cost of a reproduction, and about what the user must accept."""
    yield "what it costs:"
    yield from cost_lines(page.cost)
    yield "what must be accepted:"
    if page.asks is None or not page.asks.asks:
        yield "  nothing: the project asks this machine for no bind, variable, secret or program"
    else:
        for line in page.asks.asks:
            yield from wrapped(line, first="  ", indent=4)
        if not page.asks.accepted:
            yield f"  accept it with --accept {page.asks.digest}"
    yield from wrapped("The script itself is code of the authors, and runs with your rights.", first="  ")
    if page.expected is not None:
        yield from _expected_lines(page)


def cost_lines(cost: Cost) -> Iterator[str]:
    """Yield the lines about the cost of a job. A value that is not known is shown as `unknown`."""
    gpus = f", {cost.gpus_per_node} GPUs on each" if cost.gpus_per_node else ", no GPU"
    yield f"  nodes      {cost.nodes}{gpus if cost.nodes else ''}"
    yield f"  GPU hours  {'unknown' if cost.gpu_hours is None else f'{cost.gpu_hours:.2f}'}"
    yield f"  minutes    {'unknown' if cost.minutes is None else f'{cost.minutes:.1f}'} in the job, without the queue"
    yield f"  to fetch   {'unknown' if cost.fetch_bytes is None else size.shown(cost.fetch_bytes)}"
    yield from wrapped(f"estimated from the recorded run: {cost.basis}", first="  ", indent=4)


def proof_lines(proofs: Sequence[StatementProof]) -> Iterator[str]:
    """Yield one or more lines for each proof."""
    for one in proofs:
        yield from wrapped(f"{_MARKS[one.result]}  {one.what}: {one.why}", first="  ", indent=11)


def _expected_lines(page: Reproduction) -> Iterator[str]:
    if page.expected is None:
        return
    yield f"what can be expected: {_BEST[page.expected.best]}"
    for reason in page.expected.reasons:
        yield from wrapped(reason, first="  ", indent=4)
