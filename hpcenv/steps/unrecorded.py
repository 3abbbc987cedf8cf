"""Runs whose submission was not recorded: Slurm gave no answer, or `hpcenv submit` was killed. Runs on: LOGIN NODE.

A job of theirs can only be found by its name and working directory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from hpcenv.adapters import slurm
from hpcenv.adapters.slurm import Found
from hpcenv.errors import HpcenvError
from hpcenv.steps.runs import RunState, Unrecorded

# sbatch is given 180 s (adapters/submitit_bridge.py): after that no submission is under way any more.
_SECONDS_TO_SUBMIT = 240.0


def read_unrecorded(entries: Sequence[Unrecorded], environ: Mapping[str, str]) -> list[RunState]:
    """Return where some of them stand: one call of squeue for all."""
    places = {entry.place: entry.run for entry in entries if entry.cluster == "slurm"}
    try:
        found, problem = slurm.find_jobs(places, environ), ""
    except HpcenvError as error:
        found, problem = {}, error.what
    return [_state(entry, found.get(entry.place, ()), problem) for entry in entries]


def _state(entry: Unrecorded, jobs: Sequence[Found], problem: str) -> RunState:
    if jobs:
        ids = ", ".join(job.job_id for job in jobs)
        words = f"job {ids}, whose submission got no answer; `scancel {ids.replace(',', '')}` ends it"
        return RunState(state=jobs[0].state, detail=words)
    if problem and entry.cluster == "slurm":
        return RunState(state="unknown", detail=f"its submission got no answer, and whether it is queued: {problem}")
    age = time.time() - entry.changed
    if age < _SECONDS_TO_SUBMIT:
        words = f"submitted {max(age, 0):.0f} s ago and not recorded: it may still be under way"
        return RunState(state="unknown", detail=words)
    if entry.started:
        return RunState(state="unknown", detail="it ran, and its submission was not recorded", gone=True)
    never = "never queued as far as Slurm says" if entry.cluster == "slurm" else "never started"
    return RunState(state="not-queued", detail=f"{never}; `hpcenv clean {entry.folder.path.name}` removes it")
