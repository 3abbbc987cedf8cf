"""`hpcenv image init`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from hpcenv.cli import _render
from hpcenv.cli.image import _conversion


@click.command("init")
@click.option("--torch", metavar="X.Y.Z", help="torch release; the lock's, or the newest that fits.")
@click.option("--cuda", metavar="X.Y|cpu", help="CUDA of the torch build; else that of the default index.")
@click.option("--python", metavar="3.X", help="Python; else the distribution's own.")
@click.option("--os", "system", default="bookworm", show_default=True, help="bookworm, trixie or ubuntu24.04.")
@click.option("--pylock", "lock", metavar="FILE", help="pylock.toml, uv.lock or requirements with hashes.")
@click.option("--with", "extra", multiple=True, metavar="REQ", help="One more package for pip; without --pylock.")
@click.option("--apt", "packages", multiple=True, metavar="NAME", help="One more package for apt.")
@click.option("--base", metavar="REF", help="Base image NAME[:TAG][@sha256:...], or a SIF.")
@click.option("--base-python", is_flag=True, help="The base brings the Python: install none.")
@click.option("--name", default="train", show_default=True, help="Name of the image.")
@click.option("--out", default="image", show_default=True, metavar="DIR", help="Folder for the files.")
@_conversion.plain_http
@click.option("--compat-file", metavar="FILE", help="Another compatibility table.")
@click.option("--force", is_flag=True, help="Replace files that hpcenv did not write.")
@_render.json_option
def command(as_json: bool, out: str, lock: str | None, compat_file: str | None, base: str | None, **words: Any) -> int:
    """Write a Dockerfile and an equivalent Apptainer definition file.

    torch, CUDA and Python are checked against the compatibility table, the base is named
    by digest, and every package by its sha256. pip and apt use their own configuration.
    """
    from hpcenv.steps.image.init import init

    if lock is not None and words["extra"]:
        raise click.UsageError("--with adds to what pip resolves; with --pylock the lock is all there is")
    here = _render.cwd()
    if base is not None and base.endswith(".sif"):
        base = os.path.abspath(here / base)
    result = init(
        Path(os.path.abspath(here / out)),
        environ=os.environ,
        name=words["name"],
        torch=words["torch"],
        cuda=words["cuda"],
        python=words["python"],
        system=words["system"],
        lock=None if lock is None else Path(os.path.abspath(here / lock)),
        extra=words["extra"],
        base=base,
        base_has_python=words["base_python"],
        system_packages=words["packages"],
        plain_http=words["plain_http"],
        table=None if compat_file is None else Path(os.path.abspath(here / compat_file)),
        force=words["force"],
    )
    if as_json:
        _render.success("image init", result)
        return 0
    for note in result.notes:
        _render.tell(f"note: {note}")
    cuda = "CPU only" if result.cuda == "cpu" else f"CUDA {result.cuda}"
    _render.say(f"{result.image}: torch {result.torch}, {cuda}, Python {result.python}, {result.packages} packages")
    _render.say(f"base {result.base}")
    _render.say(f"wrote {', '.join(str(path.relative_to(result.folder)) for path in result.files)} to {result.folder}")
    return 0
