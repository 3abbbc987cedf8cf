"""Lengths of time, as people and Slurm write lengths: `90`, `30m`, `2h`, `1d`, `HH:MM:SS`, `D-HH:MM:SS`.

Runs on: LOGIN NODE. Pure. Every option, key and argument that is a length of time accepts the same forms.
"""

from __future__ import annotations

import re
from typing import Literal

FORMS = "a number, 90s, 30m, 2h, 1d, 1w, HH:MM:SS or D-HH:MM:SS"

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
# A number with more than nine digits is too large for Slurm, which counts minutes in 32 bits.
_WITH_UNIT = re.compile(r"([0-9]{1,9})(s|min|m|h|d|w)")
# sbatch(1), option --time (Slurm 24.11): `minutes`, `minutes:seconds`, `hours:minutes:seconds`,
# `days-hours`, `days-hours:minutes`, `days-hours:minutes:seconds`.
_CLOCK = re.compile(r"(?:([0-9]{1,9})-)?([0-9]{1,9})(?::([0-9]{1,9}))?(?::([0-9]{1,9}))?")


def parse(text: str, *, number: Literal["seconds", "minutes"]) -> int:
    """Return a length of time in seconds.

    Args:
        text: one of the forms above.
        number: the unit of a plain number. In time limits, Slurm reads a plain number as minutes.

    Raises:
        ValueError: the text has none of the forms.
    """
    with_unit = _WITH_UNIT.fullmatch(text)
    if with_unit is not None:
        return int(with_unit[1]) * _UNITS[with_unit[2]]
    clock = _CLOCK.fullmatch(text)
    if clock is None:
        raise ValueError(f"is not a length of time: use {FORMS}")
    days, *rest = clock.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(parts) == 1:
        return parts[0] * (60 if number == "minutes" else 1)
    hours, minutes, seconds = [0, *parts][-3:]
    return (hours * 60 + minutes) * 60 + seconds


def slurm_time(text: str) -> str:
    """Return a time limit as sbatch reads it: `2h` as `02:00:00`, and Slurm's own forms unchanged.

    Raises:
        ValueError: the text is not a length of time.
    """
    seconds = parse(text, number="minutes")
    return clock(seconds) if _WITH_UNIT.fullmatch(text) else text


def time_minutes(text: str) -> float | None:
    """Return a Slurm time limit in minutes; None if the text is not a time limit."""
    try:
        return parse(text, number="minutes") / 60
    except ValueError:
        return None


def clock(seconds: int) -> str:
    """Return a length of time as Slurm writes it, for example `1-02:30:00`."""
    days, rest = divmod(seconds, 86400)
    text = f"{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}-{text}" if days else text
