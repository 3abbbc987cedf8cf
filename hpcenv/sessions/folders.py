"""Folders of a session that only its user can read: a lasting folder, and a folder on the node's own disk.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcenv import filesystem
from hpcenv.errors import Command, FileUnusable
from hpcenv.records.session import NodeFolder

_PREFIX = "hpcenv-session-"
# Paths of Unix sockets have at most 107 bytes (unix(7)). Jupyter adds `/jupyter/kernel-UUID-ipc-N`, which has 58.
_LONGEST_FOLDER = 48


def require_private(path: Path) -> None:
    """Refuse a path that is not a folder of this user, or that other users may read or write.

    Raises:
        FileUnusable: other users could read the session's files and use its sockets.
        OSError: the path does not exist.
    """
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise FileUnusable(
            f"`{path}` is not a folder for a session",
            why=f"mode {stat.S_IMODE(found.st_mode):04o}, owner {found.st_uid}: others could read the session's files",
            hint=("it must be your own: ", Command("chmod", "700", str(path))),
        )


@contextmanager
def node_folder() -> Iterator[NodeFolder]:
    """Make the folder of a session on this node, which only its user can read; remove it after the block.

    Also remove folders of this user's earlier sessions whose processes were killed. Such a folder is not locked.

    Raises:
        FileUnusable: the folder cannot be made, or the node has no local disk for it.
    """
    place = _place()
    for old in Path(place).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another session of this user may just end
            if old.lstat().st_uid == os.getuid() and (lock := locked(old)) is not None:
                shutil.rmtree(old, ignore_errors=True)
                os.close(lock)
    try:
        # The folder is locked before it gets its name: without a lock, another session would remove it.
        made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=place))
        lock = locked(made)
        path = made.rename(made.with_name(made.name[1:]))
    except OSError as error:
        raise FileUnusable("this node cannot make a folder for the session", why=str(error)) from error
    try:
        yield NodeFolder(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _place() -> str:
    """Return a folder on a local disk of this node. On a shared disk, locks and sockets of several nodes would mix."""
    places = (tempfile.gettempdir(), "/tmp", "/dev/shm")  # noqa: S108  (the name cannot be guessed; mode 0700)
    for place in places:
        mount = filesystem.mount_of(Path(os.path.realpath(place)))
        if len(place) + len(_PREFIX) + 8 <= _LONGEST_FOLDER and mount is not None and not mount.network:
            return place
    raise FileUnusable(
        "this node has no local disk for the folder of a session",
        why=f"the paths are too long, or on a network file system: {', '.join(places)}",
    )


def locked(path: Path) -> int | None:
    """Open and lock a file or folder; return the descriptor. None if another process has the lock, or on an error."""
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
