"""`hpcenv report`: what became of a run. Runs on: LOGIN NODE."""

from __future__ import annotations

import os

import click

from hpcenv.cli import _render
from hpcenv.cli._terminal import escape_control
from hpcenv.cli.listing import table
from hpcenv.node.launch import first_failure
from hpcenv.runs import report_text
from hpcenv.runs.report import SweepReport, report

# Failures of a sweep's runs that are printed in full. The table names all failed runs.
_MAX_FAILURES = 10


@click.command("report")
@_render.run_argument
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(min=0),
    metavar="N",
    default=10,
    show_default=True,
    help="Number of lines of the log's end to print.",
)
@_render.json_option
def command(run: str | None, runs: str | None, lines: int, as_json: bool) -> None:
    """Show what became of a run: first failure, exits of its nodes, code, verdict, settings, end of the log.

    RUN is a run folder, a run name or a job id; the default is the latest run. For a sweep,
    a table shows all of its runs, and the first failure of each failed run follows.
    """
    result = report(_render.cwd(), run, environ=os.environ, runs=runs, lines=lines)
    if as_json:
        _render.verdict_on("report", result, ok=result.ok)
    elif isinstance(result, SweepReport):
        _show_sweep(result)
    else:
        _render.say(report_text.render(result))


def _show_sweep(result: SweepReport) -> None:
    _render.say(f"{escape_control(result.sweep.run)}: {result.sweep.detail}")
    for line in table(result.runs, names=result.names, failures=result.failures):
        _render.say(line)
    for problem in result.problems:
        _render.tell(f"note: {escape_control(problem)}")
    for run, failure in list(result.failures.items())[:_MAX_FAILURES]:
        _render.say()
        folder = str(result.sweep.run_folder / run)
        _render.say(first_failure.render(failure, word=f"{escape_control(run)}, first failure", folder=folder))
    if len(result.failures) > _MAX_FAILURES:
        _render.say()
        more = len(result.failures) - _MAX_FAILURES
        _render.say(f"{more} more runs failed: hpcenv report {escape_control(result.sweep.run)}/RUN")
