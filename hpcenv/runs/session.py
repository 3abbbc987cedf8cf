"""Wait for a session, connect to a session, and say how a laptop reaches its services.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcenv.cluster import slurm, slurm_command
from hpcenv.errors import HpcenvError, UsageError
from hpcenv.records.files import read_file
from hpcenv.records.session import SessionFolder, SessionNode, SessionOptions, read_nodes
from hpcenv.runs.attach import Attachment, nodes_of, python_of
from hpcenv.runs.entries import Run
from hpcenv.runs.find import find_run
from hpcenv.runs.status import RunStatus, read_status
from hpcenv.sessions.ssh import SshHost, page_command, ssh_config

# The variables that srun needs from the caller's environment. Variables of the login node's .bashrc are not passed on.
_FOR_SRUN = re.compile(r"(PATH|HOME|USER|LOGNAME|SLURM_\w+)\Z")


def find_session(start: Path, word: str | None, *, runs: str | None = None) -> tuple[Run, SessionOptions]:
    """Find a session by its name, or in the same ways as a run.

    Raises:
        RunNotFound, RecordInvalid: as for `find_run`.
        UsageError: the run is not a session, or the session belongs to another user.
    """
    run = find_run(start, word, runs=runs)
    session = run.manifest.session
    if session is None:
        raise UsageError(f"`{run.submission.run}` is not a session", hint="hpcenv list shows which runs are")
    owner = os.stat(run.folder.path).st_uid
    if owner != os.geteuid():
        raise UsageError(
            f"`{run.submission.run}` is the session of another user", why=f"its run folder belongs to user {owner}"
        )
    return run, session


def wait_until_open(
    run: Run,
    *,
    environ: Mapping[str, str],
    pause: Callable[[float], None],
    on_status: Callable[[RunStatus], None],
) -> tuple[RunStatus, SessionNode | None]:
    """Wait until a session and its services are ready, have a problem, or have ended.

    Return the state of the run, and the session record of a node that has a problem. If no node has a problem, return
    the session record of the first node.

    Args:
        environ: environment variables, for the Slurm commands.
        pause: called with the seconds to sleep between two queries.
        on_status: called with the state after each query.
    """
    seconds = 0.5
    while True:
        status = read_status(run, environ)
        on_status(status)
        # A session with a problem ends at once, so its run may have ended when the record is read.
        broken = [node for node in read_nodes(run.folder, status.attempt) if node.problem]
        door = (*broken, *status.session, None)[0]
        if status.quiet or (door is not None and (door.ready or door.problem)):
            return status, door
        pause(seconds)
        # A job may wait in the queue for hours, but the session of a running job is open soon.
        seconds = 0.5 if status.state == "running" else min(10.0, seconds * 1.3)


def plan_connect(
    start: Path, word: str, *, environ: Mapping[str, str], page: str = "", runs: str | None = None
) -> Attachment:
    """Return the command that serves one connection to a session, as a step of the session's job.

    Args:
        page: the service that a browser connects to; empty for a connection of ssh.

    Raises:
        RunNotRunning: the session waits, is being checked, or has ended.
        UsageError: the run is not a session of this user.
    """
    run, _session = find_session(start, word, runs=runs)
    status = read_status(run, environ)
    node = nodes_of(status)[0]
    name, *service = ("page", page) if page else ("ssh-server",)
    step = [python_of(run), "-I", str(run.folder.step), name, str(run.folder.path), *service]
    argv = slurm.shell_argv(status.job_id, node, step, environ, tty=False, protocol=True)
    kept = slurm_command.clean_environment(environ).items()
    env = {name: value for name, value in kept if _FOR_SRUN.match(name)}
    return Attachment(run=status.run, node=node, argv=tuple(argv), env=env)


def read_token(status: RunStatus, door: SessionNode, environ: Mapping[str, str]) -> str:
    """Read the token of Jupyter, with a step of the job, from the node's own disk; empty without Jupyter."""
    if not door.token_file:
        return ""
    argv = slurm.shell_argv(status.job_id, door.node, ["cat", door.token_file], environ, tty=False)
    env = slurm_command.clean_environment(environ)
    return slurm_command.run(argv, env, timeout=60).stdout.strip()


def render_ssh_config(start: Path, word: str, *, login: str, user: str, program: str, runs: str | None = None) -> str:
    """Return the `Host` block of a session for the ssh configuration of a laptop.

    Args:
        login: the name that the laptop uses for the login node.
        user: name of the user on the cluster.
        program: absolute path of hpcenv on the login node.
    """
    run, session = find_session(start, word, runs=runs)
    try:
        key = read_file(SessionFolder(Path(session.folder)).public_key).decode()
    except (OSError, HpcenvError) as error:
        raise UsageError(f"the session `{session.name}` has no host key", why=str(error)) from error
    connect = connect_words(run, session, program)
    return ssh_config(SshHost(name=session.name, login=login, user=user, connect=connect, host_key=key))


def connect_words(run: Run, session: SessionOptions, program: str) -> tuple[str, ...]:
    """Return the argv of `hpcenv session connect` on the login node, where `program` is hpcenv."""
    return (program, "session", "connect", session.name, "--runs-dir", str(run.folder.path.parent))


@dataclass(frozen=True, kw_only=True)
class ServicePage:
    """How a laptop opens a service: the line to type on the laptop, and the address for its browser."""

    service: str
    line: str
    address: str


# The first port on the laptop. The same port may be in use on the cluster, because the session does not listen there.
_FIRST_PORT = 8888


def pages_of(
    session: SessionOptions, door: SessionNode, token: str = "", *, login: str = "", connect: Sequence[str] = ()
) -> tuple[ServicePage, ...]:
    """Return how a laptop opens each service of a session.

    Args:
        token: the token of Jupyter; empty without Jupyter.
        login: the login node, as the laptop calls it. Only a node without sshd needs `login` and `connect`.
        connect: argv of `hpcenv session connect` on the login node.
    """
    found = []
    for port, (service, path) in enumerate(door.sockets.items(), start=_FIRST_PORT):
        query = f"/?token={token}" if service == "jupyter" and token else "/"
        through_ssh = f"ssh -N -L 127.0.0.1:{port}:{path} {session.name}"
        line = through_ssh if door.sshd else page_command(port, login, (*connect, "--page", service))
        found.append(ServicePage(service=service, line=line, address=f"http://127.0.0.1:{port}{query}"))
    return tuple(found)
