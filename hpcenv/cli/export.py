"""`hpcenv export`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from hpcenv.cli import _render
from hpcenv.cli._complete import lockfile_names
from hpcenv.locking.export import export, exporters

_FORMATS = exporters()
_HELP = """Write the lockfile in another tool's format.

\b
FORMAT is one of
{formats}

A value that a format cannot contain is left out. The reason is in `left_out` of --json,
and in a comment if the format has comments. Formats that do not ask pip's index need
only the lockfile.

To export a job instead, as a folder that anyone can submit: `hpcenv submit --export DIR`.
"""


def _list_formats() -> str:
    return "\n".join(f"  {exporter.name:<14}{exporter.help}" for exporter in _FORMATS.values())


@click.command("export", help=_HELP.format(formats=_list_formats()))
@click.argument("kind", metavar="FORMAT", type=click.Choice(list(_FORMATS)))
@click.option(
    "--lock",
    metavar="NAME",
    default="default",
    show_default=True,
    help="Lockfile to export: lockfiles/NAME.lock.toml, or the path of any lockfile.",
    shell_complete=lockfile_names,
)
@click.option(
    "-o", "--output", metavar="FILE", help="File to write. Without --output, or with `-`, hpcenv prints the export."
)
@_render.json_option
def command(kind: str, lock: str, output: str | None, as_json: bool) -> None:
    """Export a lockfile; the help text is above."""
    path = None if output in (None, "-") else Path(os.path.abspath(_render.cwd() / str(output)))
    result = export(_render.cwd(), kind, environ=os.environ, lock=lock, output=path)
    if as_json:
        data = {
            "format": result.kind,
            "lockfile": result.lockfile,
            "fingerprint": result.fingerprint,
            "path": result.path,
            "text": result.text if result.path is None else None,
            "count": result.count,
            "left_out": result.left_out,
            "notes": result.notes,
            "replaced": result.replaced,
        }
        _render.success("export", data)
        return
    for note in result.notes:
        _render.tell(f"note: {note}")
    if result.path is None:
        _render.put(result.text.removesuffix("\n") + "\n")
        return
    for package in result.left_out:
        _render.tell(f"left out: {package.name} {package.version}: {package.reason}")
    _render.say(f"{'replaced' if result.replaced else 'wrote'} {result.path} ({result.count} packages)")
