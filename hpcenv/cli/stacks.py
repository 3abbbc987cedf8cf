"""`hpcenv stacks`: print the lines of code that the ranks of an active run execute. Runs on: LOGIN NODE."""

from __future__ import annotations

import os

import click

from hpcenv.cli import _render
from hpcenv.runs.hangs import ask_stacks


@click.command("stacks")
@_render.run_argument
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Show only this rank.")
@_render.json_option
def command(run: str | None, runs: str | None, rank: int | None, as_json: bool) -> None:
    """Say on which line each rank of a running run is, and what it waits for. The ranks continue.

    RUN is a run folder, a run name or a job id; the default is the latest run. hpcenv prints each different Python
    stack once, with the ranks that have this stack, the innermost line first. For a rank that cannot answer, hpcenv
    prints the state of the rank and the system call that it is in. The nodes look for a request every 10 seconds.
    """
    found = ask_stacks(_render.cwd(), run, environ=os.environ, runs=runs, rank=rank, tell=_render.tell)
    if as_json:
        _render.success("stacks", found)
    else:
        _render.say(str(found))
