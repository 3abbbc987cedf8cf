"""Folders of a session that only its user can read: a lasting folder, and a folder on the node's own disk.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcenv.errors import Command, FileUnusable
from hpcenv.launch import node_folders
from hpcenv.records.session import NodeFolder

# Paths of Unix sockets have at most 107 bytes (unix(7)). Jupyter adds `/jupyter/kernel-UUID-ipc-N`, which has 58.
_LONGEST_FOLDER = 48


def require_private(path: Path) -> None:
    """Refuse a path if it is not a folder of this user, or if other users may read or write it.

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

    Raises:
        FileUnusable: the folder cannot be made, or the node has no local disk for it.
    """
    fits = [place for place in node_folders.places() if len(place) + len(node_folders.SESSION) + 8 <= _LONGEST_FOLDER]
    if not fits:
        raise FileUnusable(
            "this node has no local disk for the folder of a session",
            why="TMPDIR, /tmp and /dev/shm have too long paths, or are on a network file system",
        )
    try:
        path = Path(tempfile.mkdtemp(prefix=node_folders.SESSION, dir=fits[0]))
    except OSError as error:
        raise FileUnusable("this node cannot make a folder for the session", why=str(error)) from error
    with node_folders.in_use(path):
        try:
            yield NodeFolder(path)
        finally:
            shutil.rmtree(path, ignore_errors=True)
