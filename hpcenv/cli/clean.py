"""`hpcenv clean`: remove old run folders. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
import time

import click

from hpcenv import size
from hpcenv.cli import _accept, _duration, _render
from hpcenv.cli._complete import run_names
from hpcenv.cli._terminal import escape_control
from hpcenv.errors import FileUnusable
from hpcenv.runs.clean import Cleaned, CleanPlan, CleanRequest, clean, plan_clean


@click.command("clean")
@click.argument("run", nargs=-1, shell_complete=run_names)
@_render.runs_option
@click.option(
    "--older-than",
    metavar="AGE",
    callback=_duration.parse_seconds,
    help="Remove runs that did not change for this time, for example 12h or 30d. A number without a unit is seconds.",
)
@click.option(
    "--state",
    "states",
    metavar="STATE",
    multiple=True,
    help="Remove only runs in this state, for example failed or cancelled. Can be repeated.",
)
@click.option("--keep", type=click.IntRange(min=0), metavar="N", help="Keep the newest N runs.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed; remove nothing.")
@click.option("--yes", is_flag=True, help="Remove without asking for confirmation.")
@_accept.option
@_render.json_option
def command(
    run: tuple[str, ...],
    runs: str | None,
    older_than: float | None,
    states: tuple[str, ...],
    keep: int | None,
    dry_run: bool,
    yes: bool,
    accept: str | None,
    as_json: bool,
) -> int:
    """Remove run folders, and packed data that no run needs any more.

    RUN is a run folder, a run name, a job id or a sweep. Without RUN, all runs that match the
    options are removed. hpcenv first shows what will be removed, and then asks you for confirmation. Files that
    scripts wrote into their copies of the project are shown first. Runs that wait, run, or may still run are kept.
    Runs with checkpoints are removed only if you name them.
    """
    wanted = tuple(word for state in states for word in state.split(","))
    request = CleanRequest(words=run, older_than=older_than, states=wanted, keep=keep, runs=runs)
    plan = plan_clean(_render.cwd(), request, environ=os.environ, now=time.time())
    if not as_json:
        _show(plan)
    done = None
    if plan.removals and not dry_run:
        if runs is None and not run:
            _accept.require_paths(accept, as_json=as_json)
        if not yes:
            _render.consent(f"{len(plan.removals)} folders and files", as_json=as_json)
        done = clean(plan, environ=os.environ)
    failed = done is not None and done.failed
    if as_json:
        _render.verdict_on("clean", {"plan": plan, "done": done}, ok=not failed)
    elif done is not None:
        _show_done(done)
    return FileUnusable.exit_status if failed else 0


def _show(plan: CleanPlan) -> None:
    for kept in plan.kept:
        _render.tell(f"kept: {escape_control(kept.name)}: {escape_control(kept.why)}")
    for removal in plan.removals:
        if removal.outputs:
            more = removal.outputs - len(removal.some_outputs)
            named = ", ".join(map(escape_control, removal.some_outputs)) + (f" and {more} more" if more else "")
            _render.say(f"{escape_control(removal.name)} holds what its script made: {named}")
    width = max((len(removal.name) for removal in plan.removals), default=0)
    for removal in plan.removals:
        _render.say(f"{escape_control(removal.name):<{min(width, 40)}}  {size.shown(removal.size):>10}  {removal.why}")
    _render.say(f"{len(plan.removals)} to remove: {size.shown(plan.frees)} in {plan.folder}")


def _show_done(done: Cleaned) -> None:
    for kept in done.kept:
        _render.tell(f"not removed: {escape_control(kept.name)}: {escape_control(kept.why)}")
    _render.say(f"removed {len(done.removed)}, {size.shown(done.freed)}")
