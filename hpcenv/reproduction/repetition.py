"""Repeat the beginning of a run with a trace, with the same code, lockfile, options and shape. Runs on: LOGIN NODE.

If the code in the folder where the run was submitted is unchanged, this code is used. If that code has changed, the
run's copy of the code is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hpcenv.errors import FileUnusable, HpcenvError
from hpcenv.project.acceptance import Asked
from hpcenv.project.code_listing import changed_files
from hpcenv.project.context import Context
from hpcenv.project.workspace import Workspace
from hpcenv.records.code_listing import Listing
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.reproduction.code_copy import copy_code
from hpcenv.runs.entries import Run, open_run
from hpcenv.submission import request, rerun
from hpcenv.submission.plan import Plan
from hpcenv.submission.plan_job import plan_job
from hpcenv.submission.request import SubmitOptions


@dataclass(frozen=True, kw_only=True)
class TracedSteps:
    """Which optimizer steps are traced.

    Attributes:
        first, last: the first and the last traced step; the process ends after the last step.
        resumed: step of the checkpoint with which the training begins; 0 if the training begins without a checkpoint.
        checkpoint: name of this checkpoint in the run folder; empty without a checkpoint.
    """

    first: int
    last: int
    resumed: int = 0
    checkpoint: str = ""

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """The job that is submitted to trace steps of a run.

    Attributes:
        recorded: the requests to this machine in the record of the run.
        notes: where the code comes from, in words.
    """

    of: str
    plan: Plan
    context: Context
    workspace: Workspace
    recorded: tuple[Asked, ...]
    notes: tuple[str, ...] = ()


def traced_options(run: Run, steps: TracedSteps) -> SubmitOptions:
    """Return the options that repeat a run up to the last traced step.

    Raises:
        UsageError, RecordInvalid, FileUnusable: the run cannot be submitted again from its record.
    """
    if steps.resumed and not steps.checkpoint and not run.manifest.resume_from:
        raise FileUnusable(
            f"`{run.manifest.run}` has no checkpoint of step {steps.resumed}",
            why="the trace of the other run begins with the checkpoint of that step",
        )
    old = rerun.options_of_run(run)
    wanted: dict[str, object] = {"trace_steps": str(steps), "stop_after_steps": steps.last, "record_metrics": True}
    if steps.checkpoint:
        wanted["resume_from"] = str(run.folder.checkpoints / steps.checkpoint)
    elif run.manifest.resume_from:
        # The recorded checkpoint is named, because the run that saved it may have a newer checkpoint now.
        wanted["resume_from"] = run.manifest.resume_from
    name = rerun.free_name(f"{old.name or run.manifest.run}-trace"[:90], run.folder.path.parent)
    options = replace(old, **{**request.parse_flags(wanted), "name": name, "chain": None, "requeue": None})
    return rerun.with_own_lockfile(options, run.folder)


def plan_repetition(
    run: Run,
    steps: TracedSteps,
    context: Context,
    *,
    copies: Path,
    open_project: Callable[[Path], Workspace],
) -> Repetition:
    """Plan the job that traces steps of a run.

    Args:
        context: the context of the command.
        copies: a folder outside of every project, for a copy of the code. The submitted run has its own copy.
        open_project: returns the project around a folder.

    Raises:
        HpcenvError: the run cannot be repeated here; `why` has the reasons.
    """
    options = traced_options(run, steps)
    recorded = rerun.asked_by_record(options, {})
    try:
        here = rerun.context_again(context, run.manifest, request.command_of(options))
        workspace = open_project(here.cwd)
        plan = plan_job(workspace, options, here)
        rerun.require_same_inputs(run.manifest, plan, allow=False, other_lock=False)
        return Repetition(of=run.manifest.run, plan=plan, context=here, workspace=workspace, recorded=recorded)
    except HpcenvError as error:
        if run.manifest.source is None or not run.folder.source.is_dir():
            raise
        in_place = error
    try:
        return _from_copy(run, options, context, copies, open_project, recorded)
    except HpcenvError as error:
        why = "\n".join(filter(None, (error.why, f"and where it was submitted: {in_place.what}", in_place.why)))
        raise error.changed(why=why) from error


def _from_copy(
    run: Run,
    options: SubmitOptions,
    context: Context,
    copies: Path,
    open_project: Callable[[Path], Workspace],
    recorded: tuple[Asked, ...],
) -> Repetition:
    copy = copy_code(run.folder, run.manifest, copies / run.folder.path.name)
    workspace = open_project(copy.folder)
    options = replace(options, runs_dir=str(run.folder.path.parent), copied=copy.code)
    there = replace(context, cwd=copy.folder, command=request.command_of(options))
    plan = plan_job(workspace, options, there)
    rerun.require_same_inputs(_at_commit_of(run.manifest, plan.manifest), plan, allow=False, other_lock=False)
    notes = ("the code is the run's own copy", *copy.left_out)
    return Repetition(
        of=run.manifest.run, plan=plan, context=there, workspace=workspace, recorded=recorded, notes=notes
    )


def _at_commit_of(before: Manifest, now: Manifest) -> Manifest:
    """Return a run's manifest with the commit of another run. The files are compared, so the commit is not needed."""
    if before.source is None or now.source is None:
        return before
    source = replace(before.source, commit=now.source.commit, diff_sha256=now.source.diff_sha256)
    return replace(before, source=source)


def earlier_repetitions(run: Run, steps: TracedSteps) -> Iterator[RunFolder]:
    """Yield earlier repetitions of a run that traced these steps, with the same options, lockfile and inputs."""
    try:
        wanted = traced_options(run, steps)
    except HpcenvError:
        return
    for path in sorted(run.folder.path.parent.glob("*-trace*")):
        with contextlib.suppress(HpcenvError, OSError):
            other = open_run(path)
            differing = {one.flag for one in rerun.changes(wanted, rerun.options_of_run(other))}
            # The lockfiles are compared by their fingerprints. The names of the runs always differ.
            same_lock = run.manifest.fingerprint == other.manifest.fingerprint != ""
            if same_lock and differing <= {"--name", "--runs-dir"} and _has_same_inputs(run, other):
                yield other.folder


def _has_same_inputs(run: Run, other: Run) -> bool:
    before, now = run.manifest, other.manifest
    if before.source is not None and now.source is not None:
        listings = (load_record(Listing, one.folder.listing) for one in (run, other))
        if changed_files(*listings):
            return False
        before = replace(before, source=now.source)
    return not rerun.changed_inputs(before, now)
