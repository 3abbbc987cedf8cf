"""Options and commands whose help has no indentation to strip: click loads `inspect` for that."""

from __future__ import annotations

import functools
from typing import Any

import click


class Option(click.Option):
    """An option; its help is one line."""

    def __init__(self, *args: Any, help: str | None = None, **words: Any) -> None:  # noqa: A002  (click's word)
        super().__init__(*args, **words)
        self.help = help


option = functools.partial(click.option, cls=Option)


class Command(click.Command):
    """A command with such a help option."""

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        return help_option(self, ctx)


def help_option(command: click.Command, ctx: click.Context) -> click.Option | None:
    """Return a command's `--help`, which is what click makes it."""
    names = command.get_help_option_names(ctx)
    if not names or not command.add_help_option:
        return None
    words: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": _show_help}
    return Option(names, **words, help="Show this message and exit.")


def _show_help(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()
