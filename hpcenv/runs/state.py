"""The state of a run, from Slurm's answer and from the records in the run folder.

Runs on: LOGIN NODE. If neither Slurm nor the records show the state, it is `unknown`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcenv.cluster import slurm
from hpcenv.cluster.slurm import JobState
from hpcenv.errors import SetupFailed
from hpcenv.hostlist import expand_hostlist
from hpcenv.launch.previous_job import is_over
from hpcenv.project.context import state_folder
from hpcenv.records import secret_file
from hpcenv.records.files import read_end
from hpcenv.records.run_folder import RunFolder
from hpcenv.runs.attempts import (
    attempt_number,
    describe_rejection,
    describe_stop,
    describe_unfinished,
    nodes_started,
    read_record,
    read_verdict_result,
    state_after_stop,
    stopped_before_training,
)
from hpcenv.runs.entries import Submitted
from hpcenv.runs.local_process import local_state

# Only this part at the end of a log is read. It is enough for the lines that the batch script writes before its first
# step.
_LOG_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run, from Slurm and from the small records in its folder.

    Attributes:
        state: Slurm's job state in lower case; `rejected` if the gate stopped the run; `not-queued`
            if the run never became a job.
        detail: the reason for the state, as text.
        exit_status: exit status of the batch script; None if the value is unknown. The exit status is 90 or 91 if the
            gate stopped the run, otherwise the status of the training.
        attempt: number of this attempt. The first attempt has number 0.
        nodes: nodes of the job; empty while they are not known.
        elapsed: elapsed time as Slurm prints it, `D-HH:MM:SS`; empty if the value is unknown.
        waits_again: whether the run is queued again, or its new attempt has not started. If so, the records in the run
            folder are from the previous attempt.
        gone: whether Slurm no longer knows the job, and no record says how the job ended.
    """

    state: str
    detail: str = ""
    exit_status: int | None = None
    attempt: int = 0
    nodes: tuple[str, ...] = ()
    elapsed: str = ""
    waits_again: bool = False
    gone: bool = False

    @property
    def ended(self) -> bool:
        """Whether the run is known to have ended. False if the state is `unknown`, even if Slurm has lost the job."""
        return self.state in slurm.ENDED or self.state in ("rejected", "not-queued")

    @property
    def quiet(self) -> bool:
        """Whether the run will not change any more, because it has ended or Slurm no longer knows its job."""
        return self.ended or self.gone


@dataclass(frozen=True, kw_only=True)
class ResolvedState:
    """The state of a run, with the records that it is based on.

    Attributes:
        job_id: for a chain, the job that decides the state.
        finished: record of how the last attempt of that job ended; empty while the attempt has not ended.
        waited: whether the job ended while it was queued again. If so, the records are from the previous attempt.
    """

    job_id: str
    state: RunState
    finished: Mapping[str, Any]
    waited: bool = False


def read_states(runs: Sequence[Submitted], environ: Mapping[str, str]) -> list[RunState]:
    """Return the states of some runs, with one call of squeue and sacct for all runs, and their small records."""
    return [resolved.state for resolved in resolve_states(runs, environ)]


def resolve_states(runs: Sequence[Submitted], environ: Mapping[str, str]) -> list[ResolvedState]:
    """Return the states of some runs, each with the records that it is based on."""
    # Ask Slurm first, then read the files. If Slurm says that a job has ended, all its records are already written.
    on_slurm = [run for run in runs if run.submission.cluster == "slurm"]
    jobs = slurm.job_states((job_id for run in on_slurm for job_id in run.job_ids), environ) if on_slurm else {}
    resolved = [_resolve_state(run, jobs) for run in runs]
    # If a command finds that a run has ended, it removes the values of the run's secrets. A job that was killed, or
    # cancelled in the queue, has no step that removes them.
    ended = [str(run.folder.path) for run, found in zip(runs, resolved, strict=True) if found.state.quiet]
    secret_file.remove(state_folder(environ), ended)
    return resolved


