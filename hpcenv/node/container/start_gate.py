"""Hold the training until it may start, and until it is proved that the container was started from the checked SIF.

Runs on: COMPUTE NODE. Standard library only.

Apptainer gets `/proc/self/fd/N` of the checked file, but it resolves the link and opens the file by
its name again (seen with 1.4.5: after a rename over the name it ends with "lstat ... (deleted)"; a
swap between its two steps would not be noticed). So the first command in the container waits at a
gate. When it waits, Apptainer has opened all its files. If the name then still leads to the checked
file, with the same `ctime`, which every rename changes, it led there all the time, and the container
may load its code. The same is asked once more before the training starts.

The command that waits is incontainer/agent.py, which starts torchrun. It runs with `python -S`, so
that only Python itself has run from the image before it may load more. Loading (site-packages, torch, torchrun) and
starting (the script) are two steps: a container that was proved to be the locked one loads while the nodes are still
checked. incontainer/start_gate.py is the inner side, and has the messages.
"""

from __future__ import annotations

import json
import os
import select
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcenv.node.check.sif_check import identity_of
from hpcenv.records.checked_sif import CheckedSif
from hpcenv.records.manifest import Bind

# A path in the container that no image and no site uses.
INSIDE = "/hpcenv/start-gate"
# Option of incontainer/agent.py: wait at the gate in this folder.
OPTION = "--start-gate"

# A message of the agent has two hundred lines of mountinfo at most; one that is longer is not from the agent.
_LONGEST_MESSAGE = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Release:
    """What the agent gets when the training may start.

    Attributes:
        words: the command line that follows the agent's own; empty if the agent has it already.
        variables: variables to set, beyond those that the container was started with.
        unset: variables to remove.
    """

    words: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    unset: Sequence[str] = ()


