"""`hpcenv compare --explain-op`: trace what is missing, compare, and print the first operation that differs."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcenv.cli import _accept, _render
from hpcenv.cli import submit as submit_cli
from hpcenv.cli.wait import tell_state
from hpcenv.errors import Command, HpcenvError, Interrupted, NotComparable, Status, UsageError
from hpcenv.project.option_values import first_and_last, step_range
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.trace import read_run_trace
from hpcenv.reproduction import explain_op, explain_op_text
from hpcenv.reproduction.compare import RunComparison, Side, Steps, causes_between, compare, read_side
from hpcenv.reproduction.explain_op import Traces, TraceSource
from hpcenv.reproduction.repetition import Repetition, TracedSteps, plan_repetition
from hpcenv.runs.entries import Run, open_run
from hpcenv.runs.find import find_run
from hpcenv.runs.status import RunStatus
from hpcenv.runs.wait import exit_status_of, wait_for
from hpcenv.submission.submit import submit


@dataclass(frozen=True, kw_only=True)
class ExplainWish:
    """What the user typed."""

    reference: str
    run: str
    runs: str | None
    trace_steps: str | None
    accept: str | None
    timeout: float | None
    as_json: bool


def show(wish: ExplainWish) -> int:
    """Find and print the first operation that differs; return the exit status."""
    words = (wish.reference, wish.run)
    runs = [find_run(_render.cwd(), word, runs=wish.runs) for word in words]
    sides = [read_side(_render.cwd(), word, wish.runs, Steps(), ()) for word in words]
    if sides[0].ranks != sides[1].ranks:
        raise NotComparable(
            f"`{sides[0].name}` and `{sides[1].name}` have other numbers of ranks",
            why=f"{sides[0].ranks} and {sides[1].ranks}: each rank has other data, so all operations differ",
        )
    traces: list[Traces] = [read_run_trace(RunFolder(side.folder)) for side in sides]
    steps = _steps(wish, sides, traces)
    if steps is None:
        _render.tell(
            "the runs are equal to the last bit: no operation has to be explained (--trace-steps A:B compares)"
        )
        if wish.as_json:
            _render.verdict_on("compare", {"verdict": "equal", "headline": "equal to the last bit"}, ok=True)
        return 0
    sources = [TraceSource(run=side.name, folder=side.folder, how="recorded") for side in sides]
    absent = [n for n in (0, 1) if not explain_op.has_steps(traces[n], sides[n], steps)]
    if absent:
        repeated = _repeat({n: runs[n] for n in absent}, sides, steps, wish)
        for number, (source, found) in repeated.items():
            sources[number], traces[number] = source, found
    causes, not_compared = causes_between(_render.cwd(), sides[0], sides[1])
    result = explain_op.explain(sides, traces, steps, sources, causes, not_compared)
    if wish.as_json:
        _render.verdict_on("compare", result, ok=result.verdict == "equal")
    else:
        _render.say(explain_op_text.render(result))
    return 0 if result.verdict == "equal" else Status.RESULTS_DIFFER


def _steps(wish: ExplainWish, sides: Sequence[Side], traces: Sequence[Traces]) -> TracedSteps | None:
    """Return the steps to compare: those that are asked for, that are traced, or that follow the last equal state.

    None if the runs are equal.
    """
    if wish.trace_steps is not None:
        try:
            first, last = first_and_last(step_range(wish.trace_steps))
        except ValueError as error:
            raise UsageError(f"`--trace-steps {wish.trace_steps}` {error}") from error
        return explain_op.begin_of(sides, traces, first, last)
    recorded = explain_op.recorded_steps(traces)
    if recorded:
        return explain_op.begin_of(sides, traces, recorded[0], recorded[-1])
    compared = _compared(wish)
    if compared is not None and compared.verdict == "equal":
        return None
    return explain_op.steps_to_trace(sides[0], sides[1], compared)


def _compared(wish: ExplainWish) -> RunComparison | None:
    try:
        return compare(_render.cwd(), wish.reference, wish.run, runs=wish.runs)
    except NotComparable:
        return None


def _repeat(
    runs: Mapping[int, Run], sides: Sequence[Side], steps: TracedSteps, wish: ExplainWish
) -> dict[int, tuple[TraceSource, Traces]]:
    """Repeat the steps of runs with the trace on; return side -> where its trace is, and the trace.

    Raises:
        NotComparable: a run cannot be repeated here.
    """
    planned = _plan(runs, sides, steps)
    if not wish.as_json:
        for one in planned.values():
            _render.tell(f"{one.of}: repeats the steps up to {steps.last}, traces {steps}: {one.plan.request.shape}")
            for note in one.notes:
                _render.tell(f"  {note}")
    for one in planned.values():
        _accept.require(one.workspace, wish.accept, as_json=wish.as_json, more=one.recorded)
    folders = {number: submit(one.plan, one.context).run_folder for number, one in planned.items()}
    statuses = dict(zip(folders, _wait([open_run(folder) for folder in folders.values()], wish), strict=True))
    found: dict[int, tuple[TraceSource, Traces]] = {}
    reasons = {}
    for number, folder in folders.items():
        traces = read_run_trace(RunFolder(folder))
        if explain_op.has_steps(traces, sides[number], steps):
            repeats = explain_op.how_it_repeats(sides[number], RunFolder(folder), steps)
            source = TraceSource(run=sides[number].name, folder=folder, how="repeated", repeats=repeats)
            found[number] = source, traces
        else:
            reasons[sides[number].name] = _why_no_trace(folder.name, statuses[number], traces)
    if reasons:
        raise explain_op.missing(reasons, steps, sides)
    return found


def _plan(runs: Mapping[int, Run], sides: Sequence[Side], steps: TracedSteps) -> dict[int, Repetition]:
    planned, reasons = {}, {}
    for number, run in runs.items():
        try:
            planned[number] = plan_repetition(run, steps, submit_cli.context_of(), open_project=_render.open_project)
        except HpcenvError as error:
            reasons[sides[number].name] = "; ".join(filter(None, (error.what, error.why)))
    if reasons:
        raise explain_op.missing(reasons, steps, sides)
    names = [one.plan.manifest.run for one in planned.values()]
    if len(set(names)) < len(names):
        raise UsageError("both sides are the same run", why="an operation differs between two runs")
    return planned


def _why_no_trace(name: str, status: RunStatus, traces: Traces) -> str:
    """Return why a repetition gave no trace, in words."""
    ended = exit_status_of(status)
    texts = [f"its repetition {name} ended as {status.state}, status {ended}"]
    texts += [status.detail] if status.detail else []
    texts += [problem for one in traces.values() for problem in (*one.problems, *one.notes)][:2]
    if not ended and len(texts) == 1:
        texts.append("it has no trace of these steps: are there optimizer steps, and is torch 2.0 or newer?")
    return "; ".join(texts)


def _wait(runs: Sequence[Run], wish: ExplainWish) -> tuple[RunStatus, ...]:
    def on_status(status: RunStatus) -> None:
        if not wish.as_json:
            tell_state(status)

    try:
        return wait_for(runs, environ=os.environ, pause=time.sleep, on_status=on_status, timeout=wish.timeout)
    except KeyboardInterrupt as stop:
        names = [str(run.folder.path) for run in runs]
        hint = Command("hpcenv", "cancel", *names)
        raise Interrupted(f"interrupted; {len(names)} repetitions continue", hint=hint) from stop
