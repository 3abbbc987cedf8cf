"""`hpcenv image prune`."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import click

from hpcenv.cli import _render
from hpcenv.errors import HpcenvError, SpecError
from hpcenv.model import size

if TYPE_CHECKING:
    from hpcenv.steps.image.prune import Pruned, PrunePlan

_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}


def _parse_age(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> float:
    match = re.fullmatch(r"(\d{1,9})(s|min|h|d|w)", value or "0s")
    if match is None:
        raise click.BadParameter(f"{value!r} is not an age, for example 12h, 30d or 8w")
    return float(int(match[1]) * _SECONDS[match[2]])


def _parse_bytes(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,15})\s*([KMGT]?)B?", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a size, for example 500M or 200G")
    return int(match[1]) * _BYTES[match[2]]


@click.command("prune")
@click.option("--older-than", metavar="AGE", callback=_parse_age, help="Only what was not used for 12h, 30d, 8w.")
@click.option(
    "--keep-bytes", metavar="N", callback=_parse_bytes, help="Remove the longest unused until 200G or less are left."
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_render.store_option
@_render.json_option
def command(
    older_than: float,
    keep_bytes: int | None,
    dry_run: bool,
    yes: bool,
    where: _render.Where,
    as_json: bool,
) -> None:
    """Remove images, layers and leftovers that no lockfile and no run needs.

    Says first what it would remove, and asks. What a known lockfile needs stays, and so
    does the image of a run that waits, runs, or whose state cannot be told. While anybody
    converts an image nothing is removed. --keep-bytes may also remove layers of images
    that stay; their SIFs stay.
    """
    from hpcenv.cli import _progress
    from hpcenv.steps.image.prune import PruneRequest, plan_prune, prune

    place = where.place()
    if not place.exists():
        _answer(None, None, as_json, f"there is no store in {place.root}")
        return
    request = PruneRequest(place=place, workspaces=_projects(), older_than=older_than, keep_bytes=keep_bytes)
    with _progress.shown(as_json=as_json) as show:
        plan = plan_prune(request, environ=os.environ, on_event=show)
    if not as_json:
        _show(plan)
    done = None
    if plan.removals and not dry_run:
        if not yes:
            _render.consent(f"{len(plan.removals)} of the store's files and folders", as_json=as_json)
        with _progress.shown(as_json=as_json) as show:
            done = prune(plan, request, environ=os.environ, on_event=show)
    _answer(plan, done, as_json, "")


def _projects() -> tuple[Any, ...]:
    """Return the project the user is in; nothing may be removed for one that cannot be read."""
    from hpcenv.steps.workspace import SPEC_NAME

    here = _render.cwd()
    if not any((folder / SPEC_NAME).is_file() for folder in (here, *here.parents)):
        return ()
    try:
        return (_render.open_project(),)
    except HpcenvError as error:
        raise SpecError(
            "the project you are in cannot be read, so nobody knows what it needs", why=str(error), hint=error.hint
        ) from error


def _show(plan: PrunePlan) -> None:
    from hpcenv.cli.image.listing import columns

    for item in plan.kept:
        _render.tell(f"stays: {item.digest[7:19]} {size.shown(item.size)}: {item.why}")
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
            _render.tell(f"left: {item.path}: in use or needed since, or not yours to remove")
        _render.say(f"removed {len(done.removed)}, {size.shown(done.freed)}")
