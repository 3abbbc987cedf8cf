"""Read an archive at any position: a plain file, or one that gzip compressed.

Runs on: LOGIN NODE. Nothing is unpacked to a disk. Gzip data can be read only from the beginning, so the first pass
keeps the state of the decompressor every 32 MiB (some 40 KiB of memory each); a later read begins at the
last state before its position.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

_CHUNK = 1024 * 1024
_KEEP_EVERY = 32 * 1024 * 1024
_GZIP = b"\x1f\x8b"
# Limit for the ratio of compression. Real layers reach 20, deflate allows 1032.
MOST_RATIO = 200
_RATIO_FROM = 64 * 1024 * 1024


class TooMuchData(Exception):
    """The archive decompresses to more than MOST_RATIO times its size."""


class ArchiveBytes(Protocol):
    """The uncompressed bytes of an archive."""

    def reaches(self, end: int) -> bool:
        """Tell whether the archive has at least `end` bytes."""

    def pieces(self, begin: int, end: int) -> Iterator[bytes]:
        """Yield the bytes from `begin` to `end`; several threads may call it at the same time."""

    def close(self) -> None:
        """Close the file; readers that have begun continue."""


def open_archive(path: str) -> ArchiveBytes:
    """Open an archive.

    Raises:
        OSError: the file cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _GzipBytes(fd) if os.pread(fd, 2, 0) == _GZIP else _PlainBytes(fd)
    except BaseException:
        os.close(fd)
        raise


def pread_pieces(fd: int, begin: int, end: int) -> Iterator[bytes]:
    """Yield the bytes of a file from `begin` to `end`."""
    while begin < end and (data := os.pread(fd, min(_CHUNK, end - begin), begin)):
        begin += len(data)
        yield data


class _PlainBytes:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._size = os.fstat(fd).st_size

    def reaches(self, end: int) -> bool:
        return end <= self._size

    def pieces(self, begin: int, end: int) -> Iterator[bytes]:
        # Duplicate the descriptor: `close` may be called while another thread still reads.
        fd = os.dup(self._fd)
        try:
            yield from pread_pieces(fd, begin, end)
        finally:
            os.close(fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(kw_only=True)
class _GzipPlace:
    """A place in gzip data.

    Attributes:
        engine: the decompressor.
        taken: how many compressed bytes it has consumed.
        position: how many bytes came out of it.
    """

    engine: Any = field(default_factory=lambda: zlib.decompressobj(31))
    taken: int = 0
    position: int = 0

    def copy(self) -> _GzipPlace:
        return _GzipPlace(engine=self.engine.copy(), taken=self.taken, position=self.position)

    def read(self, fd: int, most: int) -> bytes:
        """Return the next bytes, at most `most`; empty at the end.

        Raises:
            zlib.error: the data are damaged.
        """
        while True:
            compressed = os.pread(fd, _CHUNK // 4, self.taken)
            if self.engine.eof:  # another member may follow (RFC 1952, 2.2), or padding
                if not compressed.startswith(_GZIP):
                    return b""
                self.engine = zlib.decompressobj(31)
            # Also without more input: the engine may hold output that did not fit the last time.
            data: bytes = self.engine.decompress(compressed, most)
            left = self.engine.unused_data if self.engine.eof else self.engine.unconsumed_tail
            self.taken += len(compressed) - len(left)
            self.position += len(data)
            if data or not (compressed or self.engine.eof):
                return data


class _GzipBytes:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._most = _RATIO_FROM + os.fstat(fd).st_size * MOST_RATIO
        self._kept = [_GzipPlace()]
        self._furthest = _GzipPlace()

    def reaches(self, end: int) -> bool:
        place = self._furthest
        while place.position < end:
            until = min(end, self._kept[-1].position + _KEEP_EVERY)
            if not place.read(self._fd, min(_CHUNK, until - place.position)):
                return False
            if place.position > self._most:
                raise TooMuchData
            if place.position >= self._kept[-1].position + _KEEP_EVERY:
                self._kept.append(place.copy())
        return True

    def pieces(self, begin: int, end: int) -> Iterator[bytes]:
        fd = os.dup(self._fd)
        try:
            at = bisect_right([place.position for place in self._kept], begin) - 1
            place = self._kept[at].copy()
            while place.position < end:
                before = place.position
                data = place.read(fd, min(_CHUNK, max(begin, before) - before or end - before))
                if not data:
                    return
                if before >= begin:
                    yield data
        finally:
            os.close(fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
