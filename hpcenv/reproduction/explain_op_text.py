"""Text about the first operation that differs, at most 80 columns wide. Pure. Runs on: LOGIN NODE."""

from __future__ import annotations

from collections.abc import Iterator

from hpcenv.reproduction.compare_text import cause_lines, some_lines, wrapped
from hpcenv.reproduction.explain_op import ExplainedOperation
from hpcenv.reproduction.operations import DifferingValue, OperationDifference
from hpcenv.text import visible

# The largest numbers of values and of ranks that are printed. `--json` has all of them.
_VALUES, _RANKS = 4, 4


def render(result: ExplainedOperation) -> str:
    """Return the answer as text, without control characters."""
    return "\n".join(_lines(result))


def _lines(result: ExplainedOperation) -> Iterator[str]:
    yield from wrapped(result.headline)
    if result.meaning:
        yield from wrapped(result.meaning, first="  ")
    yield ""
    yield f"  reference  {visible(result.reference)}"
    yield f"  run        {visible(result.other)}"
    if result.first is not None:
        yield from _operation_lines(result.first)
    others = [one for one in result.of_ranks if one is not result.first]
    for one in others[:_RANKS]:
        text = f"rank {one.rank}: {one.name or one.other_name}, {one.phase}, operation {one.index} ({one.kind})"
        yield from wrapped(text, first="  also       ", indent=13)
    if len(others) > _RANKS:
        yield f"  and {len(others) - _RANKS} more ranks"
    yield from _cause_part(result)
    yield ""
    yield "traces:"
    begin = f"from the checkpoint of step {result.resumed}" if result.resumed else "from the start of the training"
    for source in result.sources:
        how = "recorded in it" if source.how == "recorded" else f"repeated as {source.folder.name}, {begin}"
        yield from wrapped(f"{source.run}: {how}", first="  ", indent=4)
        if source.repeats:
            yield from wrapped(source.repeats, first="    ", indent=4)
    if result.not_seen:
        yield ""
        yield from some_lines("not seen", result.not_seen)


def _operation_lines(first: OperationDifference) -> Iterator[str]:
    if first.at:
        yield f"  called at  {visible(first.at)}" + (" in the reference" if first.other_at else "")
    if first.other_at:
        yield f"             {visible(first.other_at)} in the run"
    yield f"  before it  {first.index} operations of this rank and step are equal"
    for value in first.values[:_VALUES]:
        yield from _value_lines(value)
    if len(first.values) > _VALUES:
        yield f"  and {len(first.values) - _VALUES} more values"


def _value_lines(value: DifferingValue) -> Iterator[str]:
    if value.role == "arguments":
        yield from wrapped(f"{value.reference} -> {value.value}", first="  arguments  ", indent=13)
        return
    yield from wrapped(f"{value.name}: {value.type}", first=f"  {value.role:9}  ", indent=13)
    yield f"             {value.reference[:16]} -> {value.value[:16]}"


def _cause_part(result: ExplainedOperation) -> Iterator[str]:
    if result.verdict == "equal":
        return
    yield ""
    if result.likely:
        yield "what differs between the runs and can explain it, the most likely first:"
        yield from cause_lines(result.likely)
    else:
        yield "nothing that is known to explain it differs between the runs"
    if result.others:
        yield "also different:"
        yield from cause_lines(result.others, first=len(result.likely) + 1)
