"""`hpcenv bundle push`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from hpcenv.cli import _progress, _render
from hpcenv.cli._complete import run_names
from hpcenv.cli._terminal import escape_control
from hpcenv.cli.bundle.make import run_folder
from hpcenv.cli.image import _conversion
from hpcenv.image.reference import SifReference, parse_sif_reference
from hpcenv.image.registry.source import Access
from hpcenv.progress import OnEvent
from hpcenv.reproduce.bundle.make import SUFFIX, make
from hpcenv.reproduce.bundle.registry import PushedBundle, push_bundle

_SUBJECTS = {
    "image": "the image {0}",
    "sif": "the SIF {0}, in this repository",
    "bundle": "the bundle {0}: its image is not in this repository",
}


@click.command("push")
@click.argument("bundle", metavar="BUNDLE|RUN", shell_complete=run_names)
@click.argument("reference")
@click.option("--runs-dir", "runs", metavar="DIR", help="Folder of runs, if not the project's.")
@_conversion.registry_options
@_render.json_option
def command(bundle: str, reference: str, runs: str | None, as_json: bool, **values: Any) -> None:
    """Upload a bundle, or the bundle of a run, to a registry, and print its name by digest.

    REFERENCE is oras://HOST/NAME:TAG. Lockfile, bill of materials, conversion proof and run
    record are attached to the image's digest, if the image or the SIF is in that repository,
    else to the bundle.
    """
    target = parse_sif_reference(reference)
    access = _conversion.registry_access(target, values)
    with _conversion.own_plain_http_hint(target.api_host), _progress.shown(as_json=as_json) as on_event:
        pushed = _pushed(bundle, target, access, runs, on_event)
    if as_json:
        _render.success("bundle push", pushed)
        return
    _show(pushed)


def _pushed(bundle: str, target: SifReference, access: Access, runs: str | None, on_event: OnEvent) -> PushedBundle:
    path = _render.cwd() / bundle
    if path.is_file():
        return push_bundle(path, target, access, on_event=on_event)
    folder = run_folder(bundle, runs)
    with tempfile.TemporaryDirectory(prefix="hpcenv-bundle-") as place:
        made = make(folder, Path(place) / f"{folder.name}{SUFFIX}", on_event=on_event)
        return push_bundle(made.path, target, access, on_event=on_event)


def _show(pushed: PushedBundle) -> None:
    _render.tell(f"{pushed.reference}: sha256 {pushed.sha256}")
    kinds = ", ".join(one.kind for one in pushed.attached if one.kind != "signature")
    _render.tell(f"attached to {_SUBJECTS[pushed.subject_is].format(pushed.subject)}: {kinds}")
    for kind, why in pushed.left_out.items():
        _render.tell(f"no {kind}: {escape_control(why)}")
    _render.say(pushed.by_digest)
