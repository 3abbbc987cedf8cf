"""Ask Slurm's accounting for the jobs of this user since a given time, with their GPUs and durations.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from hpcenv import process
from hpcenv.cluster import slurm_command
from hpcenv.cluster.slurm import State, parse_state

_SECONDS = 60.0
# The folder is the last column, because it may contain the separator.
_COLUMNS = "JobID,Partition,State,Start,ElapsedRaw,AllocTRES,WorkDir"
_GPUS = re.compile(r"(?:^|,)gres/gpu=([0-9]{1,6})(?:,|$)")


@dataclass(frozen=True, kw_only=True)
class AccountedJob:
    """One start of a job. A job that was queued again has several starts.

    Attributes:
        job_id: `123`, or `123_4` for an element of an array.
        started: in seconds since the epoch.
        seconds: how long the job ran; if it still runs, how long so far.
        gpus: number of GPUs on all nodes together; None if the site does not account GPUs.
        folder: working directory of the batch script: the folder of the run, or the folder of the sweep.
    """

    job_id: str
    partition: str
    state: State
    started: float
    seconds: float
    gpus: int | None
    folder: str


def jobs_since(since: float, environ: Mapping[str, str]) -> tuple[AccountedJob, ...]:
    """Return the jobs that started at a given time or later; the time is in seconds since the epoch.

    Raises:
        ToolMissing, ToolFailed: sacct is missing, or did not answer.
    """
    sacct = process.find_tool("sacct", needed_for="ask for the jobs of the last time", path=environ.get("PATH"))
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since))
    argv = [sacct, "--noheader", "--parsable2", "--allocations", "--duplicates", f"--starttime={start}"]
    env = slurm_command.clean_environment(environ)
    text = slurm_command.run([*argv, f"--format={_COLUMNS}"], env, timeout=_SECONDS).stdout
    # sacct also lists jobs that started earlier and still ran at the given time.
    return tuple(job for job in parse(text) if job.started >= since)


def parse(text: str) -> tuple[AccountedJob, ...]:
    """Return the jobs that sacct printed, without jobs that never started. Pure, but depends on the local time zone."""
    rows = [row for line in text.splitlines() if len(row := line.split("|", 6)) == 7]
    # If AccountingStorageTRES in slurm.conf does not contain gres/gpu, no row of sacct names GPUs.
    accounted = any(_GPUS.search(row[5]) for row in rows)
    jobs = []
    for job_id, partition, state, start, seconds, resources, folder in rows:
        found = _GPUS.search(resources)
        try:
            job = AccountedJob(
                job_id=job_id,
                partition=partition,
                state=parse_state(state),
                started=time.mktime(time.strptime(start, "%Y-%m-%dT%H:%M:%S")),
                seconds=float(seconds),
                gpus=int(found[1]) if found else 0 if accounted else None,
                folder=folder,
            )
        except (ValueError, OverflowError):
            continue
        jobs.append(job)
    return tuple(jobs)
