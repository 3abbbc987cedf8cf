"""`hpcenv.Executor`: a submitit executor whose jobs are checked against the lockfile before the function runs.

Runs on: LOGIN NODE.

    executor = hpcenv.Executor("jobs", nodes=2, tasks_per_node=4, time="1:00:00")
    job = executor.submit(train, lr=3e-4)
    print(job.results())

A program that was written for submitit needs only one change: replace `submitit.AutoExecutor` by `hpcenv.AutoExecutor`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import submitit
from submitit.auto import auto
from submitit.core import utils

from hpcenv.api.parameters import SUBMITIT, ParameterNames, translate
from hpcenv.api.submitit_errors import WrongParameter, refused_as_in_submitit
from hpcenv.errors import UsageError
from hpcenv.project.options import in_place
from hpcenv.submission.submitit_executor import ScriptExecutor

if TYPE_CHECKING:
    from hpcenv.api.function_submission import FunctionSubmission
    from hpcenv.submission.plan import Plan

NAME = "hpcenv"
KEYWORDS = frozenset(option.name for option in in_place("python"))


class Executor(ScriptExecutor):
    """Submits functions as `submitit.SlurmExecutor` does. The nodes of each job are checked before the function starts.

    A job starts the function only if every node agrees with the project's lockfile. If a node differs, the job ends
    with exit status 90, and `job.result()` raises an error with the table of differences.

    Args:
        folder: the folder for functions, results and logs, in submitit's layout. All nodes must see this folder.
        max_num_timeout: how many times a `Checkpointable` function is queued again after it reached the time limit.
        max_pickle_size_gb: the largest size of a function and its arguments.
        python: cannot be set, because functions run in the Python of the lockfile.
        project: folder of hpcenv.toml.
        accept: digest of the project's requests to this machine, if you have not accepted these requests yet. The error
            NotAccepted contains the digest.
        parameters: as for `update_parameters`.
    """

    def __init__(
        self,
        folder: str | Path,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
        *,
        project: str | Path = ".",
        accept: str | None = None,
        **parameters: Any,
    ) -> None:
        if python is not None:
            raise UsageError(
                "`python` is not a parameter of hpcenv.Executor", why="functions run in the Python of the lockfile"
            )
        super().__init__(folder, max_num_timeout=max_num_timeout, max_pickle_size_gb=max_pickle_size_gb)
        self.project = project
        self.accept = accept
        self.update_parameters(**parameters)

    @classmethod
    def name(cls) -> str:
        """Return the name of the plug-in: `submitit.AutoExecutor(folder, cluster="hpcenv")`."""
        return NAME

    @classmethod
    def affinity(cls) -> int:
        """Return 0: submitit uses this executor only if a program names it."""
        return 0

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return ParameterNames({*SUBMITIT, *KEYWORDS, "call", "name", "outputs"})

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Set submitit's generic parameters, the parameters of SlurmExecutor, and the keywords of `hpcenv.submit`.

        Raises:
            WrongParameter: there is no such parameter, or two parameters contradict each other.
        """
        generic = {name: kwargs.pop(name) for name in list(self._equivalence_dict()) if name in kwargs}
        # `nodes` and `cpus_per_task` have the same name in submitit and in hpcenv.
        given = {**self._convert_parameters(generic), **kwargs}
        parameters = {**self.parameters, **given}
        try:
            translate(parameters, KEYWORDS)
        except UsageError as error:
            raise WrongParameter(error.what, why=error.why, hint=error.hint) from error
        # The dictionary is changed in place, because AutoExecutor uses the same dictionary.
        self.parameters.update(given)

    def plan(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Plan:
        """Plan a job; nothing is written or submitted. `plan(...).script` is the batch script."""
        with refused_as_in_submitit():
            return self._submission([utils.DelayedSubmission(function, *args, **kwargs)]).plan()

    def _internal_process_submissions(
        self, delayed_submissions: Sequence[utils.DelayedSubmission]
    ) -> list[submitit.Job[Any]]:
        """Submit one job, or an array of jobs. `submit`, `map_array` and `batch` call this method."""
        with refused_as_in_submitit():
            return list(self._submission(list(delayed_submissions)).submit())

    def _submission(self, submissions: list[utils.DelayedSubmission]) -> FunctionSubmission:
        # Imported here, because submitit loads this module for every AutoExecutor, also for other kinds of executors.
        from hpcenv.api.function_submission import FunctionSubmission

        return FunctionSubmission(
            submissions=tuple(submissions),
            options=translate(self.parameters, KEYWORDS),
            folder=self.folder,
            project=self.project,
            max_num_timeout=self.max_num_timeout,
            max_pickle_size_gb=self.max_pickle_size_gb,
            accept=self.accept,
        )


class AutoExecutor(submitit.AutoExecutor):
    """`submitit.AutoExecutor` for programs that set `slurm_*` parameters.

    submitit ignores `slurm_*` parameters if the cluster is not `slurm`. This class hands `slurm_*` parameters to
    hpcenv, so `slurm_partition=...` has an effect, and so has `partition=...`.

    Args:
        folder: the folder for functions, results and logs.
        cluster: submitit's name of an executor. None, `slurm` and `hpcenv` choose the executor of hpcenv. `local` and
            `debug` choose submitit's own executors.
    """

    def __init__(self, folder: str | Path, cluster: str | None = None, **kwargs: Any) -> None:
        cluster = NAME if cluster in (None, "slurm") else cluster
        # submitit converts its old names first, before hpcenv replaces names. So submitit can warn about an old name
        # and say which name is right.
        auto._convert_deprecated_args(kwargs, self._ctor_deprecated_args)  # noqa: SLF001
        super().__init__(folder, cluster=cluster, **_for_hpcenv(kwargs))

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        super()._internal_update_parameters(**_for_hpcenv(kwargs))


# Parameters that submitit translates for every cluster.
_GENERIC = frozenset(submitit.AutoExecutor._typed_parameters())  # noqa: SLF001
_CONSTRUCTOR = ("max_pickle_size_gb", "python")


def _for_hpcenv(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the prefix `slurm_` by `hpcenv_`, and add `hpcenv_` to SlurmExecutor's parameters without a prefix."""
    renamed: dict[str, Any] = {}
    for name, value in parameters.items():
        plain = name.removeprefix("slurm_")
        belongs = plain != name or (name not in _GENERIC and (name in SUBMITIT or name in _CONSTRUCTOR))
        # If a parameter is also given with the prefix `hpcenv_`, the value with this prefix is used.
        if belongs:
            renamed.setdefault(f"{NAME}_{plain}", parameters.get(f"{NAME}_{plain}", value))
        else:
            renamed[name] = value
    return renamed
