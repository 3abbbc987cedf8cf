"""The state of a run that was started without Slurm: its process and its last record.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from hpcenv.cluster.slurm import JobState
from hpcenv.runs.attempts import read_record
from hpcenv.runs.entries import Submitted


def local_state(run: Submitted) -> JobState:
    """Return the state of a local run, from its process and its last record."""
    pid = run.submission.job_id.rpartition("-")[2]
    alive = pid.isdigit() and _is_process_of(int(pid), run)
    # Look for the process first, then read the record, because the process writes the record just before it ends.
    finished = read_record(run.folder.finished)
    if finished is not None and isinstance(finished.get("status"), int):
        status = int(finished["status"])
        ended = finished.get("time")
        seconds = ended - run.submission.submitted if isinstance(ended, (int, float)) else -1.0
        elapsed = _elapsed(seconds) if 0 <= seconds < _MAX_SECONDS else ""
        if finished.get("cancelled") is True:
            return JobState(state="cancelled", exit_status=status, elapsed=elapsed)
        return JobState(state="completed" if status == 0 else "failed", exit_status=status, elapsed=elapsed)
    if alive and (waiting := read_record(run.folder.waiting)) is not None:
        return JobState(state="pending", reason=str(waiting.get("why", "")))
    if alive:
        return JobState(state="running", elapsed=_elapsed(time.time() - run.submission.submitted))
    return JobState(state="failed", reason="its process is gone from this machine, and it left no exit status")


def _is_process_of(pid: int, run: Submitted) -> bool:
    """Whether process `pid` belongs to this run. The operating system may have given the number to another process.

    A process that has just started has no command line yet. Its parent waits only until execve(2) closes the files
    that are not inherited. The kernel sets the command line some steps later (begin_new_exec and
    create_elf_tables, Linux 6.18), and on a busy machine another process runs in between (seen: 47 ms). A process that
    has just started already has a program file. An ended process, or a thread of the kernel, has no program file
    (proc_pid_exe(5)).
    """
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if command:
            return os.fsencode(str(run.folder.path)) in command.split(b"\0")
        os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return False
    return True


# The longest time of a run, in seconds. A longer time means that a clock was wrong.
_MAX_SECONDS = 10.0 * 365 * 86400


def _elapsed(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{rest:02d}"
