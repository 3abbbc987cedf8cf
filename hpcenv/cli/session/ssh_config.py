"""`hpcenv session ssh-config`. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
import pwd
import socket

import click

from hpcenv.cli import _render
from hpcenv.runs.session import render_ssh_config


@click.command("ssh-config")
@click.argument("name")
@click.option(
    "--login",
    metavar="HOST",
    help="Name of this login node for ssh on your laptop. Default: the full name of this login node.",
)
@_render.runs_option
def command(name: str, login: str | None, runs: str | None) -> None:
    """Print the Host block with which ssh on your laptop reaches the session NAME.

    Add the Host block to ~/.ssh/config on the laptop once for each NAME, because later sessions with this NAME use
    the same block.

    \b
        ssh LOGIN 'cd PROJECT && hpcenv session ssh-config lab' >> ~/.ssh/config
        ssh lab
    """  # noqa: D301  (click's mark for "do not wrap")
    program = _render.own_program()
    user = pwd.getpwuid(os.getuid()).pw_name
    host = login or socket.getfqdn()
    _render.put(render_ssh_config(_render.cwd(), name, login=host, user=user, program=program, runs=runs))
