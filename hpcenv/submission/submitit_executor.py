"""A submitit executor that submits the batch scripts of hpcenv.

Runs on: LOGIN NODE. `hpcenv submit` uses `queue_script`, and `hpcenv.Executor` is a `ScriptExecutor`. This class
differs from its parent class, `submitit.SlurmExecutor`, in two points:

- The batch script is the file in the run folder, byte for byte. This script has the check before the training.
- sbatch is called in the same way as every program in hpcenv. submitit 1.5.4 has no time limit for sbatch, takes the
first "job N" in a site's banner as the job id, and does not show the warnings of sbatch.

submitit and this class run on the host, because an image has no scontrol. The job on the host starts the container.
The overridden methods are private in submitit. So pyproject.toml limits the version of submitit, and a contract test
checks that the methods exist.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import submitit
from submitit.core import utils
from submitit.core.core import PicklingExecutor

from hpcenv import process
from hpcenv.cluster import munge, slurm_command
from hpcenv.errors import SubmitRejected, SubmitUncertain, ToolFailed, UsageError

# If slurmctld does not answer, sbatch itself ends after MessageTimeout (10 s) and a few retries.
# With the job_submit plugin of a site, an answer can take a minute.
_SECONDS = 180.0


class NoJobId(SubmitUncertain, utils.FailedSubmissionError):
    """sbatch answered without a job id. submitit raises `FailedSubmissionError` in this case."""


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job in Slurm's queue, and the warnings of sbatch."""

    job_id: str
    warnings: tuple[str, ...]


class ScriptExecutor(submitit.SlurmExecutor):
    """A `submitit.SlurmExecutor` that submits an existing batch script.

    Args:
        folder: the folder for the files of submitit.
        max_num_timeout, max_pickle_size_gb, python: see `submitit.SlurmExecutor`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
    ) -> None:
        # The constructor of SlurmExecutor is not called, because it refuses a machine without srun. `queue_script`
        # checks this.
        PicklingExecutor.__init__(self, folder, max_num_timeout=max_num_timeout, max_pickle_size_gb=max_pickle_size_gb)
        self.python = shlex.quote(sys.executable) if python is None else python

    def _make_submission_file_text(self, command: str, uid: str) -> str:  # noqa: ARG002
        raise UsageError(
            "hpcenv submits no job without its check",
            why="submitit's own batch script has no check",
            hint="call `submit`",
        )

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        """Return the job id from the standard output of sbatch."""
        stdout = string if isinstance(string, str) else string.decode(errors="replace")
        # sbatch prints "Submitted batch job N", sometimes followed by " on cluster C" (sbatch(1)). A site's
        # wrapper of sbatch may print a banner before and after this line.
        line = re.search(r"^Submitted batch job ([0-9]+)\b", stdout, re.MULTILINE)
        if line is None:
            raise NoJobId(
                "sbatch answered without a job id", why=f"expected `Submitted batch job N`, got {stdout[:500]!r}"
            )
        return line[1]


def queue_script(
    script: Path, *, environ: Mapping[str, str], options: Sequence[str] = (), passed: Sequence[str] = ()
) -> QueuedJob:
    """Submit a batch script of a run folder.

    Args:
        script: the file. The `#SBATCH` lines of this script describe the job, or the array.
        environ: the user's environment. The job gets this environment without credentials, and without the variables of
            Slurm and of launchers that started this process.
        options: options for sbatch, which override the lines of the script.
        passed: names or patterns of variables that the ranks get from the job (--pass-env).

    Raises:
        ToolMissing: sbatch or srun is not on PATH.
        SubmitRejected: sbatch refused the job. Nothing is queued.
        SubmitUncertain: sbatch did not answer, or its answer has no job id (`NoJobId`).
    """
    path = environ.get("PATH")
    sbatch = process.find_tool("sbatch", needed_for="submit a job", path=path)
    process.find_tool("srun", needed_for="start the steps of a job", path=path)
    executor = ScriptExecutor(script.parent)
    command = executor._make_submission_command(script)  # noqa: SLF001
    stored = slurm_command.environment_to_store(environ, passed)
    done = _call_sbatch([sbatch, *options, *command[1:]], stored)
    job_id = executor._get_job_id_from_submission_command(done.stdout)  # noqa: SLF001
    return QueuedJob(job_id=job_id, warnings=tuple(_warnings(done.stderr)))


def _call_sbatch(argv: Sequence[str], environ: Mapping[str, str]) -> process.Completed:
    try:
        return slurm_command.run(argv, environ, timeout=_SECONDS)
    except ToolFailed as error:
        if error.what == munge.DOWN:
            # Slurm does not accept a request without a munge credential, so nothing is queued.
            raise SubmitRejected(error.what, why=error.why, hint=error.hint) from error
        if error.status is None:
            raise SubmitUncertain(error.what, why=error.why) from error
        reason, hint = slurm_command.rejection(error.stderr)
        if re.search(r"timed out|zero bytes|connection reset|broken pipe", error.stderr, re.IGNORECASE):
            # The request was sent, but no answer arrived. So the job may be queued.
            raise SubmitUncertain("Slurm did not answer", why=reason, hint=hint) from error
        raise SubmitRejected("Slurm refused the job", why=reason, hint=hint) from error


def _warnings(stderr: str) -> list[str]:
    return [line.partition("warning:")[2].strip() for line in stderr.splitlines() if "warning:" in line]
