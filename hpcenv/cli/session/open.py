"""`hpcenv session open`. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
import socket

import click

from hpcenv.cli import _render
from hpcenv.errors import RunNotRunning, UsageError
from hpcenv.records.session import SessionOptions
from hpcenv.runs.session import connect_words, find_session, pages_of, read_token
from hpcenv.runs.status import read_status


@click.command("open")
@click.argument("name")
@click.option(
    "--login",
    metavar="HOST",
    help="Name of this login node for ssh on your laptop, for a node without sshd. Default: the node's full name.",
)
@_render.runs_option
@_render.json_option
def command(name: str, login: str | None, runs: str | None, as_json: bool) -> None:
    """For each web page of the session NAME, print a command for your laptop, and an address for its browser.

    Type this command on your laptop. The file ~/.ssh/config on the laptop must contain the Host block that hpcenv
    session ssh-config prints. If the node has no sshd, the command does not need the Host block, but it needs the
    program socat on your laptop.
    """
    run, session = find_session(_render.cwd(), name, runs=runs)
    status = read_status(run, os.environ)
    if not status.session:
        raise RunNotRunning(f"the session `{session.name}` is not open", hint=f"hpcenv status {session.name}")
    door = status.session[0]
    connect = connect_words(run, session, _render.own_program())
    token = read_token(status, door, os.environ)
    found = pages_of(session, door, token, login=login or socket.getfqdn(), connect=connect)
    if not found:
        raise _no_page(session, is_ready=door.ready)
    if as_json:
        _render.success("session open", {"services": found})
        return
    for one in found:
        _render.say(one.line)
        _render.say(one.address)


def _no_page(session: SessionOptions, *, is_ready: bool) -> UsageError:
    if not session.services:
        why, hint = (
            "it was started without a service",
            "start another one with --jupyter, --tensorboard RUN or --serve PORT",
        )
    elif not is_ready:
        why, hint = "its services are still starting", f"try again, or look at the log: hpcenv logs {session.name}"
    else:
        why, hint = "its services have ended", f"the log says why: hpcenv logs {session.name}"
    return UsageError(f"the session `{session.name}` has no web page", why=why, hint=hint)
