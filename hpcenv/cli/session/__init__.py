"""`hpcenv session`: work in the locked environment, in a job.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import click

from hpcenv.cli._group import LazyGroup

# Command -> its one-line help.
VERBS = {
    "start": "Start a session: a job in which you work.",
    "open": "Say how your laptop opens the web pages of a session.",
    "ssh-config": "Print what ssh on your laptop needs to reach a session.",
    "connect": "Serve one connection of ssh to a session (ssh starts it).",
}


@click.group(
    "session",
    cls=LazyGroup,
    verbs=VERBS,
    package="hpcenv.cli.session",
    modules={"ssh-config": "ssh_config"},
    context_settings={"help_option_names": ["-h", "--help"], "terminal_width": 80},
)
def command() -> None:
    """Work in the locked environment: a shell, ssh, editors and web pages in a job.

    The commands list, status, logs, attach and cancel can be used for sessions, too.
    """
