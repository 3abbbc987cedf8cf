"""`hpcenv logs`."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from hpcenv.cli import _render, _terminal

if TYPE_CHECKING:
    from hpcenv.steps.runs import Run


@click.command("logs")
@_render.run_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended, also through a requeue.")
@click.option("--rank", "ranks", type=click.IntRange(min=0), multiple=True, help="Lines of this rank; repeatable.")
@click.option("--node", metavar="NODE", help="Lines of the ranks on this node.")
@click.option("--err", is_flag=True, help="What ranks wrote to standard error, from their own files.")
@_render.json_option
def command(
    run: str | None, runs: str | None, follow: bool, ranks: tuple[int, ...], node: str | None, err: bool, as_json: bool
) -> None:
    """Print a run's log: RUN is a folder, a name or a job id; default the latest.

    On a terminal each rank's number has the colour of its node (not with NO_COLOR), and
    control characters are shown as escapes; into a pipe or file the text goes as it is.
    """
    from hpcenv.steps.logs import Selection, follow_selected, read_selected
    from hpcenv.steps.runs import find_run, read_states

    found = find_run(_render.cwd(), run, runs=runs)
    selection = Selection(ranks=ranks, node=node, err=err)
    if follow:
        pieces = follow_selected(
            found, selection, ended=lambda: read_states([found], os.environ)[0].quiet, pause=time.sleep
        )
    else:
        pieces = read_selected(found, selection, word=run if runs is None else None)
    if as_json:
        text = "".join(pieces)
        lines = text.removesuffix("\n").split("\n") if text else []
        _render.success("logs", {"run": found.manifest.run, "path": found.folder.log, "lines": lines})
        return
    show = LogPrinter(found)
    for piece in pieces:
        show(piece)
    show.end()


# Six colours that can be read on dark and light backgrounds (SGR 31 to 36).
_COLOURS = (36, 33, 35, 32, 34, 31)
_PREFIX = re.compile(r"^\[([0-9]{1,6})\] ", re.MULTILINE)


class LogPrinter:
    """Prints a log piece by piece: as it is into a pipe, harmless and with its nodes' colours on a terminal."""

    def __init__(self, run: Run) -> None:
        from hpcenv.steps.logs import RankNodes

        self._cleaner: _terminal.Cleaner | None = None
        self._paint: _Paint | None = None
        if _terminal.is_terminal():
            colours = _terminal.has_colours()
            self._cleaner = _terminal.Cleaner(colours=colours)
            where = RankNodes(run)
            self._paint = _Paint(lambda rank: (where.of(rank) or (None,))[0]) if colours else None

    def __call__(self, text: str) -> None:
        """Print the next piece."""
        self._print(text if self._cleaner is None else self._cleaner.feed(text))

    def end(self) -> None:
        """Print what was held back."""
        if self._cleaner is not None:
            self._print(self._cleaner.rest())

    def _print(self, text: str) -> None:
        print(text if self._paint is None else self._paint(text), end="", flush=True)


class _Paint:
    """Colours the rank at the start of a line; a piece may begin within one."""

    def __init__(self, node_of: Callable[[int], str | None]) -> None:
        self._node_of = node_of
        self._colours: dict[str, int] = {}
        self._inside = False

    def __call__(self, text: str) -> str:
        if not text:
            return text
        first, newline, others = text.partition("\n")
        painted = (first if self._inside else _PREFIX.sub(self._prefix, first)) + newline
        self._inside = not text.endswith("\n")
        return painted + _PREFIX.sub(self._prefix, others)

    def _prefix(self, match: re.Match[str]) -> str:
        node = self._node_of(int(match[1]))
        if node is None:
            return match[0]
        number = self._colours.setdefault(node, len(self._colours))
        return f"\x1b[{_COLOURS[number % len(_COLOURS)]}m[{match[1]}]\x1b[0m "
