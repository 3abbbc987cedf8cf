"""Folders of a job on a node's own disk. Only their user can read them.

Runs on: COMPUTE NODE. Standard library only.

A job removes its folders at its end. If the job or its node was killed, the user's next job on the node removes them. A
folder is in use while a process has a lock on it. The kernel removes the lock when the process ends in any way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcenv import filesystem

# The beginnings of the folder names: for the folder of a session, and for the folder that is /tmp in a job's container.
SESSION, JOB = "hpcenv-session-", "hpcenv-job-"
# A whole name ends with the random characters of tempfile, or with the digest of the run. The beginning alone is not
# enough, because the name of a user's own folder may begin in the same way.
_OURS = re.compile(rf"(?:{SESSION}|{JOB}(?:local-)?[\d_+]+-)(?:[a-z0-9_]{{8}}|[0-9a-f]{{16}})")


def places() -> tuple[str, ...]:
    """Return the folders for temporary files on local disks. On a shared disk, nodes would see locks of other nodes."""
    names = dict.fromkeys((tempfile.gettempdir(), "/tmp", "/dev/shm"))  # noqa: S108  (the names below have mode 0700)
    mounts = {name: filesystem.mount_of(Path(os.path.realpath(name))) for name in names}
    return tuple(name for name, mount in mounts.items() if mount is not None and not mount.network)


@contextmanager
def in_use(path: str | Path) -> Iterator[None]:
    """Mark a folder as in use during the block. Several processes can use one folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        with contextlib.suppress(OSError):  # if the file system has no locks, no job removes the folder
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def remove_left() -> None:
    """Remove the folders of this user's earlier jobs on this node that no process uses.

    An empty folder is not removed, because another job may have just made the folder and not locked it yet.
    """
    found: list[Path] = []
    with contextlib.suppress(OSError):  # the node has no folder for temporary files
        found = [path for place in places() for path in Path(place).glob("hpcenv-*") if _OURS.fullmatch(path.name)]
    for path in found:
        with contextlib.suppress(OSError):  # another job of this user may be removing the folder now
            status = path.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if is_ours and (lock := locked(path)) is not None:
                try:
                    if os.listdir(path):
                        shutil.rmtree(path, ignore_errors=True)
                finally:
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
