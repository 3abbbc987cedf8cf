"""A session: a run that a user works in, through a shell, ssh or a web page.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

ServiceKind = Literal["jupyter", "tensorboard", "command"]


@dataclass(frozen=True, kw_only=True)
class SessionService:
    """A program that a session starts, with a web page.

    Attributes:
        argv: of `command`, its command; of `tensorboard`, the runs.
        port: where a `command` listens; None for a program that listens on a socket.
    """

    kind: ServiceKind
    argv: tuple[str, ...] = ()
    port: int | None = None


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """What makes a run a session.

    Attributes:
        name: all runs of this name are one session, one after the other.
        folder: on the shared disk, of this user only; it outlives the run. See `SessionFolder`.
        services: programs that the first node starts.
        allow_port: a service may listen on 127.0.0.1 of the node, where it can have no separate network.
        ends_unused: seconds without a shell after which the session ends (`hpcenv shell`); 0 for never.
    """

    name: str
    folder: str
    services: tuple[SessionService, ...] = ()
    allow_port: bool = False
    ends_unused: int = 0


@dataclass(frozen=True)
class SessionFolder:
    """The lasting files of a session, of all its runs. Only their user can read them.

    The host key is among them: so what a laptop knows of a session holds for its next run.
    """

    path: Path

    @property
    def home(self) -> Path:
        """The home folder in the session: editors keep their servers there."""
        return self.path / "home"

    @property
    def host_key(self) -> Path:
        """The private key of the session's sshd."""
        return self.path / "host_key"

    @property
    def public_key(self) -> Path:
        """The public key of it, for the laptop."""
        return self.path / "host_key.pub"

    @property
    def jupyter(self) -> Path:
        """What the user sets in Jupyter."""
        return self.path / "jupyter"

    @property
    def authorized_keys(self) -> Path:
        """The public keys that open the session."""
        return self.path / "authorized_keys"


@dataclass(frozen=True)
class NodeFolder:
    """The files of a session on one node's own disk: they end with the session."""

    path: Path

    @property
    def environment(self) -> Path:
        """The variables of the launch step, which sshd drops."""
        return self.path / "environment.json"

    @property
    def sshd_config(self) -> Path:
        """What the node's sshd reads."""
        return self.path / "sshd_config"

    @property
    def empty_home(self) -> Path:
        """HOME of the login shell that sshd starts: no startup file is in it."""
        return self.path / "empty"

    @property
    def sockets(self) -> Path:
        """What is TMPDIR for ssh in a container: sshd, outside of it, opens the sockets that programs make there."""
        return self.path / "run"

    @property
    def open(self) -> Path:
        """One locked file for each open shell or connection."""
        return self.path / "open"


@dataclass(frozen=True, kw_only=True)
class SessionNode:
    """An open session on one node (`session/NODE.json`).

    Attributes:
        folder: its folder on the node's own disk.
        sshd: path of the node's sshd; empty where the node has none.
        ready: its services have started, too.
        problem: why a service has not started; then the session ends.
        sockets: service -> its Unix socket.
        token_file: of Jupyter; empty without it.
        ports: `ADDRESS:PORT (PROGRAM)` of what programs of the session listen to.
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
    ports: tuple[str, ...] = ()
