"""The jobs of hpcenv: `submitit.SlurmJob` with the state that hpcenv knows. Runs on: LOGIN NODE.

Jobs of scripts and jobs of functions have the same class. So one list may contain jobs of scripts and of functions.
`submitit.helpers.as_completed` and `monitor_jobs` accept this list.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import submitit
from submitit.core import utils
from submitit.slurm.slurm import SlurmInfoWatcher

from hpcenv.api.run import RunHandle, find_here
from hpcenv.api.submitit_errors import NoResult
from hpcenv.errors import Command, HpcenvError, JobFailed, RunNotFound
from hpcenv.records.run_folder import RunFolder
from hpcenv.runs.entries import Submitted, open_run
from hpcenv.runs.state import RunState, read_states
from hpcenv.runs.status import RunStatus
from hpcenv.submission.function import read_result

R_co = TypeVar("R_co", covariant=True)

# A result file from another node may become visible late: nfs(5), attribute caching.
_SECONDS_FOR_FILES = 15.0
_SECONDS_FOR_FILES_OF_FAILED = 1.0
# For some seconds, squeue may no longer list a job although sacct does not show the job's end yet.
_SECONDS_AFTER_GONE = 10.0
_NOT_SLURMS_WORDS = {"rejected": "FAILED", "not-queued": "FAILED"}


def remember_run(folder: Path, job_id: str, run_folder: Path) -> None:
    """Record which run belongs to a job, as a symbolic link in the folder of the executor."""
    _link(folder, job_id).symlink_to(run_folder)


def _link(folder: str | Path, job_id: str) -> Path:
    return utils.JobPaths.get_first_id_independent_folder(folder) / f"{job_id}_run"


class RunWatcher(SlurmInfoWatcher):
    """Gets the states of jobs from hpcenv, not from sacct, because a cluster may have no accounting."""

    def __init__(self, delay_s: int = 60) -> None:
        super().__init__(delay_s)
        self._links: dict[str, Path] = {}
        self._gone_since: dict[str, float] = {}

    def register_run(self, job_id: str, link: Path) -> None:
        """Register a job. `link` is the run folder of the job, or a symbolic link to the run folder."""
        if self._links.get(job_id) != link:
            # The operating system reuses process ids, so a later local job can have the id of an earlier local job.
            self._finished.discard(job_id)
            # The state of a newly registered job is read at once.
            self._registered.discard(job_id)
            self._info_dict.pop(job_id, None)
            self._gone_since.pop(job_id, None)
        self._links[job_id] = link
        if job_id not in self._registered:
            self.register_job(job_id)

    def update(self) -> None:
        """Read the states of the jobs that have not ended, with one call of squeue for all jobs."""
        self._num_calls += 1
        self._last_status_check = time.time()
        job_ids = sorted(self._registered - self._finished)
        runs = {job_id: run for job_id in job_ids if (run := self._run(job_id)) is not None}
        for job_id, state in zip(runs, read_states(list(runs.values()), os.environ), strict=True):
            self._info_dict[job_id] = _info(job_id, state)
            if state.ended or self._is_lost(job_id, state):
                self._finished.add(job_id)

    def _is_lost(self, job_id: str, state: RunState) -> bool:
        """Whether Slurm has not known the job for some time, and no record says how the job ended."""
        if not state.gone:
            self._gone_since.pop(job_id, None)
            return False
        return time.monotonic() - self._gone_since.setdefault(job_id, time.monotonic()) > _SECONDS_AFTER_GONE

    def _run(self, job_id: str) -> Submitted | None:
        try:
            return open_run(Path(os.path.realpath(self._links[job_id])))
        except (KeyError, HpcenvError):
            return None

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return Slurm's word for the state of a job. A job that the check rejected is FAILED."""
        return self.get_info(job_id, mode=mode).get("State", "UNKNOWN")

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Return whether a job has ended and cannot start again."""
        self.get_info(job_id, mode=mode)
        return job_id in self._finished


def _info(job_id: str, state: RunState) -> dict[str, str]:
    """Return the job's state in the words of sacct."""
    word = _NOT_SLURMS_WORDS.get(state.state, state.state.upper().replace("-", "_"))
    status = "" if state.exit_status is None else f"{state.exit_status}:0"
    return {"JobID": job_id, "State": word, "NodeList": ",".join(state.nodes), "ExitCode": status}


class ScriptPaths(utils.JobPaths):
    """The files of a script's job. All ranks of the job write to the log of the run."""

    @property
    def folder(self) -> Path:
        """The run folder. A `%` in the path of the folder is not a placeholder."""
        return self._folder

    @property
    def submission_file(self) -> Path:
        """The batch script."""
        return RunFolder(self._folder).script

    @property
    def stdout(self) -> Path:
        """The log of the run, with both streams of all ranks."""
        return RunFolder(self._folder).log

    @property
    def stderr(self) -> Path:
        """The same file as `stdout`."""
        return self.stdout


