"""`hpcenv session start`. Runs on: LOGIN NODE."""

from __future__ import annotations

from typing import Any

import click

from hpcenv.cli import _accept, _render, _session
from hpcenv.cli._dashes import WithDashes, after_dashes
from hpcenv.cli._help_all import GroupedCommand, RareOption
from hpcenv.errors import UsageError
from hpcenv.records.session import SessionService
from hpcenv.runs.find import find_run


class _StartCommand(WithDashes, GroupedCommand):
    """A command with the options of a submission. The words after `--` are the command of a service."""


@click.command("start", cls=_StartCommand)
@click.argument("name")
@click.option(
    "--key",
    metavar="FILE",
    help="File with the public keys that may connect to the session by ssh. Default: ~/.ssh/authorized_keys.",
)
@click.option("--jupyter", is_flag=True, help="Start JupyterLab.")
@click.option(
    "--tensorboard", metavar="RUN", multiple=True, help="Start TensorBoard, and show this run. Can be repeated."
)
@click.option(
    "--serve",
    metavar="PORT",
    type=click.IntRange(1, 65535),
    help="Start the command after --, which must listen on PORT.",
)
@click.option(
    "--allow-port",
    is_flag=True,
    cls=RareOption,
    help="Let a service listen on 127.0.0.1 of the node, where every user of the node can connect to it.",
)
@click.option("--no-wait", is_flag=True, help="Do not wait until the nodes are checked and the session is open.")
@_session.session_options
@_accept.option
@_render.json_option
def command(
    name: str,
    key: str | None,
    jupyter: bool,
    tensorboard: tuple[str, ...],
    serve: int | None,
    allow_port: bool,
    no_wait: bool,
    accept: str | None,
    as_json: bool,
    **params: Any,
) -> int:
    """Start the session NAME: a job in which you work, on nodes that match the lockfile.

    \b
        hpcenv session start lab --gpus 1 --time 4:00:00
        hpcenv attach lab
        hpcenv cancel lab

    On your laptop, once:

    \b
        ssh LOGIN 'cd PROJECT && hpcenv session ssh-config lab' >> ~/.ssh/config
    """  # noqa: D301  (click's mark for "do not wrap")
    result = _session.begin(
        name,
        params,
        key=key,
        accept=accept,
        as_json=as_json,
        services=_services(jupyter, tensorboard, serve, params["runs_dir"]),
        allow_port=allow_port,
    )
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
            lost = "ssh and editors on your laptop do not"
            _render.tell(f"note: node {door.node} has no sshd: hpcenv attach and web pages work; {lost}")
        pages = (("session", "open", name),) if door.sockets else ()
        from_laptop = (*pages, ("session", "ssh-config", name)) if door.sshd else pages
        words = (("attach", name), *from_laptop, ("cancel", name))
        _render.tell("\nnext: " + "    ".join(_render.quoted(("hpcenv", *one)) for one in words))
    return status


def _services(
    jupyter: bool, tensorboard: tuple[str, ...], serve: int | None, runs: str | None
) -> tuple[SessionService, ...]:
    """Return the services that the user wants to start.

    Raises:
        UsageError: `--serve` is given without a command, or a command is given without `--serve`.
        RunNotFound: a run of `--tensorboard` does not exist.
    """
    argv = after_dashes() or ()
    if (serve is None) == bool(argv):
        raise UsageError("a service needs a port and a command", hint="--serve PORT -- COMMAND")
    found = [SessionService(kind="jupyter")] if jupyter else []
    if tensorboard:
        shown = [str(find_run(_render.cwd(), run, runs=runs).folder.path) for run in tensorboard]
        found.append(SessionService(kind="tensorboard", argv=tuple(shown)))
    if serve is not None:
        found.append(SessionService(kind="command", argv=argv, port=serve))
    return tuple(found)
