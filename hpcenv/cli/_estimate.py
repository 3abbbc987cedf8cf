"""`hpcenv submit --test-only`: print when Slurm would start the job."""

from __future__ import annotations

from hpcenv.cli import _render
from hpcenv.cluster.estimate import estimate_start
from hpcenv.errors import UsageError
from hpcenv.project.context import Context
from hpcenv.project.workspace import Workspace
from hpcenv.submission.plan_job import plan_job
from hpcenv.submission.request import SubmitOptions


def show(workspace: Workspace, options: SubmitOptions, context: Context, *, alone: bool, as_json: bool) -> int:
    """Print Slurm's estimate. Nothing is queued, and nothing is written.

    Args:
        alone: whether --dry-run and --wait are both not given.

    Raises:
        UsageError: --dry-run or --wait is given, or the submission is not a single Slurm job.
    """
    if not alone:
        raise UsageError("`--test-only` cannot be combined with --dry-run or --wait", why="it submits nothing")
    if options.sweep or options.array is not None:
        raise UsageError("`--test-only` is for one run", hint="leave out --sweep or --array")
    plan = plan_job(workspace, options, context)
    if plan.manifest.cluster == "local":
        raise UsageError("`--test-only` needs Slurm", why="on this machine a run starts at once (--cluster local)")
    found = estimate_start(plan.script, context.environ)
    if as_json:
        _render.success("submit", {"estimate": found, "shape": plan.request.shape, "notes": plan.notes})
        return 0
    for note in plan.notes:
        _render.tell(f"note: {note}")
    where = f" in partition {found.partition}" if found.partition else ""
    _render.say(f"{plan.request.shape}: would start at {found.start} on {found.nodes}{where}")
    _render.tell("Slurm's estimate for the queue as it is now; nothing is submitted")
    return 0
