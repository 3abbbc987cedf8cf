"""The options of `hpcenv submit` and `hpcenv rerun`: made from the table of options, and shown in groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from hpcenv.cli._complete import lockfile_names
from hpcenv.project import options
from hpcenv.project.options import GROUPS, in_place

_GROUP = "Output"


class GroupedOption(click.Option):
    """An option of click that knows the group under which the help shows it."""

    def __init__(self, *args: Any, group: str = _GROUP, **words: Any) -> None:
        super().__init__(*args, **words)
        self.group = group

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Add nothing to the help text: it says the default and the range where they matter."""
        del ctx
        return {}


class _Whole(click.IntRange):
    """A whole number, and an error that says so: `--nodes two`, `--nodes 2-4`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if str(value).strip().removeprefix("-").isdecimal():
            return int(super().convert(value, param, ctx))
        return self.fail(f"{value!r} is not a whole number from {self.min} on", param, ctx)


class GroupedCommand(click.Command):
    """A command whose help shows its options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group in GROUPS:
            records = [
                record
                for option in self.get_params(ctx)
                if isinstance(option, click.Option)
                if getattr(option, "group", _GROUP) == group and (record := option.get_help_record(ctx)) is not None
            ]
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)


def submit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command all options of the table that can be set on the command line."""
    for row in reversed(in_place("command")):
        command = click.option(*_spelling(row), row.name, cls=GroupedOption, **_words(row))(command)
    return command


def table_option(name: str, note: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives another command one option of the table.

    Args:
        name: of the row.
        note: a sentence for the help, about this command.
    """
    row = next(row for row in in_place("command") if row.name == name)
    words = _words(row)
    return click.option(*_spelling(row), row.name, cls=GroupedOption, **{**words, "help": f"{row.help} {note}".strip()})


def _spelling(row: options.Option) -> tuple[str, ...]:
    if row.kind == "switch":
        return (f"{row.flag}/--no-{row.key}",)
    return (f"-{row.letter}", row.flag) if row.letter else (row.flag,)


def _words(row: options.Option) -> dict[str, Any]:
    words: dict[str, Any] = {"group": row.group, "help": row.help, "metavar": row.metavar or None}
    if row.kind == "flag":
        return {**words, "is_flag": True}
    if row.kind == "switch":
        return {**words, "default": True}
    if row.kind == "count":
        return {**words, "metavar": row.metavar or "N", "type": _Whole(min=row.minimum)}
    if row.kind == "choice":
        return {**words, "type": click.Choice(row.choices)}
    if row.name == "lock":
        words["shell_complete"] = lockfile_names
    return {**words, "multiple": row.kind in ("texts", "variables", "secrets", "native"), "default": row.default}


def table_values(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a command's parameters that are options of the table."""
    return {row.name: params[row.name] for row in in_place("command") if row.name in params}
