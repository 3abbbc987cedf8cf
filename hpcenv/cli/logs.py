"""`hpcenv logs`: print or follow the log of a run. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable

import click

from hpcenv.cli import _render, _terminal
from hpcenv.cli._pending import PendingLine
from hpcenv.cli._wait import interruptible
from hpcenv.cli.wait import tell_exit_status, tell_state
from hpcenv.runs.entries import Run
from hpcenv.runs.find import find_run
from hpcenv.runs.logs import RankNodes, Selection, follow_selected, read_selected
from hpcenv.runs.state import resolve_states
from hpcenv.runs.status import read_details, read_status
from hpcenv.runs.wait import NoStart, exit_status_of


@click.command("logs")
@_render.run_argument
@click.option(
    "-f", "--follow", is_flag=True, help="Print new lines until the run has ended, also after the job was queued again."
)
@click.option(
    "--rank", "ranks", type=click.IntRange(min=0), multiple=True, help="Print only lines of this rank. Can be repeated."
)
@click.option("--node", metavar="NODE", help="Print only lines of the ranks on this node.")
@click.option("--err", is_flag=True, help="Print only standard error of the ranks, from the files of each rank.")
@_render.json_option
def command(
    run: str | None, runs: str | None, follow: bool, ranks: tuple[int, ...], node: str | None, err: bool, as_json: bool
) -> int:
    """Print the log of a run.

    RUN is a run folder, a run name or a job id; the default is the latest run. On a terminal,
    the number of each rank has the colour of its node (unless NO_COLOR is set), and control
    characters are shown as escapes. The text in a pipe or file is unchanged.
    """
    opened = find_run(_render.cwd(), run, runs=runs)
    selection = Selection(ranks=ranks, node=node, err=err)
    if follow and not as_json:
        with interruptible("the run continues", run or str(opened.folder.path), again=("logs", "-f")):
            return _follow(opened, selection)
    if follow:
        pieces = follow_selected(opened, selection, ended=_has_ended(opened), pause=time.sleep)
    else:
        pieces = read_selected(opened, selection, word=run if runs is None else None)
    if as_json:
        text = "".join(pieces)
        lines = text.removesuffix("\n").split("\n") if text else []
        _render.success("logs", {"run": opened.manifest.run, "path": opened.folder.log, "lines": lines})
        return 0
    show = LogPrinter(opened)
    for piece in pieces:
        show(piece)
    show.end()
    return 0


def _follow(run: Run, selection: Selection) -> int:
    """Print the log of a run while it grows. While the run waits, print why.

    Returns:
        The exit status of `hpcenv wait` if the run ended before it had a log; else 0.
    """
    show = LogPrinter(run)
    with PendingLine(os.environ) as line:
        for piece in follow_selected(run, selection, ended=_has_ended(run, line), pause=time.sleep):
            line.clear()
            show(piece)
    show.end()
    if run.folder.log.exists():
        return 0
    status = read_status(run, os.environ)
    tell_state(status)
    tell_exit_status(status)
    return exit_status_of(status)


def _has_ended(run: Run, line: PendingLine | None = None) -> Callable[[], bool]:
    """Return a function that asks Slurm whether a run has ended. It raises `CannotStart`, as `hpcenv wait` does.

    Args:
        run: the run.
        line: the line that shows why the run waits.
    """
    no_start, began = NoStart(os.environ), time.monotonic()

    def has_ended() -> bool:
        resolved = resolve_states([run], os.environ)[0]
        if resolved.state.state in ("pending", "requeued") or (line is not None and line.waits):
            status = read_details(run, resolved)
            if line is not None:
                line.see(status)
            if (never := no_start.see(run, status, time.monotonic() - began)) is not None:
                raise never
        return resolved.state.quiet

    return has_ended


# Six colours that can be read on dark and light backgrounds (SGR 31 to 36).
_COLOURS = (36, 33, 35, 32, 34, 31)
_PREFIX = re.compile(r"^\[([0-9]{1,6})\] ", re.MULTILINE)


class LogPrinter:
    """Prints a log in pieces: unchanged in a pipe; with colours and escaped control characters on a terminal."""

    def __init__(self, run: Run) -> None:
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
        """Print the rest of the text."""
        if self._cleaner is not None:
            self._print(self._cleaner.rest())

    def _print(self, text: str) -> None:
        print(text if self._paint is None else self._paint(text), end="", flush=True)


class _Paint:
    """Colours the rank number at the start of each line. A piece may begin inside a line."""

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
