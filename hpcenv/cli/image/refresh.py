"""`hpcenv image refresh`.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from hpcenv.cli import _accept, _progress, _render
from hpcenv.cli.submit import context_of
from hpcenv.errors import Command, render_hint
from hpcenv.recipes.refresh import Refreshed, plan_refresh, refresh


@click.command("refresh")
@click.argument("folder", default="image", metavar="[DIR]")
@click.option("--dry-run", is_flag=True, help="Write nothing; say which base and Python packages changed.")
@click.option("--force", is_flag=True, help="Replace files of the recipe that you edited.")
@_accept.option
@_render.json_option
def command(folder: str, dry_run: bool, force: bool, accept: str | None, as_json: bool) -> int:
    """Make the project's image again, with the packages of today.

    DIR (default: image) contains the files that `hpcenv image init` wrote. hpcenv resolves the packages of these
    files again. Versions that you named stay; other versions may be newer. Then hpcenv builds and locks the image,
    and lists what changed: the base, Python packages, packages of the distribution, and the lockfile.
    """
    workspace = _render.open_project()
    _accept.require(workspace, accept, as_json=as_json)
    place = Path(os.path.abspath(_render.cwd() / folder))
    plan = plan_refresh(workspace, place, environ=os.environ, force=force)
    if dry_run and as_json:
        _render.success("image refresh", {"recipe": plan.changes, "notes": plan.prepared.notes})
        return 0
    if not as_json:
        _list("base and Python packages", plan.changes)
    if dry_run:
        for note in plan.prepared.notes:
            _render.tell(f"note: {note}")
        _render.tell("the packages of the distribution are known after the build")
        return 0
    with _progress.shown(as_json=as_json) as on_event:
        result = refresh(workspace, plan, context_of(), on_event, force=force)
    if as_json:
        _render.success("image refresh", result)
    else:
        _show(result, workspace.shown(result.path))
    return 0


def _show(result: Refreshed, lockfile: str) -> None:
    for note in result.notes:
        _render.tell(f"note: {note}")
    if result.system is None:
        _render.say(
            "packages of the distribution: not known, because the old image is missing or has no list of its packages"
        )
    else:
        _list("packages of the distribution", result.system)
    _list(lockfile, result.lock)
    scan = Command("hpcenv", "export", "cyclonedx", "-o", "bom.cdx.json")
    _render.tell(
        render_hint(("\nknown vulnerabilities of the Python packages: ", scan, ", then: grype sbom:bom.cdx.json"))
    )
    if result.sif is not None:
        _render.tell(f"of the distribution, too: {shlex.join(('grype', f'singularity:{result.sif}'))}")


def _list(title: str, changes: Sequence[str]) -> None:
    _render.say(f"{title}: {'changed' if changes else 'no change'}")
    for change in changes:
        _render.say(f"  {change}")
