"""`hpcenv image pull`.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import click

from hpcenv.cli import _accept, _progress, _render
from hpcenv.cli._help_all import GroupedCommand
from hpcenv.cli.image import _conversion
from hpcenv.container import runtime
from hpcenv.errors import UsageError
from hpcenv.image.pull import BuiltImage, ConvertOptions, ImageRequest, pull
from hpcenv.image.reference import Reference, SifReference, parse_sif_reference
from hpcenv.image.sif_proof import request_options
from hpcenv.image.sif_registry import OTHER_COMPRESSION, fetch_sif, resolve_sif
from hpcenv.image.store.store_folder import open_place


@click.command("pull", cls=GroupedCommand)
@click.argument("reference")
@_conversion.image_options
@click.option("--allow-floating", is_flag=True, help="Accept an image without a tag or with the tag `latest`.")
@_conversion.convert_options
@_accept.option
@_render.store_option
@_render.json_option
def command(
    reference: str, accept: str | None, as_json: bool, where: _render.Where, allow_floating: bool, **values: Any
) -> int:
    """Convert an image to a SIF in the store, and print the path of the SIF.

    REFERENCE is docker://HOST/NAME:TAG, oci:DIR, oci-archive:FILE or docker-archive:FILE.
    hpcenv resolves the tag once, downloads the layers, and checks and stores them. What
    the store already has is not downloaded or converted again. If REFERENCE contains a digest (NAME@sha256:...) and
    the store has this image, hpcenv does not contact the registry. oras://HOST/NAME:TAG names a finished SIF, and
    hpcenv downloads this SIF and checks its digest.
    """
    if reference.startswith(f"{SifReference.scheme}://"):
        return _pull_sif(
            parse_sif_reference(reference), accept, where, values, floating=allow_floating, as_json=as_json
        )
    request = _conversion.image_request(_conversion.layered_image(reference), values, allow_floating=allow_floating)
    if where.is_projects:
        _accept.require_paths(accept, as_json=as_json)
    with _progress.shown(as_json=as_json) as on_event:
        result = pull(request, _conversion.chosen(values), place=where.place(), environ=os.environ, on_event=on_event)
    return _conversion.show_result(
        "image pull", result, as_json=as_json, verify=_verify_command(request, result, where)
    )


def _pull_sif(
    wanted: SifReference,
    accept: str | None,
    where: _render.Where,
    values: dict[str, Any],
    *,
    floating: bool,
    as_json: bool,
) -> int:
    """Fetch a finished SIF into the store."""
    if _conversion.chosen(values) != ConvertOptions():
        raise UsageError(
            f"`{wanted}` is a finished SIF", why="nothing is converted or compared with layers",
            hint="leave out the options of a conversion",
        )  # fmt: skip
    access = _conversion.registry_access(wanted, values)
    if where.is_projects:
        _accept.require_paths(accept, as_json=as_json)
    with _progress.shown(as_json=as_json) as on_event:
        spec = resolve_sif(wanted, access, allow_floating=floating, on_event=on_event)
        store = open_place(where.place(), create=True)
        result = fetch_sif(wanted, spec, access, platform=values["platform"], store=store, on_event=on_event)
    unreadable = runtime.unreadable_here(result.record.sif.compression, os.environ)
    if unreadable:
        result = replace(result, notes=(*result.notes, f"{unreadable}; {OTHER_COMPRESSION}"))
    return _conversion.show_result("image pull", result, as_json=as_json)


def _verify_command(request: ImageRequest, result: BuiltImage, where: _render.Where) -> str:
    """Return the command that verifies this SIF. The command also works if the tag later names another image."""
    source, digest = request.source, result.record.manifest_digest
    if isinstance(source, Reference) and digest is not None:
        source = replace(source, digest=digest)
    return _render.quoted(("hpcenv", "image", "verify", str(source), *request_options(request), *where.options()))
