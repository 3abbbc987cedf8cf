"""`submit --after RUN`: the runs that must complete before the new run starts.

Runs on: LOGIN NODE. With Slurm, the new job gets the dependency `afterok` on the jobs that have not ended (sbatch(1),
"--dependency"). Without Slurm, `submit` itself waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpcenv.errors import Command, SubmitRejected, UsageError
from hpcenv.project.context import Context
from hpcenv.runs.entries import Submitted, Sweep, open_submitted, runs_of
from hpcenv.runs.find import find_submitted
from hpcenv.runs.state import read_states
from hpcenv.runs.wait import wait_for
from hpcenv.submission.plan import EarlierRuns, Request
from hpcenv.submission.request import Cluster, SubmitOptions


def find(options: SubmitOptions, context: Context, cluster: Cluster) -> EarlierRuns:
    """Return the runs that `--after` names, and which of these runs have not ended.

    Raises:
        RunNotFound: there is no run with such a name.
        SubmitRejected: one of the runs has ended and did not complete.
    """
    if not options.after:
        return EarlierRuns()
    entries = [find_submitted(context.cwd, word, runs=options.runs_dir) for word in options.after]
    runs = [(entry, run) for entry in entries for run in runs_of(entry)]
    going: list[Submitted] = []
    job_ids: list[str] = []
    for (entry, run), state in zip(runs, read_states([run for _, run in runs], context.environ), strict=True):
        if state.quiet and state.state != "completed":
            raise _failed(_name(run), state.state, state.detail)
        if not state.quiet:
            going.append(run)
            job_ids.append(_job_of(entry, run))
    # Slurm waits only if the new run and the earlier run are both Slurm jobs.
    by_slurm = [cluster == "slurm" and run.submission.cluster == "slurm" for run in going]
    return EarlierRuns(
        names=tuple(_name(entry) for entry in entries),
        going=tuple(run.folder.path for run in going),
        on_slurm=tuple(dict.fromkeys(job for job, slurm in zip(job_ids, by_slurm, strict=True) if slurm)),
        waited_for=tuple(run.folder.path for run, slurm in zip(going, by_slurm, strict=True) if not slurm),
    )


def _job_of(entry: Submitted | Sweep, run: Submitted) -> str:
    """Return the id of the job that must complete: the last job of a chain, or the whole array of a sweep."""
    job_id = run.job_ids[-1]
    return job_id.partition("_")[0] if isinstance(entry, Sweep) else job_id


def _name(entry: Submitted | Sweep) -> str:
    return entry.folder.name if isinstance(entry, Sweep) else entry.submission.run


def _failed(name: str, state: str, detail: str) -> SubmitRejected:
    return SubmitRejected(
        f"`{name}` did not complete: {state}",
        why="\n".join(filter(None, (detail, "--after starts a run only after the named one has completed"))),
        hint=(Command("hpcenv", "report", name), " says why it did not"),
    )


def with_dependency(request: Request, earlier: EarlierRuns) -> Request:
    """Return the request to Slurm with a dependency on the jobs that must complete first.

    The request also contains the option with which Slurm cancels the job if the job can never start.

    Raises:
        UsageError: the user's own `--dependency` has a `?`. With `?`, the job starts after any one of several jobs.
    """
    own = request.dependency
    if earlier.on_slurm and own is not None and "?" in own:
        raise UsageError(
            f"`--after` and `--dependency {own}` contradict each other",
            why="with `?` the job would start after any of the jobs, with --after only after all of them",
        )
    completed = ["afterok:" + ":".join(earlier.on_slurm)] if earlier.on_slurm else []
    dependency = ",".join(filter(None, (own, *completed)))
    if not dependency:
        return request
    # Without this option, a job that can never start stays in the queue, and hpcenv waits for it forever.
    sbatch = {"kill-on-invalid-dep": "yes", **request.sbatch}
    return replace(request, dependency=dependency, sbatch=sbatch)


def notes_on(earlier: EarlierRuns) -> list[str]:
    """Return notes that say how the new run waits for the earlier runs."""
    names = ", ".join(folder.name for folder in earlier.going)
    if not earlier.going:
        return [f"{name} has completed" for name in earlier.names]
    if earlier.waited_for:
        return [f"`submit` itself waits until these runs have completed: {names}"]
    return [f"Slurm starts the job when these runs have completed, and cancels it if one fails: {names}"]


def wait(folders: Sequence[Path], context: Context) -> None:
    """Wait until runs have completed.

    Raises:
        SubmitRejected: a run has ended and did not complete.
    """
    if not folders:
        return
    runs = [open_submitted(folder) for folder in folders]
    statuses = wait_for(runs, environ=context.environ, pause=time.sleep, on_status=lambda _status: None)
    for status in statuses:
        if status.state != "completed":
            raise _failed(status.run, status.state, status.detail)
