"""`hpcenv data fetch`.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os

import click

from hpcenv import size
from hpcenv.cli import _accept, _progress, _render
from hpcenv.errors import UsageError
from hpcenv.hub.access import find_access
from hpcenv.hub.fetch import FetchedTree, fetch
from hpcenv.image.store.store_folder import open_place
from hpcenv.project.hub_reference import parse_locked


@click.command("fetch")
@click.option(
    "--check", is_flag=True, help="Also read the files that are already in the store, and compare their hashes."
)
@_accept.option
@_render.store_option
@_render.json_option
def command(check: bool, accept: str | None, where: _render.Where, as_json: bool) -> None:
    """Fetch the repositories that [[data]] in hpcenv.toml names with `hub`, into the store.

    Every file is compared with the hash that the hub lists for this file. After an interruption
    the same command continues. HF_ENDPOINT names the hub. HF_TOKEN or `hf auth login` gives the
    token. Only this command and `hpcenv data resolve` use the hub and the token; the nodes do not use them.
    """
    workspace = where.project()
    named = [one for one in workspace.project.data if one.hub is not None]
    if not named:
        raise UsageError(
            "there is nothing to fetch",
            why=f"no [[data]] in {workspace.spec} names a repository of a hub",
            hint='add [[data]] with hub = "ORG/NAME@COMMIT"',
        )
    access = find_access(os.environ)
    if where.is_projects:
        _accept.require_paths(accept, as_json=as_json)
    fetched = []
    with _progress.shown(as_json=as_json) as on_event:
        store = open_place(where.place(), create=True)
        for one in named:
            wanted = parse_locked(one.hub or "")
            fetched.append(fetch(wanted, one.files, access, store, check=check, on_event=on_event))
    if as_json:
        _render.success("data fetch", {"endpoint": access.endpoint, "data": fetched})
        return
    for tree in fetched:
        _render.say(_line(tree, check=check))


def _line(tree: FetchedTree, *, check: bool) -> str:
    state = "is there" if tree.already else "fetched, each file as the hub lists it"
    if tree.already and check:
        state = "is there, each file as the hub lists it"
    return f"{tree.hub}: {tree.files} files, {size.shown(tree.size)}: {state}\n  {tree.path}"
