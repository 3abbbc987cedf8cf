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
@click.option(
    "--since",
    metavar="TIME",
    default="30d",
    callback=parse_seconds,
    help="How long before now the sum begins. Default: 30d.",
)
@click.option(
    "--by",
    type=click.Choice(["run", "lockfile", "partition"]),
    default="run",
    help="What one row of the table stands for.",
)
@_render.runs_option
@_render.json_option
def command(since: float, by: By, runs: str | None, as_json: bool) -> None:
    """Sum the requested, used and idle GPU hours of the project's runs, and their energy.

    This command also says how many hours failed runs ran after their last checkpoint. For runs whose folder was
    removed, only the requested hours are known, from sacct.
    """
    usage = read_usage(_render.cwd(), environ=os.environ, since=time.time() - since, by=by, runs=runs)
    if as_json:
        _render.success("usage", usage)
        return
    for line in usage_lines(usage):
        _render.say(line)
