"""List folders, and open files that cannot be trusted. Only regular files are opened.

Runs on: inside the image.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class NotAFile(ValueError):
    """A folder, device, socket or pipe was found where a file was expected."""


def open_regular(path: str, inside: Callable[[str], bool]) -> tuple[int, bool]:
    """Open a regular file, without waiting for a pipe.

    Args:
        inside: tells whether a folder, with its links resolved, is in the environment.

    Returns:
        The descriptor, and whether the path leads through a link out of the environment.

    Raises:
        NotAFile: the path is not a regular file.
        OSError: the file cannot be opened.
    """
    import errno
    import stat

    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    outside = not inside(os.path.dirname(path))
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise NotAFile("not a regular file") from None
        if error.errno != errno.ELOOP:
            raise
        outside = not inside(os.path.dirname(os.path.realpath(path)))
        descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFile("not a regular file")
    return descriptor, outside


def list_folder(folder: str) -> list[str]:
    """Return the names in a folder; none if it cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def is_below(path: str, root: str) -> bool:
    """Return whether a path is `root` or below it; False for an empty root."""
    return bool(root) and (path == root or path.startswith(root.rstrip("/") + "/"))
