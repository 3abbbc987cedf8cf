"""Text of other programs, without control characters that would affect the terminal.

Other people or programs write logs, host names, keys of a lockfile and messages of failed ranks. In a terminal, control
characters in these texts could move the cursor, hide lines, or make the terminal type answers. So hpcenv prints control
characters as escapes. Colours of logs (SGR, ECMA-48 section 8.3.117) are kept.

`clean_text` is for the messages of a command, even in a pipe. `_streams.prepare` uses `escape_stream` for all output to
a terminal. So data, help and tracebacks also send no control characters to a terminal.
"""

from __future__ import annotations

import os
import re
import sys

from hpcenv.text import visible

_COLOURS = re.compile(r"\x1b\[[0-9;:]{0,32}m")
_UNFINISHED = re.compile(r"(\x1b(\[[0-9;:]{0,32})?|\r)\Z")
_RESET = "\x1b[0m"
# A no-break space has no effect on a terminal.
_BLANK = "\u00a0"


def is_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()


def has_colours() -> bool:
    """Whether to print colours: only on a terminal, if NO_COLOR (no-color.org) is not set and TERM is not `dumb`."""
    return is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def escape_control(text: str) -> str:
    """Return text as one line, with each control character as an escape."""
    return visible(text, keep=_BLANK)


def clean_text(text: str) -> str:
    """Return text with each control character as an escape. Line ends and tabs are kept."""
    return text if text.isprintable() else visible(text, keep="\n\t" + _BLANK)


def escape_stream(text: str) -> str:
    """Return text for a terminal. This is like `clean_text`, but keeps colours. The text may be a part of a line."""
    if text.isprintable():
        return text
    parts, position = [], 0
    for match in _COLOURS.finditer(text):
        parts += [clean_text(text[position : match.start()]), match[0]]
        position = match.end()
    return "".join([*parts, clean_text(text[position:])])


class Cleaner:
    """Replaces control characters in the text of a log by escapes. The text arrives in pieces.

    A piece may end in the middle of an escape sequence.
    """

    def __init__(self, *, colours: bool = True) -> None:
        self._colours = colours
        self._pending = ""
        self._coloured = False

    def feed(self, text: str) -> str:
        """Return the text so far, without an unfinished escape sequence at its end."""
        text = self._pending + text
        cut = _UNFINISHED.search(text)
        text, self._pending = (text, "") if cut is None else (text[: cut.start()], text[cut.start() :])
        return self._clean(text)

    def rest(self) -> str:
        """Return the rest of the text at the end of the log, and reset the colour."""
        text, self._pending = self._pending, ""
        return self._clean(text) + (_RESET if self._coloured else "")

    def _clean(self, text: str) -> str:
        # A carriage return (for example from a progress bar) would overwrite the line. So it is replaced by a line end.
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        parts, position = [], 0
        for match in _COLOURS.finditer(text):
            parts.append(self._plain(text[position : match.start()]))
            if self._colours:
                parts.append(match[0])
                self._coloured = match[0] not in ("\x1b[m", _RESET)
            position = match.end()
        parts.append(self._plain(text[position:]))
        return "".join(parts)

    def _plain(self, text: str) -> str:
        shown = clean_text(text)
        if self._coloured and "\n" in shown:
            # A colour ends at the end of its line, because the next line may be from another rank.
            self._coloured = False
            return shown.replace("\n", f"{_RESET}\n", 1)
        return shown
