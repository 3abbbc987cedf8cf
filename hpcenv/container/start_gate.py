"""Stop the training at a gate until it is certain that the container was started from the checked SIF.

Runs on: COMPUTE NODE. Standard library only.

Apptainer gets `/proc/self/fd/N` of the checked file, but resolves this link and opens the file again by its name. This
was seen with 1.4.5: after a rename over the name, Apptainer ends with "lstat ... (deleted)". If the file is replaced
between these two steps, Apptainer does not notice it. So the first command in the container waits at a gate. When this
command waits, Apptainer has opened all its files. Every rename changes the `ctime` of a file. If the name then still
leads to the checked file, and the `ctime` is the same, the name led to this file during the whole time. So the training
may start.

The command that waits is incontainer/agent.py, which starts torchrun. Before the agent waits, it imports torch, and
reports which libraries the loader has mapped. The function `judge`, which the caller gives, compares these libraries.
incontainer/start_gate.py is the part inside the container, and defines the messages.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcenv.identity.sif_check import identity_of
from hpcenv.records.checked_sif import CheckedSif
from hpcenv.records.manifest import Bind

# A path in the container that no image and no site uses.
INSIDE = "/hpcenv/start-gate"
# Option of incontainer/agent.py: wait at the gate in this folder.
OPTION = "--start-gate"


class StartGate:
    """The start gate of one container or process, seen from outside.

    Attributes:
        is_open: whether the training was allowed to start.
        refused: whether the container was started, or may have been started, from another file.
        path: path of the SIF; empty on the host.
    """

    def __init__(
        self,
        folder: Path,
        sif: tuple[int, CheckedSif] | None = None,
        overlay: CheckedSif | None = None,
        *,
        load: Mapping[str, Any],
        judge: Callable[[Mapping[str, Any]], bool] = lambda _report: True,
    ) -> None:
        """Make the gate in `folder`.

        Args:
            folder: an empty folder of this user on this node.
            sif: the open file from which the container is started, and its check; None on the host.
            overlay: the check of a squashfs that is mounted over the image.
            load: the modules that the agent imports and inspects before it waits (incontainer/start_gate.py).
            judge: gets the agent's report; returns whether the training may start.
        """
        self.refused = False
        self.is_open = False
        self.path = "" if sif is None else sif[1].path
        self._folder = folder
        self._sif = sif
        self._overlay = overlay
        self._judge = judge
        self._received = b""
        self._answered = False
        self._closed = False
        (folder / "load.json").write_text(json.dumps(load), encoding="utf-8")
        for name in ("reports", "answers"):
            os.mkfifo(folder / name, 0o600)
        self._reports = os.open(folder / "reports", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        # The FIFO is opened also for reading. So opening does not wait for the agent (fifo(7)).
        self._answers = os.open(folder / "answers", os.O_RDWR | os.O_CLOEXEC)

    @property
    def bind(self) -> Bind:
        """The bind mount by which a container sees the gate."""
        return Bind(source=str(self._folder), target=INSIDE, read_only=True)

    @property
    def options(self) -> tuple[str, ...]:
        """The options of the agent that name the gate."""
        return (OPTION, str(self._folder) if self._sif is None else INSIDE)

    def wait(self, seconds: float) -> None:
        """Wait for the report of the agent, and answer it. Call this method again until `is_open` is true."""
        poll = select.poll()
        poll.register(self._reports, select.POLLIN)
        with suppress(InterruptedError):
            poll.poll(seconds * 1000)
        report = self._report()
        if report is None or self._answered:
            return
        self.refused = not self.is_same()
        self.is_open = not self.refused and self._judge(report)
        self._answer("start" if self.is_open else "end")

    def is_same(self) -> bool:
        """Whether the names of SIF and overlay still lead to the checked files; True on the host."""
        same = self._sif is None or leads_to(self._sif[1], self._sif[0])
        return same and (self._overlay is None or is_unchanged(self._overlay))

    def close(self) -> None:
        """End the agent if it waits, and close the gate. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if not self._answered:
            self._answer("end")
        for descriptor in (self._reports, self._answers):
            os.close(descriptor)

    def _report(self) -> dict[str, Any] | None:
        """Return the report of the agent, one line of JSON; None until it is complete."""
        with suppress(BlockingIOError):
            while piece := os.read(self._reports, 1 << 16):
                self._received += piece
        line, newline, _ = self._received.partition(b"\n")
        return dict(json.loads(line)) if newline else None

    def _answer(self, word: str) -> None:
        self._answered = True
        with suppress(OSError):  # the agent was killed
            os.write(self._answers, f"{word}\n".encode())


def leads_to(checked: CheckedSif, descriptor: int) -> bool:
    """Whether the name of a checked SIF leads to the open file, and name and file are unchanged since the check."""
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
    """Whether the name of a checked file still leads to the same file, and the file is unchanged since the check."""
    try:
        descriptor = os.open(checked.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return identity_of(descriptor) == checked.file
    finally:
        os.close(descriptor)
