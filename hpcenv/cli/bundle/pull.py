"""`hpcenv bundle pull`."""

from __future__ import annotations

from typing import Any

import click

from hpcenv.cli import _progress, _render
from hpcenv.cli._terminal import escape_control
from hpcenv.cli.image import _conversion
from hpcenv.errors import BundleInvalid
from hpcenv.image.reference import parse_sif_reference
from hpcenv.reproduce.bundle.registry import pull_bundle


@click.command("pull")
@click.argument("reference")
@click.option("-o", "--output", metavar="FILE", help="The archive. Default: its name in the registry, in this folder.")
@_conversion.registry_options
@_render.json_option
def command(reference: str, output: str | None, as_json: bool, **values: Any) -> int:
    """Fetch a bundle from a registry, verify it, and print its path.

    REFERENCE is oras://HOST/NAME:TAG or oras://HOST/NAME@sha256:... A signature in the registry
    is written beside the file. Ends with 45 if the bundle is damaged, or if a lockfile or
    record that is attached to it is not the one in it.
    """
    wanted = parse_sif_reference(reference)
    access = _conversion.registry_access(wanted, values)
    target = None if output is None else _render.cwd() / output
    with _conversion.own_plain_http_hint(wanted.api_host), _progress.shown(as_json=as_json) as on_event:
        pulled = pull_bundle(wanted, target, _render.cwd(), access, on_event=on_event)
    if as_json:
        _render.verdict_on("bundle pull", pulled, ok=pulled.same)
    else:
        _render.tell(f"{pulled.by_digest}: sha256 {pulled.sha256}")
        for one in pulled.attached:
            _render.tell(f"attached: {one.kind} {one.digest}{f': {one.result.upper()}' if one.result else ''}")
        _render.say(escape_control(str(pulled.path)))
    return 0 if pulled.same else BundleInvalid.exit_status
