"""A group of commands. The module of a command is imported only when the command is used."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

import click

from hpcenv.cli import _other_words


class LazyGroup(click.Group):
    """A click group with a table of commands. Its `--help` imports no module of a command.

    Args:
        verbs: name of a command -> its one-line help, in the order of the help.
        package: the package with the modules of the commands. Each module has a click command named `command`.
        modules: name of a command -> name of its module, if the names differ (`list` is a built-in of Python).
    """

    def __init__(
        self,
        *args: Any,
        verbs: Mapping[str, str],
        package: str,
        modules: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._verbs = verbs
        self._package = package
        self._modules = modules or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._verbs:
            return None
        module = importlib.import_module(f"{self._package}.{self._modules.get(cmd_name, cmd_name)}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self._verbs and not args[0].startswith("-"):
            self.answer_other_word(ctx, args)
            close = difflib.get_close_matches(args[0], self._verbs, n=1)
            ctx.fail(f"No such command '{args[0]}'" + (f". Did you mean '{close[0]}'?" if close else ""))
        return super().resolve_command(ctx, args)

    def answer_other_word(self, ctx: click.Context, typed: list[str]) -> None:
        """If the user typed another program's name for a command, raise an error that names hpcenv's command."""
        answer = _other_words.command(ctx.command_path, typed)
        if answer is not None:
            raise answer

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # click's own method is not used, because it imports every command to get its help.
        with formatter.section("Commands"):
            formatter.write_dl(list(self._verbs.items()))
