"""`hpcenv kernel`: Jupyter kernels in the locked environment.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import click

from hpcenv.cli._group import LazyGroup

# Command -> its one-line help.
VERBS = {"install": "Install a Jupyter kernel that starts in the locked environment."}


@click.group(
    "kernel",
    cls=LazyGroup,
    verbs=VERBS,
    package="hpcenv.cli.kernel",
    context_settings={"help_option_names": ["-h", "--help"], "terminal_width": 80},
)
def command() -> None:
    """Jupyter kernels that start in the locked environment."""
