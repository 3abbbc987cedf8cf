"""`hpcenv attach`: start a shell or a command in an active run. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
import sys

import click

from hpcenv.cli import _render
from hpcenv.cli._dashes import WithDashes, after_dashes
from hpcenv.runs.attach import attach, plan_attach


@click.command("attach", cls=WithDashes, options_metavar="[OPTIONS]")
@_render.run_argument
@click.option("--node", metavar="NODE", help="Node of the run. Default: the first node of the run.")
@click.option("--secrets", is_flag=True, help="Also set the run's secrets in the shell or command.")
@_render.json_option
def command(run: str | None, runs: str | None, node: str | None, secrets: bool, as_json: bool) -> int:
    """Open a shell in a running run, or start a command in this run.

    The shell has the same SIF or host environment, binds and variables as the ranks on the same node, and shares the
    job's CPUs, GPUs and memory. RUN is a run folder, a run name or a job id; the default is the latest run. Write a
    command after --; hpcenv then ends with the exit status of this command:

    \b
        hpcenv attach
        hpcenv attach first --node n2 -- nvidia-smi

    With --json, hpcenv only prints the command line that it would start.
    """  # noqa: D301  (click's mark for "do not wrap")
    argv = after_dashes() or ()
    tty = sys.stdin.isatty() and sys.stdout.isatty()
    planned = plan_attach(
        _render.cwd(),
        run,
        environ=os.environ,
        node=node,
        command=argv,
        secrets=secrets,
        tty=tty or (as_json and not argv),
        runs=runs,
    )
    if as_json:
        _render.success("attach", {"run": planned.run, "node": planned.node, "argv": planned.argv})
        return 0
    if not argv:
        _render.tell(f"{planned.run}, node {planned.node}; the run continues when you leave this shell")
    return attach(planned)
