"""Folders of a job on a node's own disk. Only their user can read them.

Runs on: COMPUTE NODE. Standard library only.

A job removes its folders at its end. If the job or its node was killed, the user's next job on the node removes them. A
folder is in use while a process has a lock on it. The kernel removes the lock when the process ends in any way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcenv import filesystem

# The first part of the names: of the folder of a session, and of the folder that is /tmp in the container of a job.
SESSION, JOB = _OURS = "hpcenv-session-", "hpcenv-job-"


def places() -> tuple[str, ...]:
    """Return the folders of temporary files on local disks. On a shared disk, locks of several nodes would mix."""
    names = dict.fromkeys((tempfile.gettempdir(), "/tmp", "/dev/shm"))  # noqa: S108  (the names below have mode 0700)
    mounts = {name: filesystem.mount_of(Path(os.path.realpath(name))) for name in names}
    return tuple(name for name, mount in mounts.items() if mount is not None and not mount.network)


@contextmanager
def in_use(path: str | Path) -> Iterator[None]:
    """Mark a folder as in use during the block. Several processes can use one folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        with contextlib.suppress(OSError):  # the file system has no locks: then nobody removes the folder
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def remove_left() -> None:
    """Remove the folders of this user's earlier jobs on this node that no process uses.

    An empty folder is left alone, because another job may have made it at this moment, and may not have locked it yet.
    """
    found: list[Path] = []
    with contextlib.suppress(OSError):  # the node has no folder for temporary files
        found = [path for place in places() for path in Path(place).glob("hpcenv-*") if path.name.startswith(_OURS)]
    for path in found:
        with contextlib.suppress(OSError):  # another job of this user may just end
            if path.lstat().st_uid == os.getuid() and (lock := locked(path)) is not None:
                if os.listdir(path):
                    shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def locked(path: Path) -> int | None:
    """Open and lock a file or folder; return the descriptor. None if another process has a lock, or on an error."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
