"""The digest of what a bind shows in a container.

Runs on: COMPUTE NODE, and on the login node while locking. Standard library only.

`hpcenv-bind-v1`: for a file the sha256 of its bytes; for a folder the sha256 of the sorted lines `KIND NUL path NUL
value`, where the value is the sha256 of a file or the target of a link. Folders count by name, owners, modes and times
do not count. A link out of the folder is resolved in the container, so only its target counts.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator

# What hides files of an image is code or a library. Data belongs to a path that the image does not have.
LIMIT_BYTES = 2 << 30
LIMIT_FILES = 50_000


def content_digest(source: str) -> str:
    """Return the digest of a file or folder of the host, `sha256:...`.

    Raises:
        OSError: something cannot be read.
        ValueError: it is neither, or too large for a digest on each node.
    """
    status = os.stat(source)
    if stat.S_ISREG(status.st_mode):
        if status.st_size > LIMIT_BYTES:
            raise ValueError(_too_large(source))
        return f"sha256:{_file_digest(source)}"
    if not stat.S_ISDIR(status.st_mode):
        raise ValueError(f"{source} is neither a file nor a folder")
    return folder_digest(source)


HashFiles = Callable[[Callable[[bytes], str], Iterable[bytes]], Iterable[str]]


def folder_digest(
    folder: str, *, hash_files: HashFiles = map, most: tuple[int, int] = (LIMIT_BYTES, LIMIT_FILES)
) -> str:
    """Return the digest of a folder, `sha256:...`.

    Args:
        hash_files: applies a function to each path, in order: `map`, or that of a pool of threads.
        most: bytes, and files.

    Raises:
        OSError: something cannot be read.
        ValueError: it has more.
    """
    lines: list[bytes] = []
    files: list[bytes] = []
    for kind, path, value in _entries(os.fsencode(folder), most):
        if kind == b"file":
            files.append(path)
        else:
            lines.append(b"\0".join((kind, path, value)))
    whole = os.fsencode(folder)
    digests = hash_files(lambda path: _file_digest(os.path.join(whole, path)), files)
    lines += [b"\0".join((b"file", path, found.encode())) for path, found in zip(files, digests, strict=True)]
    return "sha256:" + hashlib.sha256(b"\n".join(sorted(lines))).hexdigest()


def _entries(folder: bytes, most: tuple[int, int]) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yield kind, relative path and value of all that is in a folder; the value of a file is not read."""
    total = count = 0
    for place, folders, files in os.walk(folder, onerror=_raise):
        for name in (*folders, *files):
            path = os.path.join(place, name)
            status = os.lstat(path)
            count += 1
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
            if total > most[0] or count > most[1]:
                raise ValueError(_too_large(os.fsdecode(folder), most))
            kind, value = b"other", b""
            if stat.S_ISLNK(status.st_mode):
                kind, value = b"link", os.readlink(path)
            elif stat.S_ISDIR(status.st_mode):
                kind = b"folder"
            elif stat.S_ISREG(status.st_mode):
                kind = b"file"
            yield kind, os.path.relpath(path, folder), value


def _raise(error: OSError) -> None:
    raise error


def _too_large(source: str, most: tuple[int, int] = (LIMIT_BYTES, LIMIT_FILES)) -> str:
    return f"{source} has more than {most[0] >> 30} GiB or {most[1]} files"


def _file_digest(path: str | bytes) -> str:
    digest = hashlib.sha256()
    # O_NONBLOCK: a FIFO that took the place of the file must not block.
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
