"""Check this machine, or check nodes with a Slurm job that has no training, and wait for the result.

Runs on: LOGIN NODE. `hpcenv verify` uses this module, and `hpcenv doctor --nodes` uses it to check nodes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcenv.errors import Command, HpcenvError, Interrupted, SubmitRejected, UsageError
from hpcenv.project.context import Context
from hpcenv.project.fields import FieldLevel
from hpcenv.project.spec import DEFAULT_LOCK
from hpcenv.project.workspace import Workspace
from hpcenv.records.facts import Facts
from hpcenv.records.files import load_record
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import Verdict
from hpcenv.runs.cancel import cancel
from hpcenv.runs.wait import wait
from hpcenv.submission.import_check import PackageImport
from hpcenv.submission.plan_job import plan_job
from hpcenv.submission.request import SubmitOptions, parse_flags
from hpcenv.submission.submit import SubmitResult, submit
from hpcenv.submission.verify_here import verify, with_notes
from hpcenv.text import Shown


@dataclass(frozen=True, kw_only=True, repr=False)
class Verified(Shown):
    """An environment that was compared with the lockfile, on this machine or on nodes.

    Attributes:
        facts: the facts of each node that reported, in the order of the nodes' names.
        imports: the result of the import of each locked package; empty if no package was imported.
    """

    verdict: Verdict
    facts: tuple[Facts, ...]
    imports: tuple[PackageImport, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CheckedNodes(Verified):
    """The result of a job that only checked its nodes."""

    job: SubmitResult


# Options of a submission that are only for a job.
OF_JOBS = ("partition", "account", "time", "preflight")


def options_to_verify(
    *, nodes: int | None, lock: str, deep: bool, sif: object, gpus: int | None, **of_jobs: Any
) -> SubmitOptions:
    """Return the options of a verification.

    With `nodes`, the result is the options of a job. If `nodes` is None, this machine is verified.

    Args:
        of_jobs: the values of the options in OF_JOBS.

    Raises:
        UsageError: an option cannot be used with `nodes`, or needs `nodes`, or a value is not valid.
    """
    if nodes is not None and sif is not None:
        raise UsageError(
            "`--sif` does not go with `--nodes`",
            why="nodes are checked with the project's own SIF, as for a job",
            hint="leave out --nodes to verify that SIF on this machine",
        )
    given = [f"--{name}" for name in OF_JOBS if of_jobs[name] is not None]
    if nodes is None and given:
        raise UsageError(
            f"`{given[0]}` goes with `--nodes` only",
            why="without --nodes, this machine is verified",
            hint="add --nodes N",
        )
    level: FieldLevel | None = "deep" if deep else None
    return SubmitOptions(script=None, level=level, nodes=nodes, gpus=gpus, lock=lock, **parse_flags(of_jobs))


def verify_environment(
    workspace: Workspace,
    options: SubmitOptions,
    context: Context,
    *,
    sif: str | Path | None = None,
    imports: bool = False,
    on_submitted: Callable[[SubmitResult], None] = lambda _job: None,
) -> Verified:
    """Compare the environment of this machine, a SIF, or the environments of nodes with the lockfile.

    Args:
        options: see `options_to_verify`.
        sif: a SIF to verify instead of the SIF of the project.
        imports: also import each locked package, if the environment matches the lockfile.
        on_submitted: called when the job is queued.

    Raises:
        UsageError: `imports` is used with nodes. The imports are not tested on nodes.
        HpcenvError: as for `verify` and for `verify_nodes`.
    """
    if imports and options.nodes is not None:
        raise UsageError(
            "`--imports` does not go with `--nodes`",
            why="the packages are imported on this machine, and the nodes have the same ones if they match",
            hint="leave out --nodes",
        )
    lock = options.lock or DEFAULT_LOCK
    if options.nodes is not None:
        found = verify_nodes(workspace, options, context, on_submitted=on_submitted)
        return replace(found, verdict=with_notes(found.verdict, workspace, lock))
    verdict, facts, tried = verify(
        workspace,
        environ=context.environ,
        lock=lock,
        level=options.level,
        sif=None if sif is None else Path(os.path.abspath(context.cwd / sif)),
        gpus=options.gpus,
        imports=imports,
    )
    return Verified(verdict=verdict, facts=(facts,), imports=tried)


def verify_nodes(
    workspace: Workspace, options: SubmitOptions, context: Context, *, on_submitted: Callable[[SubmitResult], None]
) -> CheckedNodes:
    """Submit a job that only checks its nodes, and wait until the job has ended.

    Args:
        options: the options, without a script. This function sets the number of ranks for a smoke test.
        on_submitted: called when the job is queued.

    Raises:
        SubmitRejected: Slurm or hpcenv refused the job, or the job ended without a verdict.
        Interrupted: the user stopped the wait; the job is cancelled.
    """
    options = replace(options, nproc=_ranks_per_node(workspace, options))
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


def _ranks_per_node(workspace: Workspace, given: SubmitOptions) -> int | None:
    """Return the number of ranks on each node for a smoke test; None for the default of a submission."""
    usual = workspace.project.submit
    tested = (given.preflight or usual.preflight) == "full"
    count = usual.gpus if given.gpus is None else given.gpus
    return None if tested and (count or usual.nproc) else 1


def _cancelled(result: SubmitResult, context: Context) -> Interrupted:
    """Cancel the job of an interrupted command. Return the error, which says whether the job is cancelled."""
    job = f"job {result.job_id}"
    try:
        cancel(context.cwd, str(result.run_folder), environ=context.environ, pause=time.sleep)
    except (HpcenvError, KeyboardInterrupt):
        left = f"interrupted; {job} may still occupy its nodes"
        return Interrupted(left, hint=Command("hpcenv", "cancel", str(result.run_folder)))
    return Interrupted(f"interrupted; {job} is cancelled")
