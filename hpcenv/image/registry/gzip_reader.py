"""Read gzip data at any position: an archive that was compressed as a whole, or a layer in an archive.

Runs on: LOGIN NODE. Nothing is unpacked to a disk. Gzip data can be read only from the beginning. So a reader saves the
state of its decompressor every 32 MiB (some 40 KiB of memory each), and readers of the same data share these states. A
read begins at the last state before its position. gzip.GzipFile and isal are not used, because they cannot begin at a
saved state: for each layer, they would begin at the start of the archive. The state of isal's decompressor cannot be
copied (isal 1.7).
"""

from __future__ import annotations

import io
import zlib
from bisect import bisect_right
from typing import Any, BinaryIO, NamedTuple

_CHUNK = 1024 * 1024
_KEEP_EVERY = 32 * 1024 * 1024
GZIP = b"\x1f\x8b"
# Limit for the ratio of compression. Real layers reach 20, deflate allows 1032.
MOST_RATIO = 200
_RATIO_FROM = 64 * 1024 * 1024


class TooMuchData(Exception):
    """The data decompress to more than MOST_RATIO times their size."""


class GzipState(NamedTuple):
    """The state of a decompressor: the position of its next byte, and how many compressed bytes it has consumed."""

    position: int
    taken: int
    engine: Any


class GzipReader(io.RawIOBase):
    """The uncompressed bytes of gzip data, which may have several members (RFC 1952, 2.2).

    `read` and `seek` raise zlib.error if the data are damaged or incomplete, and TooMuchData if the data become too
    large.

    Args:
        file: contains the data; it is closed with the reader.
        size: the size of the data, in bytes.
        begin: the position of the data in the file.
        states: the states that earlier readers of the same data saved; this reader adds states.
    """

    def __init__(self, file: BinaryIO, size: int, *, begin: int = 0, states: list[GzipState] | None = None) -> None:
        super().__init__()
        self._file = file
        self._size = size
        self._begin = begin
        self._most = _RATIO_FROM + size * MOST_RATIO
        self._states = [] if states is None else states
        if not self._states:
            self._states.append(GzipState(0, 0, zlib.decompressobj(31)))
        self._go_to(self._states[0])

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in the uncompressed data."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a position that counts from the beginning of the data; stop at the end of the data."""
        if whence != io.SEEK_SET:
            raise io.UnsupportedOperation
        state = self._states[bisect_right([state.position for state in self._states], offset) - 1]
        if not state.position <= self._position <= offset:
            self._go_to(state)
        while self._position < offset and self._next(min(_CHUNK, offset - self._position)):
            pass
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Read the next bytes; 0 at the end."""
        data = self._next(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()

    def _go_to(self, state: GzipState) -> None:
        self._position, self._taken, self._engine = state.position, state.taken, state.engine.copy()

    def _next(self, most: int) -> bytes:
        """Return at most `most` bytes; empty at the end."""
        while True:
            self._file.seek(self._begin + self._taken)
            compressed = self._file.read(min(_CHUNK // 4, self._size - self._taken))
            if self._engine.eof:  # after this, another member or padding may follow
                if not compressed.startswith(GZIP):
                    return b""
                self._engine = zlib.decompressobj(31)
            # Decompress even without more input: the decompressor may still contain output that did not fit into the
            # last result.
            data: bytes = self._engine.decompress(compressed, most)
            left = self._engine.unused_data if self._engine.eof else self._engine.unconsumed_tail
            self._taken += len(compressed) - len(left)
            self._position += len(data)
            if self._position > self._most:
                raise TooMuchData
            if self._position >= self._states[-1].position + _KEEP_EVERY:
                self._states.append(GzipState(self._position, self._taken, self._engine.copy()))
            if data:
                return data
            if not (compressed or self._engine.eof):
                raise zlib.error("incomplete")
