"""`hpcenv clean`."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import click

from hpcenv.cli import _duration, _render
from hpcenv.cli._terminal import harmless
from hpcenv.errors import FileUnusable
from hpcenv.model import size

if TYPE_CHECKING:
    from hpcenv.steps.clean import Cleaned, CleanPlan


@click.command("clean")
@click.argument("run", nargs=-1)
@click.option("--runs", metavar="DIR", help="Folder of runs, if not the project's.")
@click.option("--older-than", metavar="AGE", callback=_duration.parse_seconds, help="Ended 12h, 30d, 8w ago or longer.")
@click.option("--state", "states", metavar="STATE", multiple=True, help="Only failed, cancelled ...; repeatable.")
@click.option("--keep", type=click.IntRange(min=0), metavar="N", help="Leave the newest N runs alone.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_render.json_option
def command(
    run: tuple[str, ...],
    runs: str | None,
    older_than: float | None,
    states: tuple[str, ...],
    keep: int | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Remove run folders that are no longer wanted, and packed data that no run needs.

    RUN as in `hpcenv status`, or a sweep; without one, all runs to which the options apply.
    Says first what it would remove, and asks. What waits, runs, or may still run stays; so
    does a run with checkpoints, unless it is named.
    """
    from hpcenv.steps.clean import CleanRequest, clean, plan_clean

    wanted = tuple(word for state in states for word in state.split(","))
    request = CleanRequest(words=run, older_than=older_than, states=wanted, keep=keep, runs=runs)
    plan = plan_clean(_render.cwd(), request, environ=os.environ, now=time.time())
    if not as_json:
        _show(plan)
    done = None
    if plan.removals and not dry_run:
        if not yes:
            _render.consent(f"{len(plan.removals)} folders and files", as_json=as_json)
        done = clean(plan, environ=os.environ)
    failed = done is not None and done.failed
    if as_json:
        _render.verdict_on("clean", {"plan": plan, "done": done}, ok=not failed)
    elif done is not None:
        _answer(done)
    return FileUnusable.exit_status if failed else 0


def _show(plan: CleanPlan) -> None:
    for kept in plan.kept:
        _render.tell(f"stays: {harmless(kept.name)}: {harmless(kept.why)}")
    width = max((len(one.name) for one in plan.removals), default=0)
    for one in plan.removals:
        _render.say(f"{harmless(one.name):<{min(width, 40)}}  {size.shown(one.size):>10}  {one.why}")
    _render.say(f"{len(plan.removals)} to remove: {size.shown(plan.frees)} in {plan.folder}")


def _answer(done: Cleaned) -> None:
    for kept in done.kept:
        _render.tell(f"left: {harmless(kept.name)}: {harmless(kept.why)}")
    _render.say(f"removed {len(done.removed)}, {size.shown(done.freed)}")
