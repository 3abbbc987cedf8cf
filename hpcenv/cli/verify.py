"""`hpcenv verify`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcenv.cli import _render
from hpcenv.errors import UsageError

if TYPE_CHECKING:
    from hpcenv.model.fields import Level
    from hpcenv.steps.workspace import Workspace
    from hpcenv.wire import Verdict


@click.command("verify")
@click.option("--name", default="default", show_default=True, help="Which lockfile: lockfiles/NAME.lock.toml.")
@click.option("--deep", is_flag=True, help="Hash every file, import torch, and see what the loader maps.")
@click.option("--strict", is_flag=True, help="End with 92 when something differs that is only warned of.")
@click.option("--sif", metavar="PATH", help="Verify this SIF instead of the project's own.")
@click.option("--nodes", type=click.IntRange(min=1), help="Verify this many nodes, through Slurm.")
@click.option("--gpus", type=click.IntRange(min=0), default=0, help="GPUs that each machine must offer.")
@click.option("--partition", help="As sbatch, with --nodes.")
@click.option("--account", help="As sbatch, with --nodes.")
@click.option("--time", "time_limit", help="As sbatch, with --nodes.")
@_render.json_option
def command(nodes: int | None, as_json: bool, strict: bool, **words: Any) -> int:
    """Compare this environment, a SIF, or a set of nodes with the lockfile.

    Exit status: 0 match, 90 mismatch, 91 could not tell, 92 warnings under --strict,
    93 nodes disagree with each other, 4 to 7 no usable lockfile.
    """
    from hpcenv.node import table
    from hpcenv.steps.verify import outcome

    _require_heeded(nodes, words)
    workspace = _render.open_project()
    level: Level | None = "deep" if words["deep"] else None
    started = time.monotonic()
    if nodes is None:
        verdict, seconds = _here(workspace, words, level)
    else:
        verdict, seconds = _on_nodes(workspace, nodes, words, level)
    word, status = outcome(verdict, strict=strict)
    if as_json:
        data = {"outcome": word, "verdict": verdict, "seconds": seconds}
        _render.verdict_on("verify", data, ok=status == 0)
        return status
    shown = workspace.shown(workspace.lockfile_path(words["name"]))
    _render.say(table.render(verdict, lockfile=shown, settings=False).rstrip())
    for node, parts in seconds.items():
        _render.tell(f"{node}: " + ", ".join(f"{part} {took:.2f} s" for part, took in sorted(parts.items())))
    _render.tell(f"{word}, in {time.monotonic() - started:.1f} s")
    return status


def _require_heeded(nodes: int | None, words: dict[str, Any]) -> None:
    """Let nobody believe that a flag was heeded which means nothing with, or without, --nodes."""
    if nodes is not None and words["sif"] is not None:
        raise UsageError(
            "`--sif` does not go with `--nodes`",
            why="nodes are checked with the project's own SIF, as for a job",
            hint="leave --nodes out to verify that SIF here",
        )
    of_jobs = {"--partition": "partition", "--account": "account", "--time": "time_limit"}
    given = [flag for flag, name in of_jobs.items() if words[name] is not None]
    if nodes is None and given:
        raise UsageError(
            f"`{given[0]}` goes with `--nodes` only", why="without it this machine is verified", hint="add --nodes N"
        )


def _here(
    workspace: Workspace, words: dict[str, Any], level: Level | None
) -> tuple[Verdict, dict[str, dict[str, float]]]:
    from hpcenv.steps.verify import verify

    verdict, facts = verify(
        workspace,
        environ=os.environ,
        name=words["name"],
        level=level,
        sif=None if words["sif"] is None else Path(os.path.abspath(_render.cwd() / words["sif"])),
        gpus=words["gpus"],
    )
    return verdict, {facts.node: facts.seconds}


def _on_nodes(
    workspace: Workspace, nodes: int, words: dict[str, Any], level: Level | None
) -> tuple[Verdict, dict[str, dict[str, float]]]:
    """Submit a job that only checks its nodes, and wait for it."""
    from hpcenv import wire
    from hpcenv.cli.submit import surroundings
    from hpcenv.errors import SubmitRejected
    from hpcenv.steps.plan import plan_job
    from hpcenv.steps.request import Asked
    from hpcenv.steps.status import wait
    from hpcenv.steps.submit import submit
    from hpcenv.steps.verify import with_notes
    from hpcenv.wire import Facts, RunFolder

    around = surroundings()
    asked = Asked(
        script=None,
        level=level,
        nodes=nodes,
        gpus=words["gpus"],
        nproc=1,
        partition=words["partition"],
        account=words["account"],
        time=words["time_limit"],
        lock=words["name"],
    )
    result = submit(plan_job(workspace, asked, around), around)
    _render.tell(f"checking {nodes} nodes, job {result.job_id}, {result.run_folder}")
    status = wait(result.run_folder, environ=os.environ, pause=time.sleep, on_status=lambda _status: None)
    if status.verdict is None:
        raise SubmitRejected(
            f"the job {result.job_id} ended without a verdict: {status.state}",
            why=status.detail or None,
            hint=f"hpcenv logs {result.run}",
        )
    found = [wire.read(Facts, path) for path in sorted(RunFolder(result.run_folder).facts.glob("*.json"))]
    return with_notes(status.verdict, workspace, words["name"]), {facts.node: facts.seconds for facts in found}
