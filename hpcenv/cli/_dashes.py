"""A verb whose words after `--` are not its own, also where the words before it are optional."""

from __future__ import annotations

import click

_KEY = "hpcenv.after-dashes"


class WithDashes(click.Command):
    """Keeps what stands after `--` apart: click alone would fill the verb's arguments with it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            place = args.index("--")
            ctx.meta[_KEY] = tuple(args[place + 1 :])
            args = args[:place]
        return super().parse_args(ctx, args)


def after_dashes() -> tuple[str, ...] | None:
    """Return the words after `--`; None where there is no `--`."""
    found: tuple[str, ...] | None = click.get_current_context().meta.get(_KEY)
    return found
