"""The jobs of `hpcenv.Executor`: `submitit.SlurmJob` with the state that hpcenv knows. Runs on: LOGIN NODE."""

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

from hpcenv.api.run import Job, open_job
from hpcenv.errors import Command, HpcenvError, JobFailed, RunNotFound
from hpcenv.runs.entries import Submitted, open_run
from hpcenv.runs.state import RunState, read_states
from hpcenv.submission.function import read_result

R_co = TypeVar("R_co", covariant=True)

# A result file that another node wrote may be seen late: nfs(5), attribute caching.
_SECONDS_FOR_FILES = 15.0
_SECONDS_FOR_FILES_OF_FAILED = 1.0
_NOT_SLURMS_WORDS = {"rejected": "FAILED", "not-queued": "FAILED"}


class NoResult(JobFailed, utils.UncompletedJobError):
    """A job ended without a result: it was rejected, cancelled, or killed."""


def remember_run(folder: Path, job_id: str, run_folder: Path) -> None:
    """Write down which run belongs to a job: a symbolic link in the folder of the executor."""
    _link(folder, job_id).symlink_to(run_folder)


def _link(folder: str | Path, job_id: str) -> Path:
    return utils.JobPaths.get_first_id_independent_folder(folder) / f"{job_id}_run"


class RunWatcher(SlurmInfoWatcher):
    """Asks hpcenv for the states of jobs, not sacct: a cluster may have no accounting."""

    def __init__(self, delay_s: int = 60) -> None:
        super().__init__(delay_s)
        self._links: dict[str, Path] = {}

    def register_run(self, job_id: str, link: Path) -> None:
        """Register a job; `link` is the symbolic link to its run folder."""
        self._links[job_id] = link
        if job_id not in self._registered:
            self.register_job(job_id)

    def update(self) -> None:
        """Read the states of the jobs that have not ended, with one call of squeue for all."""
        self._num_calls += 1
        self._last_status_check = time.time()
        job_ids = sorted(self._registered - self._finished)
        runs = {job_id: run for job_id in job_ids if (run := self._run(job_id)) is not None}
        for job_id, state in zip(runs, read_states(list(runs.values()), os.environ), strict=True):
            self._info_dict[job_id] = _info(job_id, state)
            if state.quiet:
                self._finished.add(job_id)

    def _run(self, job_id: str) -> Submitted | None:
        try:
            return open_run(Path(os.path.realpath(self._links[job_id])))
        except (KeyError, HpcenvError):
            return None

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return Slurm's word for the state of a job; FAILED for one that the check rejected."""
        return self.get_info(job_id, mode=mode).get("State", "UNKNOWN")

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Return whether nothing more will happen in a job."""
        self.get_info(job_id, mode=mode)
        return job_id in self._finished


def _info(job_id: str, state: RunState) -> dict[str, str]:
    """Return what sacct would say, in its words."""
    word = _NOT_SLURMS_WORDS.get(state.state, state.state.upper().replace("-", "_"))
    status = "" if state.exit_status is None else f"{state.exit_status}:0"
    return {"JobID": job_id, "State": word, "NodeList": ",".join(state.nodes), "ExitCode": status}


class FunctionJob(submitit.SlurmJob[R_co]):
    """The call of a function, in a job whose nodes are checked first.

    It has the methods of `submitit.SlurmJob`. Another process opens it again with its folder and id:
    `FunctionJob(folder, job_id, tasks)`.
    """

    watcher = RunWatcher()

    def __init__(self, folder: str | Path, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        self._run_link = _link(folder, job_id)
        super().__init__(folder, job_id, tasks)

    @property
    def run(self) -> Job:
        """The run of this job: its folder, status, verdict and report."""
        folder = Path(os.path.realpath(self._run_link))
        if not folder.is_dir():
            raise RunNotFound(f"job {self.job_id} has no run folder", why=f"looked for {folder}")
        return open_job(folder)

    def _register_in_watcher(self) -> None:
        self.watcher.register_run(self.job_id, self._run_link)

    def done(self, force_check: bool = False) -> bool:
        """Return whether the job has ended, or its result is there."""
        # A job that was pickled in another process is not known to the watcher of this one.
        self._register_in_watcher()
        return super().done(force_check)

    @property
    def state(self) -> str:
        """Slurm's word for the state, as of a few seconds ago at most."""
        self._register_in_watcher()
        return self.watcher.get_state(self.job_id, mode="standard")

    def cancel(self, check: bool = True) -> None:
        """Cancel the job.

        Args:
            check: raise an error where that fails.
        """
        if not self.job_id.startswith("local-"):
            super().cancel(check)
            return
        try:
            self.run.cancel()
        except HpcenvError:
            if check:
                raise

    def results(self) -> list[R_co]:
        """Wait for all tasks, and return what the function returned in each.

        Raises:
            FailedJobError: the function raised an exception; its text has the traceback. Of several tasks it is the
                one that failed first.
            NoResult: the job ended without a result, for example because a node differs from the lockfile.
        """
        if self._sub_jobs:
            error = self.exception()
            if error is not None:
                raise error
        return super().results()

    def exception(self) -> Any:
        """Wait, and return the exception that `results` raises; None without one."""
        if not self._sub_jobs:
            return super().exception()
        self.wait()
        errors = [(task, error) for task in self._sub_jobs if (error := task.exception()) is not None]
        # Where one task fails hpcenv ends the others: they have no result, and are not the reason.
        failed = [pair for pair in errors if isinstance(pair[1], utils.FailedJobError)]
        first = min(failed, key=lambda pair: pair[0].paths.result_pickle.stat().st_mtime, default=None)
        return first[1] if first else errors[0][1] if errors else None

    def _get_outcome_and_result(self) -> tuple[str, Any]:
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

    def _no_result(self) -> NoResult:
        """Return why there is no result: the verdict, the first failure, and the end of the log."""
        try:
            report = self.run.report()
        except HpcenvError as error:
            return NoResult(f"job {self.job_id} ended without a result", why=str(error))
        status = report.status
        how = status.state if status.exit_status is None else f"{status.state}, exit status {status.exit_status}"
        failure = () if report.failure is None else (report.failure.headline, report.failure.traceback)
        details = (report.table,) if status.state == "rejected" else (*failure, *report.last_lines)
        return NoResult(
            f"job {self.job_id} (task {self.task_id}) ended without a result",
            why="\n".join((how, *filter(None, details))),
            hint=Command("hpcenv", "report", report.status.run),
        )


def _refresh(folder: Path) -> None:
    """Let NFS look at a folder again: a change of its mode, also to the same one, ends what is cached of it."""
    with contextlib.suppress(OSError):
        folder.chmod(folder.stat().st_mode)
