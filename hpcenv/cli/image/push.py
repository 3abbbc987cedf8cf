"""`hpcenv image push`.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from typing import Any

import click

from hpcenv import size
from hpcenv.cli import _progress, _render
from hpcenv.cli.image import _conversion
from hpcenv.image.reference import parse_sif_reference
from hpcenv.image.sif_registry import push_sif


@click.command("push")
@click.argument("sif", type=click.Path())
@click.argument("reference")
@_conversion.registry_options
@_render.json_option
def command(sif: str, reference: str, as_json: bool, **values: Any) -> None:
    """Upload a SIF to a registry, and print the reference that names it by digest.

    REFERENCE is oras://HOST/NAME:TAG. `hpcenv image pull` and `apptainer pull` fetch it from
    there. The login is that of docker, podman or Apptainer. What the registry has is not
    uploaded again.
    """
    target = parse_sif_reference(reference)
    access = _conversion.registry_access(target, values)
    with _conversion.own_plain_http_hint(target.api_host), _progress.shown(as_json=as_json) as on_event:
        pushed = push_sif(_render.cwd() / sif, target, access, on_event=on_event)
    if as_json:
        _render.success("image push", pushed)
        return
    state = "uploaded" if pushed.uploaded else "the registry had it"
    _render.tell(f"{pushed.reference}: sha256 {pushed.sha256}, {size.shown(pushed.size)}, {state}")
    _render.say(pushed.by_digest)
