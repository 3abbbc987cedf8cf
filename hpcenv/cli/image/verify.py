"""`hpcenv image verify`.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from hpcenv.cli import _progress, _render
from hpcenv.cli.image import _conversion
from hpcenv.image.convert.layer_index import LayerLimits
from hpcenv.image.reference import LayeredImage, require_layers
from hpcenv.image.registry.oci_layout import local_form
from hpcenv.image.sif_proof import Proof, origin, refusal, verify
from hpcenv.project.severities import severities
from hpcenv.project.store_config import StorePlace
from hpcenv.project.workspace import SPEC_NAME
from hpcenv.records.manifest import Severity
from hpcenv.text import plural

_TREE = "container.sif.tree"


@click.command("verify")
@click.argument("what", metavar="REFERENCE|SIF")
@click.option(
    "--image",
    metavar="REF",
    help="Image that the SIF must contain. Default: the image that the label of the SIF names.",
)
@_conversion.image_options
@_conversion.limit
@_render.store_option
@_render.json_option
def command(what: str, as_json: bool, where: _render.Where, image: str | None, **values: Any) -> int:
    """Check that a SIF contains exactly what the layers of its image contain.

    hpcenv reads the layers (from the store, or else from the registry) and the SIF, compares every path, and lists
    the differences. hpcenv ends with 11 if there are differences, or with 0 if [policy] of the project gives the
    field `container.sif.tree` a lower severity than `must`.
    """
    place = where.place()
    path, source = _sif_and_image(what, image, place)
    request = _conversion.image_request(source, values, allow_floating=True)
    limits = LayerLimits().raised(values["limits"])
    with _progress.shown(as_json=as_json) as on_event:
        proof = verify(request, path, limits=limits, place=place, on_event=on_event)
    if _has_overlay() and not as_json:
        _render.tell("note: this is about the image; `hpcenv lock --check` compares the overlay of the project")
    # With --json, the error is printed and not raised. So the store options are added to the hint here.
    severity = _tree_severity()
    if not proof.equal and severity != "must":
        return _show_accepted(proof, severity, as_json=as_json)
    problem = None if proof.equal else where.with_options(refusal(proof, request))
    if as_json:
        _render.verdict_on("image verify", proof, ok=proof.equal, problem=problem)
        return 0 if problem is None else problem.exit_status
    if problem is not None:
        raise problem
    if not proof.exact:
        _render.tell(
            "note: hpcenv did not make this SIF; the comparison leaves out what Apptainer adds "
            "(/.singularity.d and its scripts, /etc/hosts, /etc/resolv.conf), and owners and times"
        )
    depth = "every field" if proof.exact else "type, mode, size, content and link target"
    _render.say(f"equal: {proof.paths} paths, {depth}; tree {proof.found}")
    return 0


def _sif_and_image(what: str, image: str | None, place: StorePlace) -> tuple[Path | None, LayeredImage]:
    """Return the path of the SIF (None for the SIF in the store), and the image with which the SIF is compared."""
    is_sif = what.endswith(".sif") or (os.path.isfile(what) and local_form(Path(what)) is None)
    if "://" in what or not is_sif:
        return None, _conversion.layered_image(what)
    path = _render.cwd() / what
    return path, require_layers(origin(path, place)) if image is None else _conversion.layered_image(image)


def _tree_severity() -> Severity:
    """Return the severity of a SIF with a different tree: from the project; outside a project, the default."""
    here = _render.cwd()
    if not any((folder / SPEC_NAME).is_file() for folder in (here, *here.parents)):
        return severities({}).of(_TREE)
    project = _render.open_project().project
    return severities(project.policy, project.determinism.profile).of(_TREE)


def _has_overlay() -> bool:
    """Return whether the project here has an overlay over its image."""
    here = _render.cwd()
    if not any((folder / SPEC_NAME).is_file() for folder in (here, *here.parents)):
        return False
    return _render.open_project().project.overlay is not None


def _show_accepted(proof: Proof, severity: Severity, *, as_json: bool) -> int:
    """Print differences that the project accepts; return the exit status."""
    if as_json:
        _render.verdict_on("image verify", proof, ok=True)
        return 0
    for line in proof.differences:
        _render.say(line)
    _render.say(f"{plural(len(proof.differences), 'difference')}; {_TREE} = {severity}, by [policy]")
    return 0