def _resolve_state(run: Submitted, jobs: Mapping[str, JobState]) -> ResolvedState:
    started, last_end = read_record(run.folder.started), read_record(run.folder.finished)
    is_previous = is_from_previous_job(run, started)
    if is_previous:
        last_end = None
    if run.submission.cluster == "slurm":
        job_id, job = _deciding_job(run, jobs, started, last_end)
    else:
        job_id, job = run.submission.job_id, local_state(run)
    if job_id == _last_started_job(run, started, job_id) and _will_run_again(job, last_end):
        job = replace(job, state="requeued", reason=job.reason or "the job is queued again")
    waited = last_end is not None and (
        job_id != _last_started_job(run, started, job_id) or _ended_in_queue(job, last_end)
    )
    finished = None if waited else last_end
    status = _exit_status(job, finished)
    if job.gone and last_end is None and (started is None or is_previous) and _array_is_known(run, jobs):
        job = replace(job, state="cancelled", reason="in the queue, before it started", gone=False)
    state, detail = _explain(job, status, started, run, finished or {})
    if last_end is not None and not job.ended and (job.unconfirmed or (state == "unknown" and not job.gone)):
        state, detail = _state_from_files(state, detail, last_end)
    if state in ("pending", "requeued"):
        detail = "; ".join(filter(None, (describe_stop(last_end or {}), detail)))
    run_state = RunState(
        state=state,
        detail=detail,
        exit_status=status,
        attempt=attempt_number(started),
        nodes=(() if is_previous else nodes_started(started)) or _allocated_nodes(job),
        elapsed=job.elapsed,
        waits_again=_waits_again(state, is_previous, started, last_end),
        gone=job.gone and state == "unknown",
    )
    return ResolvedState(job_id=job_id, state=run_state, finished=finished or {}, waited=waited and run_state.quiet)


def _array_is_known(run: Submitted, jobs: Mapping[str, JobState]) -> bool:
    """Whether Slurm knows another element of this run's job array, or another element has started.

    Slurm 24.11 keeps no record of an element that `scancel` ends in the queue. But if Slurm knows the job array without
    this element, and this element never started, then this element was cancelled.
    """
    array, _, index = run.submission.job_id.partition("_")
    if not index:
        return False
    if any(job_id.partition("_")[0] == array and job.state != "unknown" for job_id, job in jobs.items()):
        return True
    for other in run.folder.path.parent.glob(f"*/{run.folder.started.name}"):
        job_id = (read_record(other) or {}).get("submitted_as")
        if isinstance(job_id, str) and job_id != run.submission.job_id and job_id.partition("_")[0] == array:
            return True
    return False


def _last_started_job(run: Submitted, started: Mapping[str, Any] | None, otherwise: str) -> str:
    """Return the job of a chain that started last; `otherwise` if this job is unknown, or if there is no chain."""
    ran = (started or {}).get("job_id")
    return ran if isinstance(ran, str) and len(run.job_ids) > 1 and ran in run.job_ids else otherwise


def _ended_in_queue(job: JobState, last_end: Mapping[str, Any]) -> bool:
    """Whether a job ended, or is gone, while it was queued again, so that the last attempt's record cannot say how."""
    # A job that completed was not queued again.
    over = job.state != "completed" if job.ended else job.gone or job.no_slurm
    return last_end.get("again") is True and over


def is_from_previous_job(run: Submitted, started: Mapping[str, Any] | None) -> bool:
    """Whether the records are from an earlier job, because a sweep element was submitted again and has not started."""
    job_id = (started or {}).get("submitted_as")
    return isinstance(job_id, str) and "_" in job_id and job_id not in run.job_ids


def _waits_again(
    state: str, is_previous: bool, started: Mapping[str, Any] | None, finished: Mapping[str, Any] | None
) -> bool:
    """Whether the run will continue, and its records are from the previous attempt.

    Slurm says `running` before the batch script writes its first record.
    """
    if state in ("pending", "requeued"):
        return started is not None
    again = is_previous or (finished is not None and finished.get("again") is True)
    return again and state in ("running", "suspended")


def _will_run_again(job: JobState, finished: Mapping[str, Any] | None) -> bool:
    """Whether a job was requeued, but Slurm does not show it yet, because a job is `completing` before `pending`."""
    unsure = job.state == "completing" or (job.state == "unknown" and not job.gone and not job.no_slurm)
    return unsure and finished is not None and finished.get("again") is True


def _state_from_files(state: str, detail: str, finished: Mapping[str, Any]) -> tuple[str, str]:
    """Return state and detail while Slurm does not answer, from the record of how the batch script ended."""
    recorded = f"the batch script recorded status {finished.get('status')}"
    if state == "running" and not finished.get("again"):
        state = "completing"
    return state, "; ".join(filter(None, (recorded, detail)))


