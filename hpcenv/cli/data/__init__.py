"""`hpcenv data`: models and data sets of a hub.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import click

from hpcenv.cli._group import LazyGroup

# Command -> its one-line help.
VERBS = {
    "fetch": "Fetch the repositories that [[data]] names, and check them.",
    "list": "List the repositories of a hub that are in the store.",
    "resolve": "Print the commit that a branch or tag names now.",
}


@click.group(
    "data",
    cls=LazyGroup,
    verbs=VERBS,
    package="hpcenv.cli.data",
    modules={"list": "listing"},
    context_settings={"help_option_names": ["-h", "--help"], "terminal_width": 80},
)
def command() -> None:
    """Fetch models and data sets of a hub, for nodes without network."""
