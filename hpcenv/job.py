"""The Python API: the words of the command line as functions and keywords.

Runs on: LOGIN NODE. Like `cli`, this is where the user's own environment, folder and clock
are read; everything below gets them handed in.

    import hpcenv

    job = hpcenv.submit("train.py", ["--lr", "3e-4"], nodes=2, gpus=8, time="4:00:00")
    job.wait()
    print(job.report().status.exit_status)
"""

from __future__ import annotations

import os
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hpcenv.model.plan import Call, Plan
    from hpcenv.steps.report import RunReport
    from hpcenv.steps.request import Asked, Surroundings
    from hpcenv.steps.runs import Run, RunStatus
    from hpcenv.steps.workspace import Workspace


class Flags(TypedDict, total=False):
    """The flags of `hpcenv submit`, with `_` for `-`; `hpcenv submit --help` says what each means.

    `env` and `secret` are mappings, `stage_limit` is in bytes, GPUs, CPUs, memory and ranks
    are per node.
    """

    nodes: int
    gpus: int
    gpu_type: str
    nproc: int
    cpus: int
    mem: str
    time: str
    partition: str
    account: str
    qos: str
    constraint: str
    reservation: str
    exclude: str
    nodelist: str
    dependency: str
    spare: int
    retry_excluding: int
    site: str
    standalone: bool
    max_restarts: int
    torchrun_args: Sequence[str]
    env: Mapping[str, str]
    pass_env: Sequence[str]
    secret: Mapping[str, str]
    grace: int
    stop_signal: str
    requeue: str
    max_requeues: int
    snapshot: bool
    allow_dirty: bool
    chain: int
    lock: str
    locked: bool
    frozen: bool
    cluster: str
    run: str
    runs: str
    template: str
    compat_file: str
    assume_shared: bool
    stage: bool
    stage_data: Sequence[str]
    stage_dir: str
    stage_limit: int


@dataclass(frozen=True)
class Job:
    """A submitted run.

    Attributes:
        folder: its run folder; with it alone a job is found again: `hpcenv.open_job(folder)`.
    """

    folder: Path

    @property
    def run(self) -> str:
        """The run's name."""
        return self._open().submission.run

    @property
    def job_id(self) -> str:
        """Slurm's job id, or `local-PID`."""
        return self._open().submission.job_id

    def status(self) -> RunStatus:
        """Return what Slurm and the run folder say now."""
        from hpcenv.steps.runs import read_status

        return read_status(self._open(), os.environ)

    def state(self) -> str:
        """Return Slurm's word for it in lower case; `rejected` when the gate stopped it."""
        return self.status().state

    def wait(self, timeout: float | None = None) -> RunStatus:
        """Wait until it has ended, however that is.

        Args:
            timeout: seconds to wait at most.

        Raises:
            StillGoing: the time is over.
        """
        from hpcenv.steps.wait import wait_for

        run = self._open()
        return wait_for([run], environ=os.environ, pause=time.sleep, on_status=lambda _status: None, timeout=timeout)[0]

    def cancel(self) -> RunStatus:
        """End it, and wait until it has ended.

        Raises:
            ToolFailed: it did not end, not even after KILL.
        """
        from hpcenv.steps.cancel import cancel_runs

        return cancel_runs([self._open()], environ=os.environ, pause=time.sleep)[0]

    def report(self) -> RunReport:
        """Return what became of it: verdict, failures, the end of its log."""
        from hpcenv.steps.report import RunReport, report

        found = report(self.folder, str(self.folder), environ=os.environ)
        assert isinstance(found, RunReport)
        return found

    def log(self) -> str:
        """Return its log so far."""
        from hpcenv.wire import RunFolder

        try:
            return RunFolder(self.folder).log.read_text(encoding="utf-8", errors="backslashreplace")
        except FileNotFoundError:
            return ""

    def _open(self) -> Run:
        from hpcenv.steps.runs import open_run

        return open_run(self.folder)


def plan_job(
    script: str | Path, args: Sequence[object] = (), *, project: str | Path | None = None, **flags: Unpack[Flags]
) -> Plan:
    """Decide everything about a run; writes and submits nothing: `hpcenv submit --dry-run`.

    Args:
        script: the training script; relative to `project`.
        args: for it, each literal; `str()` is taken of what is none.
        project: the folder to submit from; None for the current one.
        flags: those of `hpcenv submit`.

    Raises:
        HpcenvError: anything that would make the job fail and can be known here.
    """
    from hpcenv.steps.plan import plan_job as plan

    workspace, around = _here(project, ("hpcenv", "submit", str(script), *_words(flags), "--", *map(str, args)))
    return plan(workspace, _asked(str(script), args, flags), around)


def submit(
    script: str | Path, args: Sequence[object] = (), *, project: str | Path | None = None, **flags: Unpack[Flags]
) -> Job:
    """Submit a script to run under torchrun on every node, as locked: `hpcenv submit`.

    Args and errors are those of `plan_job`.

    Raises:
        SubmitRejected, ToolMissing: nothing is queued, and no run folder is left.
    """
    from hpcenv.steps.plan import plan_job as plan
    from hpcenv.steps.submit import submit as submit_plan

    workspace, around = _here(project, ("hpcenv", "submit", str(script), *_words(flags), "--", *map(str, args)))
    result = submit_plan(plan(workspace, _asked(str(script), args, flags), around), around)
    return Job(result.run_folder)


