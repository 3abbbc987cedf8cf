"""A program that copies small files: `python -I -S file_copies.py SOURCE TARGET ... [--archive TARGET MODULE ...]`.

Runs on: LOGIN NODE. `node_code` starts it, and the submission goes on while it works. It imports nothing of hpcenv,
and no zipfile, which takes 20 ms. It copies each SOURCE, and packs the MODULEs into one zip archive: a parallel file
system makes one file much faster than hundreds. It prints `copied` when everything is there. If a file fails, it writes
the number of the system's error and the path to standard error.
"""

from __future__ import annotations

import os
import struct
import sys
from binascii import crc32
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash

TYPE_CHECKING = False  # typing takes 4 ms
if TYPE_CHECKING:
    from collections.abc import Iterator

DONE = "copied"
ARCHIVE = "--archive"

# Folder of the modules in the archive.
_PACKAGE = "hpcenv"

# Flags of a compiled module (PEP 552): what the 8 bytes after them hold, and whether Python compares them.
_BY_TIME, _UNCHECKED_HASH, _CHECKED_HASH = 0, 1, 3


def main(words: list[str]) -> int:
    """Copy each SOURCE to its TARGET, whose folder is made, and write the archive; return the exit status."""
    end = words.index(ARCHIVE) if ARCHIVE in words else len(words)
    try:
        for source, target in zip(words[0:end:2], words[1:end:2], strict=True):
            _write(target, _read(source)[0])
        if words[end:]:
            _write(words[end + 1], pack(words[end + 2 :]))
    except OSError as error:
        sys.stderr.write(f"{error.errno} {error.filename}\n")
        return 1
    sys.stdout.write(DONE)
    return 0


def pack(modules: list[str]) -> bytes:
    """Return a zip archive of modules, whose paths are relative to the package, and what Python has compiled of them.

    The archive is the same for the same modules. It is not compressed: Python then reads it without zlib. The format:
    PKWARE's APPNOTE 6.3.10, sections 4.3.7, 4.3.12 and 4.3.16.
    """
    body, index, at = [], [], 0
    for name, content in _members(modules):
        size, path = len(content), f"{_PACKAGE}/{name}".encode()
        head = struct.pack("<HHHHHLLLHH", 20, 0, 0, 0, 0x21, crc32(content), size, size, len(path), 0)
        body += [b"PK\3\4", head, path, content]
        index.append(b"PK\1\2\x14\0" + head + struct.pack("<HHHLL", 0, 0, 0, 0, at) + path)
        at += 30 + len(path) + size
    directory = b"".join(index)
    end = struct.pack("<HHHHLLH", 0, 0, len(index), len(index), len(directory), at, 0)
    return b"".join([*body, directory, b"PK\5\6", end])


def _members(modules: list[str]) -> Iterator[tuple[str, bytes]]:
    for module in modules:
        source, status = _read(module)
        yield module, source
        compiled = _compiled(module, source, status)
        if compiled is not None:
            yield f"{module}c", compiled


def _compiled(module: str, source: bytes, status: os.stat_result) -> bytes | None:
    """Return what Python has compiled of a module, or None if that is not there or not of this source.

    In an archive, Python compares the times of both with a precision of 2 s and in the time zone of the node
    (zipimport, Python 3.13). So they are compared here, and the header gets a hash that Python does not check.
    """
    try:
        compiled, _ = _read(cache_from_source(module))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None  # the nodes compile it
    flags, stamp = int.from_bytes(compiled[4:8], "little"), compiled[8:16]
    by_hash = source_hash(source)
    by_time = b"".join((int(value) & 0xFFFFFFFF).to_bytes(4, "little") for value in (status.st_mtime, status.st_size))
    fresh = stamp == by_time if flags == _BY_TIME else flags in (_UNCHECKED_HASH, _CHECKED_HASH) and stamp == by_hash
    if compiled[:4] != MAGIC_NUMBER or not fresh:
        return None
    return MAGIC_NUMBER + _UNCHECKED_HASH.to_bytes(4, "little") + by_hash + compiled[16:]


def _read(path: str) -> tuple[bytes, os.stat_result]:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.readall(), os.fstat(file.fileno())
    except OSError as error:
        error.filename = path  # Python names it for `open` only
        raise


def _write(path: str, content: bytes) -> None:
    """Write a file and make its folder. Its mode is that of new files: a read-only installation must not matter.

    Raises:
        OSError: it cannot be written; `filename` names it.
    """
    try:
        try:
            file = open(path, "wb", buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            file = open(path, "wb", buffering=0)  # noqa: SIM115
        with file:
            while content:
                content = content[file.write(content) :]
    except OSError as error:
        error.filename = error.filename or path
        raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
