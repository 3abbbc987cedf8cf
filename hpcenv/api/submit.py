"""Submit a script from Python: `hpcenv submit` and `hpcenv submit --sweep`. Runs on: LOGIN NODE.

job = hpcenv.submit("train.py", ["--lr", "3e-4"], nodes=2, gpus=8, time="4:00:00")
print(job.result().exit_status)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcenv.api.here import open_here, require_accepted
from hpcenv.api.job import Job, job_of
from hpcenv.api.submitit_errors import refused_as_in_submitit
from hpcenv.project.option_types import SubmitKeywords
from hpcenv.runs.entries import open_run
from hpcenv.runs.status import RunStatus
from hpcenv.submission import plan_job as planning
from hpcenv.submission.plan import Plan
from hpcenv.submission.request import command_of, from_keywords
from hpcenv.submission.submit import submit as submit_plan
from hpcenv.submission.sweep_job import plan_sweep, submit_sweep

if TYPE_CHECKING:
    from typing_extensions import Unpack


def plan_job(
    script: str | Path, args: Sequence[object] = (), *, project: str | Path = ".", **options: Unpack[SubmitKeywords]
) -> Plan:
    """Plan a run, as `hpcenv submit --dry-run` does; nothing is written or submitted.

    Args:
        script: the training script; relative to `project`.
        args: arguments for the script, passed literally. Values that are not text are converted with `str()`.
        project: the folder to submit from.
        options: the options of `hpcenv submit`, with `_` for `-`.

    Raises:
        HpcenvError: the job would fail, and the reason is already known now.
    """
    given = from_keywords(str(script), args, options)
    workspace, context = open_here(project, command_of(given))
    with refused_as_in_submitit():
        return planning.plan_job(workspace, given, context)


def submit(
    script: str | Path,
    args: Sequence[object] = (),
    *,
    project: str | Path = ".",
    accept: str | None = None,
    **options: Unpack[SubmitKeywords],
) -> Job[RunStatus]:
    """Submit a script that torchrun starts on every node, in the locked environment: `hpcenv submit`.

    Arguments and errors are the same as for `plan_job`. These are added:

    Args:
        accept: digest of the project's requests to this machine, if you have not accepted these requests yet. The error
            NotAccepted contains the digest.

    Raises:
        NotAccepted: you have not accepted the project's requests to this machine.
        NotSubmitted, ToolMissing: Slurm refused the job, or sbatch is missing. Nothing is queued, and no run folder is
            left.
    """
    with refused_as_in_submitit():
        given = from_keywords(str(script), args, options)
        workspace, context = open_here(project, command_of(given))
        require_accepted(workspace, accept)
        result = submit_plan(planning.plan_job(workspace, given, context), context)
    return Job(result.run_folder, result.job_id)


def sweep(
    script: str | Path,
    args: Sequence[object] = (),
    *,
    over: Mapping[str, Sequence[object]],
    max_parallel: int | None = None,
    project: str | Path = ".",
    accept: str | None = None,
    **options: Unpack[SubmitKeywords],
) -> list[Job[RunStatus]]:
    r"""Submit a run for every combination of values, as one job array: `hpcenv submit --sweep`.

    Args:
        args: arguments for the script. `{NAME}` in an argument is replaced by a value of NAME. If no argument contains
            `{NAME}`, `--NAME=VALUE` is appended.
        over: name -> the values of this name. The last name varies fastest.
        max_parallel: how many jobs may run at the same time.
        accept: as for `submit`.

    Returns:
        One job for each element, in the order of their indices.
    """
    axes = tuple(f"{name}=" + ",".join(str(value).replace(",", r"\,") for value in over[name]) for name in over)
    with refused_as_in_submitit():
        given = replace(from_keywords(str(script), args, options), sweep=axes, max_parallel=max_parallel)
        workspace, context = open_here(project, command_of(given))
        require_accepted(workspace, accept)
        result = submit_sweep(plan_sweep(workspace, given, context), context)
    return [job_of(open_run(result.run_folder / one.folder)) for one in result.elements]
