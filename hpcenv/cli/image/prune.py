"""`hpcenv image prune`.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
import re

import click

from hpcenv import size
from hpcenv.cli import _accept, _duration, _progress, _render
from hpcenv.errors import UsageError
from hpcenv.image.store.store_folder import place_exists
from hpcenv.runs.prune import DAY, SPARED, Pruned, PrunePlan, PruneRequest, plan_prune, prune
from hpcenv.text import columns

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
    callback=_duration.parse_seconds,
    help="Remove only what was not used for this long, for example 90d. Default: 30d; with --all, the age does not "
    "matter.",
)
@click.option(
    "--all", "every", is_flag=True, help="Also remove images that were used lately, and images that your jobs name."
)
@click.option(
    "--keep-bytes",
    metavar="N",
    callback=_parse_bytes,
    help="Remove the least recently used images until the store has at most this size, for example 200G.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
@click.option("--yes", is_flag=True, help="Remove without asking for confirmation.")
@_accept.option
@_render.store_option
@_render.json_option
def command(
    older_than: float | None,
    every: bool,
    keep_bytes: int | None,
    dry_run: bool,
    yes: bool,
    accept: str | None,
    where: _render.Where,
    as_json: bool,
) -> None:
    """Remove images, downloaded files and leftovers that were not used for 30 days.

    hpcenv prints what it would remove, and asks for confirmation. An image counts as used when a job with this image
    is submitted, when a run starts with this image, and when the image is read. hpcenv keeps the images that your
    queued and running jobs name. hpcenv also keeps SIFs that were not made from an image in a registry, because such
    SIFs cannot be made again. hpcenv removes nothing while a process converts or verifies an image.
    """
    place = where.place()
    if not place_exists(place):
        _answer(None, None, as_json, f"{place.root} has no store")
        return
    request = PruneRequest(place=place, older_than=_age(older_than, every=every), all=every, keep_bytes=keep_bytes)
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


def _age(asked: float | None, *, every: bool) -> float:
    """Return the time in seconds. A file that was not used for this time may be removed."""
    if asked is None:
        return 0.0 if every else SPARED
    if asked < SPARED and not every:
        raise UsageError(
            "`--older-than` is shorter than 30 days",
            why=f"without --all, hpcenv keeps everything that was used in the last {SPARED / DAY:.0f} days",
            hint="give --all, too",
        )
    return asked


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
