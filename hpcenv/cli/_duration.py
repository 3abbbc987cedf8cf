"""The type of options that are lengths of time: `90`, `30m`, `2h`, `1d`, `HH:MM:SS`, `D-HH:MM:SS`."""

from __future__ import annotations

import click

from hpcenv.project import duration


def parse_seconds(_context: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
    """Return the seconds of an option's value, a plain number being seconds; None without a value."""
    if value is None:
        return None
    try:
        return float(duration.parse(value, number="seconds"))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} {error}") from error
