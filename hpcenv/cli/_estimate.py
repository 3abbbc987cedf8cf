"""`hpcenv submit --test-only`: when would the job start?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcenv.cli import _render
from hpcenv.errors import UsageError

if TYPE_CHECKING:
    from hpcenv.steps.request import Asked, Surroundings


def show(asked: Asked, around: Surroundings, *, alone: bool, as_json: bool) -> int:
    """Print Slurm's estimate; nothing is queued and nothing is written.

    Args:
        alone: whether `--test-only` is the only word about what to do.

    Raises:
        UsageError: it is not, or it is not one job for Slurm.
    """
    from hpcenv.adapters.slurm_cluster import estimate_start
    from hpcenv.steps.plan import plan_job

    if not alone:
        raise UsageError("`--test-only` submits nothing", why="--dry-run and --wait ask for something else")
    if asked.sweep or asked.array is not None:
        raise UsageError("`--test-only` is for one run", hint="leave out --sweep or --array: each asks the same")
    plan = plan_job(_render.open_project(), asked, around)
    if plan.manifest.cluster == "local":
        raise UsageError("`--test-only` asks Slurm", why="on this machine a run starts at once (--cluster local)")
    found = estimate_start(plan.script, around.environ)
    if as_json:
        _render.success("submit", {"estimate": found, "shape": plan.request.shape, "notes": plan.notes})
        return 0
    for note in plan.notes:
        _render.tell(f"note: {note}")
    where = f" in partition {found.partition}" if found.partition else ""
    _render.say(f"{plan.request.shape}: would start at {found.start} on {found.nodes}{where}")
    _render.tell("an estimate of Slurm's, as the queue is now; nothing is submitted")
    return 0
