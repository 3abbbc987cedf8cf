"""Read a wheel on a server.

Runs on: LOGIN NODE, in the process beside pip: standard library and pip only.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from hpcenv.locking.wheels.cache import read_entry, write_entry
from hpcenv.locking.wheels.lists import ListedWheel
from hpcenv.locking.wheels.pip_session import PipSession, hash_chunks
from hpcenv.locking.wheels.proof import InstalledDist
from hpcenv.locking.wheels.range_file import DOWNLOAD_BYTES, RangeFile
from hpcenv.locking.wheels.wheel_file import WheelReading, examine

WHOLE_BYTES = 1 << 20  # up to this size, one more request fetches the whole wheel, so every file can be checked


def read_remote(link: ListedWheel, dist: InstalledDist, *, pip: PipSession, cache: Path) -> WheelReading:
    """Return the cached result for a file with this hash, or read the wheel.

    Raises:
        NotAWheel: the file is not a valid wheel.
        Unreachable: the server did not answer as needed.
    """
    key: list[Any] = [link.filename, link.sha256]
    read = _cached_reading(cache, key) if link.sha256 else None
    if read is not None:
        return read
    with contextlib.closing(RangeFile(pip, link.location)) as file:
        if link.sha256 is None and file.tag:
            key = [link.filename, file.size, file.tag]
            read = _cached_reading(cache, key)
        if read is None:
            read = _read_ranges(file, link, dist)
            if (link.sha256 or file.tag) and read.records and not read.unread:
                write_entry(cache, "wheel", key, {"read": asdict(read)})
    return read


def _cached_reading(cache: Path, key: list[Any]) -> WheelReading | None:
    entry = read_entry(cache, "wheel", key)
    try:
        if entry is None:
            return None
        read = entry["read"]
        programs = tuple((name, digest) for name, digest in read["programs"])
        return WheelReading(**{**read, "records": tuple(read["records"]), "programs": programs})
    except (TypeError, KeyError, ValueError):
        return None


def _read_ranges(file: RangeFile, link: ListedWheel, dist: InstalledDist) -> WheelReading:
    if file.complete is not None or file.size <= WHOLE_BYTES:
        file.fetch(0, file.size)
        sha256 = hash_chunks(iter(lambda: file.read(1 << 20), b""), file.pip.deadline)
        return examine(cast("BinaryIO", file), link.filename, sha256=sha256, whole=True)
    read = examine(cast("BinaryIO", file), link.filename, sha256=None, whole=False)
    if link.sha256 is None and dist.record_sha256 in read.records:
        # It is the installed wheel, but the index does not state its hash. So download it to compute the hash.
        if file.size > DOWNLOAD_BYTES:
            unread = f"it has {file.size >> 20} MiB, more than the {DOWNLOAD_BYTES >> 20} MiB that are downloaded"
            return replace(read, unread=unread)
        return replace(read, sha256=file.download_sha256())
    return read
