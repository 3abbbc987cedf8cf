"""Help in groups: `--help` shows the options that most users need, and `--help-all` shows all options."""

from __future__ import annotations

from typing import Any

import click

from hpcenv.project.options import GROUPS

WHOLE = "hpcenv.help-all"  # if this key is in click's `meta`, the help also shows rare options


class RareOption(click.Option):
    """An option that few users need: `--help` leaves it out, `--help-all` shows it."""

    rare = True


class GroupedOption(click.Option):
    """A click option with the group under which the help shows the option, and with a flag for rare options."""

    def __init__(self, *args: Any, group: str, rare: bool = False, **words: Any) -> None:
        super().__init__(*args, **words)
        self.group, self.rare = group, rare

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return nothing, so that click adds no default and no range. The help text names them where needed."""
        del ctx
        return {}


def _show_whole(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        context.meta[WHOLE] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


_HELP_ALL = click.Option(
    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_whole,
    help="Show all options and exit; --help shows those that most users need.",
)  # fmt: skip


class GroupedCommand(click.Command):
    """A command whose help shows its options in groups. Rare options are shown only by --help-all."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), _HELP_ALL]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        last = GROUPS[-1] if any(isinstance(one, GroupedOption) for one in params) else "Options"
        shown: dict[str, list[tuple[str, str]]] = {}
        for option in params:
            record = option.get_help_record(ctx)
            if record is not None and (WHOLE in ctx.meta or not getattr(option, "rare", False)):
                shown.setdefault(getattr(option, "group", last), []).append(record)
        for group in sorted(shown, key=(*GROUPS, "Options").index):
            with formatter.section(group):
                formatter.write_dl(shown[group])
