"""Hold the training until it is proved that the container was started from the checked SIF.

Runs on: COMPUTE NODE. Standard library only.

Apptainer gets `/proc/self/fd/N` of the checked file, but it resolves the link and opens the file by
its name again (seen with 1.4.5: after a rename over the name it ends with "lstat ... (deleted)"; a
swap between its two steps would not be noticed). So the first command in the container waits at a
FIFO. When it waits, Apptainer has opened all its files. If the name then still leads to the checked
file, with the same `ctime`, which every rename changes, it led there all the time, and the training
may start.

The command that waits is incontainer/agent.py, which starts torchrun. It runs with `python -S`, so
that only Python itself has run from the image before the gate opens.
"""

from __future__ import annotations

import os
from pathlib import Path

from hpcenv.node.check.sif_check import identity_of
from hpcenv.records.facts import CheckedSif
from hpcenv.records.manifest import Bind

# A path in the container that no image and no site uses.
_INSIDE = "/hpcenv/start-gate"
_FIFO = "fifo"

# Options of incontainer/agent.py: wait at this FIFO.
GATE_OPTIONS = ("--start-gate", f"{_INSIDE}/{_FIFO}")


class StartGate:
    """The start gate of one container, seen from outside.

    Attributes:
        bind: bind mount of the folder with the FIFO.
        is_open: whether the container got its answer.
        refused: whether the container was started from another file, or may have been.
        path: path of the SIF.
    """

    def __init__(self, folder: Path, descriptor: int, checked: CheckedSif) -> None:
        """Make the FIFO in `folder`, for a container that is started from the open file `descriptor`."""
        self.bind = Bind(source=str(folder), target=_INSIDE, read_only=True)
        self.refused = False
        self.is_open = False
        self.path = checked.path
        self._fifo = folder / _FIFO
        self._descriptor = descriptor
        self._checked = checked
        os.mkfifo(self._fifo, 0o600)

    def attend(self) -> None:
        """Answer the container's first command if it waits at the FIFO. Call this until `is_open`."""
        if self.is_open:
            return
        try:
            fifo = os.open(self._fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return  # the container does not wait yet (ENXIO)
        self.is_open = True
        self.refused = not self.is_same()
        try:
            os.write(fifo, b"no" if self.refused else b"go")
        except BrokenPipeError:
            pass  # the container was killed
        finally:
            os.close(fifo)

    def is_same(self) -> bool:
        """Whether the name of the SIF still leads to the checked file."""
        return leads_to(self._checked, self._descriptor)


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
