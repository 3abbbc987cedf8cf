"""Numbers of bytes as text. Pure."""

from __future__ import annotations

import re

_UNITS = (("kB", 10**3), ("MB", 10**6), ("GB", 10**9))


def gigabytes(text: str) -> int | None:
    """Return the number of gigabytes in a text such as `40 GB`; None if the text has another form."""
    match = re.fullmatch(r"([1-9][0-9]{0,6}) GB", text)
    return int(match[1]) if match else None


def shown(count: int) -> str:
    """Return a number of bytes as text for a reader: `812 bytes`, `1.7 kB`, `352.1 MB`.

    Units are powers of 1000 (IEC 80000-13). `df -H` and disk makers use the same units.
    """
    if count < 1000:
        return f"{count} bytes"
    for unit, size in _UNITS:
        if count < 999.95 * size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 10**12:.1f} TB"
