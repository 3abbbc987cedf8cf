"""Text for people: lines that fit a terminal, and control characters that cannot act. Pure.

Runs on: ANY NODE. Standard library only.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

# Columns of a terminal that each page must fit into.
WIDTH = 80


def visible(text: str) -> str:
    """Replace characters that are not printable (control characters, direction marks) by escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def visible_ascii(text: str) -> str:
    """Replace control characters and what is not ASCII by escapes: the encoding of a log is not known."""
    return "".join(c if " " <= c <= "~" else ascii(c)[1:-1] for c in text)


def wrap(text: str, *, indent: int = 2, width: int = WIDTH) -> str:
    """Return `text` in lines of at most `width` columns; a longer word, such as a path, is not broken.

    Args:
        text: one paragraph.
        indent: spaces before each line but the first.
        width: columns.
    """
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def plural(count: int, noun: str) -> str:
    """Return a number and its noun: `1 node`, `2 nodes`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(names: Sequence[str], most: int) -> str:
    """Return the first names, and the number of the others: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
