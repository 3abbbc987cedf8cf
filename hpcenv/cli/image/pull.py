"""`hpcenv image pull`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcenv.cli import _progress, _render
from hpcenv.cli.image import _conversion

if TYPE_CHECKING:
    from hpcenv.steps.image.pull import Asked, BuiltImage


@click.command("pull")
@click.argument("reference")
@click.option("--platform", default="linux/amd64", show_default=True, help="Which image of a multi-platform one.")
@_conversion.plain_http_of_reference
@click.option("--ca-file", metavar="FILE", help="Certificates to trust for the registry, in PEM form.")
@click.option("--allow-floating", is_flag=True, help="Accept `latest` or no tag.")
@_conversion.options
@_render.store_option
@_render.json_option
def command(reference: str, as_json: bool, where: _render.Where, **words: Any) -> int:
    """Convert an image to a SIF in the store.

    REFERENCE is docker://HOST/NAME:TAG, oci:DIR, oci-archive:FILE or docker-archive:FILE.
    The tag is resolved once; layers are fetched, checked and kept; the SIF's path is
    printed. What is in the store already is neither fetched nor converted again; for a
    digest, NAME@sha256:..., no registry is asked then.
    """
    from hpcenv.steps.image.pull import Asked, pull

    asked = Asked(
        reference=reference,
        platform=words["platform"],
        plain_http=_conversion.registries(words["plain_http"], reference),
        ca_file=None if words["ca_file"] is None else Path(os.path.abspath(_render.cwd() / words["ca_file"])),
        allow_floating=words["allow_floating"],
        **_conversion.chosen(words),
    )
    with _progress.shown(as_json=as_json) as on_event:
        result = pull(asked, place=where.place(), environ=os.environ, on_event=on_event)
    return _conversion.tell("image pull", result, as_json=as_json, verify=_verify(asked, result, where))


def _verify(asked: Asked, result: BuiltImage, where: _render.Where) -> str:
    """Return the command that proves this very SIF, also when a tag has moved."""
    name, digest = asked.reference, result.record.manifest_digest
    if name.startswith("docker://") and digest is not None:
        name = f"{name.partition('@')[0]}@{digest}"
    words = ["hpcenv", "image", "verify", name]
    words += ["--platform", asked.platform] if asked.platform != "linux/amd64" else []
    for host in asked.plain_http:
        words += ["--plain-http", host]
    words += ["--ca-file", str(asked.ca_file)] if asked.ca_file is not None else []
    return _render.quoted((*words, *where.words()))
