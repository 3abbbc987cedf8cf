"""`hpcenv init`."""

from __future__ import annotations

import os

import click

from hpcenv.cli import _render
from hpcenv.project.init import init


@click.command("init")
@click.option("--image", default="host", show_default=True, help="docker://HOST/NAME:TAG, or host.")
@click.option("--python", help="The interpreter: a path (host), or a name inside the image.")
@click.option("--plain-http", multiple=True, metavar="HOST:PORT", help="A registry that is spoken to without TLS.")
@_render.json_option
def command(image: str, python: str | None, plain_http: tuple[str, ...], as_json: bool) -> None:
    """Write a commented hpcenv.toml into the current folder."""
    result = init(_render.cwd(), environ=os.environ, image=image, python=python, plain_http=plain_http)
    if as_json:
        _render.success("init", result)
        return
    _render.say(f"wrote {result.path.name}: image = {result.image}")
    _render.tell("\nnext: hpcenv lock")
