"""Hold the training at the door until it is certain which SIF the container was made from.

Runs on: COMPUTE NODE. Standard library only.

Apptainer is given `/proc/self/fd/N` of the file that was checked, but opens it by name again:
it resolves the link and opens what lies there (seen with 1.4.5: after a rename over the name
it ends with "lstat ... (deleted)", and a swap between its two steps would go unseen). So the
first command in the container waits at a FIFO. When it is there, Apptainer has opened all it
opens; if the name then still leads to the file that was checked, with the `ctime` that every
rename changes, it led there all the time, and the training may start.

Who waits is incontainer/agent.py, the start of torchrun, in a Python that was told -S: of the image
nothing has run by then but Python itself.
"""

from __future__ import annotations

import os
from pathlib import Path

from hpcenv.node.sif_check import identity_of
from hpcenv.wire import Bind, CheckedSif

# A path that no image and no site uses, as for the run's home.
_INSIDE = "/hpcenv/door"
_FIFO = "fifo"

# The words that tell incontainer/agent.py where to wait.
WAITING = ("--door", f"{_INSIDE}/{_FIFO}")


class Door:
    """The outside of the door of one container.

    Attributes:
        refused: whether the container was made from another file, or may have been.
    """

    def __init__(self, folder: Path, descriptor: int, checked: CheckedSif) -> None:
        """Make the FIFO in `folder`, for a container that is made from the open file `descriptor`."""
        self.bind = Bind(source=str(folder), target=_INSIDE, read_only=True)
        self.refused = False
        self.is_open = False
        self.path = checked.path
        self._fifo = folder / _FIFO
        self._descriptor = descriptor
        self._checked = checked
        os.mkfifo(self._fifo, 0o600)

    def attend(self) -> None:
        """Answer the container's first command if it is there by now; call it until `is_open`."""
        if self.is_open:
            return
        try:
            fifo = os.open(self._fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return  # nobody reads yet (ENXIO)
        self.is_open = True
        self.refused = not self.is_same()
        try:
            os.write(fifo, b"no" if self.refused else b"go")
        except BrokenPipeError:
            pass  # it was killed meanwhile
        finally:
            os.close(fifo)

    def is_same(self) -> bool:
        """Whether the name still leads to the very file that was checked."""
        return leads_to(self._checked, self._descriptor)


def leads_to(checked: CheckedSif, descriptor: int) -> bool:
    """Whether a name leads to an open file, and neither was touched since it was checked."""
    try:
        other = os.open(checked.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # Opened, not only looked up: an NFS client asks the server at `open`.
        return identity_of(other) == identity_of(descriptor) == checked.file
    finally:
        os.close(other)
