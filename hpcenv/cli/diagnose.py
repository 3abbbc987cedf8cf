"""`hpcenv diagnose`: find the cause of a failure in the logs. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
from pathlib import Path

import click

from hpcenv.cli import _render
from hpcenv.errors import FileUnusable, Status, UsageError, WouldOverwrite
from hpcenv.records.files import write_text
from hpcenv.runs.diagnose import text
from hpcenv.runs.diagnose.diagnose import diagnose
from hpcenv.runs.diagnose.ticket import write_ticket


@click.command("diagnose")
@click.argument("words", metavar="[RUN|LOGFILE]...", nargs=-1)
@_render.runs_option
@click.option(
    "--ticket", is_flag=True, help="Print a text for the support desk instead. Read this text before you send it."
)
@click.option("-o", "--output", metavar="FILE", help="With --ticket: write the text to a new file.")
@_render.json_option
def command(words: tuple[str, ...], runs: str | None, ticket: bool, output: str | None, as_json: bool) -> int:
    """Name the earliest cause of a failure that the logs show: where, why, and what to do.

    RUN is a run folder, a run name, a job id or a sweep; the default is the latest run. Several log files
    are read as logs of one job; files of torch's flight recorder (rank_0, rank_1, ...) may be among them.
    hpcenv ends with 0 if it found a cause for each run or set of log files, else with 30.
    """
    if output is not None and not ticket:
        raise UsageError("`--output` needs --ticket", hint="add --ticket, or leave --output out")
    found = diagnose(_render.cwd(), words, environ=os.environ, runs=runs)
    ok = all(one.diagnosis.ok for one in found)
    shown: object = [one.diagnosis for one in found]
    if ticket:
        user = os.environ.get("USER", "")
        tickets = [write_ticket(one.diagnosis, one.run, one.status, user=user) for one in found]
        shown = tickets
        if output is not None:
            _write(_render.cwd() / output, "\n".join(one.text for one in tickets))
    if as_json:
        _render.verdict_on("diagnose", {"tickets" if ticket else "diagnoses": shown}, ok=ok)
    elif ticket and output is None:
        _render.say("\n".join(one.text for one in tickets).rstrip())
    elif ticket:
        _render.tell(f"wrote {output}: read it before you send it")
    else:
        _render.say("\n\n".join(text.render(one.diagnosis) for one in found))
    return 0 if ok else Status.NO_CAUSE_FOUND


def _write(path: Path, content: str) -> None:
    if os.path.lexists(path):
        raise WouldOverwrite(f"`{path}` exists", why="a ticket is written to a new file", hint="name another file")
    try:
        write_text(content, path)
    except OSError as error:
        raise FileUnusable(f"cannot write `{path}`", why=error.strerror) from error
