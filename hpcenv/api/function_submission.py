"""Submit Python functions for `hpcenv.Executor`, as one job or as an array of jobs. Runs on: LOGIN NODE."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from submitit.core import utils

from hpcenv.api.here import open_here, require_accepted
from hpcenv.api.job import Job, remember_run
from hpcenv.api.parameters import FunctionOptions
from hpcenv.errors import UsageError
from hpcenv.project.context import Context
from hpcenv.project.spec import DEFAULT_LOCK
from hpcenv.project.workspace import Workspace, read_lockfile
from hpcenv.records.run_folder import RunFolder
from hpcenv.submission import function as function_step
from hpcenv.submission import submit as submit_step
from hpcenv.submission import sweep_job
from hpcenv.submission.plan import Call, Plan
from hpcenv.submission.plan_job import plan_job
from hpcenv.submission.request import SubmitOptions, detect_cluster, from_keywords


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """The project, its options, and the command with which the ranks call the function."""

    workspace: Workspace
    context: Context
    options: SubmitOptions
    call: Call
    python: str


@dataclass(frozen=True, kw_only=True)
class FunctionSubmission:
    """Functions with their arguments. The jobs of these functions have the same options.

    Attributes:
        submissions: the functions. Several functions become one array.
        options: the options of hpcenv that follow from the parameters of the executor.
        folder: the executor's folder, with submitit's `%j`, `%A` and `%a`.
        project: folder of hpcenv.toml.
        max_num_timeout, max_pickle_size_gb, accept: see `Executor`.
    """

    submissions: tuple[utils.DelayedSubmission, ...]
    options: FunctionOptions
    folder: Path
    project: str | Path
    max_num_timeout: int
    max_pickle_size_gb: float
    accept: str | None = None

    @property
    def shared_folder(self) -> Path:
        """The part of the folder that all jobs share."""
        return utils.JobPaths.get_first_id_independent_folder(self.folder)

    def plan(self) -> Plan:
        """Plan one job; nothing is written or submitted."""
        prepared = self._prepared
        options = replace(prepared.options, call=prepared.call, max_parallel=None)
        return plan_job(prepared.workspace, options, prepared.context)

    def submit(self) -> list[Job[Any]]:
        """Submit all functions as one array. If the cluster is this machine, submit one job after the other."""
        if len(self.submissions) > 1 and self._is_local():
            return [job for one in self.submissions for job in replace(self, submissions=(one,)).submit()]
        prepared = self._prepared
        require_accepted(prepared.workspace, self.accept)
        for folder in prepared.call.folders:
            folder.mkdir(parents=True, exist_ok=True)
        return self._submit_array(prepared) if len(self.submissions) > 1 else [self._submit_one(prepared)]

    def _is_local(self) -> bool:
        _workspace, context = open_here(self.project, ())
        return (self.options.keywords.get("cluster") or detect_cluster(context.environ)) == "local"

    @cached_property
    def _prepared(self) -> _Prepared:
        name = getattr(self.submissions[0].function, "__qualname__", type(self.submissions[0].function).__name__)
        workspace, context = open_here(self.project, ("hpcenv.Executor", name))
        lockfile = read_lockfile(workspace.lockfile_path(self.options.keywords.get("lock", DEFAULT_LOCK)))
        python = str(lockfile.facts["python.version"])
        options = from_keywords(None, (), self.options.keywords)
        return _Prepared(
            workspace=workspace,
            context=context,
            options=replace(options, max_parallel=self.options.max_parallel),
            call=self._call(python),
            python=python,
        )

    def _call(self, python: str) -> Call:
        calls = [
            function_step.make_call(
                submission.function,
                folder=self.shared_folder,
                outputs=None if self.options.outputs is None else Path(self.options.outputs).absolute(),
                submitit_folder=str(self.folder),
                python=python,
                per=self.options.call,
                name=self.options.name,
                stderr_to_stdout=self.options.stderr_to_stdout,
            )
            for submission in self.submissions
        ]
        if len({call.module for call in calls}) > 1:
            files = ", ".join(sorted({str(call.module) for call in calls}))
            raise UsageError("the functions of an array are in one file", why=files, hint="submit one array per file")
        return calls[0]

    def _submit_one(self, prepared: _Prepared) -> Job[Any]:
        plan = self.plan()
        with self._pickled(plan, prepared.python) as pickles:
            result = submit_step.submit(plan, prepared.context)
            return self._job(result.job_id, result.run_folder, plan, pickles[0], RunFolder(result.run_folder).script)

    def _submit_array(self, prepared: _Prepared) -> list[Job[Any]]:
        sweep = sweep_job.plan_calls(
            prepared.workspace, prepared.options, prepared.context, prepared.call, len(self.submissions)
        )
        with self._pickled(sweep.plan, prepared.python) as pickles:
            result = sweep_job.submit_sweep(sweep, prepared.context)
            script = RunFolder(result.run_folder).script
            return [
                self._job(
                    f"{result.job_id}_{element.index}", result.run_folder / element.folder, sweep.plan, path, script
                )
                for element, path in zip(result.elements, pickles, strict=True)
            ]

    @contextlib.contextmanager
    def _pickled(self, plan: Plan, python: str) -> Iterator[list[Path]]:
        """Pickle functions and arguments under temporary names. At the end, remove files that still have such names."""
        paths = [self.shared_folder / f"{uuid.uuid4().hex}.pkl" for _ in self.submissions]
        minutes = plan.request.time_minutes
        try:
            for path, submission in zip(paths, self.submissions, strict=True):
                # If only Slurm knows the time limit, use five minutes, the default of submitit.
                submission.set_timeout(5 if minutes is None else int(minutes), self.max_num_timeout)
                function_step.dump(submission, path, python=python)
                self._require_size(path)
            yield paths
        finally:
            for path in paths:
                path.unlink(missing_ok=True)

    def _require_size(self, path: Path) -> None:
        count, size = len(self.submissions), path.stat().st_size / 1024**3
        if count * size > self.max_pickle_size_gb:
            raise UsageError(
                f"about {count} x {size:.2f} GB of functions and arguments are too much",
                why=f"max_pickle_size_gb is {self.max_pickle_size_gb:g}",
                hint="pass paths of files, or set executor.max_pickle_size_gb",
            )

    def _job(self, job_id: str, run_folder: Path, plan: Plan, pickled: Path, script: Path) -> Job[Any]:
        """Give the files of a job their final names, and return the job. `script` is the file that sbatch read."""
        paths = utils.JobPaths(self.folder, job_id=job_id)
        remember_run(self.folder, job_id, run_folder)
        (run_folder / function_step.FOLDER / "job").write_text(job_id, encoding="utf-8")
        paths.move_temporary_file(pickled, "submitted_pickle")
        with contextlib.suppress(FileExistsError):
            paths.submission_file.symlink_to(script)
        count = plan.manifest.nodes * plan.manifest.nproc_per_node
        return Job(folder=self.folder, job_id=job_id, tasks=list(range(count)))
