"""A session: a run that a user works in, through a shell, ssh or a web page.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpcenv.errors import RecordInvalid
from hpcenv.records.files import load_record
from hpcenv.records.run_folder import RunFolder

ServiceKind = Literal["jupyter", "tensorboard", "command"]


@dataclass(frozen=True, kw_only=True)
class SessionService:
    """A program with a web page, which a session starts.

    Attributes:
        argv: for `command`, the command line; for `tensorboard`, the runs to show.
        port: TCP port on which a `command` listens; None for a program that listens on a Unix socket.
    """

    kind: ServiceKind
    argv: tuple[str, ...] = ()
    port: int | None = None


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """What makes a run a session.

    Attributes:
        name: name of the session. All runs with this name belong to one session, and run one after the other.
        folder: folder on the shared disk. Only this user can read it, and it is kept after the run. See
            `SessionFolder`.
        services: programs that the first node starts.
        allow_port: whether a service may listen on 127.0.0.1 of the node, if the service cannot get a separate network.
        ends_unused: the session ends after this number of seconds without a shell (`hpcenv shell`); 0 for never.
    """

    name: str
    folder: str
    services: tuple[SessionService, ...] = ()
    allow_port: bool = False
    ends_unused: int = 0


@dataclass(frozen=True)
class SessionFolder:
    """The files of a session that are kept over all its runs. Only the user of the session can read these files.

    These files include the host key. So a laptop that has connected to one run of a session can also connect to the
    next run.
    """

    path: Path

    @property
    def home(self) -> Path:
        """The home folder in the session, in which editors keep their servers."""
        return self.path / "home"

    @property
    def host_key(self) -> Path:
        """The private key of the session's sshd."""
        return self.path / "host_key"

    @property
    def public_key(self) -> Path:
        """The public key of the session's sshd, for the laptop."""
        return self.path / "host_key.pub"

    @property
    def jupyter(self) -> Path:
        """The settings that the user changes in Jupyter."""
        return self.path / "jupyter"

    @property
    def authorized_keys(self) -> Path:
        """The public keys with which a user can connect to the session."""
        return self.path / "authorized_keys"


@dataclass(frozen=True)
class NodeFolder:
    """The files of a session on one node's own disk, which are removed when the session ends."""

    path: Path

    @property
    def environment(self) -> Path:
        """The environment variables of the launch step, because sshd does not pass them to its shells."""
        return self.path / "environment.json"

    @property
    def sshd_config(self) -> Path:
        """The configuration of the node's sshd."""
        return self.path / "sshd_config"

    @property
    def empty_home(self) -> Path:
        """HOME of the login shell that sshd starts. It contains no startup files."""
        return self.path / "empty"

    @property
    def sockets(self) -> Path:
        """TMPDIR for ssh in a container. The sshd outside of the container can open the sockets in this folder."""
        return self.path / "run"

    @property
    def open(self) -> Path:
        """A folder with one locked file for each open shell or connection."""
        return self.path / "open"


@dataclass(frozen=True, kw_only=True)
class SessionNode:
    """An open session on one node (`session/NODE.json`).

    Attributes:
        folder: the session's folder on the node's own disk.
        sshd: path of the node's sshd; empty if the node has no sshd.
        ready: whether the services have started, too.
        problem: why the session could not be opened, or has broken. The session then ends.
        sockets: service -> its Unix socket.
        token_file: file with Jupyter's token; empty without Jupyter.
        connections: number of open shells and connections of ssh on this node.
        ports: the ports on which programs of the session listen, each as `ADDRESS:PORT (PROGRAM)`.
    """

    schema: int
    run: str
    node: str
    attempt: int
    folder: str
    sshd: str = ""
    ready: bool = False
    problem: str = ""
    sockets: dict[str, str] = field(default_factory=dict)
    token_file: str = ""
    connections: int = 0
    ports: tuple[str, ...] = ()


def read_nodes(run: RunFolder, attempt: int) -> Iterator[SessionNode]:
    """Yield the records that the nodes of a session have written in this attempt, sorted by node."""
    for path in sorted(run.session.glob("*.json")):
        with suppress(RecordInvalid):
            node = load_record(SessionNode, path)
            if node.attempt == attempt:
                yield node
