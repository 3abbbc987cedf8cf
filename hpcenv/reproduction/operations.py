"""Find the first operation at which two traces of the same optimizer steps differ. Pure. Runs on: LOGIN NODE.

Operations are compared in the order in which each rank called them. If an operation read the same bytes in both runs
and wrote different bytes, the operation is a cause, because its kernel gives different results. If the operation read
different bytes, the difference is only a consequence of an operation on another rank, of data, or of something that the
trace does not record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hpcenv.records.trace import UNKNOWN, RankTrace, TracedOperation, TracedStep, TracedTensor, TracePhase

# The kinds of difference, the best explanation first. If several ranks differ, the kind that is first here is shown.
DifferenceKind = Literal["kernel", "random", "sequence", "collective", "inputs"]
KINDS: tuple[DifferenceKind, ...] = ("kernel", "random", "sequence", "collective", "inputs")

_COMMUNICATION = ("c10d.", "_c10d_functional.")
_GENERATOR = "generator"


@dataclass(frozen=True, kw_only=True)
class DifferingValue:
    """An input or output that differs.

    Attributes:
        role: `input`, `output`, or `arguments` for arguments that are not tensors.
        name: the name in the operation's schema, or a number for a returned value. For a tensor in a list, also its
            place in the list.
        type: dtype and shape in the reference, followed by dtype and shape in the other run if they differ.
        reference, value: the hashes, or the arguments as text.
        written_by: for an input, the operation of this step that wrote its bytes in the reference; empty if no
            operation of this step wrote them.
    """

    role: Literal["input", "output", "arguments"]
    name: str
    type: str
    reference: str
    value: str
    written_by: str = ""


@dataclass(frozen=True, kw_only=True)
class OperationDifference:
    """The first difference of one rank.

    Attributes:
        kind: `kernel`: the inputs are equal, but the outputs differ. `random`: the outputs differ, and the only input
            that differs is the state of the random number generator. `collective`: the outputs of an operation between
            ranks differ, although the inputs of this rank are equal. `sequence`: the runs called different operations.
            `inputs`: the inputs already differ.
        step, rank: the step and the rank of the difference.
        index: place of the operation in the step, counted from 0; all operations before it are equal.
        other_name: for a `sequence`, the operation that the other run called; empty if that run called no further
            operation.
        name, phase, module, module_class, at: the operation of the reference. `name` is empty if the reference called
            no further operation; the other fields then describe the operation of the other run.
        other_at: for a `sequence`, the line of the script that called the other run's operation.
        values: the first values that differ.
    """

    kind: DifferenceKind
    step: int
    rank: int
    index: int
    name: str
    phase: TracePhase
    module: str
    module_class: str
    at: str
    values: tuple[DifferingValue, ...] = ()
    other_name: str = ""
    other_at: str = ""


@dataclass(frozen=True, kw_only=True)
class TraceComparison:
    """The comparison of two traces.

    Attributes:
        first: the difference that explains most, in the first step that differs; None if all operations are equal.
        of_ranks: for each rank that differs, its first difference in that step.
        steps: the steps that were compared.
        ranks: the ranks that both traces have.
        operations: how many operations were compared, up to the first difference of each rank.
        not_seen: what the traces do not show, in words.
    """

    first: OperationDifference | None
    of_ranks: tuple[OperationDifference, ...]
    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    operations: int
    not_seen: tuple[str, ...] = ()


def common_steps(reference: Mapping[int, RankTrace], other: Mapping[int, RankTrace]) -> tuple[int, ...]:
    """Return the steps that are complete in both traces on all common ranks."""
    ranks = reference.keys() & other.keys()
    whole = [set(side[rank].steps) for rank in ranks for side in (reference, other)]
    return tuple(sorted(set.intersection(*whole))) if whole else ()


def compare_traces(
    reference: Mapping[int, RankTrace], other: Mapping[int, RankTrace], steps: Sequence[int]
) -> TraceComparison:
    """Compare steps of two traces.

    Args:
        reference, other: rank -> the rank's trace.
        steps: the steps to compare. Both traces must have these steps on all common ranks, see `common_steps`.
    """
    ranks = tuple(sorted(reference.keys() & other.keys()))
    found: list[OperationDifference] = []
    compared, done = 0, []
    for step in steps:
        done.append(step)
        for rank in ranks:
            first, count = _first_difference(reference[rank].steps[step], other[rank].steps[step], rank)
            compared += count
            found += [] if first is None else [first]
        if found:
            break
    return TraceComparison(
        first=min(found, key=lambda one: (KINDS.index(one.kind), one.index, one.rank), default=None),
        of_ranks=tuple(found),
        steps=tuple(done),
        ranks=ranks,
        operations=compared,
        not_seen=_not_seen(reference, other, ranks),
    )


def _not_seen(
    reference: Mapping[int, RankTrace], other: Mapping[int, RankTrace], ranks: Sequence[int]
) -> tuple[str, ...]:
    texts = [
        text for side in (reference, other) for rank in ranks for text in (*side[rank].notes, *side[rank].problems)
    ]
    alone = sorted(reference.keys() ^ other.keys())
    texts += [f"only one of the traces has ranks {', '.join(map(str, alone))}"] if alone else []
    return tuple(dict.fromkeys(texts))


def _first_difference(reference: TracedStep, other: TracedStep, rank: int) -> tuple[OperationDifference | None, int]:
    """Return the first difference of one rank in one step, and how many operations were compared."""
    written: dict[str, str] = {}
    for index in range(max(len(reference.operations), len(other.operations))):
        left = reference.operations[index] if index < len(reference.operations) else None
        right = other.operations[index] if index < len(other.operations) else None
        if left is None or right is None or left.name != right.name:
            return _sequence(left, right, reference.step, rank), index
        outputs = _differing(left.outputs, right.outputs, "output")
        if outputs:
            return _of_values(left, right, outputs, written, reference.step, rank), index
        for one in left.outputs:
            for known in (one.hash, *one.each):
                written[known] = f"{left.name} ({index})"
    return None, len(reference.operations)


def _sequence(left: TracedOperation | None, right: TracedOperation | None, step: int, rank: int) -> OperationDifference:
    shown = left or right
    assert shown is not None
    return _difference(
        "sequence",
        shown,
        step,
        rank,
        name="" if left is None else left.name,
        other_name="" if right is None else right.name,
        other_at="" if right is None or left is None else right.at,
    )


def _of_values(
    left: TracedOperation,
    right: TracedOperation,
    outputs: tuple[DifferingValue, ...],
    written: Mapping[str, str],
    step: int,
    rank: int,
) -> OperationDifference:
    inputs = _differing(left.inputs, right.inputs, "input", writer=lambda known: written.get(known, ""))
    generator = any(one.name == _GENERATOR for one in inputs)
    if left.arguments != right.arguments:
        changed = DifferingValue(
            role="arguments", name="arguments", type="", reference=left.arguments, value=right.arguments
        )
        inputs = (*inputs, changed)
    kind: DifferenceKind = "inputs"
    if generator and len(inputs) == 1:
        kind = "random"
    elif not inputs:
        kind = "collective" if left.name.startswith(_COMMUNICATION) else "kernel"
    return _difference(kind, left, step, rank, values=(*inputs, *outputs))


def _difference(
    kind: DifferenceKind,
    shown: TracedOperation,
    step: int,
    rank: int,
    *,
    values: tuple[DifferingValue, ...] = (),
    name: str | None = None,
    other_name: str = "",
    other_at: str = "",
) -> OperationDifference:
    return OperationDifference(
        kind=kind,
        step=step,
        rank=rank,
        index=shown.index,
        name=shown.name if name is None else name,
        phase=shown.phase,
        module=shown.module,
        module_class=shown.module_class,
        at=shown.at,
        values=values,
        other_name=other_name,
        other_at=other_at,
    )


def _differing(
    left: Sequence[TracedTensor],
    right: Sequence[TracedTensor],
    role: Literal["input", "output"],
    *,
    writer: Callable[[str], str] = lambda _known: "",
) -> tuple[DifferingValue, ...]:
    """Return the values that differ. If a value has no hash in one run, it does not count as different."""
    found = []
    for number in range(max(len(left), len(right))):
        a = left[number] if number < len(left) else None
        b = right[number] if number < len(right) else None
        if a is None or b is None:
            one = a or b
            assert one is not None
            sides = (one.hash if a is not None else "not there", one.hash if b is not None else "not there")
            found.append(DifferingValue(role=role, name=one.name, type=one.type, reference=sides[0], value=sides[1]))
        elif a.type != b.type or (a.hash != b.hash and UNKNOWN not in (a.hash, b.hash)):
            found.append(_pair(a, b, role, writer))
    return tuple(found)


def _pair(
    a: TracedTensor, b: TracedTensor, role: Literal["input", "output"], writer: Callable[[str], str]
) -> DifferingValue:
    name, kind, left, right = a.name, a.type, a.hash, b.hash
    if a.each and len(a.each) == len(b.each):
        places = [place for place, pair in enumerate(zip(a.each, b.each, strict=True)) if pair[0] != pair[1]]
        if places:
            more = f" and {len(places) - 1} more" if len(places) > 1 else ""
            name = f"{a.name}[{places[0]}] of {len(a.each)}{more}"
            kind, left, right = a.types[places[0]], a.each[places[0]], b.each[places[0]]
    if a.type != b.type:
        kind = f"{a.type} -> {b.type}"
    return DifferingValue(role=role, name=name, type=kind, reference=left, value=right, written_by=writer(left))
