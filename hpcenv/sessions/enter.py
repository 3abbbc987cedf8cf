"""Enter a session: start a shell through srun, serve a connection of ssh, and start the command that ssh requests.

Runs on: COMPUTE NODE, in steps of the session's job. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hpcenv import process
from hpcenv.container.manifest import open_manifest
from hpcenv.errors import HpcenvError, NodesUnknown, ToolMissing
from hpcenv.launch import attach as attach_step
from hpcenv.launch import processes
from hpcenv.machine.this_node import LOCAL_NODE
from hpcenv.records.files import load_record, read_json
from hpcenv.records.manifest import Bind, Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.session import NodeFolder, SessionNode
from hpcenv.sessions.ssh import PAGE_BEGINS, SFTP

# ssh sends a line of shell code. bash runs this line if the image has bash; otherwise sh runs the line.
_COMMAND = ("/bin/sh", "-c", 'command -v bash >/dev/null && exec bash -c "$1"; exec sh -c "$1"', "sh")

# Variables of the connection that a program in the session gets. SSH_CLIENT is left out: with it, bash reads .bashrc
# even for a command.
_OF_CONNECTION = ("TERM", "SSH_CONNECTION", "SSH_TTY")
_OF_SOCKETS = ("TMPDIR", "XDG_RUNTIME_DIR")

# The exit status of sshd after each connection, even a normal one. srun would print a line about this status.
_CONNECTION_ENDED = 255

# The largest number of bytes that are read at once from a browser or a service.
_PIECE = 1 << 16

# The folders of the sftp server on Debian, Red Hat, SUSE and Alpine.
_SFTP_PLACES = ("/usr/lib/openssh", "/usr/libexec/openssh", "/usr/lib/ssh", "/usr/libexec")
# The folder in the container for the node's sftp server and its libraries. The libraries in the image may be different,
# or missing.
_SFTP_INSIDE = "/hpcenv/sftp"


def attach(run: RunFolder, environ: Mapping[str, str], command: Sequence[str], *, secrets: bool) -> int:
    """Start a shell or a command of `hpcenv attach`, in a session or in any other run; return its exit status."""
    manifest = open_manifest(run, environ)
    if manifest.session is None:
        return attach_step.attach(run, environ, command, secrets=secrets)
    folder = Path(_of_node(manifest, run, environ).folder)
    terminal = {"TERM": environ["TERM"]} if "TERM" in environ else {}
    with _nothing_left():
        return _inside(run, NodeFolder(folder), terminal, command, secrets=secrets)


def serve_ssh(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Serve one connection of ssh on standard input and output. The node's sshd does this, as this user."""
    manifest = open_manifest(run, environ)
    door = _of_node(manifest, run, environ)
    if not door.sshd:
        raise ToolMissing(
            f"node {door.node} has no sshd",
            why="openssh-server is not installed there",
            hint="hpcenv attach gives a shell without it",
        )
    folder = NodeFolder(Path(door.folder))
    argv = (door.sshd, "-i", "-e", "-f", str(folder.sshd_config))
    with _nothing_left(), marked_open(folder):
        status = process.run_in_terminal(argv, env={"PATH": "/usr/bin:/bin"}, cwd=folder.path)
    return 0 if status == _CONNECTION_ENDED else status


def serve_page(run: RunFolder, environ: Mapping[str, str], service: str) -> int:
    """Serve one connection of a browser on standard input and output, for a node without sshd.

    The line `hpcenv-page` comes before the first byte, because the user's shell may print text before it.

    Raises:
        NodesUnknown: the service does not answer.
    """
    door = _of_node(open_manifest(run, environ), run, environ)
    with marked_open(NodeFolder(Path(door.folder))), socket.socket(socket.AF_UNIX) as page:
        try:
            if service not in door.sockets:
                raise OSError(f"the services: {', '.join(door.sockets) or 'none'}")
            page.connect(door.sockets[service])
        except OSError as error:
            what, hint = f"the service {service!r} does not answer on node {door.node}", "read the log: hpcenv logs"
            raise NodesUnknown(what, why=str(error), hint=hint) from error
        threading.Thread(target=_send_input, args=(page,), daemon=True).start()
        with contextlib.suppress(OSError), open(sys.stdout.fileno(), "wb", buffering=0, closefd=False) as output:
            output.write(f"\n{PAGE_BEGINS}\n".encode())
            while data := page.recv(_PIECE):
                output.write(data)
    return 0


