"""`hpcenv image init`.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from hpcenv.cli import _render
from hpcenv.project.workspace import SPEC_NAME, open_workspace
from hpcenv.recipes.combination import DISTRIBUTIONS
from hpcenv.recipes.init import WrittenRecipe, init


@click.command("init")
@click.option("--torch", metavar="X.Y.Z", help="torch release. Default: the locked one, or the newest that fits.")
@click.option("--cuda", metavar="X.Y|cpu", help="CUDA of the torch build. Default: that of the default index.")
@click.option("--python", metavar="3.X", help="Python version. Default: the distribution's own.")
@click.option(
    "--os", "distribution", metavar="NAME", default="bookworm", show_default=True, help=f"{', '.join(DISTRIBUTIONS)}."
)
@click.option("--pylock", metavar="FILE", help="Locked packages: pylock.toml, uv.lock or requirements with hashes.")
@click.option("--base", metavar="IMAGE", help="Image to start from: NAME[:TAG][@sha256:...], or a SIF.")
@click.option("--tag", default="train", show_default=True, metavar="NAME[:TAG]", help="Name of the new image.")
@click.option("-o", "--output", default="image", show_default=True, metavar="DIR", help="Folder for the files.")
@click.option("--force", is_flag=True, help="Replace files that hpcenv did not write.")
@_render.json_option
def command(
    output: str, pylock: str | None, base: str | None, as_json: bool, tag: str, force: bool, **options: Any
) -> int:
    """Write a Dockerfile and an Apptainer definition file that make the same image.

    torch, CUDA and Python are checked against the compatibility table. The files name the
    base by digest and every package by sha256. pip and apt use their own configuration.
    """
    here = _render.cwd()
    if base is not None and base.endswith(".sif"):
        base = os.path.abspath(here / base)
    result = init(
        Path(os.path.abspath(here / output)),
        environ=os.environ,
        tag=tag,
        pylock=None if pylock is None else Path(os.path.abspath(here / pylock)),
        base=base,
        force=force,
        **_project_settings(here),
        **options,
    )
    if as_json:
        _render.success("image init", result)
        return 0
    _show(result)
    return 0


def _project_settings(here: Path) -> dict[str, Any]:
    """Return the registries without TLS and the compatibility table of hpcenv.toml, if `here` is in a project."""
    if not any((folder / SPEC_NAME).is_file() for folder in (here, *here.parents)):
        return {}
    workspace = open_workspace(here)
    table = workspace.project.submit.compat_file
    return {
        "plain_http": workspace.project.plain_http,
        "compat_file": None if table is None else workspace.root / os.path.expanduser(table),
    }


def _show(result: WrittenRecipe) -> None:
    for note in result.notes:
        _render.tell(f"note: {note}")
    cuda = "CPU only" if result.cuda == "cpu" else f"CUDA {result.cuda}"
    _render.say(f"{result.image}: torch {result.torch}, {cuda}, Python {result.python}, {result.packages} packages")
    _render.say(f"base {result.base}")
    _render.say(f"wrote {', '.join(str(path.relative_to(result.folder)) for path in result.files)} to {result.folder}")
