"""Find the line of a TOML document that sets a key, for messages.

Runs on: LOGIN NODE. Pure. The readers of TOML that hpcenv uses (tomllib, tomlkit) do not report the line of a value.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_TABLE = re.compile(r"\s*(\[\[?)([^\]\n]*)\]")
_KEY = re.compile(r"\s*([A-Za-z0-9_\-.\"' ]+?)\s*=")


def line_of(text: str, location: Sequence[int | str]) -> int | None:
    """Return the number of the line that sets a key; None if there is no such line. The first line has number 1.

    For a key within an inline table or a list, the line of its table is returned.

    Args:
        text: the text of a TOML document.
        location: keys, and positions in lists of tables, as pydantic names them.
    """
    wanted = [part for part in location if isinstance(part, str)]
    # Number of keys before a position -> the position. For `bind[1].source`, this is 1 -> 1.
    positions = {
        sum(isinstance(key, str) for key in location[:place]): part
        for place, part in enumerate(location)
        if isinstance(part, int)
    }
    here: list[str] = []
    seen: dict[tuple[str, ...], int] = {}
    best: tuple[int, int] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        table = _TABLE.match(line)
        if table is not None:
            here = _parts(table[2])
            seen[tuple(here)] = seen.get(tuple(here), -1) + 1
            path = here
        else:
            key = _KEY.match(line)
            if key is None or line.lstrip().startswith("#"):
                continue
            path = [*here, *_parts(key[1])]
        right = all(seen.get(tuple(wanted[:n]), position) == position for n, position in positions.items())
        if right and path == wanted[: len(path)] and (best is None or len(path) > best[0]):
            best = (len(path), number)
    return None if best is None else best[1]


def _parts(key: str) -> list[str]:
    return [part.strip().strip("\"'") for part in key.split(".")]
