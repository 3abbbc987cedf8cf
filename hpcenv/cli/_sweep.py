"""Sweeps and arrays on the command line: print their table, and submit many runs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from hpcenv.cli import _accept, _render
from hpcenv.cli._wait import Wait, interruptible
from hpcenv.errors import RunEndUnknown
from hpcenv.project.acceptance import Review
from hpcenv.project.context import Context
from hpcenv.project.workspace import Workspace
from hpcenv.records.codec import encode_record
from hpcenv.submission.request import SubmitOptions
from hpcenv.submission.sweep_job import (
    SweepPlan,
    SweepResult,
    SweepStatus,
    counts,
    element_plan,
    plan_sweep,
    submit_sweep,
    wait_for_sweep,
)
from hpcenv.text import columns, plural, visible

# The number of rows that are printed. A terminal shows about this number of rows. `--json` has all rows.
_ROWS = 40


def submit(
    workspace: Workspace, options: SubmitOptions, context: Context, *, dry_run: bool, wait: Wait | None, as_json: bool
) -> int:
    """Plan a sweep and submit it. If `wait` is set, wait until the sweep has ended. Return the exit status."""
    plan = plan_sweep(workspace, options, context)
    if not dry_run:
        _accept.remember_typed(workspace, options, plan.plan)
    review = _accept.reviewed(workspace) if dry_run else None
    return carry_out(plan, context, by_name=options.runs_dir is None, review=review, wait=wait, as_json=as_json)


def carry_out(
    plan: SweepPlan,
    context: Context,
    *,
    by_name: bool,
    review: Review | None,
    wait: Wait | None,
    as_json: bool,
    verb: str = "submit",
) -> int:
    """Submit a planned sweep, or print it for a dry run. With `wait`, wait for its end. Return the exit status.

    Args:
        by_name: whether other commands find the sweep by its name. With --runs-dir, these commands need its folder.
        review: the settings that the user must accept. A dry run prints them. With None, the sweep is submitted.
        verb: name of the command, for the JSON envelope.
    """
    if review is not None:
        _show_plan(plan, review, as_json=as_json, verb=verb)
        return 0
    return go_on(submit_sweep(plan, context), by_name=by_name, wait=wait, as_json=as_json, verb=verb)


def go_on(
    result: SweepResult, *, by_name: bool, wait: Wait | None, as_json: bool, verb: str = "submit", again: bool = False
) -> int:
    """Print the submitted sweep. If `wait` is set, wait until the sweep has ended. Return the exit status.

    Args:
        again: whether only some runs of the sweep were submitted again, in their old folders.
    """
    word = result.run if by_name else str(result.run_folder)
    if as_json and wait is None:
        _render.success(verb, result)
    elif not as_json:
        _show_submitted(result, word, again=again)
    if wait is None:
        return 0
    with interruptible(f"{result.run} continues", word):
        return follow(result, word, wait, as_json=as_json, verb=verb)


def _show_plan(plan: SweepPlan, review: Review, *, as_json: bool, verb: str) -> None:
    first = element_plan(plan, plan.record.elements[0])
    if as_json:
        _render.success(
            verb,
            {
                "script": plan.script,
                "sweep": plan.record,
                "arguments": {str(index): list(words) for index, words in plan.arguments.items()},
                "first": {"script": first.script, "manifest": first.manifest},
                "shape": plan.shape,
                "notes": plan.plan.notes,
                "acceptance": review,
            },
        )
        return
    for note in plan.plan.notes:
        _render.tell(f"note: {note}")
    _accept.show(review)
    _render.tell(f"dry run: {plan.shape}; nothing is written")
    rows = [
        [element.folder, *element.values.values(), _render.quoted(plan.arguments[element.index])]
        for element in plan.record.elements
    ]
    _render.tell(table(["element", *plan.record.names, "arguments"], rows))
    _render.tell("---- job.sbatch")
    _render.put(plan.script)
    _render.tell(f"---- {first.manifest.run}: job.sbatch")
    _render.put(first.script)
    _render.tell(f"---- {first.manifest.run}: manifest.json")
    _render.put(encode_record(first.manifest))


def _show_submitted(result: SweepResult, word: str, *, again: bool) -> None:
    for note in result.notes:
        _render.tell(f"note: {note}")
    _render.say(f"submitted {result.run}{' again' if again else ''}: {result.shape}, job array {result.job_id}")
    names = list(result.elements[0].values)
    rows = [[element.folder, *element.values.values()] for element in result.elements]
    if names:
        _render.tell(table(["element", *names], rows))
    _render.tell(f"run folder {result.run_folder}")
    commands = [_render.quoted(("hpcenv", *words)) for words in (("report", word), ("cancel", word))]
    _render.tell("\nnext: " + "    ".join(commands))


def follow(result: SweepResult, word: str, wait: Wait, *, as_json: bool, verb: str = "submit") -> int:
    """Print each change of state until all elements have ended; return the exit status of the first failed element.

    Raises:
        WaitTimeout: an element has not ended in time. The sweep continues.
    """

    def on_change(status: SweepStatus) -> None:
        if not as_json:
            _render.tell(f"{status.run}: {counts(status)}")

    status = wait_for_sweep(
        result.run_folder, environ=os.environ, pause=time.sleep, on_change=on_change, timeout=wait.timeout
    )
    code = RunEndUnknown.exit_status if status.exit_status is None else status.exit_status
    if as_json:
        _render.verdict_on(verb, {"submitted": result, "status": _as_data(status)}, ok=code == 0)
    else:
        show(status)
        if code != 0:
            # If an element cannot be read, the status is not 0, although it is possible that no element has failed.
            first = f"{word}/{status.failed[0].element}" if status.failed else word
            _render.tell("\nhint: " + _render.quoted(("hpcenv", "report", first)))
        source = f"{status.run}/{status.failed[0].element}" if status.failed else status.run
        _render.tell(f"exit status {code}: from run {source}")
    return code


def _as_data(status: SweepStatus) -> dict[str, Any]:
    return {
        "run": status.run,
        "run_folder": status.run_folder,
        "names": status.names,
        "exit_status": status.exit_status,
        "elements": status.elements,
        "problems": status.problems,
    }


def show(status: SweepStatus) -> None:
    """Print the table of a sweep. Failed elements come first. The number of rows is limited."""
    _render.say(f"{status.run}: {plural(len(status.elements), 'run')}: {counts(status)}")
    failed = {element.element for element in status.failed}
    rows = sorted(status.elements, key=lambda element: element.element not in failed)
    lines = [
        [
            element.element,
            *(element.values.get(name, "") for name in status.names),
            element.state.state,
            "-" if element.state.exit_status is None else str(element.state.exit_status),
            element.state.elapsed or "-",
            element.state.detail,
        ]
        for element in rows[:_ROWS]
    ]
    _render.say(table(["element", *status.names, "state", "exit", "elapsed", ""], lines))
    if len(rows) > _ROWS:
        _render.say(f"... and {len(rows) - _ROWS} more; --json has all of them")
    for problem in status.problems:
        _render.tell(f"note: {problem}")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, most: int = _ROWS) -> str:
    """Return a table as text, with control characters as escapes. The last column is not padded."""
    lines = columns([[visible(cell) for cell in row] for row in (head, *rows[:most])])
    more = len(rows) - most
    return "\n".join((*lines, f"... and {more} more") if more > 0 else lines)
