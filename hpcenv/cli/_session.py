"""Functions that `hpcenv session start` and `hpcenv shell` share. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcenv.cli import _accept, _render
from hpcenv.cli._pending import PendingLine
from hpcenv.cli._submit_options import submit_options, table_values
from hpcenv.cli._wait import interruptible
from hpcenv.cli.submit import context_of
from hpcenv.cli.wait import say_failure, tell_exit_status, tell_state
from hpcenv.errors import SpecError, ToolFailed
from hpcenv.judge import verdict_table
from hpcenv.records.manifest import Manifest
from hpcenv.records.session import SessionFolder, SessionNode, SessionService
from hpcenv.runs.entries import open_run
from hpcenv.runs.session import wait_until_open
from hpcenv.runs.status import RunStatus
from hpcenv.runs.wait import exit_status_of
from hpcenv.sessions.tools import TOOLS, how_to_add, lacking
from hpcenv.submission.plan_job import plan_job
from hpcenv.submission.request import SubmitOptions, parse_flags
from hpcenv.submission.session import prepare_folder, read_keys, with_session
from hpcenv.submission.submit import SubmitResult, submit

# Options of a submission that have an effect without a script.
_OPTIONS = frozenset((
    "nodes", "gpus", "allow_cpu_torch", "gpu_type", "cpus", "mem", "time", "partition", "account", "qos", "constraint",
    "reservation", "exclude", "nodelist", "dependency", "comment", "sbatch", "site", "lock", "frozen", "runtime",
    "bind", "env", "pass_env", "secret", "preflight", "skip_check", "stage", "stage_data", "stage_dir", "runs_dir",
    "idle_end",
))  # fmt: skip


def session_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a submission that a session can have."""
    return submit_options(command, only=_OPTIONS)


def begin(
    name: str,
    params: Mapping[str, Any],
    *,
    key: str | None,
    accept: str | None,
    as_json: bool,
    services: Sequence[SessionService] = (),
    allow_port: bool = False,
    ends_unused: int = 0,
) -> SubmitResult:
    """Submit the job of a session, and print the same lines as a submission."""
    context = context_of()
    workspace = _render.open_project()
    _accept.require(workspace, accept, as_json=as_json)
    options = SubmitOptions(script=None, **parse_flags(table_values(params)))
    options = with_session(
        workspace,
        options,
        name,
        os.environ,
        services=services,
        allow_port=allow_port,
        ends_unused=ends_unused,
    )
    plan = plan_job(workspace, options, context)
    _require_programs(plan.manifest, services)
    keys, notes = read_keys(None if key is None else Path(key), Path.home())
    _accept.remember_typed(workspace, options, plan)
    assert options.session is not None
    prepare_folder(SessionFolder(Path(options.session.folder)), keys)
    return submit(replace(plan, notes=(*plan.notes, *notes)), context)


def _require_programs(manifest: Manifest, services: Sequence[SessionService]) -> None:
    """Before anything is queued, refuse a service if its program is not in the lockfile."""
    missing = lacking([one.kind for one in services], {package.name for package in manifest.packages})
    if missing:
        hint = how_to_add(missing[0], on_host=manifest.environment.kind == "host")
        why = f"{manifest.lockfile} has no package {TOOLS[missing[0]][0]}"
        raise SpecError(f"the environment cannot start {missing[0]}", why=why, hint=hint)


def wait_open(result: SubmitResult, name: str, *, as_json: bool) -> tuple[int, SessionNode | None]:
    """Wait until the session is open. Return the exit status and the record of its node. Print why a session fails."""
    run, line = open_run(result.run_folder), PendingLine(os.environ)
    told: list[tuple[str, str]] = []

    def on_status(status: RunStatus) -> None:
        if as_json or line.see(status) or (status.state, status.detail) in told[-1:]:
            return
        told.append((status.state, status.detail))
        tell_state(status)

    def pause(seconds: float) -> None:
        line.renew()
        time.sleep(seconds)

    with interruptible(f"the session {name} continues", name, again=("status",)), line:
        status, door = wait_until_open(run, environ=os.environ, pause=pause, on_status=on_status)
    if door is not None and door.problem:
        raise ToolFailed(f"the session {name} ends, because it could not be opened on {door.node}", why=door.problem)
    if door is not None:
        return 0, door
    if not as_json:
        if status.verdict is not None and status.verdict.result != "match":
            _render.tell(verdict_table.render(status.verdict, lockfile=run.manifest.lockfile))
        say_failure(run, status)
        tell_exit_status(status)
    return exit_status_of(status), None
