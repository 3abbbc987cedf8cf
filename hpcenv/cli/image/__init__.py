"""`hpcenv image`: images and their SIFs."""

from __future__ import annotations

import click

from hpcenv.cli._group import VerbGroup

# Verb -> its one-line help: getting an image, looking at what is there, making one.
VERBS = {
    "pull": "Convert an image to a SIF in the store.",
    "build": "Make the project's SIF, or one from a definition file.",
    "verify": "Prove that a SIF holds what its image's layers hold.",
    "inspect": "Say what a SIF is and where it came from.",
    "list": "List the store's images and who needs them.",
    "path": "Print where the SIF of an image lies.",
    "prune": "Remove what no lockfile and no run needs.",
    "init": "Write a Dockerfile and a definition file for a torch.",
    "lint": "Look for trouble in recipes and images.",
    "rebuild": "Make an image again from a lockfile.",
}


@click.group(
    "image",
    cls=VerbGroup,
    verbs=VERBS,
    package="hpcenv.cli.image",
    modules={"list": "listing"},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)
def command() -> None:
    """Convert images, keep their SIFs, prove them, and make new ones."""
