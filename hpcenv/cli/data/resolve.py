"""`hpcenv data resolve`.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
from dataclasses import replace

import click

from hpcenv.cli import _render
from hpcenv.errors import UsageError
from hpcenv.hub.access import find_access
from hpcenv.hub.fetch import resolve
from hpcenv.project.hub_reference import parse_repository


@click.command("resolve")
@click.argument("repository")
@_render.json_option
def command(repository: str, as_json: bool) -> None:
    """Print REPOSITORY with the commit that its branch or tag names now, in the form for [[data]].

    REPOSITORY is ORG/NAME or ORG/NAME@BRANCH for a model. For a data set, REPOSITORY is datasets/ORG/NAME, and for a
    space, spaces/ORG/NAME. The default branch is `main`.
    """
    try:
        wanted = parse_repository(repository)
    except ValueError as error:
        raise UsageError(str(error), hint="ORG/NAME for a model; datasets/ORG/NAME, spaces/ORG/NAME") from error
    access = find_access(os.environ)
    commit = resolve(wanted, access)
    found = replace(wanted, revision=commit)
    if as_json:
        _render.success("data resolve", {"hub": str(found), "revision": wanted.revision, "endpoint": access.endpoint})
        return
    _render.say(f'hub = "{found}"')
