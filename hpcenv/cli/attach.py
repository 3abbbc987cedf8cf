"""`hpcenv attach`."""

from __future__ import annotations

import os
import sys

import click

from hpcenv.cli import _render
from hpcenv.cli._dashes import WithDashes, after_dashes


@click.command("attach", cls=WithDashes, options_metavar="[OPTIONS]")
@_render.run_argument
@click.option("--node", metavar="NODE", help="Which of its nodes, if not the first one.")
@click.option("--secrets", is_flag=True, help="Give it the run's secrets too.")
@_render.json_option
def command(run: str | None, runs: str | None, node: str | None, secrets: bool, as_json: bool) -> int:
    """Open a shell in a running run, or run a command there.

    It has the SIF or host environment, the binds and the variables that the ranks on that
    node have, and shares the job's CPUs, GPUs and memory. RUN as in `hpcenv status`; a
    command stands after --, and hpcenv ends with its exit status:

    \b
        hpcenv attach
        hpcenv attach first --node n2 -- nvidia-smi

    With --json it only says which command would be started.
    """  # noqa: D301  (click's mark for "do not wrap")
    from hpcenv.steps.attach import attach, plan_attach

    words = after_dashes() or ()
    tty = sys.stdin.isatty() and sys.stdout.isatty()
    planned = plan_attach(
        _render.cwd(),
        run,
        environ=os.environ,
        node=node,
        command=words,
        secrets=secrets,
        tty=tty or (as_json and not words),
        runs=runs,
    )
    if as_json:
        _render.success("attach", {"run": planned.run, "node": planned.node, "argv": planned.argv})
        return 0
    if not words:
        _render.tell(f"{planned.run}, node {planned.node}; the run goes on when you leave")
    return attach(planned)
