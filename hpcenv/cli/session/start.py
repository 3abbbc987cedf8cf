"""`hpcenv session start`. Runs on: LOGIN NODE."""

from __future__ import annotations

from typing import Any

import click

from hpcenv.cli import _accept, _render, _session
from hpcenv.cli._dashes import WithDashes
from hpcenv.cli._help_all import GroupedCommand


class _StartCommand(WithDashes, GroupedCommand):
    """A command with the options of a submission; the command of a service stands behind `--`."""


@click.command("start", cls=_StartCommand)
@click.argument("name")
@click.option(
    "--key", metavar="FILE", help="The public keys that open the session by ssh. Default: ~/.ssh/authorized_keys."
)
@click.option("--no-wait", is_flag=True, help="Do not wait until the nodes are checked and the session is open.")
@_session.session_options
@_accept.option
@_render.json_option
def command(name: str, key: str | None, no_wait: bool, accept: str | None, as_json: bool, **params: Any) -> int:
    """Start the session NAME: a job in which you work, on nodes that match the lockfile.

    \b
        hpcenv session start lab --gpus 1 --time 4:00:00
        hpcenv attach lab
        hpcenv session ssh-config lab >> ~/.ssh/config
        hpcenv cancel lab
    """  # noqa: D301  (click's mark for "do not wrap")
    result = _session.begin(name, params, key=key, accept=accept, as_json=as_json)
    if not as_json:
        for note in result.notes:
            _render.tell(f"note: {note}")
        _render.say(f"submitted {result.run}: job {result.job_id}")
    status, door = (0, None) if no_wait else _session.wait_open(result, name, as_json=as_json)
    if as_json:
        _render.verdict_on("session start", {"submitted": result, "session": door}, ok=status == 0)
        return status
    if door is not None:
        _render.say(f"session {name} is open on {door.node}: its environment is the locked one")
        if not door.sshd:
            _render.tell(f"note: node {door.node} has no sshd: hpcenv attach works, ssh and editors do not")
        words = (("attach", name), ("session", "ssh-config", name), ("cancel", name))
        _render.tell("\nnext: " + "    ".join(_render.quoted(("hpcenv", *one)) for one in words))
    return status
