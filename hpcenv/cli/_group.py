"""A group of verbs whose modules are imported only when they are asked for."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import click

from hpcenv.cli import _later, _words

# Verbs that start no threads before they know what they need, and are typed often.
_QUICK = ("submit", "status", "list")


class VerbGroup(click.Group):
    """A click group over a table; `hpcenv --help` loads none of what the verbs need.

    Args:
        verbs: verb -> its one-line help, in the order in which they are shown.
        package: where the verbs' modules lie; each holds its click command as `command`.
        modules: verb -> module name, where the two differ (`list` is no name for a module).
    """

    def __init__(
        self,
        *args: Any,
        verbs: Mapping[str, str],
        package: str,
        modules: Mapping[str, str] | None = None,
        **words: Any,
    ) -> None:
        super().__init__(*args, **words)
        self._verbs = verbs
        self._package = package
        self._modules = modules or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._verbs:
            return None
        if cmd_name not in _QUICK:
            _later.load_now()
        module = importlib.import_module(f"{self._package}.{self._modules.get(cmd_name, cmd_name)}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self._verbs and not args[0].startswith("-"):
            import difflib

            close = difflib.get_close_matches(args[0], self._verbs, n=1)
            ctx.fail(f"No such verb '{args[0]}'" + (f". Did you mean '{close[0]}'?" if close else ""))
        return super().resolve_command(ctx, args)

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        return _words.help_option(self, ctx)

    def get_help(self, ctx: click.Context) -> str:
        ctx.terminal_width = ctx.terminal_width or max(min(_columns(), ctx.max_content_width or 80) - 2, 50)
        return super().get_help(ctx)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # As click does it, for a text that has no indentation.
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(self.help or "")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.epilog:
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(self.epilog)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self._verbs.items()))


def _columns() -> int:
    """Return what shutil.get_terminal_size does; click would import that module, and compression with it, for this."""
    said = os.environ.get("COLUMNS", "")
    if said.isdecimal() and int(said) > 0:
        return int(said)
    try:
        return os.get_terminal_size(sys.__stdout__.fileno()).columns or 80  # type: ignore[union-attr]
    except (AttributeError, ValueError, OSError):
        return 80
