"""A file on a server. Only the parts that are needed are fetched.

Runs on: LOGIN NODE, in the process beside pip: standard library and pip only. The package remotezip (0.12.6) is not
used. It imports requests, has no time limit, and does not notice if a file changes on the server between two
requests.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from typing import Any, BinaryIO, cast

from hpcenv.locking.wheels.pip_session import PipSession, Unreachable, hash_chunks, limited, raw_chunks
from hpcenv.locking.wheels.wheel_record import NotAWheel

TAIL_BYTES = 64 << 10  # contains the zip directory and the RECORD of a wheel with up to about 400 files
DOWNLOAD_BYTES = 64 << 20  # limit of a download, if the server allows no partial reads or the index states no hash
RANGE_BYTES = 32 << 20  # limit of one partial read; the zip directory of torch has 1.2 MB


class RangeFile(io.RawIOBase):
    """A file on a server. Only the parts that are read are fetched.

    Attributes:
        size: the size of the file in bytes.
        tag: the server's ETag; "" if the server sends no ETag.
        complete: a copy on this machine, if the server sent the whole file.

    Raises:
        Unreachable: the server does not answer, or the file is too large for a server without partial reads.
    """

    def __init__(self, pip: PipSession, url: str) -> None:
        super().__init__()
        self.pip = pip
        self.url = url
        self.size = 0
        self.tag = ""
        self.complete: BinaryIO | None = None
        self._position = 0
        self._parts: list[tuple[int, bytes]] = []
        self._open()

    def _open(self) -> None:
        """Fetch the end of the file, which contains the zip directory."""
        answer = self._get(f"bytes=-{TAIL_BYTES}")
        with contextlib.closing(answer):
            self.tag = answer.headers.get("ETag", "")
            span = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answer.headers.get("Content-Range", ""))
            if answer.status_code == 206 and span:
                self.size = int(span[3])
                self._keep(int(span[1]), answer, TAIL_BYTES)
                return
            if answer.status_code == 200:
                self._copy(answer)
                return
        with contextlib.closing(self._get(None)) as answer:
            self._copy(answer)

    def _copy(self, answer: Any) -> None:
        """Download the whole file, because the server does not support partial reads."""
        if answer.status_code != 200:
            raise Unreachable(f"the server answers with HTTP {answer.status_code}")
        length = int(answer.headers.get("Content-Length") or 0)
        if length > DOWNLOAD_BYTES:
            raise Unreachable(f"the server allows no partial reads, and it has {length >> 20} MiB")
        self.complete = cast("BinaryIO", tempfile.TemporaryFile())  # noqa: SIM115 - closed with this object
        for chunk in limited(raw_chunks(answer), DOWNLOAD_BYTES, self.pip.deadline):
            self.complete.write(chunk)
        self.size = self.complete.tell()
        if length not in (0, self.size):
            raise Unreachable("index not reachable: an answer was cut")

    def close(self) -> None:
        """See `io.RawIOBase`."""
        if self.complete is not None:
            self.complete.close()
        super().close()

    def download_sha256(self) -> str:
        """Return the sha256 of the file. The file is downloaded, but not kept."""
        with contextlib.closing(self._get(None)) as answer:
            if answer.status_code != 200:
                raise Unreachable(f"the server answers with HTTP {answer.status_code}")
            return hash_chunks(limited(raw_chunks(answer), DOWNLOAD_BYTES, self.pip.deadline), self.pip.deadline)

    def _get(self, span: str | None) -> Any:
        # no-cache: pip's own cache must not answer. identity: the server must send the bytes of the file unchanged.
        headers = {"Accept-Encoding": "identity", "Cache-Control": "no-cache"}
        return self.pip.get(self.url, headers | ({"Range": span} if span else {}), stream=True)

    def _keep(self, start: int, answer: Any, limit: int) -> None:
        data = b"".join(limited(raw_chunks(answer), limit, self.pip.deadline))
        expected = answer.headers.get("Content-Length")
        if expected is not None and int(expected) != len(data):
            raise Unreachable("index not reachable: an answer was cut")
        self._parts.append((start, data))

    def fetch(self, start: int, end: int) -> None:
        """Fetch the bytes from `start` to `end`. Bytes that were fetched before are not fetched again.

        Raises:
            NotAWheel: too many bytes at once.
            Unreachable: the server did not send these bytes.
        """
        end = min(end, self.size)
        if self.complete is not None or any(part <= start and end <= part + len(data) for part, data in self._parts):
            return
        for part, data in self._parts:
            if part < end <= part + len(data):
                self._fetch_exactly(start, part)
                self._parts.append((start, self._parts.pop()[1] + data))
                return
        self._fetch_exactly(start, end)

    def _fetch_exactly(self, start: int, end: int) -> None:
        if end - start > RANGE_BYTES:
            raise NotAWheel("its zip directory or RECORD is too large")
        answer = self._get(f"bytes={start}-{end - 1}")
        with contextlib.closing(answer):
            if answer.status_code != 206:
                raise Unreachable(f"the server answers with HTTP {answer.status_code} to a partial read")
            if answer.headers.get("Content-Range") != f"bytes {start}-{end - 1}/{self.size}":
                raise Unreachable("the file changed on the server while it was read")
            self._keep(start, answer, end - start)

    def read(self, size: int | None = -1) -> bytes:
        """See `io.RawIOBase`."""
        end = self.size if size is None or size < 0 else min(self._position + size, self.size)
        start = self._position
        if end <= start:
            return b""
        if self.complete is not None:
            self._position = end
            self.complete.seek(start)
            return self.complete.read(end - start)
        self.fetch(start, end)
        for part, data in self._parts:
            if part <= start and end <= part + len(data):
                self._position = end
                return data[start - part : end - part]
        raise Unreachable("the server sent less than was requested")

    def seek(self, offset: int, whence: int = 0) -> int:
        """See `io.RawIOBase`."""
        self._position = max(offset + (0, self._position, self.size)[whence], 0)
        return self._position

    def tell(self) -> int:
        """See `io.RawIOBase`."""
        return self._position

    def seekable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True
