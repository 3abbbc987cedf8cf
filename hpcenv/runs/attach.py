"""`hpcenv attach`: a shell or a command in a running run, on one of its nodes. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcenv import process
from hpcenv.cluster import slurm, slurm_command
from hpcenv.errors import Command, RunNotRunning, UsageError
from hpcenv.machine.this_node import LOCAL_JOB, LOCAL_NODE, LOCAL_NODES
from hpcenv.records.files import read_file
from hpcenv.runs.entries import Run
from hpcenv.runs.find import find_run
from hpcenv.runs.status import RunStatus, read_status


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """A command in a running run, ready to be started.

    Attributes:
        run, node: name of the run, and name of the node.
        argv: command that starts the program from this machine.
        env: complete environment of `argv`. hpcenv never prints this environment.
    """

    run: str
    node: str
    argv: tuple[str, ...]
    env: Mapping[str, str]


def plan_attach(
    start: Path,
    word: str | None,
    *,
    environ: Mapping[str, str],
    node: str | None = None,
    command: Sequence[str] = (),
    secrets: bool = False,
    tty: bool = False,
    runs: str | None = None,
) -> Attachment:
    """Return the command that starts a program in the environment of a run's ranks.

    Args:
        start: current directory. The project is in this folder or in a folder above.
        word: run folder, run name or job id; None for the latest run.
        environ: environment variables of the caller.
        node: a node of the run; None for the first node that trains.
        command: argv of the program. If `command` is empty, a shell is started.
        secrets: whether the program gets the run's secrets.
        tty: whether hpcenv runs on a terminal.
        runs: folder of runs, if it is not the project's folder of runs.

    Raises:
        RunNotRunning: the run waits, is being checked, or has ended.
        UsageError: the run belongs to another user, the node does not train in this run, or a shell is requested
            without a terminal.
    """
    run = find_run(start, word, runs=runs)
    owner = os.stat(run.folder.path).st_uid
    if os.geteuid() not in (owner, 0):
        why = f"its run folder belongs to user {owner}, whose files would run in your job"
        raise UsageError(f"`{run.submission.run}` is the run of another user", why=why)
    status = read_status(run, environ)
    nodes = nodes_of(status)
    if node is not None and node not in nodes:
        raise UsageError(f"`{node}` does not train in {status.run}", why=f"its nodes: {', '.join(nodes)}")
    if not command and not tty:
        raise UsageError(
            "a shell needs a terminal",
            why="standard input and output are not a terminal",
            hint=Command("hpcenv", "attach", f"{status.run}", "--", "COMMAND"),
        )
    chosen = node or nodes[0]
    step = [python_of(run), "-I", str(run.folder.step), "attach", str(run.folder.path)]
    step += ["with-secrets" if secrets else "without-secrets", *command]
    env = slurm_command.clean_environment(environ)
    if run.submission.cluster == "slurm":
        argv = slurm.shell_argv(status.job_id, chosen, step, environ, tty=tty)
    else:
        argv = step
        env |= {LOCAL_NODE: chosen, LOCAL_NODES: ",".join(status.nodes), LOCAL_JOB: status.job_id}
    return Attachment(run=status.run, node=chosen, argv=tuple(argv), env=env)


def nodes_of(status: RunStatus) -> tuple[str, ...]:
    """Return the nodes on which the run trains now.

    Raises:
        RunNotRunning: the run waits, is being checked, or has ended.
    """
    verdict = status.verdict
    if status.state != "running":
        detail = f" ({status.detail})" if status.detail else ""
        raise RunNotRunning(
            f"the run `{status.run}` is not running",
            why=f"its state is {status.state}{detail}",
            hint=Command("hpcenv", "status", f"{status.run}"),
        )
    if verdict is None or not verdict.allows(status.attempt):
        raise RunNotRunning(
            f"the run `{status.run}` does not train yet",
            why="its nodes are still being checked",
            hint=Command("hpcenv", "logs", "-f", f"{status.run}"),
        )
    return verdict.training_nodes


def python_of(run: Run) -> str:
    """Return the path of the Python that the batch script uses for its steps. The nodes have this Python."""
    try:
        script = read_file(run.folder.script, follow=False).decode("utf-8")
        match = re.search(r"^python=(.+)$", script, re.MULTILINE)
        argv = shlex.split(match[1]) if match else []
    except (OSError, ValueError):
        argv = []
    return argv[0] if len(argv) == 1 else sys.executable


def attach(attachment: Attachment) -> int:
    """Start the program on this terminal and return its exit status."""
    return process.run_in_terminal(attachment.argv, env=attachment.env)