def sweep(
    script: str | Path,
    args: Sequence[object] = (),
    *,
    over: Mapping[str, Sequence[object]],
    max_parallel: int | None = None,
    project: str | Path | None = None,
    **flags: Unpack[Flags],
) -> tuple[Job, ...]:
    r"""Submit a run for every combination of values, as one job array: `hpcenv submit --sweep`.

    Args:
        args: `{NAME}` in them stands for a value; names that stand in none are appended as
            `--NAME=VALUE`.
        over: name -> its values; the last name varies fastest.
        max_parallel: how many run at a time.

    Returns:
        One job for each element, in the order of their indices.
    """
    from dataclasses import replace

    from hpcenv.steps.sweep import plan_sweep, submit_sweep

    axes = tuple(f"{name}=" + ",".join(str(value).replace(",", r"\,") for value in over[name]) for name in over)
    words = (*(word for axis in axes for word in ("--sweep", axis)), *_words(flags), "--", *map(str, args))
    workspace, around = _here(project, ("hpcenv", "submit", str(script), *words))
    asked = replace(_asked(str(script), args, flags), sweep=axes, max_parallel=max_parallel)
    result = submit_sweep(plan_sweep(workspace, asked, around), around)
    return tuple(Job(result.run_folder / element.folder) for element in result.elements)


def open_job(word: str | Path | None = None, *, project: str | Path | None = None) -> Job:
    """Find a run again by its folder, name or job id; None for the latest one.

    Raises:
        RunNotFound: there is none.
    """
    from hpcenv.steps.runs import find_run

    return Job(find_run(_folder(project), None if word is None else str(word)).folder.path)


def submit_call(call: Call, *, workspace: Workspace, around: Surroundings, flags: Flags) -> Path:
    """Submit a function's call and return its run folder: for `hpcenv.Executor`."""
    from dataclasses import replace

    from hpcenv.steps.plan import plan_job as plan
    from hpcenv.steps.submit import submit as submit_plan

    asked = replace(_asked(None, (), flags), call=call)
    return submit_plan(plan(workspace, asked, around), around).run_folder


def submit_calls(
    calls: Sequence[Call], *, workspace: Workspace, around: Surroundings, flags: Flags, max_parallel: int | None
) -> list[Path]:
    """Submit a function's calls as one job array; return their run folders: for `hpcenv.Executor`."""
    from dataclasses import replace

    from hpcenv.steps.sweep import plan_calls, submit_sweep

    asked = replace(_asked(None, (), flags), max_parallel=max_parallel)
    result = submit_sweep(plan_calls(workspace, asked, around, calls), around)
    return [result.run_folder / element.folder for element in result.elements]


def surroundings(project: str | Path | None, command: Sequence[str]) -> tuple[Workspace, Surroundings]:
    """Return the project and what its steps would otherwise read themselves: for `hpcenv.Executor`."""
    return _here(project, command)


def _folder(project: str | Path | None) -> Path:
    from hpcenv.cli._render import cwd

    return Path(os.path.abspath(cwd() / (project or ".")))


def _here(project: str | Path | None, command: Sequence[str]) -> tuple[Workspace, Surroundings]:
    from hpcenv.adapters.accepted import Accepted
    from hpcenv.cli._render import cache_folder
    from hpcenv.steps.request import Surroundings
    from hpcenv.steps.workspace import open_workspace

    folder, named, cache = _folder(project), os.environ.get("HPCENV_STORE"), cache_folder()
    workspace = open_workspace(
        folder,
        store=Path(os.path.abspath(folder / Path(named).expanduser())) if named else None,
        default_store=cache / "store",
        trusted_owners=tuple(os.environ.get("HPCENV_STORE_OWNERS", "").replace(",", " ").split()),
        accepted=Accepted(folder=cache / "validated"),
    )
    around = Surroundings(
        environ=os.environ,
        cwd=folder,
        now=time.localtime(),
        token=secrets.token_hex(2),
        command=tuple(command),
        cache=cache,
    )
    return workspace, around


def _words(flags: Flags) -> list[str]:
    """Return the command line's words for some flags: they go into the records of the run."""
    words: list[str] = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if value is None or (value is False and name != "snapshot"):
            continue
        if isinstance(value, bool):
            words.append(flag if value else "--no-snapshot")
        elif isinstance(value, Mapping):
            words.extend(word for key, text in value.items() for word in (flag, f"{key}={text}"))
        elif isinstance(value, (list, tuple)):
            words.extend(word for item in value for word in (flag, str(item)))
        else:
            words.extend((flag, str(value)))
    return words


def _asked(script: str | None, args: Sequence[object], flags: Flags) -> Asked:
    """Return the words of a submission as the step takes them.

    Raises:
        UsageError: there is no such flag.
    """
    import difflib

    from hpcenv.errors import UsageError
    from hpcenv.steps.request import Asked

    known = Flags.__annotations__
    for name in flags:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise UsageError(
                f"`{name}` is no flag of `hpcenv submit`", hint=f"did you mean `{close[0]}`?" if close else None
            )
    if isinstance(args, str):
        raise UsageError("`args` is one text", hint=f"a list of words: {shlex.split(args)!r}")
    words: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    words["secrets"] = dict(words.pop("secret", {}))
    for name in ("torchrun_args", "pass_env", "stage_data"):
        words[name] = tuple(words.get(name, ()))
    return Asked(script=script, args=tuple(str(word) for word in args), **words)
