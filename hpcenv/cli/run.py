"""`hpcenv run`: run any command in the locked environment. Runs on: LOGIN NODE, or inside an allocation."""

from __future__ import annotations

import os
import sys
import time

import click

from hpcenv import process
from hpcenv.cli import _accept, _render
from hpcenv.cli._dashes import WithDashes, after_dashes
from hpcenv.cli._submit_options import table_option, table_values
from hpcenv.cli.submit import context_of
from hpcenv.errors import UsageError
from hpcenv.submission.locked_command import check_place, count_nodes, find_allocation, start_argv
from hpcenv.submission.request import SubmitOptions, parse_flags


@click.command("run", cls=WithDashes, options_metavar="[OPTIONS] -- COMMAND...")
@click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="Start COMMAND on the first N nodes only.")
@click.option(
    "--gpus", type=click.IntRange(min=0), metavar="N", help="GPUs on each node. Default: the GPUs of the allocation."
)
@click.option("--pty", is_flag=True, help="Give COMMAND a terminal, on the first node. A shell always gets a terminal.")
@table_option("lock")
@table_option("site")
@table_option("bind")
@table_option("env")
@_accept.option
@_render.json_option
def command(
    nodes: int | None,
    gpus: int | None,
    pty: bool,
    lock: str,
    site: str | None,
    bind: tuple[str, ...],
    env: tuple[str, ...],
    accept: str | None,
    as_json: bool,
) -> int:
    """Run COMMAND in the locked environment, after the same check as for a job.

    Inside an allocation (salloc), COMMAND runs on all nodes, one process on each node. Outside an allocation, COMMAND
    runs on this machine. Without COMMAND, hpcenv starts a shell. hpcenv ends with the status of COMMAND. If a node
    differs from the lockfile, hpcenv starts nothing and ends with 90. If a value that must match could not be read,
    hpcenv starts nothing and ends with 91.

    \b
        hpcenv run -- python3 -c 'import torch; print(torch.__version__)'
        salloc --nodes 2 --gpus-per-node 8
        hpcenv run --pty

    With --json, hpcenv makes the check and prints the command, but does not start the command.
    """  # noqa: D301  (click's mark for "do not wrap")
    words = after_dashes() or ()
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not words and not has_terminal and not as_json:
        raise UsageError(
            "no command is given",
            why="without one, a shell starts, and a shell needs a terminal",
            hint="hpcenv run -- COMMAND",
        )
    values = table_values({"lock": lock, "site": site, "bind": bind, "env": env})
    options = SubmitOptions(script=None, gpus=gpus, **parse_flags(values))
    workspace = _render.open_project()
    _accept.require(workspace, accept, as_json=as_json)
    terminal = pty or (not words and has_terminal)
    count = count_nodes(find_allocation(os.environ), nodes=nodes, pty=terminal)
    started = time.monotonic()
    place = check_place(workspace, options, context_of())
    argv, environ = start_argv(place, words, count=count, pty=terminal)
    if as_json:
        _render.success("run", {"run": place.run.path.name, "nodes": place.nodes, "argv": argv})
        return 0
    for note in place.notes:
        _render.tell(f"note: {note}")
    many = f"{len(place.nodes)} nodes match" if len(place.nodes) > 1 else f"node {place.nodes[0]} matches"
    where = "this machine matches" if place.allocation is None else many
    _render.tell(f"{where} the lockfile, checked in {time.monotonic() - started:.1f} s")
    return process.run_in_terminal(argv, env=environ)
