"""Standard output and standard error of a command."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from hpcenv.cli import _terminal


class _CleanTerminal(io.TextIOWrapper):
    """A stream to a terminal. Whatever is printed, by whatever code: no control characters of others reach it.

    Attributes:
        unchanged: the stream below, for code that moves the cursor itself.
    """

    def __init__(self, unchanged: io.TextIOWrapper) -> None:
        self.unchanged = unchanged
        super().__init__(unchanged.buffer, encoding=unchanged.encoding, errors="backslashreplace", line_buffering=True)

    def write(self, text: str) -> int:
        super().write(_terminal.escape_stream(text))
        return len(text)


def prepare() -> None:
    """Escape the characters that the terminal's encoding does not have, so that printing a path never fails.

    Escape also those that a terminal would act upon.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        stream.reconfigure(errors="backslashreplace")
        if stream.isatty() and not isinstance(stream, _CleanTerminal):
            stream.flush()
            setattr(sys, name, _CleanTerminal(stream))


def unchanged(stream: TextIO) -> TextIO:
    """Return the stream below a terminal's, for code that moves the cursor; the caller cleans its texts."""
    return stream.unchanged if isinstance(stream, _CleanTerminal) else stream


def discard_output() -> None:
    """Send all further output to /dev/null: Python flushes at exit, which fails on a closed pipe."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
