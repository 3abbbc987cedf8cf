"""Check nodes in a Slurm job that trains nothing, and wait for what it found.

Runs on: LOGIN NODE. `hpcenv verify --nodes` and `hpcenv doctor --nodes` both do this.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hpcenv.errors import Command, HpcenvError, Interrupted, SubmitRejected
from hpcenv.project.context import Context
from hpcenv.project.workspace import Workspace
from hpcenv.records.facts import Facts
from hpcenv.records.files import load_record
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import Verdict
from hpcenv.runs.cancel import cancel
from hpcenv.runs.wait import wait
from hpcenv.submission.plan_job import plan_job
from hpcenv.submission.request import SubmitOptions
from hpcenv.submission.submit import SubmitResult, submit


@dataclass(frozen=True, kw_only=True)
class CheckedNodes:
    """What a job found that only checked its nodes.

    Attributes:
        facts: of each node that reported, by the nodes' names.
    """

    job: SubmitResult
    verdict: Verdict
    facts: tuple[Facts, ...]


def verify_nodes(
    workspace: Workspace, options: SubmitOptions, context: Context, *, on_submitted: Callable[[SubmitResult], None]
) -> CheckedNodes:
    """Submit a job that only checks its nodes, and wait for its end.

    Args:
        options: without a script.
        on_submitted: called when Slurm has the job.

    Raises:
        SubmitRejected: Slurm or hpcenv refused the job, or it ended without a verdict.
        Interrupted: the user stopped the wait; the job is cancelled.
    """
    result = submit(plan_job(workspace, options, context), context)
    on_submitted(result)
    try:
        status = wait(result.run_folder, environ=context.environ, pause=time.sleep, on_status=lambda _status: None)
    except KeyboardInterrupt as stop:
        raise _cancelled(result, context) from stop
    if status.verdict is None:
        raise SubmitRejected(
            f"the job {result.job_id} ended without a verdict: {status.state}",
            why=status.detail or None,
            hint=Command("hpcenv", "logs", result.run),
        )
    found = [load_record(Facts, path) for path in sorted(RunFolder(result.run_folder).facts.glob("*.json"))]
    return CheckedNodes(job=result, verdict=status.verdict, facts=tuple(found))


def ranks_per_node(workspace: Workspace, *, preflight: str | None, gpus: int | None) -> int | None:
    """Return how many ranks a smoke test starts on each node; None for as many as a submission without --nproc.

    Args:
        preflight, gpus: as given on the command line; None where they are not.
    """
    usual = workspace.project.submit
    tested = (preflight or usual.preflight) == "full"
    count = usual.gpus if gpus is None else gpus
    return None if tested and (count or usual.nproc) else 1


def _cancelled(result: SubmitResult, context: Context) -> Interrupted:
    """Cancel the job of an interrupted command; return the error that says so."""
    job = f"job {result.job_id}"
    try:
        cancel(context.cwd, str(result.run_folder), environ=context.environ, pause=time.sleep)
    except (HpcenvError, KeyboardInterrupt):
        left = f"interrupted; {job} may still hold its nodes"
        return Interrupted(left, hint=Command("hpcenv", "cancel", str(result.run_folder)))
    return Interrupted(f"interrupted; {job} is cancelled")
