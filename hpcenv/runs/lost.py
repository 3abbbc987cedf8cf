"""Find a job of hpcenv whose run folder was removed, by its job id or run name, to show or cancel the job.

Runs on: LOGIN NODE. The batch script is `job.sbatch` in the run folder, so Slurm knows the path of the folder.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcenv.cluster import slurm
from hpcenv.errors import Command, HpcenvError, RunNotFound, ToolFailed
from hpcenv.records.run_folder import RunFolder

_SECONDS_TO_END = 90.0
_JOB_ID = re.compile(r"[0-9]{1,18}(_[0-9]{1,18})?")


@dataclass(frozen=True, kw_only=True)
class LostRun:
    """A job that Slurm still knows although its run folder was removed.

    Attributes:
        job_id: the id that the user typed, or Slurm's id for the name that the user typed.
        state: Slurm's job state in lower case.
        run: name of the run, and of its job.
        run_folder: where the run folder was.
        nodes: nodes of the job, as Slurm writes them; empty while the job waits.
    """

    job_id: str
    state: str
    run: str
    run_folder: Path
    nodes: str = ""

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self.state in slurm.ENDED


def find_lost(word: str | None, environ: Mapping[str, str]) -> LostRun | None:
    """Return the user's own hpcenv job with this id or name, if its run folder was removed; otherwise None."""
    if word is None:
        return None
    try:
        job = slurm.own_job(word, environ)
    except HpcenvError:
        return None
    if job is None:
        return None
    script = Path(job.script)
    folder = RunFolder(script.parent)
    if script.name != folder.script.name or os.path.lexists(folder.manifest) or os.path.lexists(folder.sweep):
        return None
    job_id = word if _JOB_ID.fullmatch(word) else job.job_id
    return LostRun(job_id=job_id, state=job.state, run=job.name, run_folder=folder.path, nodes=job.nodelist)


def explain(error: RunNotFound, environ: Mapping[str, str]) -> RunNotFound:
    """Return an error that explains the job, if the word matches a job without run folder; otherwise `error`."""
    found = find_lost(error.word, environ)
    if found is None:
        return error
    return RunNotFound(
        f"the folder of run `{found.run}` is gone",
        why=f"Slurm says that its job {found.job_id} is {found.state}; the folder was {found.run_folder}",
        hint=(
            Command("hpcenv", "status", found.job_id),
            " shows the job; ",
            Command("hpcenv", "cancel", found.job_id),
            " cancels it",
        ),
    )


def cancel_lost(lost: LostRun, environ: Mapping[str, str], pause: Callable[[float], None]) -> LostRun:
    """Cancel the job of a lost run, wait until it has ended, and return its state.

    Raises:
        ToolMissing, ToolFailed: Slurm does not answer, or the job has not ended in time.
    """
    if not lost.ended:
        slurm.cancel(lost.job_id, environ)
    until = time.monotonic() + _SECONDS_TO_END
    while True:
        job = slurm.own_job(lost.job_id, environ)
        if job is None or job.state in slurm.ENDED:
            state = "cancelled" if job is None else job.state
            return LostRun(job_id=lost.job_id, state=state, run=lost.run, run_folder=lost.run_folder, nodes=lost.nodes)
        if time.monotonic() > until:
            raise ToolFailed(
                f"job {lost.job_id} has not ended {_SECONDS_TO_END:.0f} s after it was cancelled",
                why=f"Slurm says {job.state}",
                hint=Command("scontrol", "show", "job", lost.job_id),
            )
        pause(0.5)
