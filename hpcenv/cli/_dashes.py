"""A command that keeps the arguments after `--` apart from its own optional arguments."""

from __future__ import annotations

import click

_KEY = "hpcenv.after-dashes"


class WithDashes(click.Command):
    """Keeps the arguments after `--` apart: click alone would use them for the command's optional arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            index = args.index("--")
            ctx.meta[_KEY] = tuple(args[index + 1 :])
            args = args[:index]
        return super().parse_args(ctx, args)


def after_dashes() -> tuple[str, ...] | None:
    """Return the arguments after `--`; None without `--`."""
    arguments: tuple[str, ...] | None = click.get_current_context().meta.get(_KEY)
    return arguments
