"""`hpcenv cancel`: end runs. Runs on: LOGIN NODE."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpcenv.adapters import slurm
from hpcenv.errors import ToolFailed
from hpcenv.node import processes
from hpcenv.node.supervise import SECONDS_AFTER_TERM
from hpcenv.steps.runs import RunStatus, Submitted, Sweep, find_one, find_submitted, read_statuses, runs_of

# Slurm ends what KillWait has not ended; then it cleans up (epilog, cgroups).
_SECONDS_AFTER_KILL_WAIT = 10.0
_SECONDS_AFTER_KILL = 30.0

# A job that is requeued while it is cancelled, or a scancel that slurmctld lost: it is asked again.
_SECONDS_UNTIL_ASKED_AGAIN = 15.0

# A local run ends its training by itself in this time (node/supervise.py, node/local.py).
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
        words: runs as `find_one` takes them, and sweeps, of which every run is cancelled;
            nothing is cancelled unless all of them exist. Without any, the latest run.

    Raises:
        RunNotFound: no such run.
        ToolFailed: one did not end, not even after KILL; it may still be ending.
    """
    entries = [find_submitted(start, word, runs=runs) for word in words or (None,)]
    found = {run.folder.path: run for entry in entries for run in runs_of(entry)}
    arrays = {
        job_id.partition("_")[0]
        for entry in entries
        if isinstance(entry, Sweep)
        for run in entry.elements
        for job_id in run.job_ids
    }
    return cancel_runs(list(found.values()), environ=environ, pause=pause, arrays=frozenset(arrays))


def cancel_runs(
    runs: Sequence[Submitted],
    *,
    environ: Mapping[str, str],
    pause: Callable[[float], None],
    arrays: frozenset[str] = frozenset(),
) -> tuple[RunStatus, ...]:
    """Cancel runs that were found: ask, wait for KillWait, kill, and say what is still there.

    Args:
        arrays: job ids of arrays all of whose elements are meant. Of an element that is
            cancelled by itself before it started Slurm keeps no record (seen: 24.11).

    Raises:
        ToolFailed: see `cancel_all`.
    """
    statuses = read_statuses(runs, environ)
    going = [run for run, status in zip(runs, statuses, strict=True) if not status.quiet]
    if not going:
        return tuple(statuses)
    began = time.monotonic()
    _ask(going, environ, arrays, kill=False)
    asked, killed, patience = began, None, None
    while True:
        statuses = read_statuses(runs, environ)
        going = [run for run, status in zip(runs, statuses, strict=True) if not status.quiet]
        if not going:
            return tuple(statuses)
        now = time.monotonic()
        if patience is None and now - began > 2.0:
            # Only now: most jobs end at once, and it is one more question to slurmctld.
            patience = _patience(going, environ)
        if killed is None and patience is not None and now - began > patience:
            _ask(going, environ, arrays, kill=True)
            killed = asked = now
        if killed is not None and now - killed > _SECONDS_AFTER_KILL:
            raise _not_ended(runs, statuses, now - began)
        if now - asked > _SECONDS_UNTIL_ASKED_AGAIN:
            _ask(going, environ, arrays, kill=killed is not None)
            asked = now
        pause(0.5)


def _patience(runs: Sequence[Submitted], environ: Mapping[str, str]) -> float:
    """Return the seconds after which runs that were asked to end are killed."""
    on_slurm = any(run.submission.cluster == "slurm" for run in runs)
    return slurm.kill_wait(environ) + _SECONDS_AFTER_KILL_WAIT if on_slurm else _SECONDS_LOCAL


def _ask(runs: Sequence[Submitted], environ: Mapping[str, str], arrays: frozenset[str], *, kill: bool) -> None:
    asked = (job_id for run in runs if run.submission.cluster == "slurm" for job_id in run.job_ids)
    job_ids = list(dict.fromkeys(whole if (whole := one.partition("_")[0]) in arrays else one for one in asked))
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
        # Whoever would end them goes too: first those below it.
        processes.send((*processes.below(pid), pid), signal.SIGKILL)
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def _not_ended(runs: Sequence[Submitted], statuses: Sequence[RunStatus], seconds: float) -> ToolFailed:
    left = [
        f"{run.submission.run} (job {status.job_id}) is {status.state}"
        + (f" on {', '.join(status.nodes[:8])}" if status.nodes else "")
        for run, status in zip(runs, statuses, strict=True)
        if not status.quiet
    ]
    return ToolFailed(
        f"{len(left)} of {len(runs)} runs have not ended {seconds:.0f} s after they were cancelled",
        why="\n".join((*left[:20], "Slurm was asked to kill them; a process that waits for a disk cannot be killed")),
        hint=f"hpcenv status {runs[0].submission.run}; your site can look at those nodes",
    )
