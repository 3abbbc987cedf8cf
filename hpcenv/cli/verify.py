"""`hpcenv verify`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click

from hpcenv.cli import _accept, _render
from hpcenv.cli._complete import lockfile_names
from hpcenv.cli._submit_options import table_option
from hpcenv.cli.submit import context_of
from hpcenv.errors import UsageError
from hpcenv.judge import verdict_table
from hpcenv.project.fields import FieldLevel
from hpcenv.project.workspace import Workspace
from hpcenv.records.verdict import Verdict
from hpcenv.submission.request import SubmitOptions, parse_flags
from hpcenv.submission.submit import SubmitResult
from hpcenv.submission.verify import outcome, verify, with_notes
from hpcenv.submission.verify_nodes import ranks_per_node, verify_nodes

# Options of the table that only a job has.
_OF_JOBS = ("partition", "account", "time", "preflight")


@click.command("verify")
@click.option(
    "--lock",
    "lock",
    metavar="NAME",
    default="default",
    show_default=True,
    help="Which lockfile: lockfiles/NAME.lock.toml.",
    shell_complete=lockfile_names,
)
@click.option("--deep", is_flag=True, help="Hash every file, import torch, and read which libraries the loader maps.")
@click.option("--strict", is_flag=True, help="End with 92 when a field of severity `warn` differs.")
@click.option("--sif", metavar="PATH", help="Verify this SIF instead of the project's own.")
@click.option("--nodes", type=click.IntRange(min=1), help="Verify this many nodes, in a Slurm job.")
@table_option("gpus", "Each machine that is verified must offer them.")
@table_option("partition", "With --nodes.")
@table_option("account", "With --nodes.")
@table_option("time", "With --nodes.")
@table_option("preflight", "With --nodes; nothing is trained.")
@_accept.option
@_render.json_option
def command(
    nodes: int | None,
    as_json: bool,
    strict: bool,
    accept: str | None,
    **options: Any,
) -> int:
    """Compare this environment, a SIF, or a set of nodes with the lockfile.

    Exit status: 0 match; 90 a field that must match differs; 91 such a field could not be
    read; 92 with --strict, a field of severity `warn` differs; 93 the nodes differ from
    each other; 4 to 7 there is no usable lockfile.
    """
    _refuse_without_effect(nodes, options)
    options |= parse_flags({name: options[name] for name in _OF_JOBS})
    workspace = _render.open_project()
    _accept.require(workspace, accept, as_json=as_json)
    level: FieldLevel | None = "deep" if options["deep"] else None
    started = time.monotonic()
    if nodes is None:
        verdict, seconds = _verify_here(workspace, options, level)
    else:
        verdict, seconds = _verify_nodes(workspace, nodes, options, level)
    result, status = outcome(verdict, strict=strict)
    if as_json:
        data = {"outcome": result, "verdict": verdict, "seconds": seconds}
        _render.verdict_on("verify", data, ok=status == 0)
        return status
    shown = workspace.shown(workspace.lockfile_path(options["lock"]))
    _render.say(verdict_table.render(verdict, lockfile=shown, settings=False).rstrip())
    _tell_seconds(seconds)
    _render.tell(f"{result}, in {time.monotonic() - started:.1f} s")
    return status


def _tell_seconds(seconds: dict[str, dict[str, float]]) -> None:
    """Say how long each part took: of two nodes on each, of more on the slowest one."""
    slowest = sorted(seconds, key=lambda node: sum(seconds[node].values()), reverse=True)
    for node in list(seconds) if len(seconds) <= 2 else slowest[:1]:
        parts = ", ".join(f"{part} {took:.2f} s" for part, took in sorted(seconds[node].items()))
        _render.tell(f"{node}{'' if len(seconds) <= 2 else f', the slowest of {len(seconds)} nodes'}: {parts}")


def _refuse_without_effect(nodes: int | None, options: dict[str, Any]) -> None:
    """Refuse options that have no effect with, or without, --nodes."""
    if nodes is not None and options["sif"] is not None:
        raise UsageError(
            "`--sif` does not go with `--nodes`",
            why="nodes are checked with the project's own SIF, as for a job",
            hint="leave out --nodes to verify that SIF on this machine",
        )
    given = [f"--{name}" for name in _OF_JOBS if options[name] is not None]
    if nodes is None and given:
        raise UsageError(
            f"`{given[0]}` goes with `--nodes` only", why="without it this machine is verified", hint="add --nodes N"
        )


def _verify_here(
    workspace: Workspace, options: dict[str, Any], level: FieldLevel | None
) -> tuple[Verdict, dict[str, dict[str, float]]]:
    verdict, facts = verify(
        workspace,
        environ=os.environ,
        lock=options["lock"],
        level=level,
        sif=None if options["sif"] is None else Path(os.path.abspath(_render.cwd() / options["sif"])),
        gpus=options["gpus"],
    )
    return verdict, {facts.node: facts.seconds}


def _verify_nodes(
    workspace: Workspace, nodes: int, options: dict[str, Any], level: FieldLevel | None
) -> tuple[Verdict, dict[str, dict[str, float]]]:
    request = SubmitOptions(
        script=None,
        level=level,
        nodes=nodes,
        gpus=options["gpus"],
        nproc=ranks_per_node(workspace, preflight=options["preflight"], gpus=options["gpus"]),
        lock=options["lock"],
        **{name: options[name] for name in _OF_JOBS},
    )

    def say(job: SubmitResult) -> None:
        _render.tell(f"checking {nodes} nodes, job {job.job_id}, {job.run_folder}")

    found = verify_nodes(workspace, request, context_of(), on_submitted=say)
    verdict = with_notes(found.verdict, workspace, options["lock"])
    return verdict, {facts.node: facts.seconds for facts in found.facts}
