"""`hpcenv usage`: sum the GPU hours of a project's runs. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
import time

import click

from hpcenv.cli import _render
from hpcenv.cli._duration import parse_seconds
from hpcenv.reproduction.usage import By, read_usage
from hpcenv.reproduction.usage_text import usage_lines


@click.command("usage")
@click.option("--since", metavar="TIME", default="30d", callback=parse_seconds, help="How far back. Default: 30d.")
@click.option("--by", type=click.Choice(["run", "lockfile", "partition"]), default="run", help="What a row stands for.")
@click.option("--runs-dir", "runs", metavar="DIR", help="Folder of runs, if not the project's.")
@_render.json_option
def command(since: float, by: By, runs: str | None, as_json: bool) -> None:
    """Sum the GPU hours of the project's runs: asked, used and idle, and energy.

    It also says how many hours failed runs ran after their last checkpoint. For runs whose folder is gone, sacct
    gives the hours asked; the rest is unknown.
    """
    usage = read_usage(_render.cwd(), environ=os.environ, since=time.time() - since, by=by, runs=runs)
    if as_json:
        _render.success("usage", usage)
        return
    for line in usage_lines(usage):
        _render.say(line)
