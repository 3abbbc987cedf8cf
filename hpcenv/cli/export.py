"""`hpcenv export`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from hpcenv.cli import _render
from hpcenv.errors import UsageError

if TYPE_CHECKING:
    from hpcenv.model.export import Format


_FORMATS = ("pylock", "requirements", "cyclonedx", "environment")


class _Export(click.Command):
    """The formats of a lockfile; `sbatch` after the verb leads to a command with the flags of `submit`."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == ["sbatch"]:
            from hpcenv.cli._handover import command as sbatch

            return sbatch.make_context(f"{info_name} sbatch", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command("export", cls=_Export)
@click.argument("kind", metavar="FORMAT", type=click.Choice([*_FORMATS, "sbatch"]))
@click.option("--name", default="default", show_default=True, help="Which lockfile: its name, or its path.")
@click.option("-o", "--output", metavar="FILE", help="Write a file; without it, or with `-`, print.")
@_render.json_option
def command(kind: Format | Literal["sbatch"], name: str, output: str | None, as_json: bool) -> None:
    """Write the lockfile in another tool's format.

    FORMAT is pylock (PEP 751, for pip and uv), requirements (with hashes, for pip
    --require-hashes), cyclonedx (a bill of materials, version 1.6) or environment (for
    conda). What the format cannot hold is left out, with the reason in a comment. Only
    pylock asks pip's index, for URLs; the others need nothing but the lockfile.

    `hpcenv export sbatch SCRIPT` writes a folder instead, with a job that anyone can
    submit; it takes the flags of `hpcenv submit`.
    """
    from hpcenv.steps.export import export

    if kind == "sbatch":  # the class above sees it where it comes first
        raise UsageError("`sbatch` comes before every flag", hint="hpcenv export sbatch SCRIPT ... -o DIR")
    place = None if output in (None, "-") else Path(os.path.abspath(_render.cwd() / str(output)))
    result = export(_render.cwd(), kind, environ=os.environ, name=name, output=place)
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
        _render.say(result.text.removesuffix("\n"))
        return
    for one in result.left_out:
        _render.tell(f"left out: {one.name} {one.version}: {one.reason}")
    _render.say(f"{'replaced' if result.replaced else 'wrote'} {result.path} ({result.count} packages)")
