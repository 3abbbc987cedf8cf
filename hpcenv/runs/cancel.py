"""`hpcenv cancel`: cancel runs and wait until they have ended. Runs on: LOGIN NODE."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpcenv import process
from hpcenv.cluster import munge, slurm
from hpcenv.errors import Command, ToolFailed
from hpcenv.launch import processes
from hpcenv.launch.supervise import SECONDS_AFTER_TERM
from hpcenv.runs.entries import Submitted, Sweep, runs_of
from hpcenv.runs.find import find_one, find_submitted
from hpcenv.runs.status import RunStatus, read_statuses

# After KillWait, Slurm kills the processes. Then it cleans up (epilog, cgroups).
_SECONDS_AFTER_KILL_WAIT = 10.0
_SECONDS_AFTER_KILL = 30.0

# scancel is repeated, because a job may be requeued while it is cancelled, or slurmctld may lose the request.
_SECONDS_UNTIL_REPEATED = 15.0

# A local run ends its training within this time (launch/supervise.py, steps/local.py).
_SECONDS_LOCAL = SECONDS_AFTER_TERM + 15.0


def cancel(
    start: Path,
    word: str | None,
    *,
    environ: Mapping[str, str],
    pause: Callable[[float], None],
    runs: str | None = None,
) -> RunStatus:
    """Cancel a run, wait until it has ended, and return its status: see `cancel_all`."""
    return cancel_runs([find_one(start, word, runs=runs)], environ=environ, pause=pause)[0]


def cancel_all(
    start: Path,
    words: Sequence[str],
    *,
    environ: Mapping[str, str],
    pause: Callable[[float], None],
    runs: str | None = None,
) -> tuple[RunStatus, ...]:
    """Cancel runs, wait until they have ended, and return their statuses.

    Args:
        start: current directory. The project is in this folder or in a folder above.
        words: runs as for `find_one`. A sweep means all runs of the sweep. If a run does not exist, no run is
            cancelled. If `words` is empty, the latest run is cancelled.
        environ: environment variables, for the Slurm commands.
        pause: called with the seconds to sleep between two queries.
        runs: folder of runs, if it is not the project's folder of runs.

    Raises:
        RunNotFound: there is no such run.
        ToolFailed: a run has not ended, even after KILL. The run may still end later.
    """
    entries = [find_submitted(start, word, runs=runs) for word in words or (None,)]
    selected = {run.folder.path: run for entry in entries for run in runs_of(entry)}
    arrays = {
        job_id.partition("_")[0]
        for entry in entries
        if isinstance(entry, Sweep)
        for run in entry.elements
        for job_id in run.job_ids
    }
    return cancel_runs(list(selected.values()), environ=environ, pause=pause, arrays=frozenset(arrays))


def cancel_runs(
    runs: Sequence[Submitted],
    *,
    environ: Mapping[str, str],
    pause: Callable[[float], None],
    arrays: frozenset[str] = frozenset(),
) -> tuple[RunStatus, ...]:
    """Cancel runs: call scancel, wait as long as KillWait says, then kill their processes.

    Args:
        runs: the runs.
        environ: environment variables, for the Slurm commands.
        pause: called with the seconds to sleep between two queries.
        arrays: ids of job arrays that are cancelled as a whole. If a single element of an array is
            cancelled before it started, Slurm keeps no record of the element (seen: 24.11).

    Raises:
        ToolFailed: see `cancel_all`.
    """
    statuses = read_statuses(runs, environ)
    going = [run for run, status in zip(runs, statuses, strict=True) if not status.quiet]
    if not going:
        return tuple(statuses)
    down = next((status.detail for status in statuses if munge.DOWN in status.detail), "")
    if down:
        # squeue failed because munge is down. scancel would also wait and fail.
        raise munge.describe(down.partition(munge.DOWN)[2].lstrip(": "))
    began = time.monotonic()
    _send_cancel(going, environ, arrays, kill=False)
    requested, killed, time_limit = began, None, None
    while True:
        statuses = read_statuses(runs, environ)
        going = [run for run, status in zip(runs, statuses, strict=True) if not status.quiet]
        if not going:
            return tuple(statuses)
        now = time.monotonic()
        if time_limit is None and now - began > 2.0:
            # Most jobs end at once. slurmctld is asked for KillWait only if some jobs remain.
            time_limit = _seconds_until_kill(going, environ)
        if killed is None and time_limit is not None and now - began > time_limit:
            _send_cancel(going, environ, arrays, kill=True)
            killed = requested = now
        if killed is not None and now - killed > _SECONDS_AFTER_KILL:
            raise _not_ended(runs, statuses, now - began)
        if now - requested > _SECONDS_UNTIL_REPEATED:
            _send_cancel(going, environ, arrays, kill=killed is not None)
            requested = now
        pause(0.5)


def _seconds_until_kill(runs: Sequence[Submitted], environ: Mapping[str, str]) -> float:
    """Return the seconds from the cancel request to KILL."""
    on_slurm = any(run.submission.cluster == "slurm" for run in runs)
    return slurm.kill_wait(environ) + _SECONDS_AFTER_KILL_WAIT if on_slurm else _SECONDS_LOCAL


def _send_cancel(runs: Sequence[Submitted], environ: Mapping[str, str], arrays: frozenset[str], *, kill: bool) -> None:
    ids = (job_id for run in runs if run.submission.cluster == "slurm" for job_id in run.job_ids)
    job_ids = list(dict.fromkeys(array if (array := job_id.partition("_")[0]) in arrays else job_id for job_id in ids))
    if job_ids:
        if kill:
            slurm.cancel_all(job_ids, environ, kill=True)
        slurm.cancel_all(job_ids, environ)
    for run in runs:
        if run.submission.cluster == "local":
            _end_local(run, kill=kill)


def _end_local(run: Submitted, *, kill: bool) -> None:
    pid = int(run.submission.job_id.rpartition("-")[2])
    if kill:
        # Kill the descendants first. Their parent would otherwise restart them, or end them in its own way.
        processes.send((*process.below(pid), pid), signal.SIGKILL)
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def _not_ended(runs: Sequence[Submitted], statuses: Sequence[RunStatus], seconds: float) -> ToolFailed:
    remaining = [
        f"{run.submission.run} (job {status.job_id}) is {status.state}"
        + (f" on {', '.join(status.nodes[:8])}" if status.nodes else "")
        for run, status in zip(runs, statuses, strict=True)
        if not status.quiet
    ]
    return ToolFailed(
        f"{len(remaining)} of {len(runs)} runs have not ended {seconds:.0f} s after they were cancelled",
        why="\n".join(
            (*remaining[:20], "Slurm was asked to kill them; a process that waits for a disk cannot be killed")
        ),
        hint=(Command("hpcenv", "status", runs[0].submission.run), "; your site's support can check those nodes"),
    )
