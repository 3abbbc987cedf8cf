"""The options of `hpcenv submit` and `hpcenv rerun`. They are made from the table of options."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import click

from hpcenv.cli import _duration
from hpcenv.cli._complete import lockfile_names
from hpcenv.cli._help_all import GroupedOption
from hpcenv.project import options
from hpcenv.project.options import in_place


class _Whole(click.IntRange):
    """A whole number. If the value is not a whole number (`--nodes two`), the error says which values are possible."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if str(value).strip().removeprefix("-").isdecimal():
            return int(super().convert(value, param, ctx))
        return self.fail(f"{value!r} is not a whole number from {self.min} on", param, ctx)


def submit_options(
    command: Callable[..., Any], *, rare_groups: Collection[str] = (), only: Collection[str] | None = None
) -> Callable[..., Any]:
    """Give a command all options of the table that can be set on the command line.

    Args:
        rare_groups: groups of options that only `--help-all` of this command shows.
        only: names of the options that the command gets; None for all options.
    """
    rows = in_place("command")
    lacking = [row.flag for row in rows if only is not None and row.name not in only]
    for row in reversed(rows):
        if row.flag in lacking:
            continue
        # The help must not mention an option that the command does not have.
        said = (
            one for one in re.split(r"(?<=\.) ", row.help) if not any(re.search(rf"{flag}\b", one) for flag in lacking)
        )
        words = {**_words(row), "help": " ".join(said), "rare": row.rare or row.group in rare_groups}
        command = click.option(*_spelling(row), row.name, cls=GroupedOption, **words)(command)
    return command


def table_option(name: str, note: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives another command one option of the table.

    Args:
        name: name of the option in the table.
        note: a sentence for the help of this command.
    """
    row = next(row for row in in_place("command") if row.name == name)
    words = _words(row)
    return click.option(*_spelling(row), row.name, cls=GroupedOption, **{**words, "help": f"{row.help} {note}".strip()})


def _spelling(row: options.Option) -> tuple[str, ...]:
    return (f"-{row.letter}", row.flag) if row.letter else (row.flag,)


def _words(row: options.Option) -> dict[str, Any]:
    words: dict[str, Any] = {"group": row.group, "help": row.help, "metavar": row.metavar or None}
    if row.kind == "flag":
        return {**words, "is_flag": True}
    if row.kind == "count":
        return {**words, "metavar": row.metavar or "N", "type": _Whole(min=row.minimum)}
    if row.kind == "choice":
        return {**words, "type": click.Choice(row.choices)}
    if row.name == "lock":
        words["shell_complete"] = lockfile_names
    if row.kind == "seconds":
        words["callback"] = _duration.tell_unit
    return {**words, "multiple": row.kind in ("texts", "variables", "secrets", "native"), "default": row.default}


def table_values(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a command that are options of the table."""
    return {row.name: params[row.name] for row in in_place("command") if row.name in params}
