"""Keep a session open on a node: make its folder, run its services, send notices to its shells, and end it.

Runs on: COMPUTE NODE, as one process beside the process that keeps the job alive. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from hpcenv.container.manifest import open_manifest
from hpcenv.errors import HpcenvError, ToolFailed
from hpcenv.launch.node_folders import locked
from hpcenv.machine.this_node import ThisNode, find_this_node
from hpcenv.records.codec import SCHEMA
from hpcenv.records.files import save_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.session import NodeFolder, SessionFolder, SessionNode, read_nodes
from hpcenv.sessions import ports
from hpcenv.sessions.folders import node_folder, require_private
from hpcenv.sessions.notices import Notices, say
from hpcenv.sessions.services import Services, serving
from hpcenv.sessions.ssh import find_sshd, sshd_config
from hpcenv.watch.process import beside

_SECONDS_BETWEEN_LOOKS = 5.0
_SECONDS_BETWEEN_STARTS = 0.2
# In this time, the services of a session end, and its folder is removed. Slurm kills 30 s after TERM (KillWait).
_SECONDS_TO_CLOSE = 15.0


@contextmanager
def beside_launch(manifest: Manifest, run: RunFolder, this_node: ThisNode) -> Iterator[None]:
    """Keep the session open on this node, in a child process, until the block ends.

    If the child ends earlier, for example because the node had no memory left, the session ends too. Otherwise the job
    would continue although no user can connect to it, and `session start` would wait without end.
    """

    def end(status: int) -> None:
        if not run.session_end.exists():  # otherwise the child has written the reason itself
            what = f"the process that keeps the session open on node {this_node.node} ended with status {status}"
            _end_with(ToolFailed(what, hint="read the log: hpcenv logs"), run, manifest, this_node)

    with beside(manifest, "session", seconds_to_end=_SECONDS_TO_CLOSE, on_early_end=end):
        yield


def keep_open(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Keep the session open on this node until standard input is closed; return 0."""
    manifest = open_manifest(run, environ)
    assert manifest.session is not None
    this_node = find_this_node(environ, cluster=manifest.cluster)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        # This process ends only after the process that keeps the job alive. The signals get a handler and are not
        # ignored, because services would inherit ignored signals.
        signal.signal(number, lambda _number, _frame: None)
    with ExitStack() as stack:
        try:
            if not _wait_for_start(run.session_start_of(this_node.node)):
                return 0
            folder = stack.enter_context(node_folder())
            door = _prepare(run, manifest, this_node, folder, environ)
            save_record(door, run.session_of(this_node.node))  # ssh works now; services may need a minute
            services = Services(())
            if this_node.rank == 0:
                services = stack.enter_context(_serving(run, manifest, folder, environ))
            door = replace(door, ready=True, sockets=services.sockets, token_file=str(services.token_file or ""))
            save_record(door, run.session_of(this_node.node))
        except (HpcenvError, OSError) as error:
            _end_with(error, run, manifest, this_node)
            return 1
        _watch(run, manifest, door, services, environ)
    return 0


def _wait_for_start(path: Path) -> bool:
    """Wait until the gate has let this node start; return False if the session ended before."""
    while not path.exists():
        if _is_over(_SECONDS_BETWEEN_STARTS):
            return False
    return True


