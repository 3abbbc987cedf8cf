"""`hpcenv sign`. Runs on: LOGIN NODE."""

from __future__ import annotations

from pathlib import Path

import click

from hpcenv.cli import _render
from hpcenv.cli._terminal import escape_control
from hpcenv.reproduce.signature import sign


@click.command("sign")
@click.argument("file", type=click.Path())
@click.option("--key", required=True, metavar="FILE", help="Private SSH key, or the public one of a key in your agent.")
@_render.json_option
def command(file: str, key: str, as_json: bool) -> None:
    """Sign a lockfile, a bundle or the verdict of a reproduction with an SSH key.

    Writes FILE.statement.json and its signature, FILE.statement.json.sig, beside FILE. Publish
    all three. A verdict (`hpcenv reproduce --statement FILE`) is a statement itself: it gets
    FILE.sig alone. `hpcenv verify --signature FILE --signers SIGNERS` verifies them, and so does
    `ssh-keygen -Y verify`.
    """
    signed = sign(Path(file), Path(key).expanduser())
    if as_json:
        _render.success("sign", signed)
        return
    _render.say(f"signed the {signed.kind} with sha256 {signed.sha256}")
    for path in dict.fromkeys((signed.statement, signed.signature)):
        _render.say(f"  {escape_control(str(path))}")
