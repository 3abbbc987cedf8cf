"""`hpcenv top`: show what the GPUs and ranks of a run do now. Runs on: LOGIN NODE."""

from __future__ import annotations

import contextlib
import os
import sys
import time

import click

from hpcenv.cli import _render, _streams
from hpcenv.cli._terminal import has_colours, is_terminal
from hpcenv.runs.top import TopReader, find_watched, one_line, page_of

_SECONDS = 3.0


@click.command("top")
@_render.run_argument
@_render.json_option
def command(run: str | None, runs: str | None, as_json: bool) -> None:
    """Show what the nodes, GPUs and ranks of a run do now, and what is odd.

    RUN is a run folder, a run name or a job id. Without RUN, each running run of the project has a line.
    On a terminal, hpcenv updates the page until ^C. Into a pipe, hpcenv prints the page once.
    """
    readers = [TopReader(one) for one in find_watched(_render.cwd(), run, environ=os.environ, runs=runs)]
    if run is not None and not as_json and is_terminal():
        _show_live(readers[0])
        return
    tops = [reader.read(time.time()) for reader in readers]
    if as_json:
        _render.success("top", {"runs": tops})
        return
    for one in tops:
        _render.say(one_line(one) if run is None else str(one))
    if not tops:
        _render.tell("no run is running")


def _show_live(reader: TopReader) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    # The page moves the cursor. So `lines` escapes control characters in its texts, and the stream does not.
    console = Console(file=_streams.unchanged(sys.stdout), no_color=not has_colours(), highlight=False)

    def page() -> Text:
        text = Text(no_wrap=True)
        for number, line in enumerate(page_of(reader.read(time.time()), console.size.height)):
            style = "bold" if line.startswith("- ") or line.endswith("slowest") else ""
            text.append(f"\n{line}" if number else line, style=style)
        return text

    with contextlib.suppress(KeyboardInterrupt), Live(page(), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(_SECONDS)
            live.update(page(), refresh=True)
