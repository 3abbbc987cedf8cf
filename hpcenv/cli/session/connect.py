"""`hpcenv session connect`. Runs on: LOGIN NODE."""

from __future__ import annotations

import os

import click

from hpcenv.cli import _render
from hpcenv.runs.attach import attach
from hpcenv.runs.session import plan_connect


@click.command("connect")
@click.argument("name")
@_render.runs_option
@click.option(
    "--page",
    metavar="SERVICE",
    default="",
    help="Connect to this web page (jupyter, tensorboard or port-N), not to sshd.",
)
def command(name: str, runs: str | None, page: str) -> int:
    """Serve one connection of ssh, or of a browser, to the session NAME.

    ssh starts this command as its ProxyCommand, which hpcenv session ssh-config prints. For a node without sshd,
    hpcenv session open prints a command with --page. Only the bytes of the connection are written to standard output.
    """
    return attach(plan_connect(_render.cwd(), name, environ=os.environ, page=page, runs=runs))
