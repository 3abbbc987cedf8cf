"""`hpcenv net`: the network settings of runs.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import click

from hpcenv.cli._group import LazyGroup

# Command -> its one-line help.
VERBS = {
    "explain": "Say which network settings a run gets, and why.",
    "diff": "Say what differs between the networks of two runs.",
}


@click.group(
    "net",
    cls=LazyGroup,
    verbs=VERBS,
    package="hpcenv.cli.net",
    context_settings={"help_option_names": ["-h", "--help"], "terminal_width": 80},
)
def command() -> None:
    """Explain and compare the network settings of runs."""