class StartGate:
    """The start gate of one container or process, seen from outside.

    Attributes:
        is_open: whether the training was let through.
        refused: whether the container was started from another file, or may have been.
        loaded: what the agent reported after it had loaded its code; None until then.
        path: path of the SIF; empty on the host.
    """

    def __init__(
        self, folder: Path, sif: tuple[int, CheckedSif] | None = None, overlay: CheckedSif | None = None
    ) -> None:
        """Make the gate in `folder`.

        Args:
            folder: an empty folder of this user on this node.
            sif: the open file from which the container is started, and its check; None on the host.
            overlay: the check of a squashfs that is mounted over it.
        """
        self.refused = False
        self.is_open = False
        self.loaded: dict[str, Any] | None = None
        self.path = "" if sif is None else sif[1].path
        self._folder = folder
        self._sif = sif
        self._overlay = overlay
        self._may_load: Callable[[Mapping[str, Any]], Iterable[str] | None] = lambda _report: None
        self._order: dict[str, Any] = {}
        self._judge: Callable[[Mapping[str, Any]], bool] = lambda _loaded: True
        self._start: Release | None = None
        self._waiting: dict[str, Any] | None = None
        self._received = b""
        self._closed = False
        for name in ("asks", "answers"):
            os.mkfifo(folder / name, 0o600)
        self._asks = os.open(folder / "asks", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        # Also open for reading, so that opening does not wait for the agent (fifo(7)).
        self._answers = os.open(folder / "answers", os.O_RDWR | os.O_CLOEXEC)

    @property
    def bind(self) -> Bind:
        """The bind mount by which a container sees the gate."""
        return Bind(source=str(self._folder), target=INSIDE, read_only=True)

    @property
    def options(self) -> tuple[str, ...]:
        """The options of the agent that name the gate."""
        return (OPTION, str(self._folder) if self._sif is None else INSIDE)

    def load_when(
        self, may_load: Callable[[Mapping[str, Any]], Iterable[str] | None], order: Mapping[str, Any]
    ) -> None:
        """Say when the agent may load its code before the release, and what.

        Args:
            may_load: gets the agent's report; returns the folders from which nothing may be imported, or None if
                nothing may be loaded yet.
            order: further parts of the order to load.
        """
        self._may_load, self._order = may_load, dict(order)

    def release(self, start: Release, judge: Callable[[Mapping[str, Any]], bool] = lambda _loaded: True) -> None:
        """Let the training start as soon as the agent has loaded its code.

        Args:
            start: what the agent gets.
            judge: gets what the agent loaded; returns whether the training may start with it.
        """
        self._start, self._judge = start, judge
        self._may_load = lambda _report: ()
        self.attend()

    def wait(self, seconds: float) -> None:
        """Wait for a message of the agent, and answer it."""
        poll = select.poll()
        poll.register(self._asks, select.POLLIN)
        with suppress(InterruptedError):
            poll.poll(seconds * 1000)
        self.attend()

    def fileno(self) -> int:
        """Return the file descriptor that can be read when the agent has sent a message."""
        return self._asks

    def attend(self) -> None:
        """Answer the agent if it waits. Call this until `is_open`."""
        for message in self._messages():
            self._waiting = message
            if message.get("at") == "loaded":
                self.loaded = message
        if self._waiting is None or self.is_open or self.refused:
            return
        if self._waiting.get("at") == "gate":
            self._answer_gate(self._waiting)
        elif self.loaded is not None and self._start is not None:
            self._answer_loaded(self.loaded, self._start)

    def is_same(self) -> bool:
        """Whether the names of SIF and overlay still lead to the checked files; True on the host."""
        same = self._sif is None or leads_to(self._sif[1], self._sif[0])
        return same and (self._overlay is None or is_unchanged(self._overlay))

    def close(self) -> None:
        """End the agent if it waits, and close the gate. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if not self.is_open:
            self._send({"do": "end"})
        for descriptor in (self._asks, self._answers):
            os.close(descriptor)

    def _answer_gate(self, report: Mapping[str, Any]) -> None:
        elsewhere = self._may_load(report)
        if elsewhere is None:
            return
        self._waiting = None
        if not self._refuse_other_file():
            self._send({"do": "load", "elsewhere": sorted(elsewhere), **self._order})

    def _answer_loaded(self, loaded: Mapping[str, Any], start: Release) -> None:
        self._waiting = None
        if self._refuse_other_file():
            return
        if not self._judge(loaded):
            self._send({"do": "end"})
            return
        self.is_open = True
        answer = {"do": "start", "words": list(start.words), "variables": dict(start.variables)}
        # A long command does not fit into the FIFO: the agent reads while this thread writes.
        threading.Thread(target=self._send, args=({**answer, "unset": list(start.unset)},), daemon=True).start()

    def _refuse_other_file(self) -> bool:
        if self.is_same():
            return False
        self.refused = True
        self._send({"do": "end"})
        return True

    def _send(self, message: Mapping[str, Any]) -> None:
        rest = memoryview((json.dumps(message) + "\n").encode())
        with suppress(OSError):  # the agent was killed
            while rest:
                rest = rest[os.write(self._answers, rest) :]

    def _messages(self) -> Iterable[dict[str, Any]]:
        with suppress(BlockingIOError):
            while piece := os.read(self._asks, 1 << 16):
                self._received += piece
        *lines, self._received = self._received.split(b"\n")
        if len(self._received) > _LONGEST_MESSAGE:
            self._received = b""
        for line in lines:
            with suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    yield message


def leads_to(checked: CheckedSif, descriptor: int) -> bool:
    """Whether the name of a checked SIF leads to the open file, and both are unchanged since the check."""
    try:
        other = os.open(checked.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # `open` instead of `stat`: at `open`, an NFS client asks the server.
        return identity_of(other) == identity_of(descriptor) == checked.file
    finally:
        os.close(other)


def is_unchanged(checked: CheckedSif) -> bool:
    """Whether the name of a checked file leads to that very file, and it is unchanged since the check."""
    try:
        descriptor = os.open(checked.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return identity_of(descriptor) == checked.file
    finally:
        os.close(descriptor)
