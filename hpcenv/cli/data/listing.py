"""`hpcenv data list`.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import click

from hpcenv import size
from hpcenv.cli import _render
from hpcenv.errors import Command
from hpcenv.hub.stored import list_stored, partial_bytes


@click.command("list")
@_render.store_option
@_render.json_option
def command(where: _render.Where, as_json: bool) -> None:
    """List the repositories of a hub that are in the store, with their folders.

    To remove a repository that no project needs any more, delete its folder and the .json
    beside the folder. Deleting the folder alone frees no space, because STORE/hub/blobs contains each file, too. To
    free the space, delete STORE/hub/blobs as well. The other repositories keep their files, and `hpcenv data fetch`
    makes the folder STORE/hub/blobs again.
    """
    place = where.place()
    stored = list_stored(place)
    partial = partial_bytes(place)
    if as_json:
        _render.success("data list", {"store": str(place.root), "data": stored, "partial": partial})
        return
    if partial:
        what = f"{size.shown(partial)} of downloads that are not complete are in {place.root}/hub/blobs/parts"
        then = f"`{Command('hpcenv', 'data', 'fetch')}` continues them, and removes those that are older than a week"
        _render.tell(f"{what}; {then}")
    if not stored:
        _render.tell(f"{place.root} has no data of a hub; `{Command('hpcenv', 'data', 'fetch')}` brings them")
        return
    for one in stored:
        part = f" ({', '.join(one.patterns)})" if one.patterns else ""
        _render.say(f"{one.hub}{part}: {one.files} files, {size.shown(one.size)}\n  {one.path}")
