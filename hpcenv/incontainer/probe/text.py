"""Text that every JSON reader accepts.

Runs on: inside the image.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text without lone surrogates and control characters."""
    if text.isascii() and text.isprintable():
        return text  # nearly every text
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c >= " " and c != "\x7f" else f"\\x{ord(c):02x}" for c in text)


def describe_error(error: BaseException) -> str:
    """Return an error as one short line."""
    return printable(f"{type(error).__name__}: {error}")[:500]