def _send_input(page: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the service has closed the connection
        while data := os.read(0, _PIECE):
            page.sendall(data)
        page.shutdown(socket.SHUT_WR)


def run_ssh_command(run: RunFolder, environ: Mapping[str, str], folder: str) -> int:
    """Start the command, the shell or the sftp server that a client of ssh requests; return its exit status."""
    node = NodeFolder(Path(folder))
    kept = _environment(node)
    manifest = open_manifest(run, kept)
    asked = environ.get("SSH_ORIGINAL_COMMAND", "")
    binds: tuple[Bind, ...] = ()
    if manifest.environment.kind == "sif":
        # An editor listens on a socket in TMPDIR, and asks sshd to connect to it. sshd is outside of the container.
        binds = (Bind(source=str(node.sockets), target=str(node.sockets)),)
        environ = {**environ, **dict.fromkeys(_OF_SOCKETS, str(node.sockets))}
    command: tuple[str, ...] = (*_COMMAND, asked) if asked else ()
    if asked == SFTP:
        command, more = _sftp_server(in_container=manifest.environment.kind == "sif")
        binds += more
    return _inside(run, node, environ, command, binds=binds, secrets=False)


def _of_node(manifest: Manifest, run: RunFolder, environ: Mapping[str, str]) -> SessionNode:
    """Return the record that this node has written about the session.

    Raises:
        NodesUnknown: the session is not open on this node.
    """
    name = environ.get("SLURMD_NODENAME" if manifest.cluster == "slurm" else LOCAL_NODE, "")
    try:
        return load_record(SessionNode, run.session_of(name))
    except HpcenvError as error:
        raise NodesUnknown(
            f"the session is not open on node {name or '?'}",
            why=error.why or error.what,
            hint="read the log: hpcenv logs",
        ) from error


def _environment(folder: NodeFolder) -> dict[str, str]:
    """Return the variables of the launch step on this node.

    Raises:
        NodesUnknown: the session has ended.
    """
    try:
        return {str(name): str(value) for name, value in read_json(folder.environment).items()}
    except (OSError, ValueError, AttributeError) as error:
        raise NodesUnknown("the session has ended on this node", why=str(error)) from error


def _inside(
    run: RunFolder,
    folder: NodeFolder,
    environ: Mapping[str, str],
    command: Sequence[str],
    *,
    binds: Sequence[Bind] = (),
    secrets: bool,
) -> int:
    """Start a command with the variables of the launch step, because sshd and srun remove some variables."""
    with marked_open(folder):
        given = {name: environ[name] for name in (*_OF_CONNECTION, *_OF_SOCKETS) if name in environ}
        return attach_step.attach(run, _environment(folder), command, secrets=secrets, given=given, binds=binds)


@contextmanager
def _nothing_left() -> Iterator[None]:
    """After the block, end all processes that were started in it. With cgroups, Slurm does this at the end of a step.

    Without cgroups, a process would outlive the job if its parent has ended.
    """
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    processes.adopt_orphans()
    try:
        yield
    finally:
        processes.end_rest(())


@contextmanager
def marked_open(folder: NodeFolder) -> Iterator[None]:
    """Keep a locked file during the block, so that the session does not end as unused.

    The file contains the path of the terminal.
    """
    try:
        name = uuid.uuid4().hex
        path = folder.open / name
        # The file is locked before it gets its name: without a lock, it would count as the file of an ended shell.
        descriptor = os.open(folder.open / f".{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        (folder.open / f".{name}").rename(path)
    except OSError as error:
        raise NodesUnknown("the session has ended on this node", why=str(error)) from error
    try:
        os.write(descriptor, (os.ttyname(0) if sys.stdin.isatty() else "").encode())
        yield
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def _sftp_server(*, in_container: bool) -> tuple[tuple[str, ...], tuple[Bind, ...]]:
    """Return the command of the node's sftp server, and the binds that it needs in a container.

    The server runs in the container, with the libraries of the node. So it sees the same files as a shell.

    Raises:
        ToolMissing: the node has no sftp server, or its server cannot be used in a container.
    """
    places = (Path(folder, "sftp-server") for folder in _SFTP_PLACES)
    server = next((path for path in places if os.access(path, os.X_OK)), None)
    if server is None:
        raise ToolMissing("this node has no sftp server", why=f"looked in {', '.join(_SFTP_PLACES)}")
    if not in_container:
        return (str(server),), ()
    said = process.run(["ldd", str(server)], timeout=20, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"}).stdout
    libraries = re.findall(r"(/\S+) \(0x", said)
    loader = next((path for path in libraries if "/ld-" in path or "/ld64" in path), None)
    if loader is None:
        raise ToolMissing("the sftp server of this node cannot be used in a container", why=shlex.quote(said.strip()))
    binds = [
        Bind(source=os.path.realpath(path), target=f"{_SFTP_INSIDE}/{os.path.basename(path)}", read_only=True)
        for path in (str(server), *libraries)
    ]
    inside = f"{_SFTP_INSIDE}/{os.path.basename(loader)}"
    return (inside, "--library-path", _SFTP_INSIDE, f"{_SFTP_INSIDE}/sftp-server"), tuple(binds)
