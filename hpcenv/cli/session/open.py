"""`hpcenv session open`. Runs on: LOGIN NODE."""

from __future__ import annotations

import os

import click

from hpcenv.cli import _render
from hpcenv.errors import RunNotRunning, UsageError
from hpcenv.runs.session import find_session, pages_of, read_door, read_token
from hpcenv.runs.status import read_status


@click.command("open")
@click.argument("name")
@click.option("--runs-dir", "runs", metavar="DIR", help="Folder of runs, if not the project's.")
@_render.json_option
def command(name: str, runs: str | None, as_json: bool) -> None:
    """For each web page of the session NAME, print a line for your laptop, and an address.

    Type the line on your laptop, where ~/.ssh/config has the Host block of hpcenv session ssh-config.
    """
    run, session = find_session(_render.cwd(), name, runs=runs)
    status = read_status(run, os.environ)
    door = read_door(run, status)
    if door is None:
        raise RunNotRunning(f"the session `{session.name}` is not open", hint=f"hpcenv status {session.name}")
    if not door.sshd:
        why = "a web page comes through ssh, and openssh-server is not installed there"
        raise UsageError(f"node {door.node} of the session `{session.name}` has no sshd", why=why)
    found = pages_of(session, door, read_token(status, door, os.environ))
    if not found:
        raise UsageError(f"the session `{session.name}` has no web page", why="it was started without a service")
    if as_json:
        _render.success("session open", {"services": found})
        return
    for one in found:
        _render.say(one.line)
        _render.say(one.address)
