"""`hpcenv image prune`.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
import re
from typing import Any

import click

from hpcenv import size
from hpcenv.cli import _accept, _duration, _progress, _render
from hpcenv.cli.image.listing import columns
from hpcenv.errors import HpcenvError, SpecError
from hpcenv.image.store.store_folder import place_exists
from hpcenv.project.workspace import SPEC_NAME
from hpcenv.runs.prune import Pruned, PrunePlan, PruneRequest, plan_prune, prune

_BYTES = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}


def _parse_bytes(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,15})\s*([KMGT]?)B?", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a size, for example 500M or 200G")
    return int(match[1]) * _BYTES[match[2]]


@click.command("prune")
@click.option(
    "--older-than",
    metavar="AGE",
    default="1d",
    show_default=True,
    callback=_duration.parse_seconds,
    help="Remove only what was not used for this long, for example 12h or 30d; 0 for any age.",
)
@click.option(
    "--keep-bytes",
    metavar="N",
    callback=_parse_bytes,
    help="Remove the least recently used until the store has at most this size, for example 200G.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
@click.option("--yes", is_flag=True, help="Remove without asking.")
@_accept.option
@_render.store_option
@_render.json_option
def command(
    older_than: float,
    keep_bytes: int | None,
    dry_run: bool,
    yes: bool,
    accept: str | None,
    where: _render.Where,
    as_json: bool,
) -> None:
    """Remove images, layers and leftovers that no lockfile and no run needs.

    Prints what it would remove, and asks. It keeps what a known lockfile needs, and the
    image of a run that is pending, is running, or has an unknown state. It keeps what was
    used within a day, because others may run it without hpcenv. It removes nothing while a
    process converts or verifies an image. --keep-bytes may also remove layers of images
    that are kept, but not their SIFs.
    """
    place = where.place()
    if not place_exists(place):
        _answer(None, None, as_json, f"{place.root} has no store")
        return
    request = PruneRequest(place=place, workspaces=_projects(), older_than=older_than, keep_bytes=keep_bytes)
    with _progress.shown(as_json=as_json) as show:
        plan = plan_prune(request, environ=os.environ, on_event=show)
    if not as_json:
        _show(plan)
    done = None
    if plan.removals and not dry_run:
        if where.is_projects:
            _accept.require_paths(accept, as_json=as_json)
        if not yes:
            _render.consent(f"{len(plan.removals)} of the store's files and folders", as_json=as_json)
        with _progress.shown(as_json=as_json) as show:
            done = prune(plan, request, environ=os.environ, on_event=show)
    _answer(plan, done, as_json, "")


def _projects() -> tuple[Any, ...]:
    """Return the project of the current folder; if it cannot be read, nothing may be removed."""
    here = _render.cwd()
    if not any((folder / SPEC_NAME).is_file() for folder in (here, *here.parents)):
        return ()
    try:
        return (_render.open_project(),)
    except HpcenvError as error:
        raise SpecError(
            "the project of this folder cannot be read, so it is unknown which images it needs",
            why=str(error),
            hint=error.hint_parts,
        ) from error


def _show(plan: PrunePlan) -> None:
    for item in plan.kept:
        _render.tell(f"kept: {item.digest[7:19]} {size.shown(item.size)}: {item.why}")
    if plan.removals:
        rows = tuple((i.kind, i.name.removeprefix("sha256:")[:12], size.shown(i.size), i.why) for i in plan.removals)
        for line in columns(rows):
            _render.say(line)
    _render.say(f"{len(plan.removals)} to remove: {size.shown(plan.frees)} of {size.shown(plan.total)}")


def _answer(plan: PrunePlan | None, done: Pruned | None, as_json: bool, nothing: str) -> None:
    if as_json:
        _render.success("image prune", {"plan": plan, "done": done})
        return
    if plan is None:
        _render.tell(nothing)
    if done is not None:
        for item in done.skipped:
            _render.tell(f"not removed: {item.path}: it is in use or needed now, or you may not remove it")
        _render.say(f"removed {len(done.removed)}, {size.shown(done.freed)}")
