"""Standard output and standard error of a command."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from hpcenv.cli import _terminal


class OutputLost(Exception):
    """Standard output cannot be written, for example because the disk is full. `reason` is the system's error text."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _StandardStream(io.TextIOWrapper):
    """Standard output or standard error. This stream writes into the original stream of Python.

    In a terminal, this stream replaces all control characters by escapes. If a text cannot be written to standard error
    (for example, the reader has ended), the text is lost and the command continues.

    Attributes:
        unchanged: the original stream, for code that moves the cursor.
    """

    def __init__(self, unchanged: io.TextIOWrapper, descriptor: int) -> None:
        self.unchanged, self._descriptor, self._is_terminal = unchanged, descriptor, unchanged.isatty()
        super().__init__(
            unchanged.buffer,
            encoding=unchanged.encoding,
            # With this setting, a path with any bytes can be printed.
            errors="backslashreplace",
            line_buffering=unchanged.line_buffering or self._is_terminal,
            write_through=unchanged.write_through,
        )

    def write(self, text: str) -> int:
        with self._judged():
            super().write(_terminal.escape_stream(text) if self._is_terminal else text)
        return len(text)

    def flush(self) -> None:
        with self._judged():
            super().flush()

    @contextlib.contextmanager
    def _judged(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._descriptor == 2:
                discard(2)
            elif isinstance(error, BrokenPipeError):
                raise
            else:
                raise OutputLost(error.strerror or str(error)) from error


def prepare() -> None:
    """Replace standard output and standard error by `_StandardStream`. Closed standard streams are opened as /dev/null.

    If a stream stayed closed, the next opened file would get the number of the stream, and programs would write into
    this file.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the system uses the lowest free number
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(descriptor, "w", closefd=False))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and not isinstance(stream, _StandardStream):
            stream.flush()
            setattr(sys, name, _StandardStream(stream, descriptor))


def unchanged(stream: TextIO) -> TextIO:
    """Return the original stream of a `_StandardStream`, for code that moves the cursor.

    The caller must escape control characters in its own texts.
    """
    return stream.unchanged if isinstance(stream, _StandardStream) else stream


def discard(*descriptors: int) -> None:
    """Send all further output to /dev/null. At exit, Python would write its buffered text, and would fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)
