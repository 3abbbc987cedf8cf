"""Lengths of time on the command line: `90s`, `30min`, `12h`, `30d`, `8w`."""

from __future__ import annotations

import re

import click

_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_seconds(_context: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
    """Return the seconds that an option's value stands for; None without one."""
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9})(s|min|h|d|w)", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a length of time, for example 90s, 30min, 12h, 30d or 8w")
    return float(int(match[1]) * _SECONDS[match[2]])
