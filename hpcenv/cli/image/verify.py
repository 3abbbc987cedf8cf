"""`hpcenv image verify`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from hpcenv.cli import _progress, _render
from hpcenv.cli.image import _conversion


@click.command("verify")
@click.argument("what", metavar="REFERENCE|SIF")
@click.option("--image", metavar="REF", help="The image that a SIF must hold, if not the one it names itself.")
@click.option("--platform", default="linux/amd64", show_default=True, help="Which image of a multi-platform one.")
@_conversion.plain_http_of_reference
@click.option("--ca-file", metavar="FILE", help="Certificates to trust for the registry, in PEM form.")
@_conversion.limit
@_render.store_option
@_render.json_option
def command(what: str, as_json: bool, where: _render.Where, image: str | None, **words: Any) -> int:
    """Prove that a SIF holds what its image's layers hold.

    Reads the layers (from the store, else fetched) and the SIF, and compares every path;
    differences are listed. Ends with 11 when there are any.
    """
    from hpcenv.adapters.layer_index import Limits
    from hpcenv.steps.image.pull import Asked
    from hpcenv.steps.image.verify import origin, refusal, verify

    place = where.place()
    path = _render.cwd() / what if "://" not in what and (what.endswith(".sif") or os.path.isfile(what)) else None
    reference = what if path is None else image or origin(path, place)
    asked = Asked(
        reference=reference,
        platform=words["platform"],
        plain_http=_conversion.registries(words["plain_http"], reference),
        ca_file=None if words["ca_file"] is None else Path(os.path.abspath(_render.cwd() / words["ca_file"])),
        allow_floating=True,
        limits=Limits().raised(words["limits"]),
    )
    with _progress.shown(as_json=as_json) as on_event:
        proof = verify(asked, path, place=place, environ=os.environ, on_event=on_event)
    problem = None if proof.equal else refusal(proof, asked)
    if problem is not None and problem.hint:
        problem.hint = where.in_commands(problem.hint)  # here: --json prints it, and nothing is raised
    if as_json:
        _render.verdict_on("image verify", proof, ok=proof.equal, problem=problem)
        return 0 if problem is None else problem.exit_status
    if problem is not None:
        raise problem
    if not proof.exact:
        _render.tell(
            "note: hpcenv did not make this SIF; what Apptainer writes itself is not compared "
            "(/.singularity.d and its scripts, /etc/hosts, /etc/resolv.conf), nor are owners and times"
        )
    depth = "every field" if proof.exact else "type, mode, size, content and link target"
    _render.say(f"equal: {proof.paths} paths, {depth}; tree {proof.found}")
    return 0
