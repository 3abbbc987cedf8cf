"""`hpcenv image`: images and their SIFs.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import click

from hpcenv.cli._group import LazyGroup

# Command -> its one-line help.
VERBS = {
    "pull": "Convert an image to a SIF in the store.",
    "build": "Make the project's SIF, or one from a definition file or Dockerfile.",
    "verify": "Check that a SIF contains what its image's layers contain.",
    "inspect": "Describe a SIF and its origin, or print its path.",
    "list": "List the images in the store.",
    "prune": "Remove images that were not used lately.",
    "init": "Write a Dockerfile and a definition file for a torch release.",
    "refresh": "Make the project's image again, with the packages of today.",
    "lint": "Look for problems in recipes and images.",
}


@click.group(
    "image",
    cls=LazyGroup,
    verbs=VERBS,
    package="hpcenv.cli.image",
    modules={"list": "listing"},
    context_settings={"help_option_names": ["-h", "--help"], "terminal_width": 80},
)
def command() -> None:
    """Convert images to SIFs, store and verify them, and make new images."""
