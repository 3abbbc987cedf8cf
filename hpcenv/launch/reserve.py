"""Reserve space and file names in the run folder, so that the end of a run can be recorded on a full disk.

Runs on: COMPUTE NODE. Standard library only. Each node has one small file whose disk space is reserved. The batch
script has such a file, too. On a full disk, a record is written into this file. Then the file is renamed to the name of
the record. The reserved file is not removed first, because another process could then take the free space or the free
inode (seen for the inode).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from hpcenv.records.files import write_text
from hpcenv.records.run_folder import RunFolder

# This size is enough for a record with the tracebacks of some ranks.
_BYTES = 64 * 1024
# Space is reserved for at most this number of nodes, because more would need too much time and space.
_MOST_NODES = 64
BATCH = "batch-script"
# No space, or quota exceeded.
_FULL = (errno.ENOSPC, errno.EDQUOT)
# If fewer bytes than this are free, a training can no longer write its log.
_LITTLE = 256 * 1024


def make(run: RunFolder, nodes: Sequence[str]) -> None:
    """Reserve space for the end records. If the disk is already full, the records themselves report the full disk."""
    with contextlib.suppress(OSError):
        run.reserved.mkdir(exist_ok=True)
        # A folder needs blocks and an inode, too.
        run.exits.mkdir(exist_ok=True)
        for name in (BATCH, *nodes[:_MOST_NODES]):
            # The bytes are random, because a file system that compresses would reserve nothing for zeros.
            (run.reserved / name).write_bytes(os.urandom(_BYTES))


def write(run: RunFolder, name: str, text: str, path: Path) -> None:
    """Write a record to `path`. If the disk is full, write the record into the file that is reserved for `name`.

    Raises:
        OSError: the record cannot be written.
    """
    try:
        write_text(text, path)
    except OSError as error:
        if error.errno not in _FULL or not (run.reserved / name).is_file():
            raise
        try:
            _write_into(run.reserved / name, text.encode("utf-8"), path)
        except OSError as again:
            if again.errno not in _FULL:
                raise
            # A file system that copies on write needs a free block even to overwrite a file.
            (run.reserved / name).unlink(missing_ok=True)
            write_text(text, path)


def _write_into(reserved: Path, content: bytes, path: Path) -> None:
    """Write `content` over the bytes of a reserved file, and rename the file to `path`."""
    fd = os.open(reserved, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, "wb", closefd=True) as file:
        file.write(content)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
    os.replace(reserved, path)


def remove(run: RunFolder) -> None:
    """Free the reserved space, because the run has ended."""
    with contextlib.suppress(OSError):
        for path in run.reserved.iterdir():
            path.unlink(missing_ok=True)
        run.reserved.rmdir()


def why_full(run: RunFolder) -> str:
    """Return why the run folder can take no more data; empty if it has space, or if the space is unknown."""
    try:
        found = os.statvfs(run.path)
    except OSError as error:
        return f"{os.strerror(error.errno)}: {run.path}" if error.errno in _FULL else ""
    if found.f_files and not found.f_favail:
        return f"no inodes are free on the file system of {run.path}"
    free = found.f_bavail * found.f_frsize
    return f"{free} bytes are free on the file system of {run.path}" if free < _LITTLE else ""
