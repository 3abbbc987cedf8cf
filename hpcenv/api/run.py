"""Status, report and diagnosis of a run from Python. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcenv.api.here import project_folder
from hpcenv.errors import UsageError
from hpcenv.project import duration
from hpcenv.records.files import read_file
from hpcenv.records.run_folder import RunFolder
from hpcenv.reproduction.usage import By, Usage, read_usage
from hpcenv.runs.cancel import cancel as cancel_run
from hpcenv.runs.cancel import cancel_runs
from hpcenv.runs.diagnose.diagnose import Diagnosed
from hpcenv.runs.diagnose.diagnose import diagnose as diagnose_here
from hpcenv.runs.entries import Run, Submitted, open_run
from hpcenv.runs.find import find_run
from hpcenv.runs.hangs import RunStacks, ask_stacks
from hpcenv.runs.report import SweepReport
from hpcenv.runs.report import report as report_of
from hpcenv.runs.report_text import RunReport
from hpcenv.runs.run_list import RunListing, list_lines
from hpcenv.runs.status import RunStatus, read_status, with_queue
from hpcenv.runs.top import RunTop, TopReader, find_watched
from hpcenv.runs.wait import wait_for

# The largest size of a log that is read, in bytes. People do not read longer logs.
_LONGEST_LOG = 1 << 30


@dataclass(frozen=True)
class RunHandle:
    """A submitted run: `hpcenv.submit(...).run`.

    Attributes:
        folder: the run folder. `hpcenv.open_job(folder).run` opens the run again.
    """

    folder: Path

    @property
    def name(self) -> str:
        """The name of the run."""
        return self._open().submission.run

    @property
    def job_id(self) -> str:
        """Slurm's job id, or `local-PID`."""
        return self._open().submission.job_id

    def status(self) -> RunStatus:
        """Return the present status, from Slurm and the run folder."""
        return read_status(self._open(), os.environ)

    def state(self) -> str:
        """Return Slurm's word for the state in lower case, or `rejected` if a node differed from the lockfile."""
        return self.status().state

    def done(self) -> bool:
        """Return whether the run has ended."""
        return self.status().quiet

    def wait(self, timeout: float | None = None) -> RunStatus:
        """Wait until the run has ended, with or without success.

        Args:
            timeout: seconds to wait at most.

        Raises:
            WaitTimeout: the run has not ended within `timeout`.
        """
        run = self._open()
        return wait_for([run], environ=os.environ, pause=time.sleep, on_status=lambda _status: None, timeout=timeout)[0]

    def cancel(self) -> RunStatus:
        """End the run, and wait until it has ended.

        Raises:
            ToolFailed: the run did not end, not even after KILL.
        """
        return cancel_runs([self._open()], environ=os.environ, pause=time.sleep)[0]

    def report(self) -> RunReport:
        """Return the report of the run: verdict, failures, the end of its log."""
        result = report_of(self.folder, str(self.folder), environ=os.environ)
        assert isinstance(result, RunReport)
        return result

    def log(self) -> str:
        """Return the log of the run so far."""
        try:
            content = read_file(RunFolder(self.folder).log, most=_LONGEST_LOG, follow=False)
        except FileNotFoundError:
            return ""
        return content.decode("utf-8", errors="backslashreplace")

    def _open(self) -> Run:
        return open_run(self.folder)


def status(run: str | Path | None = None, *, project: str | Path = ".", runs_dir: str | None = None) -> RunStatus:
    """Return the state of a run: `hpcenv status`.

    Args:
        run: folder, name or job id of the run; None for the latest run.
        project: a folder of the project.
        runs_dir: folder of runs, if it is not the project's folder of runs.

    Raises:
        RunNotFound: no run matches.
    """
    return with_queue(read_status(find_here(run, project, runs_dir), os.environ), os.environ)


def report(
    run: str | Path | None = None, *, project: str | Path = ".", runs_dir: str | None = None, lines: int = 10
) -> RunReport | SweepReport:
    """Return the report of a run or sweep: `hpcenv report`. Arguments and errors are the same as for `status`.

    Args:
        lines: the number of lines from the end of the log.
    """
    return report_of(project_folder(project), _word(run), environ=os.environ, runs=runs_dir, lines=lines)


def stacks(
    run: str | Path | None = None, *, rank: int | None = None, project: str | Path = ".", runs_dir: str | None = None
) -> RunStacks:
    """Return which line each rank of a running run executes: `hpcenv stacks`.

    The ranks continue. The answer takes up to 45 seconds.

    Args:
        run, project, runs_dir: as for `status`.
        rank: show only this rank; None for all ranks.

    Raises:
        RunNotRunning: the run waits, is being checked, or has ended, or nothing watches its ranks.
    """
    return ask_stacks(project_folder(project), _word(run), environ=os.environ, runs=runs_dir, rank=rank)


