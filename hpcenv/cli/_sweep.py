"""Sweeps and arrays on the command line: the table, and what `submit` does with many runs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpcenv.cli import _render
from hpcenv.errors import Interrupted

if TYPE_CHECKING:
    from hpcenv.steps.request import Asked, Surroundings
    from hpcenv.steps.sweep import SweepPlan, SweepResult, SweepStatus

# A terminal's height; `--json` has them all.
_ROWS = 40


def submit(asked: Asked, around: Surroundings, *, runs: str | None, dry_run: bool, wait: bool, as_json: bool) -> int:
    """Plan a sweep, submit it, and follow it where that is asked for; return the exit status."""
    from hpcenv.steps.sweep import plan_sweep

    plan = plan_sweep(_render.open_project(), asked, around)
    return carry_out(plan, around, by_name=runs is None, dry_run=dry_run, wait=wait, as_json=as_json)


def carry_out(
    plan: SweepPlan,
    around: Surroundings,
    *,
    by_name: bool,
    dry_run: bool,
    wait: bool,
    as_json: bool,
    verb: str = "submit",
) -> int:
    """Submit a planned sweep, or show it, and follow it where that is asked for; return the exit status.

    Args:
        by_name: whether the sweep is found by its name alone, which is not so with --runs.
        verb: which one this is, for the JSON envelope.
    """
    from hpcenv.steps.sweep import submit_sweep

    if dry_run:
        _show_plan(plan, as_json=as_json, verb=verb)
        return 0
    return go_on(submit_sweep(plan, around), by_name=by_name, wait=wait, as_json=as_json, verb=verb)


def go_on(
    result: SweepResult, *, by_name: bool, wait: bool, as_json: bool, verb: str = "submit", again: bool = False
) -> int:
    """Say what was submitted, and follow it where that is asked for; return the exit status.

    Args:
        again: only some runs of it were, in their own folders.
    """
    word = result.run if by_name else str(result.run_folder)
    if as_json and not wait:
        _render.success(verb, result)
    elif not as_json:
        _show_submitted(result, word, again=again)
    if not wait:
        return 0
    try:
        return follow(result, word, as_json=as_json, verb=verb)
    except KeyboardInterrupt as stop:
        hint = _render.quoted(("hpcenv", "cancel", word))
        raise Interrupted(f"interrupted; {result.run} goes on", hint=hint) from stop


def _show_plan(plan: SweepPlan, *, as_json: bool, verb: str) -> None:
    from hpcenv import wire
    from hpcenv.steps.sweep import element_plan

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
            },
        )
        return
    for note in plan.plan.notes:
        _render.tell(f"note: {note}")
    _render.tell(f"dry run: {plan.shape}; nothing is written")
    rows = [
        [element.folder, *element.values.values(), _render.quoted(plan.arguments[element.index])]
        for element in plan.record.elements
    ]
    _render.tell(table(["element", *plan.record.names, "arguments"], rows))
    _render.tell("---- job.sbatch")
    print(plan.script, end="", flush=True)
    _render.tell(f"---- {first.manifest.run}: job.sbatch")
    print(first.script, end="", flush=True)
    _render.tell(f"---- {first.manifest.run}: manifest.json")
    print(wire.dumps(first.manifest), end="", flush=True)


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


def follow(result: SweepResult, word: str, *, as_json: bool, verb: str = "submit") -> int:
    """Say what changes until all elements have ended; return the status of the first that failed."""
    from hpcenv.steps.sweep import counts, wait_for_sweep

    def on_change(status: SweepStatus) -> None:
        if not as_json:
            _render.tell(f"{status.run}: {counts(status)}")

    status = wait_for_sweep(result.run_folder, environ=os.environ, pause=time.sleep, on_change=on_change)
    code = 1 if status.exit_status is None else status.exit_status
    if as_json:
        _render.verdict_on(verb, {"submitted": result, "status": _as_data(status)}, ok=code == 0)
    else:
        show(status)
        if code != 0:
            # Where an element only cannot be read, none has failed.
            first = f"{word}/{status.failed[0].element}" if status.failed else word
            _render.tell("\nhint: " + _render.quoted(("hpcenv", "report", first)))
    return code


def report(status: SweepStatus, *, command: str, as_json: bool) -> int:
    """Print where a sweep stands, for `status` and `report`; return 0 unless an element failed or cannot be read."""
    code = status.exit_status or 0
    if as_json:
        _render.verdict_on(command, _as_data(status), ok=code == 0)
    else:
        show(status)
    return 1 if code else 0


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
    """Print the table of a sweep: what failed first, as far as a terminal is high."""
    from hpcenv.steps.sweep import counts

    runs = "1 run" if len(status.elements) == 1 else f"{len(status.elements)} runs"
    _render.say(f"{status.run}: {runs}: {counts(status)}")
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
    """Return columns of text; the last one is as long as it is. Values are shown as a terminal can."""
    cells = [[_shown(cell) for cell in row] for row in (head, *rows[:most])]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    more = len(rows) - most
    return "\n".join((*lines, f"... and {more} more") if more > 0 else lines)


def _shown(cell: str) -> str:
    return cell if cell.isprintable() else ascii(cell)[1:-1]