def _is_over(seconds: float) -> bool:
    """Wait at most this time; return whether the session has ended. The end of a session closes standard input."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def _end_with(error: HpcenvError | OSError, run: RunFolder, manifest: Manifest, this_node: ThisNode) -> None:
    """End the session, and write the reason to the log and into a record for the commands that wait for the session."""
    said = f"error[{error.code}]: {error}" if isinstance(error, HpcenvError) else f"the session ends: {error}"
    say(said)
    known = {"schema": SCHEMA, "run": manifest.run, "node": this_node.node, "attempt": this_node.attempt}
    with contextlib.suppress(HpcenvError, OSError):
        save_record(SessionNode(**known, folder="", problem=str(error)), run.session_of(this_node.node))  # type: ignore[arg-type]
    with contextlib.suppress(OSError):
        run.session.mkdir(exist_ok=True)
        run.session_end.touch()


def _serving(
    run: RunFolder, manifest: Manifest, folder: NodeFolder, environ: Mapping[str, str]
) -> AbstractContextManager[Services]:
    session = manifest.session
    if session is None or not session.services:
        return nullcontext(Services(()))
    return serving(
        session.services,
        run=run,
        environ=environ,
        folder=folder.path,
        settings=SessionFolder(Path(session.folder)).jupyter,
        logs=run.session / "logs",
        say=say,
        is_over=_is_over,
        allow_port=session.allow_port,
    )


def _prepare(
    run: RunFolder, manifest: Manifest, this_node: ThisNode, folder: NodeFolder, environ: Mapping[str, str]
) -> SessionNode:
    """Write the files that a connection needs into the folder."""
    assert manifest.session is not None
    session = SessionFolder(Path(manifest.session.folder))
    for place in (session.path.parent, session.path, session.home):  # they may have changed since the submission
        require_private(place)
    folder.open.mkdir(mode=0o700)
    folder.empty_home.mkdir(mode=0o700)
    folder.sockets.mkdir(mode=0o700)
    command = [sys.executable, "-I", str(run.step), "ssh-command", str(run.path), str(folder.path)]
    user = pwd.getpwuid(os.getuid()).pw_name
    for path, text in (
        (folder.environment, json.dumps(dict(environ))),
        (folder.sshd_config, sshd_config(session, folder, user=user, command=command, temporary=tempfile.gettempdir())),
    ):
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    return SessionNode(
        schema=SCHEMA,
        run=manifest.run,
        node=this_node.node,
        attempt=this_node.attempt,
        folder=str(folder.path),
        sshd=find_sshd(),
    )


def _watch(
    run: RunFolder,
    manifest: Manifest,
    door: SessionNode,
    services: Services,
    environ: Mapping[str, str],
) -> None:
    """Check the session from time to time, until standard input is closed.

    The process on the first node ends a session that is not used, because the services of the session run on this node.
    """
    assert manifest.session is not None
    folder, unused = NodeFolder(Path(door.folder)), manifest.session.ends_unused
    is_first = find_this_node(environ, cluster=manifest.cluster).rank == 0
    notices, last_used = Notices(environ), time.monotonic()
    while not _is_over(_SECONDS_BETWEEN_LOOKS):
        terminals = open_terminals(folder)
        notices.give(time.time(), [path for path in terminals if path])
        if terminals or not (is_first and unused) or _is_used_elsewhere(run, door):
            last_used = time.monotonic()
        elif time.monotonic() - last_used > unused:
            say(f"hpcenv: the session ends: no shell for {unused} s")
            with contextlib.suppress(OSError):  # if the disk is full, a later check tries again
                run.session_end.touch()
        for line in services.ended():
            say(f"hpcenv: {line}")
        now = replace(door, ports=ports.listening(environ), sockets=services.sockets, connections=len(terminals))
        if now != door:
            with contextlib.suppress(OSError):  # if the disk is full, the record is written at a later check
                save_record(now, run.session_of(door.node))
                door = now


def _is_used_elsewhere(run: RunFolder, door: SessionNode) -> bool:
    """Return whether another node has an open shell or connection, as its record says."""
    return any(other.connections for other in read_nodes(run, door.attempt) if other.node != door.node)


def open_terminals(folder: NodeFolder) -> list[str]:
    """Return the terminal of each open shell or connection; empty for a connection without a terminal.

    The files of shells and connections that have ended are removed.
    """
    found = []
    for path in folder.open.glob("[!.]*"):
        lock = locked(path)
        if lock is None:
            with contextlib.suppress(OSError):
                found.append(path.read_text(encoding="utf-8"))
            continue
        path.unlink(missing_ok=True)
        os.close(lock)
    return found
