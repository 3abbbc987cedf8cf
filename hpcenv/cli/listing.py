"""`hpcenv list`: one line for each run. Runs on: LOGIN NODE."""

from __future__ import annotations

import csv
import io
import os
import shutil
import textwrap
from typing import TYPE_CHECKING

import click

from hpcenv.cli import _render
from hpcenv.cli._terminal import escape_control
from hpcenv.errors import UsageError
from hpcenv.judge.first_failure import FirstFailure
from hpcenv.runs.run_columns import COLUMNS, full_names, text_of
from hpcenv.runs.run_line import RunLine
from hpcenv.runs.run_list import RunListing, list_lines
from hpcenv.text import cut

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LINES = 20


@click.command("list")
@click.argument("sweep", required=False)
@_render.runs_option
@click.option(
    "--state",
    "states",
    metavar="STATE",
    multiple=True,
    help="Show only runs in this state, for example running or failed. Can be repeated.",
)
@click.option(
    "--fingerprint", default="", metavar="FINGERPRINT", help="Show only runs whose lockfile has this fingerprint."
)
@click.option(
    "--where",
    metavar="CONDITION",
    multiple=True,
    help="Show only runs for which this condition on an argument, metric or column is true, for example lr=3e-4, "
    "'loss<2' or state!=failed. Can be repeated.",
)
@click.option(
    "--sort",
    default="",
    metavar="NAME",
    help="Sort by this argument, metric or column; -NAME sorts in descending order.",
)
@click.option("--columns", default="", metavar="NAME,...", help="Show these arguments, metrics and columns.")
@click.option(
    "-n",
    "--lines",
    "count",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Number of runs to show. Default: {_LINES}.",
)
@click.option("--all", "everything", is_flag=True, help="Show all runs.")
@click.option(
    "--csv", "as_csv", is_flag=True, help="Print the columns of --columns, or all columns, as comma-separated values."
)
@_render.json_option
def command(
    sweep: str | None,
    runs: str | None,
    states: tuple[str, ...],
    fingerprint: str,
    where: tuple[str, ...],
    sort: str,
    columns: str,
    count: int | None,
    everything: bool,
    as_csv: bool,
    as_json: bool,
) -> None:
    """List the runs of the project, one line each, the newest first.

    With SWEEP, list the runs of that sweep. With --where, --sort, --columns or --csv, each run of a sweep has its own
    line.
    """
    if as_csv and as_json:
        raise UsageError("--csv and --json cannot be used together", hint="use one of them")
    wanted = tuple(word for state in states for word in state.split(","))
    limit = count or (None if everything or sweep is not None or as_json or as_csv else _LINES)
    listing = list_lines(
        _render.cwd(),
        environ=os.environ,
        sweep=sweep,
        runs=runs,
        states=wanted,
        fingerprint=fingerprint.removeprefix("hpcenv:"),
        where=where,
        sort=sort,
        columns=tuple(name.strip() for name in columns.split(",") if name.strip()),
        records=as_json,
        each_run=as_csv,
        limit=limit,
    )
    if as_json:
        _render.success("list", listing)
        return
    if as_csv:
        _render.put(_csv(listing, chosen=bool(columns)))
        return
    there = () if columns else (*_SHOWN, *(f"arg.{name}" for name in listing.names))
    more = {name: full for name, full in listing.columns.items() if full not in there}
    names = () if columns else listing.names
    for line in table(listing.runs, names=names, more=more, only_more=bool(columns)):
        _render.say(line)
    if not listing.total:
        matching = (f" that are {' or '.join(wanted)}" if wanted else "") + "".join(
            f" with {one}" for one in (fingerprint, *where) if one
        )
        _render.tell(f"no runs in {listing.folder}{matching}")
    elif len(listing.runs) < listing.total:
        _render.tell(f"{listing.total - len(listing.runs)} more: hpcenv list --all")


_FRONT = ("JOB", "STATE", "NODES", "ATTEMPT", "ELAPSED")
_OF_A_SWEEP = ("STATE", "EXIT", "ELAPSED")
# The columns of `_FRONT`, and the two columns around them. The names are those of `hpcenv.runs.run_columns`.
_SHOWN = ("run", *map(str.lower, _FRONT), "reason")
_TO_THE_RIGHT = ("NODES", "ATTEMPT", "ELAPSED", "EXIT")
# The column of names has at most this width. A longer name is not cut, so that it can be copied. It is printed on a
# separate line.
_NAME_WIDTH = 34
# Longer values are cut. `--json` has the full value.
_VALUE_WIDTH = 20


