"""Text for people: lines that fit into a terminal, and escapes in place of control characters. Pure.

Runs on: ANY NODE. Standard library only.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Sequence, Sized

# Every output must fit into a terminal of this width, in columns.
WIDTH = 80


class Shown:
    """A result with a repr that fits on a screen. Of a long value, the repr shows only the size or the type.

    A subclass must use `dataclass(repr=False)`. A notebook shows the text that `str` returns, for example the output
    of the command.
    """

    def __repr__(self) -> str:
        named = ((name, value) for name, value in vars(self).items() if value not in (None, "", ()))
        return f"{type(self).__name__}({', '.join(f'{name}={_brief(value)}' for name, value in named)})"

    def _repr_html_(self) -> str:
        import html  # only a notebook needs it

        return f"<pre>{html.escape(str(self))}</pre>"


def _brief(value: object) -> str:
    if isinstance(value, (str, int, float, os.PathLike)):
        return cut(repr(str(value) if isinstance(value, os.PathLike) else value), 60)
    return f"<{len(value)}>" if isinstance(value, Sized) else f"<{type(value).__name__}>"


def visible(text: str, *, keep: str = "") -> str:
    """Replace characters that are not printable (control characters, direction marks) by escapes.

    Characters in `keep` stay as they are.
    """
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def visible_ascii(text: str) -> str:
    """Replace control characters and characters outside ASCII by escapes, because the encoding of a log is unknown."""
    return "".join(c if " " <= c <= "~" else ascii(c)[1:-1] for c in text)


def printable(text: str) -> str:
    """Replace characters that are not printable by `?`, so that the text does not get longer."""
    return "".join(c if c.isprintable() else "?" for c in text)


def wrap(text: str, *, first: str = "", indent: int = 2, width: int = WIDTH, whole_words: bool = True) -> str:
    """Return `text` in lines of at most `width` columns.

    Args:
        text: one paragraph.
        first: the beginning of the first line.
        indent: number of spaces before each line except the first.
        width: number of columns.
        whole_words: do not break long words, words with hyphens, or text between backticks. The reader can then copy a
            path or a command.
    """
    if whole_words:
        text = re.sub(r"`[^`\n]+`", lambda quoted: quoted[0].replace(" ", "\0"), text)
    filled = textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=" " * indent,
        break_long_words=not whole_words,
        break_on_hyphens=not whole_words,
    )
    return filled.replace("\0", " ")


def cut(text: str, most: int) -> str:
    """Return a text with at most `most` characters; three dots replace the rest of a longer text."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines; the columns are aligned."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def plural(count: int, noun: str) -> str:
    """Return a number and its noun: `1 node`, `2 nodes`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(names: Sequence[str], most: int) -> str:
    """Return the first names, and the number of the remaining names: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
