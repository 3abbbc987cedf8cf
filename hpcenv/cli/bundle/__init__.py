"""`hpcenv bundle`: make and read archives of runs. An archive can be stored in a data repository.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import click

from hpcenv.cli._group import LazyGroup

# Command -> its one-line help.
VERBS = {
    "make": "Make the bundle of a run; `hpcenv bundle RUN` does the same.",
    "verify": "Say whether a bundle is complete and unchanged.",
    "unpack": "Verify a bundle and unpack it into a new folder.",
}


class _WithDefault(LazyGroup):
    """A group of commands. Its first argument may also be a run: `hpcenv bundle RUN` makes a bundle of this run."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # A command of another program, such as `push`, is an error here, not the name of a run. For a run with the name
        # `push`, the user types `hpcenv bundle make push`.
        self.answer_other_word(ctx, args)
        return super().resolve_command(ctx, args if args[0] in VERBS else ["make", *args])


@click.group(
    "bundle",
    cls=_WithDefault,
    verbs=VERBS,
    package="hpcenv.cli.bundle",
    context_settings={"help_option_names": ["-h", "--help"], "terminal_width": 80},
)
def command() -> None:
    """Make an archive of a run (lockfile, code, command, results); verify or unpack an archive."""
