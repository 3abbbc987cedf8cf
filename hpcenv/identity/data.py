"""The state of the data that a run reads (`[[data]]` in hpcenv.toml), in a form that can be compared.

Runs on: LOGIN NODE (records the state) and COMPUTE NODE (compares the state). Standard library only.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hpcenv.records.files import sha256_at
from hpcenv.records.manifest import DataCompare
from hpcenv.text import plural

# Reading mostly waits for the file system, and a parallel file system answers several readers at once.
_READERS = 8


@dataclass(frozen=True, kw_only=True)
class DataState:
    """The state of a file or folder.

    Attributes:
        digest: digest over names and sizes. With `size-and-time`, it also covers times. With `sha256`, it also covers
            the content.
        files: the number of files.
        size: size of all files together, in bytes.
    """

    digest: str
    files: int
    size: int

    def __str__(self) -> str:
        return f"{plural(self.files, 'file')}, {self.size} bytes, {self.digest}"


@dataclass(frozen=True, kw_only=True)
class DataEntry:
    """A file of data.

    Attributes:
        name: the path relative to the folder; empty if the data are one file.
        mtime_ns: time of the last change, in ns since 1970.
        sha256: sha256 of the content; needed only if contents are compared.
    """

    name: str
    size: int
    mtime_ns: int = 0
    sha256: str = ""


def read_state(path: str, compare: DataCompare, *, folders: bool = False) -> DataState:
    """Return the state of a file or folder. Symbolic links are followed.

    Args:
        folders: whether empty folders count, too, because a folder may be a class of a data set.

    Raises:
        OSError: the file or folder does not exist, or a part of it cannot be read.
    """
    return state_of(read_entries(path, compare, folders=folders), compare)


def read_entries(path: str, compare: DataCompare, *, folders: bool = False) -> Iterator[DataEntry]:
    """Yield the files of a file or folder, sorted by name, with the values for `compare`. Symbolic links are followed.

    If `folders` is true, an empty folder is an entry too. The entry of a folder has only a name, which ends with `/`.

    Raises:
        OSError: see `read_state`.
    """
    names = sorted(one for one in _files(path) if folders or not one[0].endswith("/"))
    with ThreadPoolExecutor(_READERS) as readers:
        files = (place for name, place in names if not name.endswith("/"))
        contents = readers.map(sha256_at, files) if compare == "sha256" else iter(())
        for name, place in names:
            if name.endswith("/"):
                yield DataEntry(name=name, size=0)
                continue
            status = os.stat(place)
            sha256 = next(contents) if compare == "sha256" else ""
            yield DataEntry(name=name, size=status.st_size, mtime_ns=status.st_mtime_ns, sha256=sha256)


def state_of(entries: Iterable[DataEntry], compare: DataCompare) -> DataState:
    """Return the joint state of files. Pure.

    Args:
        entries: the files, sorted by name.
    """
    digest, count, size = hashlib.sha256(), 0, 0
    for entry in entries:
        parts = [entry.name, str(entry.size)]
        if compare == "size-and-time":
            parts.append(str(entry.mtime_ns))
        elif compare == "sha256":
            parts.append(entry.sha256)
        digest.update(b"\0".join(os.fsencode(part) for part in parts) + b"\n")
        count, size = count + (not entry.name.endswith("/")), size + entry.size
    return DataState(digest=digest.hexdigest(), files=count, size=size)


def _files(path: str) -> Iterator[tuple[str, str]]:
    """Yield all files as (name below the path, place). If the path itself is a file, its name is empty.

    The name of an empty folder ends with `/`.
    """
    if not os.path.isdir(path):
        os.stat(path)
        yield "", path
        return
    waiting, seen = [("", path)], set()
    while waiting:
        below, folder = waiting.pop()
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            continue  # a link that leads back to a folder above it
        seen.add((status.st_dev, status.st_ino))
        empty = True
        with os.scandir(folder) as entries:
            for entry in entries:
                empty = False
                name = f"{below}/{entry.name}" if below else entry.name
                if entry.is_dir():
                    waiting.append((name, entry.path))
                else:
                    yield name, entry.path
        if empty:
            yield f"{below}/", folder