def _deciding_job(
    run: Submitted, jobs: Mapping[str, JobState], started: Mapping[str, Any] | None, finished: Mapping[str, Any] | None
) -> tuple[str, JobState]:
    """Return the job of a chain that decides the state of the run, with its state."""
    ids = run.job_ids
    last = _last_started_job(run, started, ids[0])
    for job_id in ids:
        if not jobs[job_id].ended and jobs[job_id].state not in ("unknown", "pending", "requeued"):
            return job_id, jobs[job_id]
    # After a job of the chain has finished the training, the waiting jobs have nothing to do.
    if is_over(finished or {}):
        return last, jobs[last]
    waiting = [job_id for job_id in ids if jobs[job_id].state in ("pending", "requeued")]
    # Otherwise the next job of the chain should have continued the training, but did not.
    after = ids[ids.index(last) + 1 :] if finished is not None else ()
    chosen = next(iter((*waiting, *after)), last)
    return chosen, jobs[chosen]


def _allocated_nodes(job: JobState) -> tuple[str, ...]:
    if not job.nodelist:
        return ()
    try:
        return expand_hostlist(job.nodelist)
    except ValueError:
        return ()


def _exit_status(job: JobState, finished: Mapping[str, Any] | None) -> int | None:
    """Return the exit status of a run from the batch script's record, otherwise from Slurm; None if it is unknown.

    The record is not used for a job that waits or runs, because it is from the attempt before a requeue.
    """
    if not job.ended and job.state not in ("unknown", "completing"):
        return None
    if job.state == "unknown" and not job.gone and not job.no_slurm:
        # The job may be queued again. Only squeue could say this, and it did not answer.
        return None
    if finished is not None and isinstance(finished.get("status"), int):
        status: int | None = int(finished["status"])
        return None if status == 0 and describe_unfinished(finished) else status
    status = 128 + job.exit_signal if job.exit_signal else job.exit_status
    # sacct shows 0:0 for jobs that were cancelled, timed out or lost a node.
    return status if job.ended and (status != 0 or job.state == "completed") else None


def _explain(
    job: JobState,
    status: int | None,
    started: Mapping[str, Any] | None,
    run: Submitted,
    finished: Mapping[str, Any],
) -> tuple[str, str]:
    """Return the state of a run and its reason."""
    cancelled = finished.get("cancelled") is True
    if job.state == "unknown" and status is not None and cancelled:
        return "cancelled", "from the run folder"
    if job.state == "unknown" and status is not None:
        # The batch script writes this record as its last action.
        job = JobState(state="completed" if status == 0 else "failed", reason="from the run folder")
    # If Slurm ended the job while its nodes were checked, the gate has not decided.
    by_slurm = job.state in ("cancelled", "timeout", "preempted", "node-fail", "out-of-memory")
    if stopped_before_training(finished) and (by_slurm or job.state == "failed"):
        return (job.state if by_slurm else state_after_stop(finished)), describe_stop(finished)
    if (
        describe_unfinished(finished)
        and job.state != "cancelled"
        and (by_slurm or job.state in ("failed", "completed"))
    ):
        return (job.state if by_slurm else state_after_stop(finished)), describe_unfinished(finished)
    # A job may still write a verdict after `scancel`. So the state stays until Slurm says how the job ended.
    if status == 91 and job.state == "completing":
        return job.state, job.reason
    if status in (90, 91) and not by_slurm and read_verdict_result(run.folder) not in (None, "match"):
        reason = describe_rejection(run.folder, "mismatch" if status == 90 else "unknown")
        return "rejected", f"before training: {reason}"
    if status == SetupFailed.exit_status and not by_slurm:
        return "failed", _first_error(run.folder, f"error[{SetupFailed.code}]") or job.reason
    if job.state == "cancelled" and started is None and run.submission.after and not cancelled:
        names = ", ".join(run.submission.after)
        return job.state, f"before it started; it waited for {names} (hpcenv cancel, scancel, or that run failed)"
    if job.state == "cancelled" and started is None and not finished and not job.reason:
        return job.state, "before it started (hpcenv cancel, scancel, or a dependency that can never be fulfilled)"
    if job.state == "failed" and started is None and not run.folder.log.exists():
        return "failed", f"the batch node wrote nothing into {run.folder.path}: can it see this file system?"
    if job.state == "failed" and started is None:
        first = _first_error(run.folder, "error[")
        return "failed", "; ".join(filter(None, (first and f"before its first step: {first}", job.reason)))
    return job.state, job.reason


def _first_error(folder: RunFolder, start: str) -> str:
    """Return the first line in the log of a job that begins with `start`; empty if there is no such line."""
    try:
        text = read_end(folder.log, most=_LOG_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
    return next((line for line in text.splitlines() if line.startswith(start)), "")
