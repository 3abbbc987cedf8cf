"""`hpcenv bundle verify`."""

from __future__ import annotations

from pathlib import Path

import click

from hpcenv.cli import _progress, _render
from hpcenv.cli._terminal import escape_control
from hpcenv.errors import BundleInvalid
from hpcenv.reproduction.bundle.bundle_check import VerifiedBundle, verify_bundle
from hpcenv.text import wrap


@click.command("verify")
@click.argument("file", type=click.Path())
@_render.json_option
def command(file: str, as_json: bool) -> int:
    """Say whether a bundle is complete and unchanged. This command executes and writes nothing.

    The check needs no Slurm, no container runtime and no GPU. hpcenv ends with 0 if everything matches, and with 45
    if something was changed or cannot be compared. The check does not say who made the bundle.
    """
    with _progress.shown(as_json=as_json) as on_event:
        verified = verify_bundle(Path(file), on_event=on_event)
    if as_json:
        _render.verdict_on("bundle verify", verified, ok=verified.result == "match")
    else:
        for line in lines_of(verified):
            _render.say(line)
    return 0 if verified.result == "match" else BundleInvalid.exit_status


def lines_of(verified: VerifiedBundle) -> list[str]:
    """Return the lines to print. They say what was checked."""
    lines = []
    for check in verified.checks:
        text = f"{check.name:9} {check.result.upper() if check.result != 'match' else 'match':9} {check.detail}"
        lines.append(wrap(escape_control(text), indent=20))
    lines += [f"left out: {escape_control(path)}: {escape_control(why)}" for path, why in verified.left_out.items()]
    return lines
