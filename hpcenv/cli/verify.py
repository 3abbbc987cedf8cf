"""`hpcenv verify`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click

from hpcenv.cli import _accept, _render
from hpcenv.cli._complete import lockfile_names
from hpcenv.cli._submit_options import table_option
from hpcenv.cli.submit import context_of
from hpcenv.judge import verdict_table
from hpcenv.submission.import_check import in_words
from hpcenv.submission.submit import SubmitResult
from hpcenv.submission.verify_here import outcome
from hpcenv.submission.verify_nodes import options_to_verify, verify_environment


@click.command("verify")
@click.option(
    "--lock",
    "lock",
    metavar="NAME",
    default="default",
    show_default=True,
    help="Lockfile to compare with: lockfiles/NAME.lock.toml.",
    shell_complete=lockfile_names,
)
@click.option("--deep", is_flag=True, help="Hash every file, import torch, and read which libraries the loader maps.")
@click.option("--strict", is_flag=True, help="End with 92 if a field of severity `warn` differs.")
@click.option(
    "--imports",
    is_flag=True,
    help="If the environment matches, import each locked package once, and name the packages that fail.",
)
@click.option("--sif", metavar="PATH", help="Verify this SIF instead of the project's own.")
@click.option("--nodes", type=click.IntRange(min=1), help="Verify this number of nodes, in a Slurm job.")
@table_option("gpus", "Each machine that is verified must have this number of GPUs.")
@table_option("partition", "Only with --nodes.")
@table_option("account", "Only with --nodes.")
@table_option("time", "Only with --nodes.")
@table_option("preflight", "Only with --nodes. The job trains nothing.")
@_accept.option
@_render.json_option
def command(
    nodes: int | None,
    as_json: bool,
    strict: bool,
    sif: str | None,
    imports: bool,
    accept: str | None,
    **options: Any,
) -> int:
    """Compare this environment, a SIF, or a set of nodes with the lockfile.

    Exit status: 0 if all fields match; 90 if a field that must match differs, or if a package cannot be imported
    (--imports); 91 if a field that must match could not be read; 92 if a field of severity `warn` differs (--strict);
    93 if the nodes differ from each other; 4 to 7 if there is no usable lockfile.
    """
    wanted = options_to_verify(nodes=nodes, sif=sif, **options)
    workspace = _render.open_project()
    _accept.require(workspace, accept, as_json=as_json)
    started = time.monotonic()

    def say(job: SubmitResult) -> None:
        _render.tell(f"checking {nodes} nodes, job {job.job_id}, {job.run_folder}")

    found = verify_environment(workspace, wanted, context_of(), sif=sif, imports=imports, on_submitted=say)
    seconds = {facts.node: facts.seconds for facts in found.facts}
    result, status = outcome(found.verdict, strict=strict, imports=found.imports)
    if as_json:
        data = {"outcome": result, "verdict": found.verdict, "seconds": seconds, "imports": found.imports}
        _render.verdict_on("verify", data, ok=status == 0)
        return status
    shown = workspace.shown(workspace.lockfile_path(options["lock"]))
    _render.say(verdict_table.render(found.verdict, lockfile=shown, settings=False).rstrip())
    if found.imports:
        for line in in_words(found.imports):
            _render.say(line)
    _tell_seconds(seconds)
    _render.tell(f"{result}, in {time.monotonic() - started:.1f} s")
    return status


def _tell_seconds(seconds: Mapping[str, Mapping[str, float]]) -> None:
    """Print how long each part took: on each node if there are at most two nodes, else on the slowest node."""
    slowest = sorted(seconds, key=lambda node: sum(seconds[node].values()), reverse=True)
    for node in list(seconds) if len(seconds) <= 2 else slowest[:1]:
        parts = ", ".join(f"{part} {took:.2f} s" for part, took in sorted(seconds[node].items()))
        _render.tell(f"{node}{'' if len(seconds) <= 2 else f', the slowest of {len(seconds)} nodes'}: {parts}")
