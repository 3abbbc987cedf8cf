"""`hpcenv compare --explain-op`: make missing traces, compare them, and print the first operation that differs."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcenv.cli import _accept, _render
from hpcenv.cli import submit as submit_cli
from hpcenv.cli._wait import interruptible
from hpcenv.cli.wait import wait_telling
from hpcenv.errors import Status
from hpcenv.project import acceptance
from hpcenv.reproduction import explain_op_text
from hpcenv.reproduction.repetition import Repetition, TracedSteps
from hpcenv.reproduction.traced_pair import explain_pair, find_pair, plan_missing, with_repetitions
from hpcenv.runs.entries import open_run
from hpcenv.submission.submit import submit


@dataclass(frozen=True, kw_only=True)
class ExplainWish:
    """The arguments and options that the user typed."""

    reference: str
    run: str
    runs: str | None
    trace_steps: str | None
    accept: str | None
    timeout: float | None
    as_json: bool


def show(wish: ExplainWish) -> int:
    """Find and print the first operation that differs; return the exit status."""
    pair = find_pair(_render.cwd(), wish.reference, wish.run, runs=wish.runs, trace_steps=wish.trace_steps)
    if pair is None:
        _render.tell(
            "the runs are equal to the last bit: no operation has to be explained "
            "(--trace-steps A:B compares the operations of these steps)"
        )
        if wish.as_json:
            _render.verdict_on("compare", {"verdict": "equal", "headline": "equal to the last bit"}, ok=True)
        return 0
    # The copies are outside of the work tree, so that git does not see them. Each new run has its own copy.
    with tempfile.TemporaryDirectory(prefix="hpcenv-code-") as copies:
        planned = plan_missing(pair, submit_cli.context_of(), Path(copies).resolve(), _render.open_project)
        _tell_and_ask(planned, pair.steps, wish)
        folders = [submit(one.plan, one.context).run_folder for one in planned.values()]
    with interruptible(f"{len(folders)} repetitions continue", *map(str, folders)):
        statuses = wait_telling([open_run(folder) for folder in folders], wish.timeout, as_json=wish.as_json)
    ended = zip(folders, statuses, strict=True)
    result = explain_pair(_render.cwd(), with_repetitions(pair, dict(zip(planned, ended, strict=True))))
    if wish.as_json:
        _render.verdict_on("compare", result, ok=result.verdict == "equal")
    else:
        _render.say(explain_op_text.render(result))
    return 0 if result.verdict == "equal" else Status.RESULTS_DIFFER


def _tell_and_ask(planned: Mapping[int, Repetition], steps: TracedSteps, wish: ExplainWish) -> None:
    """Print which runs are repeated, and ask the user to accept the settings of their projects that need consent."""
    if not wish.as_json:
        for one in planned.values():
            _render.tell(f"{one.of}: repeats the steps up to {steps.last}, traces {steps}: {one.plan.request.shape}")
            for note in one.notes:
                _render.tell(f"  {note}")
    # All repeated runs are in one list, so that one `--accept` is enough.
    if planned:
        first, *others = planned.values()
        more = [asked for one in planned.values() for asked in one.recorded]
        more += [asked for one in others for asked in acceptance.asked_by(one.workspace)]
        own = acceptance.asked_by(first.workspace)
        more = [asked for asked in dict.fromkeys(more) if asked not in own]
        _accept.require(first.workspace, wish.accept, as_json=wish.as_json, more=more)
