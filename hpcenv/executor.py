"""`hpcenv.Executor`: Python functions as jobs, each checked against the lockfile before it runs.

Runs on: LOGIN NODE.

    if __name__ == "__main__":
        executor = hpcenv.Executor(nodes=2, gpus=8, time="1:00:00")
        job = executor.submit(train, lr=3e-4)
        print(job.result())
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcenv.job import Flags, Job, submit_call, submit_calls, surroundings

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hpcenv.steps.function import Outcome
    from hpcenv.steps.request import Surroundings
    from hpcenv.steps.runs import RunStatus
    from hpcenv.steps.workspace import Workspace


class FunctionJob(Job):
    """A function that runs on every rank of a job."""

    def result(self, timeout: float | None = None) -> Any:
        """Return what the function returned on rank 0, once all ranks have ended.

        Args:
            timeout: seconds to wait at most.

        Raises:
            StillGoing: the time is over.
            JobFailed: the run ended before the function did, for example because a node
                differs from the lockfile.
            Exception: what the function raised on the rank where it raised first; its cause
                is the traceback there.
        """
        return self.results(timeout)[0]

    def results(self, timeout: float | None = None) -> list[Any]:
        """Return what the function returned, rank by rank. Raises as `result` does."""
        from hpcenv.steps.function import error_of, value_of

        status = self.wait(timeout)
        outcomes = self._outcomes()
        failed = sorted((outcome for outcome in outcomes.values() if not outcome.ok), key=lambda o: o.time)
        if failed:
            raise error_of(failed[0])
        if len(outcomes) < self._ranks() or status.state != "completed" or status.exit_status not in (0, None):
            raise self._no_result(status)
        return [value_of(outcomes[rank]) for rank in sorted(outcomes)]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what `result` would raise, None if it would not.

        Raises:
            StillGoing: the time is over.
        """
        from hpcenv.errors import StillGoing

        try:
            self.results(timeout)
        except StillGoing:
            raise
        except BaseException as error:  # noqa: BLE001  (whatever it is, it is the answer)
            return error
        return None

    def done(self) -> bool:
        """Return whether it has ended."""
        return self.status().quiet

    def _ranks(self) -> int:
        manifest = self._open().manifest
        return manifest.nodes * manifest.nproc_per_node

    def _outcomes(self) -> dict[int, Outcome]:
        from hpcenv.steps.function import read_outcomes
        from hpcenv.wire import RunFolder

        return read_outcomes(RunFolder(self.folder), self._ranks())

    def _no_result(self, status: RunStatus) -> Exception:
        from hpcenv.steps.function import no_result

        report = self.report()
        first = () if report.failure is None else (report.failure.headline, report.failure.traceback)
        return no_result(self.run, status.state, status.exit_status, (*filter(None, first), *report.last_lines))


class Executor:
    """Submits functions; the gate comes before them, as before a script.

    Args:
        project: the folder to submit from; None for the current one.
        max_parallel: how many jobs of a `map_array` run at a time.
        flags: those of `hpcenv submit`; without `gpus` and `nproc` one rank on each node.
    """

    def __init__(
        self, *, project: str | Path | None = None, max_parallel: int | None = None, **flags: Unpack[Flags]
    ) -> None:
        self._project = project
        self._max_parallel = max_parallel
        self._flags = flags
        if "gpus" not in flags and "nproc" not in flags:
            self._flags["nproc"] = 1

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> FunctionJob:
        """Submit `function(*args, **kwargs)`: it is called once on every rank.

        The ranks find each other through torch.distributed's environment (`init_process_group()`
        without arguments). Where the Python in the environment has another minor version than
        this one, the function must stand at the top level of a file, which every rank then
        imports: what submits stands under `if __name__ == "__main__":` there.

        Raises:
            HpcenvError: as for `hpcenv.submit`, and when the function or an argument cannot
                be sent.
        """
        from hpcenv.steps.function import make_call

        workspace, around, python = self._surroundings(function)
        call = make_call(function, args, kwargs, python=python)
        return FunctionJob(submit_call(call, workspace=workspace, around=around, flags=self._flags))

    def map_array(self, function: Callable[..., Any], /, *arguments: Iterable[Any]) -> list[FunctionJob]:
        """Submit a call for each set of arguments, as `map` would make them: one Slurm array with a job for each.

        Every job has a run folder, a gate and a result of its own. Without Slurm they are started one after another.

        Raises:
            HpcenvError: as for `submit`; all are queued or none. Also for more of them than an array may have.
            ValueError: some arguments are longer than others.
        """
        from hpcenv.steps.function import make_call
        from hpcenv.steps.request import detect_cluster

        sets = list(zip(*arguments, strict=True))
        if not sets:
            return []
        workspace, around, python = self._surroundings(function)
        if (self._flags.get("cluster") or detect_cluster(around.environ)) == "local" and self._max_parallel is None:
            return [self.submit(function, *args) for args in sets]
        calls = [make_call(function, args, {}, python=python) for args in sets]
        folders = submit_calls(
            calls, workspace=workspace, around=around, flags=self._flags, max_parallel=self._max_parallel
        )
        return [FunctionJob(folder) for folder in folders]

    def _surroundings(self, function: Callable[..., Any]) -> tuple[Workspace, Surroundings, str]:
        """Return the project, what its steps would otherwise read themselves, and the locked Python's version."""
        from hpcenv.steps.workspace import DEFAULT_LOCK, read_lockfile

        name = getattr(function, "__qualname__", repr(function))
        workspace, around = surroundings(self._project, ("hpcenv.Executor", name))
        locked = read_lockfile(workspace.lockfile_path(self._flags.get("lock", DEFAULT_LOCK)))
        return workspace, around, str(locked.facts["python.version"])
