"""`hpcenv image path`."""

from __future__ import annotations

import click

from hpcenv.cli import _render
from hpcenv.errors import UsageError


@click.command("path")
@click.argument("image", required=False)
@click.option("--lock", "lock", metavar="NAME", help="The image of lockfiles/NAME.lock.toml.")
@_render.store_option
@_render.json_option
def command(image: str | None, lock: str | None, where: _render.Where, as_json: bool) -> None:
    """Print where the SIF of IMAGE lies: a reference, a digest or the begin of one.

    Without IMAGE, the image of the project's lockfile. Ends with 10 when it is not in the
    store.
    """
    from hpcenv.steps.image.path import find_locked, find_path

    if image is not None and lock is not None:
        raise UsageError("IMAGE and --lock exclude each other", hint="hpcenv image path --help")
    if image is not None:
        found = find_path(where.place(), image)
    else:
        from hpcenv.steps.workspace import DEFAULT_LOCK, read_lockfile

        workspace = where.project()
        origin = workspace.lockfile_path(lock or DEFAULT_LOCK)
        found = find_locked(workspace.store_place, read_lockfile(origin), origin=origin, root=workspace.root)
    if as_json:
        _render.success("image path", found)
        return
    _render.say(str(found.path))
