"""What may reach a terminal: text of others without the characters that steer it.

A log, a host name or a message of a failed rank is written by anybody's program. On a
terminal, control characters could move the cursor, hide lines or answer for the user;
they are shown as escapes there. Colours (SGR, ECMA-48 section 8.3.117) stay.
"""

from __future__ import annotations

import os
import re
import sys

_COLOURS = re.compile(r"\x1b\[[0-9;:]{0,32}m")
_UNFINISHED = re.compile(r"(\x1b(\[[0-9;:]{0,32})?|\r)\Z")
_RESET = "\x1b[0m"


def is_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()


def has_colours() -> bool:
    """Whether to colour what is printed: on a terminal, unless NO_COLOR (no-color.org) or TERM=dumb says no."""
    return is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def harmless(text: str) -> str:
    """Return text in one line, every character that a terminal would act upon as an escape."""
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    if character.isprintable() or character == "\u00a0":
        return character
    return ascii(character)[1:-1]


class Cleaner:
    """Makes the text of a log harmless, piece by piece: a piece may end within an escape sequence."""

    def __init__(self, *, colours: bool = True) -> None:
        self._colours = colours
        self._held = ""
        self._coloured = False

    def feed(self, text: str) -> str:
        """Return what can be shown of the text so far."""
        text = self._held + text
        cut = _UNFINISHED.search(text)
        text, self._held = (text, "") if cut is None else (text[: cut.start()], text[cut.start() :])
        return self._clean(text)

    def rest(self) -> str:
        """Return what is left at the end, and end its colours."""
        text, self._held = self._held, ""
        return self._clean(text) + (_RESET if self._coloured else "")

    def _clean(self, text: str) -> str:
        # A progress bar's carriage return would let a line overwrite what stands there.
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        parts, position = [], 0
        for found in _COLOURS.finditer(text):
            parts.append(self._plain(text[position : found.start()]))
            if self._colours:
                parts.append(found[0])
                self._coloured = found[0] not in ("\x1b[m", _RESET)
            position = found.end()
        parts.append(self._plain(text[position:]))
        return "".join(parts)

    def _plain(self, text: str) -> str:
        if text.isprintable():
            return text
        shown = "".join(c if c in "\n\t" else _shown(c) for c in text)
        if self._coloured and "\n" in shown:
            # A colour ends with its line: the next one may be of another rank.
            self._coloured = False
            return shown.replace("\n", f"{_RESET}\n", 1)
        return shown
