"""`hpcenv compare --explain-op`: the first operation at which two runs differ, and what explains the difference.

Runs on: LOGIN NODE. If a run has no trace yet, it is repeated from the last state that is known to be equal in both
runs. The repetition writes a trace of its operations (`repetition.py`). `operations.py` compares the traces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hpcenv.errors import Command, Hint, NotComparable
from hpcenv.incontainer import provenance
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.trace import RankTrace
from hpcenv.reproduction import comparison
from hpcenv.reproduction.causes import Cause
from hpcenv.reproduction.closeness import Tolerance
from hpcenv.reproduction.compare import RunComparison, Side, Steps
from hpcenv.reproduction.measured import read_measured
from hpcenv.reproduction.operations import (
    DifferenceKind,
    OperationDifference,
    TraceComparison,
    common_steps,
    compare_traces,
)
from hpcenv.reproduction.repetition import TracedSteps

# Only a few steps are traced, because a traced step takes longer, and because different kernels already give different
# results in the first step after an equal state.
MOST_STEPS = 4

Traces = Mapping[int, RankTrace]

_EVERY_KERNEL = (
    "threads", "CPU kernels", "GPU", "determinism switches", "torch and its libraries", "driver", "packages",
)  # fmt: skip
# Groups of differences between runs (causes.py) that explain a kind of difference between operations.
_EXPLAINED_BY: dict[DifferenceKind, tuple[str, ...]] = {
    "kernel": _EVERY_KERNEL,
    "random": ("seed", "arguments", "code", "ranks per node"),
    "collective": ("communication", "ranks per node", *_EVERY_KERNEL),
    "sequence": ("arguments", "code", "data", "packages", *_EVERY_KERNEL),
    "inputs": ("arguments", "seed", "code", "data", "packages", "ranks per node"),
}


@dataclass(frozen=True, kw_only=True)
class TraceSource:
    """The source of the trace of one of the two runs.

    Attributes:
        run: the run that is compared.
        folder: the run folder with the trace.
        how: `recorded` (in the run itself) or `repeated` (in a repetition of the run).
        repeats: for a repetition, a sentence that says whether its losses equal the recorded losses.
    """

    run: str
    folder: Path
    how: Literal["recorded", "repeated"]
    repeats: str = ""


@dataclass(frozen=True, kw_only=True)
class ExplainedOperation:
    """The first operation that differs between two runs, and what explains the difference.

    Attributes:
        verdict: `operation` if an operation differs, otherwise `equal`.
        headline: the answer in one sentence.
        meaning: the kind of difference, in words; empty without a difference.
        resumed: the step of the checkpoint with which both runs began; 0 for the start of the training.
        likely: differences between the runs that explain this kind of difference, the most likely first.
        others: all other differences between the runs.
        not_seen: what the traces do not show.
    """

    reference: str
    other: str
    verdict: Literal["operation", "equal"]
    headline: str
    meaning: str
    first: OperationDifference | None
    of_ranks: tuple[OperationDifference, ...]
    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    operations: int
    resumed: int
    sources: tuple[TraceSource, ...]
    likely: tuple[Cause, ...]
    others: tuple[Cause, ...]
    not_seen: tuple[str, ...]


# -- which steps --------------------------------------------------------------------------


def steps_to_trace(reference: Side, other: Side, compared: RunComparison | None) -> TracedSteps:
    """Return the steps after the last equal state, up to the first difference, but at most MOST_STEPS.

    The repetition begins with the newest checkpoint of an equal state that both runs have. Without such a checkpoint,
    the repetition begins at the start of the training.

    Args:
        compared: the comparison of the runs; None if they have no metric in common.
    """
    differs = _first_step(compared)
    equal = _equal_until(reference, other, before=differs)
    first = equal + 1
    last = first if differs is None else min(max(differs, first), equal + MOST_STEPS)
    resumed, name = _common_checkpoint(reference, other, at_most=equal)
    return TracedSteps(first=first, last=last, resumed=resumed, checkpoint=name)


def begin_of(sides: Sequence[Side], traces: Sequence[Traces], first: int, last: int) -> TracedSteps:
    """Return these steps, and the checkpoint with which a repetition begins.

    If one of the traces has these steps, the checkpoint of that trace is returned. If no trace has these steps, the
    newest checkpoint of an equal state before these steps is returned.
    """
    steps = TracedSteps(first=first, last=last)
    for number, side in enumerate(sides):
        if has_steps(traces[number], side, steps):
            resumed = resumed_in(traces[number])
            name = _checkpoints(RunFolder(sides[1 - number].folder)).get(resumed, "") if resumed else ""
            return replace(steps, resumed=resumed, checkpoint=name)
    equal = _equal_until(sides[0], sides[1], before=first)
    resumed, name = _common_checkpoint(sides[0], sides[1], at_most=equal)
    return replace(steps, resumed=resumed, checkpoint=name)


def _first_step(compared: RunComparison | None) -> int | None:
    """Return the first optimizer step that differs. Only losses and parameters count steps of the optimizer."""
    if compared is None:
        return None
    found = [one.first for one in compared.metrics if one.source == "backward" and one.judged]
    steps = [one.step for one in (*found, compared.parameters.first) if one is not None]
    return min(steps, default=None)


def _equal_until(reference: Side, other: Side, *, before: int | None) -> int:
    """Return the last step at which the hashes of the weights are equal on all ranks; 0 without such a step."""
    left, right = reference.measured.parameters, other.measured.parameters
    equal: dict[int, bool] = {}
    for rank in left.keys() & right.keys():
        for step in left[rank].keys() & right[rank].keys():
            equal[step] = equal.get(step, True) and left[rank][step] == right[rank][step]
    unequal = min((step for step, same in equal.items() if not same), default=None)
    limits = [limit for limit in (before, unequal) if limit is not None]
    return max((step for step, same in equal.items() if same and all(step < limit for limit in limits)), default=0)


def _common_checkpoint(reference: Side, other: Side, *, at_most: int) -> tuple[int, str]:
    """Return step and name of the newest checkpoint that both runs have for a step with equal hashes."""
    left, right = (_checkpoints(RunFolder(side.folder)) for side in (reference, other))
    hashes = reference.measured.parameters
    hashed = {step for of_rank in hashes.values() for step in of_rank}
    steps = [step for step in left.keys() & right.keys() if step <= at_most and step in hashed]
    newest = max(steps, default=0)
    return (newest, left[newest]) if newest and left[newest] == right[newest] else (0, "")


def _checkpoints(run: RunFolder) -> dict[int, str]:
    try:
        found = [(provenance.step_of(path), path.name) for path in run.checkpoints.iterdir()]
    except OSError:
        return {}
    return {step: name for step, name in found if step is not None}


# -- the traces ---------------------------------------------------------------------------


def recorded_steps(traces: Sequence[Traces]) -> tuple[int, ...]:
    """Return the steps that are complete in both traces. If only one run has a trace, return the steps in it."""
    if all(traces):
        return common_steps(traces[0], traces[1])
    return next((common_steps(one, one) for one in traces if one), ())


def has_steps(traces: Traces, side: Side, steps: TracedSteps) -> bool:
    """Return whether every rank of a run has traced all these steps."""
    wanted = set(range(steps.first, steps.last + 1))
    return all(rank in traces and wanted <= traces[rank].steps.keys() for rank in range(side.ranks))


def resumed_in(traces: Traces) -> int:
    """Return the step of the checkpoint with which a recorded trace began; 0 without a checkpoint."""
    return max((step.resumed for one in traces.values() for step in one.steps.values()), default=0)


def missing(reasons: Mapping[str, str], steps: TracedSteps, sides: Sequence[Side]) -> NotComparable:
    """Return the error for missing traces. Its hint has the commands that make the traces.

    Args:
        reasons: name of a run -> why it cannot be repeated here.
    """
    first = next(side for side in sides if side.name in reasons)
    make = Command(
        "hpcenv", "rerun", first.name, "--trace-steps", str(steps), "--stop-after-steps", str(steps.last),
        "--name", f"{first.name}-trace",
    )  # fmt: skip
    hint: Hint = (
        "where that run was made: ", make, "; it writes trace/ in its run folder. Copy that run folder, then: ",
        Command("hpcenv", "compare", "--explain-op", *(_with_trace(side, first) for side in sides)),
    )  # fmt: skip
    return NotComparable(
        f"no trace of the steps {steps} of {' and '.join(reasons)}",
        why="\n".join(f"{name} cannot be repeated here: {why}" for name, why in reasons.items()),
        hint=hint,
    )


def _with_trace(side: Side, first: Side) -> str:
    return f"{side.name}-trace" if side is first else side.name


def how_it_repeats(original: Side, repetition: RunFolder, steps: TracedSteps) -> str:
    """Return a sentence that says whether a repetition gave the recorded losses."""
    until = Steps(last=steps.last)
    new = until.of(read_measured(repetition).series)
    old = until.of(original.measured.series)
    if steps.resumed:
        old, new = (Steps(first=steps.resumed + 1, last=steps.last).of(series) for series in (old, new))
    found = [
        one
        for one in comparison.compare_metrics(old, new, Tolerance(), same_ranks=True)
        if one.source == "backward" and one.compared
    ]
    if not found:
        return "whether it repeats the run is unknown: no losses in common"
    firsts = [one.first for one in found if one.first is not None]
    if not firsts:
        return f"it repeats the run: {sum(one.compared for one in found)} losses are equal to the last bit"
    first = min(firsts, key=lambda one: one.step)
    return (
        f"it does not repeat the run: the loss of step {first.step} was {first.reference}, and is {first.value}; "
        "the operation may differ from the operation in the run"
    )


# -- the answer ---------------------------------------------------------------------------


def explain(
    sides: Sequence[Side],
    traces: Sequence[Traces],
    steps: TracedSteps,
    sources: Sequence[TraceSource],
    causes: Sequence[Cause],
    not_compared: Sequence[str] = (),
) -> ExplainedOperation:
    """Return the first operation that differs, and the differences between the runs that explain it. Pure.

    Args:
        sides: the reference and the run.
        traces: the traces of both runs; each trace has the steps.
        causes: differences between the runs, the most likely cause first.
        not_compared: what could not be compared, because no record of a run contains it.
    """
    wanted = [step for step in common_steps(traces[0], traces[1]) if steps.first <= step <= steps.last]
    found = compare_traces(traces[0], traces[1], wanted)
    groups = () if found.first is None else _EXPLAINED_BY[found.first.kind]
    likely = tuple(cause for cause in causes if cause.group in groups)
    return ExplainedOperation(
        reference=sides[0].name,
        other=sides[1].name,
        verdict="equal" if found.first is None else "operation",
        headline=_headline(found),
        meaning="" if found.first is None else _meaning(found.first),
        first=found.first,
        of_ranks=found.of_ranks,
        steps=found.steps,
        ranks=found.ranks,
        operations=found.operations,
        resumed=steps.resumed,
        sources=tuple(sources),
        likely=likely,
        others=tuple(cause for cause in causes if cause not in likely),
        not_seen=(*found.not_seen, *not_compared),
    )


def _headline(found: TraceComparison) -> str:
    first = found.first
    if first is None:
        steps = f"step {found.steps[0]}" if len(found.steps) == 1 else f"steps {found.steps[0]} to {found.steps[-1]}"
        return f"no operation differs in {steps}: {found.operations} are equal to the last bit"
    name = first.name or first.other_name
    module = f" of {first.module} ({first.module_class})" if first.module else ""
    return f"the first operation that differs: {name}, {first.phase}{module}, step {first.step}, rank {first.rank}"


def _meaning(first: OperationDifference) -> str:
    if first.kind == "kernel":
        return "it read the same bytes in both runs, but wrote different ones: its kernel or the order of sums differs"
    if first.kind == "random":
        return "it drew random numbers from a different state of the generator: the seed or earlier draws differ"
    if first.kind == "collective":
        return (
            "this rank sent the same bytes, but got different bytes: the bytes of a rank without a trace differ,"
            " or the algorithm between the ranks differs"
        )
    if first.kind == "sequence":
        called = f"the reference {first.name or 'none'}, the run {first.other_name or 'none'}"
        return f"the runs called different operations: {called}"
    writer = next((one.written_by for one in first.values if one.role == "input" and one.written_by), "")
    if any(one.role == "arguments" for one in first.values):
        return "it got different arguments"
    if writer:
        return f"it read different bytes; {writer} had written equal bytes: something unseen changed them"
    return "it read different bytes, which no traced operation wrote: data, loaded weights, or unseen code"
