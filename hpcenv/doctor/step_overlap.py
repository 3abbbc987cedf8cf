"""Whether a second job step starts beside another one on this cluster: read from the runs of a project.

Runs on: LOGIN NODE. Slurm's configuration does not tell it. Since 20.11 `srun --overlap` exists (RELEASE_NOTES of Slurm
20.11), but on some clusters a second step of several nodes was reported not to start beside another one (LUMI, 2025).
The launch step of a run starts beside its check step, so each run has tried it.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

from hpcenv.errors import HpcenvError
from hpcenv.node.check.verdict_table import visible
from hpcenv.records.files import open_regular
from hpcenv.runs.entries import Run, Submitted, open_run
from hpcenv.runs.find import list_runs

# What the batch script prints when it starts the launch step a second time (sbatch_templates/job.sbatch).
STARTED_LATE = "the launch step did not start beside the check"
# With --overlap: RELEASE_NOTES of Slurm 20.11.
OLDEST = (20, 11)

_MOST_RUNS = 20
# The batch script prints its line before the script starts, so before most of the log.
_LOG_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class StepOverlap:
    """Whether steps start beside each other.

    Attributes:
        value: `yes`, `no`, or empty where no run has tried.
        how: what shows it, or why it is not known.
    """

    value: str
    how: str


def read_overlap(runs: Path | None, version: str) -> StepOverlap:
    """Return what the newest run that tried it shows.

    Args:
        runs: folder of runs; None outside of a project.
        version: of Slurm; empty where it is unknown.
    """
    number = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if len(number) == 2 and number < OLDEST:
        return StepOverlap(value="no", how=f"Slurm {version} has no srun --overlap; 20.11 and later have it")
    if runs is None or not runs.is_dir():
        return StepOverlap(value="", how="Slurm does not tell it; a run of this project will show it")
    newest = (entry for entry in list_runs(runs) if isinstance(entry, Submitted))
    for entry in itertools.islice(newest, _MOST_RUNS):
        found = _of_run(entry)
        if found is not None:
            return found
    return StepOverlap(value="", how="Slurm does not tell it; none of the newest runs has tried it")


def _of_run(entry: Submitted) -> StepOverlap | None:
    """Return what one run shows; None where it has not tried, has not come so far, or cannot be read."""
    try:
        run = entry if isinstance(entry, Run) else open_run(entry.folder.path)
        if not (run.manifest.launch.beside_check and run.manifest.launches):
            return None
        name = visible(run.folder.path.name)
        if STARTED_LATE in _beginning(run.folder.log):
            return StepOverlap(value="no", how=f"the log of run {name}: {STARTED_LATE}")
        if run.folder.launch_waits.exists():
            return StepOverlap(value="yes", how=f"run {name}: its launch step waited beside its check")
    except (HpcenvError, OSError):
        return None
    return None


def _beginning(path: Path) -> str:
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(_LOG_BYTES).decode("utf-8", errors="replace")
