"""`hpcenv report`: the result of a run. Runs on: LOGIN NODE."""

from __future__ import annotations

import os

import click

from hpcenv.cli import _render, _report_files
from hpcenv.cli._terminal import escape_control
from hpcenv.cli.listing import table
from hpcenv.errors import Command, UsageError
from hpcenv.judge import first_failure
from hpcenv.runs import report_text
from hpcenv.runs.report import SweepReport, report

# The number of failures of a sweep that are printed in full. The table names all failed runs.
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
    help="How many of the last lines of the log to print.",
)
@click.option("--html", metavar="FILE", help="Write the report as one HTML file that needs no network.")
@click.option("--markdown", metavar="FILE", help="Write the report as Markdown.")
@click.option(
    "--record", metavar="FILE", help="Write the run record as JSON. It contains all information about the run."
)
@click.option(
    "--against", metavar="RUN2", help="With --html or --markdown: compare the run with the reference run RUN2."
)
@_render.json_option
def command(
    run: str | None, runs: str | None, lines: int, html: str | None, markdown: str | None, record: str | None,
    against: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Show how a run ended: first failure, exits of its nodes, code, verdict, settings, end of the log.

    RUN is a run folder, a run name or a job id; the default is the latest run. For a sweep,
    a table shows all of its runs, and the first failure of each failed run follows.
    With --html, --markdown or --record, hpcenv writes files for people and for other programs.
    """
    if against is not None and html is None and markdown is None:
        raise UsageError(
            "`--against` needs --html or --markdown", hint=Command("hpcenv", "compare", against, run or "latest")
        )
    if html is not None or markdown is not None or record is not None:
        _report_files.write(run, runs, html=html, markdown=markdown, record=record, against=against, as_json=as_json)
        return
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