def table(
    lines: Sequence[RunLine],
    *,
    names: Sequence[str] = (),
    more: Mapping[str, str] | None = None,
    only_more: bool = False,
    failures: Mapping[str, FirstFailure] | None = None,
    margin: int = 0,
) -> list[str]:
    """Return the lines of a table as wide as the terminal; 80 columns without a terminal.

    If a reason does not fit into its row, it is printed below the row.

    Args:
        lines: the runs.
        names: the names of a sweep's parameters. Each name has a column.
        more: further columns after `names`: heading -> full name.
        only_more: show only the name of the run, `names` and `more`.
        failures: run -> first failure. It is shown instead of the reason, and is cut to the width. With None, the table
            shows the reasons.
        margin: number of columns to leave free.
    """
    if not lines:
        return []
    more = more or {}
    columns = () if only_more else _FRONT if failures is None else _OF_A_SWEEP
    last = "FIRST FAILURE" if failures is not None else "" if only_more and "reason" not in more.values() else "REASON"
    more = {name: full for name, full in more.items() if full not in ("run", "reason")}
    own = (name.upper() if name in COLUMNS else name for name in more)
    header = tuple(map(escape_control, ("RUN", *names, *own, *columns, last)))
    rows = [header, *(_cells(line, names, more, columns, last, failures or {}) for line in lines)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(header) - 1)]
    right = [name in _TO_THE_RIGHT and n > len(names) for n, name in enumerate(header[:-1])]
    total = shutil.get_terminal_size((80, 24)).columns - margin
    room = total - sum(width + len(_GAP) for width in (*widths[1:], len(header[-1])))
    widths[0] = max(min(widths[0], _NAME_WIDTH, room), len(header[0]))
    single = [True, *(line.run in (failures or {}) or not last for line in lines)]
    return [text for row, one in zip(rows, single, strict=True) for text in _row(row, widths, right, total, single=one)]


def _csv(listing: RunListing, *, chosen: bool) -> str:
    """Return comma-separated values with a header. Control characters in arguments and names become escapes."""
    columns = listing.columns if chosen else {full: full for full in full_names(listing.runs)}
    columns = {"run": "run", **columns}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(escape_control, columns))
    writer.writerows([escape_control(text_of(line, full)) for full in columns.values()] for line in listing.runs)
    return text.getvalue()


def _cells(
    line: RunLine,
    names: Sequence[str],
    more: Mapping[str, str],
    columns: Sequence[str],
    last: str,
    failures: Mapping[str, FirstFailure],
) -> tuple[str, ...]:
    failed = line.exit_status not in (None, 0)
    cells = {
        "JOB": line.job_id or "-",
        "STATE": f"{line.state} ({line.exit_status})" if failed and "EXIT" not in columns else line.state,
        "NODES": "-" if line.nodes is None else str(line.nodes),
        "ATTEMPT": str(line.attempt),
        "EXIT": "-" if line.exit_status is None else str(line.exit_status),
        "ELAPSED": line.elapsed or "-",
    }
    values = [line.values.get(name, "-") for name in names]
    values += [text_of(line, full, digits=6) or "-" for full in more.values()]
    short = [cut(value, _VALUE_WIDTH) for value in values]
    reason = failures[line.run].headline if line.run in failures else line.detail if last else ""
    return tuple(map(escape_control, (line.run, *short, *(cells[name] for name in columns), reason)))


def _row(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool], total: int, *, single: bool) -> list[str]:
    if len(cells[0]) > widths[0]:
        return [cells[0], *_row(("", *cells[1:]), widths, right, total, single=single)]
    front = _GAP.join(
        cell.rjust(width) if to_the_right else cell.ljust(width)
        for cell, width, to_the_right in zip(cells[:-1], widths, right, strict=True)
    )
    room, reason = max(total - len(front) - len(_GAP), 8), cells[-1]
    if len(reason) <= room:
        return [f"{front}{_GAP}{reason}".rstrip()]
    if single:
        return [f"{front}{_GAP}{cut(reason, room)}"]
    # Do not break at a dash, so that paths can be copied.
    below = textwrap.wrap(
        reason, max(total, 20), initial_indent=_BELOW, subsequent_indent=_BELOW, break_on_hyphens=False
    )
    return [front.rstrip(), *below]


_GAP, _BELOW = "  ", "      "
