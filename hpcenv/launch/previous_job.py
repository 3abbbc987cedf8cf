"""Find out whether an earlier job of this run has finished the training. If so, this job has nothing to do.

Runs on: COMPUTE NODE (the batch node), as the first step of the batch script. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcenv.records.files import read_json
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class PreviousJob:
    """The result of the previous job of a chain, or of the previous attempt of this job.

    Attributes:
        over: whether the run has ended. If the run has ended, this job ends at once, with `status`.
        status: exit status for this job.
        why: one line for the log.
    """

    over: bool
    status: int = 0
    why: str = ""


def number_in_chain(run: RunFolder, *, job_id: str, restarts: int) -> int:
    """Return the number of this attempt, counted over all jobs of a chain; the first one is 0.

    Args:
        run: the run folder.
        job_id: id of this job.
        restarts: how often Slurm has restarted this job.
    """
    started = _finished(run.started)
    number = started.get("attempt")
    if not isinstance(number, int) or isinstance(number, bool):
        return restarts
    same = (started.get("job_id"), started.get("restarts")) == (job_id, restarts)
    return number if same else number + 1


def read_previous_job(manifest: Manifest, run: RunFolder, *, attempt: int) -> PreviousJob:
    """Return whether the run has ended before this job started.

    The run has ended if an earlier job of the chain finished the training. Slurm may also start a job again after the
    job has ended, for two reasons. If the script of a preempted job takes long to end, Slurm may requeue the job a
    second time after the next start has completed (seen: 24.11). Slurm also requeues a preempted job that hpcenv has
    already requeued (`requeue.slurm_does_it`).
    """
    if attempt == 0 and manifest.chain < 2:
        return PreviousJob(over=False)
    finished = _finished(run.finished)
    if not is_over(finished):
        return PreviousJob(over=False)
    status = finished["status"]
    assert isinstance(status, int)
    if status == 0:
        return PreviousJob(over=True, why="the run has already completed: this job has nothing to do")
    if attempt > 0 and not any(_was_queued_by_us(path) for path in sorted(run.attempts.glob("*/finished.json"))):
        return PreviousJob(over=False)
    return PreviousJob(
        over=True, status=status, why=f"the run has failed with status {status}: it does not start again"
    )


def is_over(finished: Mapping[str, object]) -> bool:
    """Return whether an attempt ended by itself, with any status. If so, a later job has nothing to do.

    Args:
        finished: content of `finished.json`; empty if there is no such file, because a node failed.
    """
    status = finished.get("status")
    known = isinstance(status, int) and not isinstance(status, bool)
    return known and not any(finished.get(key) for key in ("stopped", "again", "unfinished"))


def _was_queued_by_us(path: Path) -> bool:
    finished = _finished(path)
    stopped, again, by = (finished.get(key) for key in ("stopped", "again", "by"))
    return stopped == "preemption" and again is True and by == "scontrol"


def _finished(path: Path) -> dict[str, object]:
    try:
        data = read_json(path)
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
