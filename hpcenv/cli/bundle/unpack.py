"""`hpcenv bundle unpack`."""

from __future__ import annotations

from pathlib import Path

import click

from hpcenv.cli import _progress, _render
from hpcenv.cli._terminal import escape_control
from hpcenv.reproduction.bundle.archive import Archive, counted


@click.command("unpack")
@click.argument("file", type=click.Path())
@click.argument("folder", required=False)
@_render.json_option
def command(file: str, folder: str | None, as_json: bool) -> None:
    """Unpack a bundle into a new folder. Without FOLDER, the archive names the folder.

    The checksum of every file is checked while the file is written. A bundle that would write outside
    the folder is refused before anything is written.
    """
    with _progress.shown(as_json=as_json) as on_event, Archive(Path(file)) as archive:
        target = _render.cwd() / (folder or archive.folder)
        archive.unpack(target, step=counted(on_event, "stage", archive.path.name, archive.size))
    if as_json:
        _render.success("bundle unpack", {"folder": target})
    else:
        _render.say(escape_control(str(target)))
