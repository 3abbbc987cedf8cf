"""Check what is mounted over an image: a squashfs by its hash, a folder by the digest of all its files.

Runs on: COMPUTE NODE, and on the login node while locking and planning. Standard library only. Only runs
with an overlay import this module. docs/decisions/0035 has the reasons.

A squashfs is one file: it is recognised like a SIF (sif_check.py), without reading all of it. A folder has no identity
that is cheaper than its content, so each node reads it, with several threads: on a parallel file system the answers
of the servers take most of the time.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from hpcenv.node.check import bind_content, sif_check
from hpcenv.records.checked_sif import CheckedSif
from hpcenv.records.facts import Look
from hpcenv.records.manifest import Overlay, SifIdentity

FILE_FIELD = "container.overlay.sha256"
FOLDER_FIELD = "container.overlay.content"

# More belongs into a squashfs: every node would read it at every start.
LIMIT_BYTES = 64 << 30
LIMIT_FILES = 1_000_000
_THREADS = 8
_NAMED = 20


def field_of(overlay: Overlay) -> str:
    """Return the field that identifies an overlay."""
    return FILE_FIELD if overlay.form == "squashfs" else FOLDER_FIELD


def check_file(
    descriptor: int, *, path: str, known: SifIdentity | None, records: sif_check.Records | None
) -> CheckedSif:
    """Return the hash of an open squashfs by the cheapest way that proves it.

    Args:
        descriptor: the open file.
        path: for the record.
        known: the identity that was taken together with the full hash; None to hash.
        records: hashes taken on this machine before; None to hash.

    Raises:
        ImageMismatch, EnvironmentUnreadable: changed while it was read, or cannot be read.
    """
    return sif_check.check(
        descriptor, path=path, staged=False, known=known, records=records, read_header=sif_check.superblock_of
    )


def identify(descriptor: int, records: sif_check.Records | None) -> tuple[str, SifIdentity | None]:
    """Return the hash of a squashfs, and its identity for the nodes; None where the file system allows none.

    Raises:
        ImageMismatch, EnvironmentUnreadable: no squashfs, changed while read, unreadable.
    """
    return sif_check.identify(descriptor, records, read_header=sif_check.superblock_of)


def folder_digest(folder: str) -> tuple[str, Look]:
    """Return the digest of a folder (`hpcenv-bind-v1`), and how its files were when they were read.

    Raises:
        OSError: something in it cannot be read.
        ValueError: it is no folder, or has more than `LIMIT_BYTES` or `LIMIT_FILES`.
    """
    if not os.path.isdir(folder):
        raise NotADirectoryError(f"{folder} is not a folder")
    look = folder_look(folder)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="hpcenv-overlay") as pool:
        content = bind_content.folder_digest(folder, hash_files=pool.map, most=(LIMIT_BYTES, LIMIT_FILES))
    return content, look


def folder_look(folder: str) -> Look:
    """Return how the files of a folder are, by size and times: to tell a later change without reading them.

    Raises:
        OSError: a folder in it cannot be read.
    """
    digest, newest, count = hashlib.sha256(b"hpcenv-overlay-look-v1\0"), 0, 0
    for path, status in _entries(folder):
        newest, count = max(newest, status.st_ctime_ns), count + 1
        # Reading a folder changes no time of it; st_size of a folder means nothing.
        size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
        digest.update(f"{path}\0{size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}\n".encode(errors="surrogateescape"))
    return Look(digest=digest.hexdigest(), newest=newest, files=count)


def changed_since(folder: str, first: Look) -> tuple[str, ...]:
    """Return the files that changed after the first look: at most 20 paths, and how many more; empty for none.

    Raises:
        OSError: a folder in it cannot be read.
    """
    now = folder_look(folder)
    if now.digest == first.digest:
        return ()
    changed = [path for path, status in _entries(folder) if status.st_ctime_ns > first.newest]
    files = [path for path in changed if not os.path.isdir(os.path.join(folder, path))] or changed
    if not files:
        return (f"{first.files - now.files} files of {folder} are gone",)
    more = len(files) - _NAMED
    return (*(os.path.join(folder, path) for path in files[:_NAMED]), *([f"and {more} more"] if more > 0 else []))


def _entries(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield all that is in a folder, in a fixed order, by relative path, with its status. Links are not followed."""
    yield ".", os.stat(folder)
    for place, folders, files in os.walk(folder, onerror=_raise):
        folders.sort()
        for name in sorted((*folders, *files)):
            path = os.path.join(place, name)
            yield os.path.relpath(path, folder), os.lstat(path)


def _raise(error: OSError) -> None:
    raise error
