"""`hpcenv report`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from hpcenv.cli import _render
from hpcenv.cli._terminal import harmless

if TYPE_CHECKING:
    from hpcenv.steps.report import RunReport, SweepReport

# Runs of a sweep whose failure is told; the table tells all.
_FAILURES = 10
# A line of the log as it is shown here; `hpcenv logs` shows all of it.
_LINE = 400


@click.command("report")
@_render.run_argument
@click.option(
    "--lines", type=click.IntRange(min=0), default=10, show_default=True, help="How much of the log's end to show."
)
@_render.json_option
def command(run: str | None, runs: str | None, lines: int, as_json: bool) -> None:
    """Say what became of a run, its first failure first: RUN as in `hpcenv status`, or a sweep."""
    from hpcenv.steps.report import SweepReport, report

    found = report(_render.cwd(), run, environ=os.environ, runs=runs, lines=lines)
    if as_json:
        _render.verdict_on("report", found, ok=found.ok)
    elif isinstance(found, SweepReport):
        _show_sweep(found)
    else:
        _show_run(found)


def _show_run(found: RunReport) -> None:
    from hpcenv.cli.status import show
    from hpcenv.model import failure

    folder = str(found.status.run_folder)
    if found.failure is not None:
        _render.say(failure.render(found.failure, folder=folder))
    for attempt in found.earlier:
        link = f", {attempt.link}" if attempt.link else ""
        _render.say(failure.render(attempt.failure, word=f"attempt {attempt.attempt}{link}", folder=folder))
    if found.failure is not None or found.earlier:
        _render.say()
    show(found.status)
    if found.manifest.element:
        values = ", ".join(f"{name}={value}" for name, value in found.manifest.element.items())
        _render.say(f"  values    {harmless(values)}")
    if found.table:
        _render.say()
        _render.say(found.table.rstrip())
    if found.last_lines and found.status.state != "rejected":
        _render.say()
        _render.say("end of the log:")
        for line in found.last_lines:
            shown = harmless(line)
            _render.say(f"  {shown[:_LINE]}..." if len(shown) > _LINE else f"  {shown}".rstrip())


def _show_sweep(found: SweepReport) -> None:
    from hpcenv.cli.listing import table
    from hpcenv.model import failure

    _render.say(f"{harmless(found.sweep.run)}: {found.sweep.detail}")
    for line in table(found.runs, names=found.names, failures=found.failures):
        _render.say(line)
    for problem in found.problems:
        _render.tell(f"note: {harmless(problem)}")
    for run, first in list(found.failures.items())[:_FAILURES]:
        _render.say()
        folder = str(found.sweep.run_folder / run)
        _render.say(failure.render(first, word=f"{harmless(run)}, first failure", folder=folder))
    if len(found.failures) > _FAILURES:
        _render.say()
        _render.say(f"{len(found.failures) - _FAILURES} more failed: hpcenv report {harmless(found.sweep.run)}/RUN")