def top(run: str | Path | None = None, *, project: str | Path = ".", runs_dir: str | None = None) -> tuple[RunTop, ...]:
    """Return what the nodes, GPUs and ranks of a run do now, and what is unusual: `hpcenv top`.

    Arguments and errors are the same as for `status`. If `run` is None, return all runs of the project that run now.
    """
    found = find_watched(project_folder(project), _word(run), environ=os.environ, runs=runs_dir)
    return tuple(TopReader(one).read(time.time()) for one in found)


def diagnose(*words: str | Path, project: str | Path = ".", runs_dir: str | None = None) -> tuple[Diagnosed, ...]:
    """Find the earliest cause of a failure in the logs: `hpcenv diagnose`.

    Args:
        words: runs, as for `status`, and log files. Without words, the latest run is used. All log files must belong
            to one job.
        project, runs_dir: as for `status`.

    Returns:
        One diagnosis for each run that failed or has not ended, and one diagnosis for all log files together.

    Raises:
        RunNotFound: no run matches.
    """
    given = tuple(str(word) for word in words)
    return diagnose_here(project_folder(project), given, environ=os.environ, runs=runs_dir)


def cancel(run: str | Path | None = None, *, project: str | Path = ".", runs_dir: str | None = None) -> RunStatus:
    """End a run, and wait until it has ended: `hpcenv cancel`. Arguments are the same as for `status`.

    Raises:
        RunNotFound: no run matches.
        ToolFailed: the run did not end, not even after KILL.
    """
    return cancel_run(project_folder(project), _word(run), environ=os.environ, pause=time.sleep, runs=runs_dir)


def usage(since: str = "30d", *, by: By = "run", project: str | Path = ".", runs_dir: str | None = None) -> Usage:
    """Sum the GPU hours of the project's runs: `hpcenv usage`.

    Args:
        since: how far back in time runs are summed, such as `30d` or `12h`.
        by: what each row of the result sums: a `run`, a `lockfile` or a `partition`.
        project, runs_dir: as for `status`.

    Raises:
        RunNotFound: the folder belongs to no project.
        UsageError: `since` is not a length of time.
    """
    try:
        begin = time.time() - duration.parse(since, number="seconds")
    except ValueError as error:
        raise UsageError(f"since={since!r} {error}") from error
    return read_usage(project_folder(project), environ=os.environ, since=begin, by=by, runs=runs_dir)


def list_runs(
    sweep: str | None = None,
    *,
    project: str | Path = ".",
    runs_dir: str | None = None,
    state: str | Sequence[str] = (),
    fingerprint: str = "",
    where: str | Sequence[str] = (),
    sort: str = "",
    lines: int | None = None,
) -> RunListing:
    """Return the runs of a project with their arguments, commit, fingerprint and last metrics: `hpcenv list`.

        for run in hpcenv.list_runs(where=["lr=3e-4", "loss<2"], sort="loss"):
            print(run.run, run.arguments["lr"], run.metrics["loss"])

    Each run of a sweep has its own line. `to_pandas()` of the result gives a DataFrame.

    Args:
        sweep: name of a sweep, to list only the runs of this sweep.
        project: a folder of the project.
        runs_dir: folder of runs, if it is not the project's folder of runs.
        state: list only runs in this state, or in one of these states.
        fingerprint: list only runs whose lockfile has this fingerprint.
        where: one condition, or several conditions. Only runs that fulfil all conditions are listed.
        sort: name of an argument, metric or column. `-` before the name means descending order. Empty means that the
            newest run is first.
        lines: the maximal number of runs.

    Raises:
        RunNotFound: the folder belongs to no project, or there is no such sweep.
        UsageError: a state or name does not exist, or a condition is not valid.
    """
    return list_lines(
        project_folder(project),
        environ=os.environ,
        sweep=sweep,
        runs=runs_dir,
        states=_words(state),
        fingerprint=fingerprint.removeprefix("hpcenv:"),
        where=_words(where),
        sort=sort,
        each_run=True,
        limit=lines,
    )


def _words(given: str | Sequence[str]) -> Sequence[str]:
    return (given,) if isinstance(given, str) else given


def find_here(run: str | Path | None, project: str | Path, runs_dir: str | None) -> Submitted:
    """Return the run that the arguments of `status` name."""
    return find_run(project_folder(project), _word(run), runs=runs_dir)


def _word(run: str | Path | None) -> str | None:
    return None if run is None else str(run)
