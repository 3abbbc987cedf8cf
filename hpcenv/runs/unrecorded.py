"""Runs whose submission was not recorded, because Slurm gave no answer or `hpcenv submit` was killed.

Runs on: LOGIN NODE. The job of this kind of run is found by its name and its working directory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from hpcenv.cluster import slurm
from hpcenv.cluster.slurm import Found
from hpcenv.errors import HpcenvError
from hpcenv.runs.entries import Unrecorded
from hpcenv.runs.state import RunState

# sbatch has a time limit of 180 s. After this time, no submission can still be in progress.
_SECONDS_TO_SUBMIT = 240.0


def read_unrecorded(entries: Sequence[Unrecorded], environ: Mapping[str, str]) -> list[RunState]:
    """Return the states of runs whose submission was not recorded, with one call of squeue for all runs."""
    names = {entry.job_folder: entry.run for entry in entries if entry.cluster == "slurm"}
    try:
        jobs, problem = slurm.find_jobs(names, environ), ""
    except HpcenvError as error:
        jobs, problem = {}, error.what
    return [_state(entry, jobs.get(entry.job_folder, ()), problem) for entry in entries]


def _state(entry: Unrecorded, jobs: Sequence[Found], problem: str) -> RunState:
    if jobs:
        ids = ", ".join(job.job_id for job in jobs)
        detail = f"job {ids}; its submission was not recorded; `scancel {ids.replace(',', '')}` cancels it"
        return RunState(state=jobs[0].state, detail=detail)
    if problem and entry.cluster == "slurm":
        detail = f"its submission was not recorded, and squeue does not say whether it is queued: {problem}"
        return RunState(state="unknown", detail=detail)
    age = time.time() - entry.changed
    if age < _SECONDS_TO_SUBMIT:
        detail = f"its submission began {max(age, 0):.0f} s ago and may still be in progress"
        return RunState(state="unknown", detail=detail)
    if entry.started:
        return RunState(state="unknown", detail="it ran, but its submission was not recorded", gone=True)
    never = "never queued, according to Slurm" if entry.cluster == "slurm" else "never started"
    return RunState(state="not-queued", detail=f"{never}; `hpcenv clean {entry.folder.path.name}` removes it")
