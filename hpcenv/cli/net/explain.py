"""`hpcenv net explain`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from hpcenv.cli import _render
from hpcenv.cli._terminal import escape_control
from hpcenv.errors import UsageError
from hpcenv.judge.network import page
from hpcenv.machine.network.explain import Backend
from hpcenv.runs.network import NetworkExplanation, explain_run
from hpcenv.survey.machine import decide_for, given_settings, seen_here, seen_in_file


@click.command("explain")
@_render.run_argument
@click.option(
    "--here", is_flag=True, help="Compute the settings for nodes like this machine, instead of showing those of a run."
)
@click.option(
    "--from",
    "file",
    metavar="FILE",
    help="Compute the settings for nodes like the node that FILE describes. FILE "
    "is from doctor --record, or is facts/NODE.json of a run.",
)
@click.option(
    "--nodes",
    type=click.IntRange(1, 4096),
    metavar="N",
    default=2,
    show_default=True,
    help="With --here or --from: number of nodes.",
)
@click.option(
    "--backend",
    type=click.Choice(["nccl", "gloo"]),
    default="nccl",
    show_default=True,
    help="With --here or --from: how the ranks communicate.",
)
@click.option(
    "--env",
    "pairs",
    metavar="NAME=VALUE",
    multiple=True,
    help="With --here or --from: a variable that you would set for the run.",
)
@click.option("--host", is_flag=True, help="With --here or --from: the ranks run without a container.")
@_render.json_option
def command(
    run: str | None,
    runs: str | None,
    here: bool,
    file: str | None,
    nodes: int,
    backend: Backend,
    pairs: tuple[str, ...],
    host: bool,
    as_json: bool,
) -> None:
    """Say which network settings a run gets: value, origin, rule, reason, source, and what hpcenv saw on the nodes.

    RUN is a run folder, a run name or a job id; the default is the latest run. With --here or --from, hpcenv computes
    the settings for an imagined job on several nodes of one kind.

    SET: hpcenv chose the value. HOST: the value comes from a file of the node. GIVEN: the value comes from you, your
    project, the site profile or the job. SKIP: hpcenv sets no value on purpose, so the library uses its default.
    """
    if (run is not None) + here + (file is not None) > 1:
        raise UsageError("RUN, --here and --from cannot be used together", hint="give one of them")
    if here or file is not None:
        machine = seen_here(os.environ, date=_today()) if file is None else seen_in_file(_render.cwd() / Path(file))
        settings = given_settings(os.environ if here else {}, pairs)
        decision = decide_for(machine, nodes=nodes, backend=backend, settings=settings, container=not host)
        result = NetworkExplanation(of=f"{machine.name} ({machine.label})", how="computed", decision=decision)
    else:
        result = explain_run(_render.cwd(), run, runs=runs)
    if as_json:
        _render.success("net explain", result)
        return
    _render.say(f"{escape_control(result.of)}: {result.how}")
    for line in page.render(result.decision).splitlines():
        _render.say(line)


def _today() -> str:
    return time.strftime("%Y-%m-%d", _render.local_time())
