"""`hpcenv list`."""

from __future__ import annotations

import os
import shutil
import textwrap
from typing import TYPE_CHECKING

import click

from hpcenv.cli import _render
from hpcenv.cli._terminal import harmless

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpcenv.model.failure import FirstFailure
    from hpcenv.steps.listing import RunLine

_LINES = 20


@click.command("list")
@click.argument("sweep", required=False)
@click.option("--runs", metavar="DIR", help="Folder of runs, if not the project's.")
@click.option("--state", "states", metavar="STATE", multiple=True, help="Only these: running, failed ...; repeatable.")
@click.option("-n", "count", type=click.IntRange(min=1), metavar="N", help=f"How many. Default: {_LINES}.")
@click.option("--all", "everything", is_flag=True, help="All of them.")
@_render.json_option
def command(
    sweep: str | None, runs: str | None, states: tuple[str, ...], count: int | None, everything: bool, as_json: bool
) -> None:
    """List the runs of the project, the newest first; or those of SWEEP."""
    from hpcenv.steps.listing import list_lines

    wanted = tuple(word for state in states for word in state.split(","))
    limit = count or (None if everything or sweep is not None or as_json else _LINES)
    found = list_lines(_render.cwd(), environ=os.environ, sweep=sweep, runs=runs, states=wanted, limit=limit)
    if as_json:
        _render.success("list", found)
        return
    for line in table(found.runs, names=found.names):
        _render.say(line)
    if not found.total:
        _render.tell(f"no runs in {found.folder}" + (f" that are {' or '.join(wanted)}" if wanted else ""))
    elif len(found.runs) < found.total:
        _render.tell(f"{found.total - len(found.runs)} more: hpcenv list --all")


_FRONT = ("JOB", "STATE", "NODES", "ATTEMPT", "ELAPSED")
_OF_A_SWEEP = ("STATE", "EXIT", "ELAPSED")
_TO_THE_RIGHT = ("NODES", "ATTEMPT", "ELAPSED", "EXIT")
# A name is there to be typed again: a longer one makes its line longer instead.
_MOST_OF_A_NAME = 34
# `--json` has a value whole.
_MOST_OF_A_VALUE = 20


def table(
    lines: Sequence[RunLine],
    *,
    names: Sequence[str] = (),
    failures: Mapping[str, FirstFailure] | None = None,
    margin: int = 0,
) -> list[str]:
    """Return a table as wide as the terminal, 80 columns where there is none.

    A reason for which a row has no room follows below it, whole.

    Args:
        names: of a sweep, whose values are shown.
        failures: run -> what went wrong first, shown instead of the state's reason and cut to fit, for it is
            told elsewhere; None for a list without it.
        margin: columns that are kept free beside it.
    """
    if not lines:
        return []
    columns = _FRONT if failures is None else _OF_A_SWEEP
    header = ("RUN", *map(harmless, names), *columns, "REASON" if failures is None else "FIRST FAILURE")
    rows = [header, *(_cells(line, names, columns, failures or {}) for line in lines)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(header) - 1)]
    widths[0] = min(widths[0], _MOST_OF_A_NAME)
    right = [name in _TO_THE_RIGHT and n > len(names) for n, name in enumerate(header[:-1])]
    whole = shutil.get_terminal_size((80, 24)).columns - margin
    cut = [True, *(line.run in (failures or {}) for line in lines)]
    return [text for row, short in zip(rows, cut, strict=True) for text in _row(row, widths, right, whole, cut=short)]


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
    short = [value if len(value) <= _MOST_OF_A_VALUE else f"{value[: _MOST_OF_A_VALUE - 3]}..." for value in values]
    reason = failures[line.run].headline if line.run in failures else line.detail
    return tuple(harmless(cell) for cell in (line.run, *short, *(cells[name] for name in columns), reason))


def _row(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool], whole: int, *, cut: bool) -> list[str]:
    front = "  ".join(
        cell.rjust(width) if to_the_right else cell.ljust(width)
        for cell, width, to_the_right in zip(cells[:-1], widths, right, strict=True)
    )
    room, reason = max(whole - len(front) - 2, 8), cells[-1]
    if len(reason) <= room:
        return [f"{front}  {reason}".rstrip()]
    if cut:
        return [f"{front}  {reason[: room - 3]}..."]
    # Paths are there to be copied: they are not taken apart at a dash.
    below = textwrap.wrap(
        reason, max(whole, 20), initial_indent=_BELOW, subsequent_indent=_BELOW, break_on_hyphens=False
    )
    return [front.rstrip(), *below]


_BELOW = "      "
