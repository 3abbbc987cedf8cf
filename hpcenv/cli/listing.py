"""`hpcenv list`: one line for each run. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
import shutil
import textwrap
from typing import TYPE_CHECKING

import click

from hpcenv.cli import _render
from hpcenv.cli._terminal import escape_control
from hpcenv.judge.first_failure import FirstFailure
from hpcenv.runs.run_list import RunLine, list_lines
from hpcenv.text import cut

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LINES = 20


@click.command("list")
@click.argument("sweep", required=False)
@click.option("--runs-dir", "runs", metavar="DIR", help="Folder of runs, if not the project's.")
@click.option(
    "--state", "states", metavar="STATE", multiple=True, help="Show only running, failed ... runs; repeatable."
)
@click.option(
    "--fingerprint", default="", metavar="FINGERPRINT", help="Show only runs whose lockfile has this fingerprint."
)
@click.option(
    "-n", "--lines", "count", type=click.IntRange(min=1), metavar="N", help=f"Runs to show. Default: {_LINES}."
)
@click.option("--all", "everything", is_flag=True, help="Show all runs.")
@_render.json_option
def command(
    sweep: str | None,
    runs: str | None,
    states: tuple[str, ...],
    fingerprint: str,
    count: int | None,
    everything: bool,
    as_json: bool,
) -> None:
    """List the runs of the project, one line each, the newest first.

    With SWEEP, list the runs of that sweep.
    """
    wanted = tuple(word for state in states for word in state.split(","))
    limit = count or (None if everything or sweep is not None or as_json else _LINES)
    listing = list_lines(
        _render.cwd(),
        environ=os.environ,
        sweep=sweep,
        runs=runs,
        states=wanted,
        fingerprint=fingerprint.removeprefix("hpcenv:"),
        limit=limit,
    )
    if as_json:
        _render.success("list", listing)
        return
    for line in table(listing.runs, names=listing.names):
        _render.say(line)
    if not listing.total:
        matching = (f" that are {' or '.join(wanted)}" if wanted else "") + (
            f" with {fingerprint}" if fingerprint else ""
        )
        _render.tell(f"no runs in {listing.folder}{matching}")
    elif len(listing.runs) < listing.total:
        _render.tell(f"{listing.total - len(listing.runs)} more: hpcenv list --all")


_FRONT = ("JOB", "STATE", "NODES", "ATTEMPT", "ELAPSED")
_OF_A_SWEEP = ("STATE", "EXIT", "ELAPSED")
_TO_THE_RIGHT = ("NODES", "ATTEMPT", "ELAPSED", "EXIT")
# The column of names has at most this width. A longer name is not cut, so that it can be copied:
# it has a separate line.
_NAME_WIDTH = 34
# Longer values are cut. `--json` has the full value.
_VALUE_WIDTH = 20


def table(
    lines: Sequence[RunLine],
    *,
    names: Sequence[str] = (),
    failures: Mapping[str, FirstFailure] | None = None,
    margin: int = 0,
) -> list[str]:
    """Return the lines of a table as wide as the terminal; 80 columns without a terminal.

    A reason that does not fit into its row follows below the row.

    Args:
        lines: the runs.
        names: parameter names of a sweep, one column each.
        failures: run -> first failure, shown instead of the reason and cut to the width; None for
            a table with reasons.
        margin: number of columns to leave free.
    """
    if not lines:
        return []
    columns = _FRONT if failures is None else _OF_A_SWEEP
    header = ("RUN", *map(escape_control, names), *columns, "REASON" if failures is None else "FIRST FAILURE")
    rows = [header, *(_cells(line, names, columns, failures or {}) for line in lines)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(header) - 1)]
    right = [name in _TO_THE_RIGHT and n > len(names) for n, name in enumerate(header[:-1])]
    total = shutil.get_terminal_size((80, 24)).columns - margin
    room = total - sum(width + len(_GAP) for width in (*widths[1:], len(header[-1])))
    widths[0] = max(min(widths[0], _NAME_WIDTH, room), len(header[0]))
    single = [True, *(line.run in (failures or {}) for line in lines)]
    return [text for row, one in zip(rows, single, strict=True) for text in _row(row, widths, right, total, single=one)]


def _cells(
    line: RunLine, names: Sequence[str], columns: Sequence[str], failures: Mapping[str, FirstFailure]
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
    short = [cut(value, _VALUE_WIDTH) for value in values]
    reason = failures[line.run].headline if line.run in failures else line.detail
    return tuple(escape_control(cell) for cell in (line.run, *short, *(cells[name] for name in columns), reason))


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
