"""Two runs whose operations are compared: the steps to compare, and the traces of both runs.

Runs on: LOGIN NODE. A run without a trace of these steps is repeated: `plan_missing` plans the repetition, the command
submits it and waits for its end, and `with_repetitions` reads the new trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcenv.errors import HpcenvError, NotComparable, UsageError
from hpcenv.project.context import Context
from hpcenv.project.option_values import first_and_last, step_range
from hpcenv.project.workspace import Workspace
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.trace import read_run_trace
from hpcenv.reproduction import explain_op
from hpcenv.reproduction.compare import RunComparison, Side, Steps, causes_between, compare_runs, read_side
from hpcenv.reproduction.explain_op import ExplainedOperation, Traces, TraceSource
from hpcenv.reproduction.repetition import Repetition, TracedSteps, earlier_repetitions, plan_repetition
from hpcenv.runs.entries import Run
from hpcenv.runs.find import find_run
from hpcenv.runs.status import RunStatus
from hpcenv.runs.wait import exit_status_of


@dataclass(frozen=True, kw_only=True)
class TracedPair:
    """The reference and the run, in this order.

    Attributes:
        traces: for each of the two runs, rank -> its trace. If a run must be repeated, its trace is empty or has
            different steps.
    """

    runs: tuple[Run, ...]
    sides: tuple[Side, ...]
    steps: TracedSteps
    traces: tuple[Traces, ...]
    sources: tuple[TraceSource, ...]

    def missing(self) -> tuple[int, ...]:
        """Return which of the two runs have no trace of the steps."""
        return tuple(n for n in (0, 1) if not explain_op.has_steps(self.traces[n], self.sides[n], self.steps))


def find_pair(
    cwd: Path, reference: str, run: str, *, runs: str | None = None, trace_steps: str | None = None
) -> TracedPair | None:
    """Return the two runs and the steps to compare; None if the runs have equal results.

    Args:
        runs: folder of runs; None for the project's folder of runs.
        trace_steps: the steps to compare, as `A:B`. None means the steps that are already traced. If no step is traced,
            None means the steps after the last equal state.

    Raises:
        RunNotFound, RecordInvalid: there is no such run, or it cannot be read.
        NotComparable: the runs have different numbers of ranks.
        UsageError: `trace_steps` is not a range of steps.
    """
    found = tuple(find_run(cwd, word, runs=runs) for word in (reference, run))
    sides = tuple(read_side(cwd, word, runs, Steps(), ()) for word in (reference, run))
    if sides[0].ranks != sides[1].ranks:
        raise NotComparable(
            f"`{sides[0].name}` and `{sides[1].name}` have different numbers of ranks",
            why=f"{sides[0].ranks} and {sides[1].ranks}: each rank has different data, so all operations differ",
        )
    traces: tuple[Traces, ...] = tuple(read_run_trace(RunFolder(side.folder)) for side in sides)
    if trace_steps is None and not explain_op.recorded_steps(traces):
        compared = _compared(cwd, reference, run, runs)
        if compared is not None and compared.verdict == "equal":
            return None
        steps = explain_op.steps_to_trace(sides[0], sides[1], compared)
    else:
        steps = explain_op.begin_of(sides, traces, *_first_and_last(trace_steps, traces))
    sources = tuple(TraceSource(run=side.name, folder=side.folder, how="recorded") for side in sides)
    pair = TracedPair(runs=found, sides=sides, steps=steps, traces=traces, sources=sources)
    return _with_traces(pair, {n: list(earlier_repetitions(found[n], steps)) for n in pair.missing()})


def _first_and_last(trace_steps: str | None, traces: Sequence[Traces]) -> tuple[int, int]:
    if trace_steps is None:
        recorded = explain_op.recorded_steps(traces)
        return recorded[0], recorded[-1]
    try:
        return first_and_last(step_range(trace_steps))
    except ValueError as error:
        raise UsageError(f"`--trace-steps {trace_steps}` {error}") from error


def _compared(cwd: Path, reference: str, run: str, runs: str | None) -> RunComparison | None:
    try:
        return compare_runs(cwd, reference, run, runs=runs)
    except NotComparable:
        return None


def plan_missing(
    pair: TracedPair, context: Context, copies: Path, open_project: Callable[[Path], Workspace]
) -> dict[int, Repetition]:
    """Plan the repetitions that make the missing traces. Return number of the run (0 or 1) -> its repetition.

    Args:
        copies: a folder outside of every project, for copies of the code. This folder is not needed after the
            submission.

    Raises:
        NotComparable: a run cannot be repeated here.
        UsageError: reference and run are the same run.
    """
    planned, reasons = {}, {}
    for number in pair.missing():
        try:
            planned[number] = plan_repetition(
                pair.runs[number], pair.steps, context, copies=copies, open_project=open_project
            )
        except HpcenvError as error:
            reasons[pair.sides[number].name] = "; ".join(filter(None, (error.what, error.why)))
    if reasons:
        raise explain_op.missing(reasons, pair.steps, pair.sides)
    names = [one.plan.manifest.run for one in planned.values()]
    if len(set(names)) < len(names):
        raise UsageError("both sides are the same run", why="an operation differs between two runs")
    return planned


def with_repetitions(pair: TracedPair, ended: Mapping[int, tuple[Path, RunStatus]]) -> TracedPair:
    """Return the pair with the traces of repetitions.

    Args:
        ended: number of the run (0 or 1) -> the run folder of its repetition, and the status with which the repetition
            ended.

    Raises:
        NotComparable: a repetition gave no trace.
    """
    found = _with_traces(pair, {number: [RunFolder(folder)] for number, (folder, _) in ended.items()})
    reasons = {
        pair.sides[n].name: _why_no_trace(ended[n][0].name, ended[n][1], read_run_trace(RunFolder(ended[n][0])))
        for n in found.missing()
    }
    if reasons:
        raise explain_op.missing(reasons, pair.steps, pair.sides)
    return found


def _with_traces(pair: TracedPair, repeated: Mapping[int, Sequence[RunFolder]]) -> TracedPair:
    """Return the pair with the traces of the repetitions that traced all steps to compare."""
    traces, sources = list(pair.traces), list(pair.sources)
    for number, folders in repeated.items():
        side = pair.sides[number]
        for folder in folders:
            found = read_run_trace(folder)
            if explain_op.has_steps(found, side, pair.steps):
                repeats = explain_op.how_it_repeats(side, folder, pair.steps)
                traces[number] = found
                sources[number] = TraceSource(run=side.name, folder=folder.path, how="repeated", repeats=repeats)
    return replace(pair, traces=tuple(traces), sources=tuple(sources))


def _why_no_trace(name: str, status: RunStatus, traces: Traces) -> str:
    """Return why a repetition gave no trace, in words."""
    ended = exit_status_of(status)
    texts = [f"its repetition {name} ended as {status.state}, status {ended}"]
    texts += [status.detail] if status.detail else []
    texts += [problem for one in traces.values() for problem in (*one.problems, *one.notes)][:2]
    if not ended and len(texts) == 1:
        texts.append("it has no trace of these steps: are there optimizer steps, and is torch 2.0 or newer?")
    return "; ".join(texts)


def explain_pair(cwd: Path, pair: TracedPair) -> ExplainedOperation:
    """Return the first operation that differs, and what explains the difference."""
    causes, not_compared = causes_between(cwd, pair.sides[0], pair.sides[1])
    return explain_op.explain(pair.sides, pair.traces, pair.steps, pair.sources, causes, not_compared)