class Job(submitit.SlurmJob[R_co]):
    """A job of hpcenv, whose nodes are checked before its script or function starts.

    A job has the methods of `submitit.SlurmJob`. Everything else that hpcenv knows about the job is in `run`. The
    result of a function's job is the value that the function returned. The result of a script's job is the status of
    its run.

    Args:
        folder: the executor's folder; for a script, the run folder. A job can be opened again with `folder` and
            `job_id`.
        job_id: Slurm's job id, or `local-PID`.
        tasks: numbers of the processes that call the function.
    """

    watcher = RunWatcher()

    def __init__(self, folder: str | Path, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        run = RunFolder(Path(folder).expanduser().absolute())
        self._is_script = run.submission.exists()
        self._run_link = run.path if self._is_script else _link(folder, job_id)
        super().__init__(folder, job_id, tasks)
        if self._is_script:
            self._paths = ScriptPaths(folder, job_id=job_id, task_id=self.task_id)

    @property
    def run(self) -> RunHandle:
        """The run of this job: its folder, status, verdict and report."""
        folder = Path(os.path.realpath(self._run_link))
        if not folder.is_dir():
            raise RunNotFound(f"job {self.job_id} has no run folder", why=f"looked for {folder}")
        return RunHandle(folder)

    def _register_in_watcher(self) -> None:
        self.watcher.register_run(self.job_id, self._run_link)

    def done(self, force_check: bool = False) -> bool:
        """Return whether the job has ended, or its result exists."""
        # The watcher of this process does not know a job that was pickled in another process.
        self._register_in_watcher()
        return super().done(force_check)

    @property
    def state(self) -> str:
        """Slurm's word for the state. The answer is at most a few seconds old."""
        self._register_in_watcher()
        return self.watcher.get_state(self.job_id, mode="standard")

    def cancel(self, check: bool = True) -> None:
        """Cancel the job.

        Args:
            check: raise an error if the job cannot be cancelled.
        """
        if not self._is_script and not self.job_id.startswith("local-"):
            super().cancel(check)
            return
        try:
            self.run.cancel()
        except HpcenvError:
            if check:
                raise

    def results(self) -> list[R_co]:
        """Wait, and return what the function returned in each task. For a script, return the status of its run.

        Raises:
            FailedJobError: the function raised an exception. The text of the error contains the traceback. If several
                tasks failed, the error is about the task that failed first.
            NoResult: the job ended without a result, for example because a node differs from the lockfile. For a
                script: the script did not complete.
        """
        if self._sub_jobs:
            error = self.exception()
            if error is not None:
                raise error
        return super().results()

    def exception(self) -> Any:
        """Wait, and return the exception that `results` would raise; None if `results` would not raise an exception."""
        if not self._sub_jobs:
            return super().exception()
        self.wait()
        errors = [(task, error) for task in self._sub_jobs if (error := task.exception()) is not None]
        # If one task fails, hpcenv ends all other tasks. The other tasks have no result, but they are not the cause.
        failed = [pair for pair in errors if isinstance(pair[1], utils.FailedJobError)]
        first = min(failed, key=lambda pair: pair[0].paths.result_pickle.stat().st_mtime, default=None)
        return first[1] if first else errors[0][1] if errors else None

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        if self._is_script:
            return "success", self._completed()
        began = time.monotonic()
        while True:
            _refresh(self.paths.folder)
            try:
                return read_result(self.paths.result_pickle)
            except FileNotFoundError:
                pass
            except JobFailed as error:
                raise NoResult(error.what, why=error.why, hint=error.hint) from error
            state = self.watcher.get_state(self.job_id, mode="cache")
            patience = _SECONDS_FOR_FILES if state == "COMPLETED" else _SECONDS_FOR_FILES_OF_FAILED
            if time.monotonic() - began > patience:
                raise self._no_result()
            time.sleep(0.2)

    def _completed(self) -> RunStatus:
        """Return the status of the run.

        Raises:
            NoResult: the run did not complete with status 0.
        """
        status = self.run.status()
        if not status.has_succeeded:
            raise self._no_result()
        return status

    def _no_result(self) -> NoResult:
        """Return the error that says why there is no result: the verdict, the first failure, the end of the log."""
        try:
            report = self.run.report()
        except HpcenvError as error:
            return NoResult(f"job {self.job_id} ended without a result", why=str(error))
        what = "did not complete" if self._is_script else "ended without a result"
        status = report.status
        how = status.state if status.exit_status is None else f"{status.state}, exit status {status.exit_status}"
        failure = () if report.failure is None else (report.failure.headline, report.failure.traceback)
        details = (report.table,) if status.state == "rejected" else (*failure, *report.last_lines)
        return NoResult(
            f"job {self.job_id} (task {self.task_id}) {what}",
            why="\n".join((how, *filter(None, details))),
            hint=Command("hpcenv", "report", report.status.run),
        )


def _refresh(folder: Path) -> None:
    """Make NFS read a folder again.

    If the mode of a folder is set, even to the same mode, NFS forgets its cached entries.
    """
    with contextlib.suppress(OSError):
        folder.chmod(folder.stat().st_mode)


def open_job(
    run: str | Path | None = None, *, project: str | Path = ".", runs_dir: str | None = None
) -> Job[RunStatus]:
    """Open the job of a run again. The job's result is the status of the run, even if the run called a function.

    Arguments and errors are the same as for `status`.
    """
    return job_of(find_here(run, project, runs_dir))


def job_of(run: Submitted) -> Job[RunStatus]:
    """Return the job of a run; for a chain, the first job of the chain."""
    return Job(run.folder.path, run.submission.job_id)
