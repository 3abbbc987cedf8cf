"""What an earlier job of this run has left to do: all of it, or nothing.

Runs on: COMPUTE NODE (the batch node), as the batch script's first step. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from hpcenv.dataclass import dataclass
from hpcenv.wire import Manifest, RunFolder


@dataclass(frozen=True, kw_only=True)
class Former:
    """How the run stands when a job starts again, or a later job of its chain begins.

    Attributes:
        over: nothing is left to do; the job ends with `status`.
        why: one line for the log.
    """

    over: bool
    status: int = 0
    why: str = ""


def number_in_chain(run: RunFolder, *, job_id: str, restarts: int) -> int:
    """Return which start of the run this is, counted over all jobs of its chain.

    `begin` writes it down with this job's own restart count; for another job, and for another
    start of this one, the number is the next.
    """
    started = _finished(run.started)
    number = started.get("attempt")
    if not isinstance(number, int) or isinstance(number, bool):
        return restarts
    same = (started.get("job_id"), started.get("restarts")) == (job_id, restarts)
    return number if same else number + 1


def look_back(manifest: Manifest, run: RunFolder, *, attempt: int) -> Former:
    """Return whether anything is left to do.

    Nothing is after a job of the same chain that came to its end. Nor is it where Slurm starts a
    job once more that ended well: it repeats the requeue of a preempted job whose script took
    long to end, though the next start has completed meanwhile (seen: 24.11), and one that ended
    badly if hpcenv queued it again besides (`requeue.slurm_does_it`).
    """
    if attempt == 0 and manifest.chain < 2:
        return Former(over=False)
    found = _finished(run.finished)
    if not is_over(found):
        return Former(over=False)
    status = found["status"]
    assert isinstance(status, int)
    if status == 0:
        return Former(over=True, why="the run has completed: nothing is left to do")
    if attempt > 0 and not any(_was_queued_by_us(path) for path in sorted(run.attempts.glob("*/finished.json"))):
        return Former(over=False)
    return Former(over=True, status=status, why=f"the run has failed with status {status}: it is not started again")


def is_over(finished: Mapping[str, object]) -> bool:
    """Whether an attempt came to its end by itself, well or badly: a job that comes after it has nothing to do.

    Args:
        finished: `finished.json`; empty without it: a node failed.
    """
    status = finished.get("status")
    known = isinstance(status, int) and not isinstance(status, bool)
    return known and not any(finished.get(key) for key in ("stopped", "again", "unfinished"))


def _was_queued_by_us(path: Path) -> bool:
    found = _finished(path)
    return found.get("stopped") == "preemption" and found.get("again") is True and found.get("by") == "scontrol"


def _finished(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
