"""Classes for commands that store which arguments were typed after `--`."""

from __future__ import annotations

import click

_KEY = "hpcenv.after-dashes"


class KnowsDashes(click.Command):
    """Stores which arguments were typed after `--`, because click does not distinguish them from other arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _remember(ctx, args)
        return super().parse_args(ctx, args)


class WithDashes(click.Command):
    """Removes the arguments after `--` and stores them, because click would use them as arguments of the command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _remember(ctx, args))


def _remember(ctx: click.Context, args: list[str]) -> list[str]:
    """Store the arguments after `--`, and return the arguments before `--`."""
    if "--" not in args:
        return args
    index = args.index("--")
    ctx.meta[_KEY] = tuple(args[index + 1 :])
    return args[:index]


def after_dashes() -> tuple[str, ...] | None:
    """Return the arguments after `--`; None if `--` was not typed."""
    arguments: tuple[str, ...] | None = click.get_current_context().meta.get(_KEY)
    return arguments
