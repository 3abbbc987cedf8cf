"""`hpcenv init`."""

from __future__ import annotations

import os

import click

from hpcenv.cli import _render
from hpcenv.locking.init import init


@click.command("init")
@click.option(
    "--image",
    default="host",
    show_default=True,
    help="Image to use: docker://HOST/NAME:TAG; or host, for no container.",
)
@click.option("--python", help="Python interpreter: a path (with --image host), or a name inside the image.")
@click.option("--plain-http", multiple=True, metavar="HOST:PORT", help="Registry that hpcenv uses without TLS.")
@click.option(
    "--force", is_flag=True, help="Replace the existing hpcenv.toml; your changes in the existing file are lost."
)
@_render.json_option
def command(image: str, python: str | None, plain_http: tuple[str, ...], force: bool, as_json: bool) -> None:
    """Write a commented hpcenv.toml into the current folder, and hpcenv.schema.json for your editor.

    This command already refuses an image or an interpreter that `hpcenv lock` would refuse.
    """
    result = init(_render.cwd(), environ=os.environ, image=image, python=python, plain_http=plain_http, force=force)
    if as_json:
        _render.success("init", result)
        return
    _render.say(f"wrote {result.path.name}: image = {result.image}")
    _render.tell("\nnext: hpcenv lock")
