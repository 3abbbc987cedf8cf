"""`hpcenv session connect`. Runs on: LOGIN NODE."""

from __future__ import annotations

import os

import click

from hpcenv.cli import _render
from hpcenv.runs.attach import attach
from hpcenv.runs.session import plan_connect


@click.command("connect")
@click.argument("name")
@click.option(
    "--runs-dir",
    "runs",
    metavar="DIR",
    help="Folder that holds the runs. Default: `runs` under [paths] in hpcenv.toml.",
)
def command(name: str, runs: str | None) -> int:
    """Serve one connection of ssh to the session NAME.

    ssh starts this command as its ProxyCommand, which hpcenv session ssh-config prints. Only the protocol of
    ssh is written to standard output.
    """
    return attach(plan_connect(_render.cwd(), name, environ=os.environ, runs=runs))
