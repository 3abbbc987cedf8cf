"""Callbacks for options with a length of time as value: `90`, `30m`, `2h`, `1d`, `HH:MM:SS`, `D-HH:MM:SS`."""

from __future__ import annotations

import click

from hpcenv.cli import _render
from hpcenv.project import duration


def tell_unit(_context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return the value of an option.

    If the value is a plain number, print its unit, because the option --time has a different unit.
    """
    if value and value.isdecimal() and int(value):
        flag = f"{parameter.opts[-1]} {value}"
        _render.tell(
            f"note: {flag} is {value} seconds, and a plain number of --time is minutes: write the unit, {flag}s"
        )
    return value


def parse_seconds(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Return the value of an option in seconds; None if there is no value. A plain number means seconds."""
    if tell_unit(context, parameter, value) is None or value is None:
        return None
    try:
        return float(duration.parse(value, number="seconds"))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} {error}") from error
