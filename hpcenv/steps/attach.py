"""`hpcenv attach`: a shell in a running run, on one of its nodes. Runs on: LOGIN NODE."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcenv.adapters import process, slurm
from hpcenv.errors import RunNotRunning, UsageError
from hpcenv.node.place import LOCAL_JOB, LOCAL_NODE, LOCAL_NODES
from hpcenv.steps.runs import Run, RunStatus, find_run, read_status


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """A command in a running run, ready to be started.

    Attributes:
        argv: how to start it from here.
        env: whole environment of that; not part of any output.
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
    """Return how to start a command in the environment of a run's ranks.

    Args:
        node: one of the run's nodes; the first one that trains where it is None.
        command: what to start; a shell where it is empty.
        secrets: also give it the run's secrets.
        tty: whether there is a terminal for it.

    Raises:
        RunNotRunning: the run waits, is being checked, or has ended.
        UsageError: no such node, or a shell is asked for without a terminal.
    """
    run = find_run(start, word, runs=runs)
    status = read_status(run, environ)
    nodes = _nodes(status)
    if node is not None and node not in nodes:
        raise UsageError(f"`{node}` does not train in {status.run}", why=f"its nodes: {', '.join(nodes)}")
    if not command and not tty:
        raise UsageError(
            "a shell needs a terminal", why="there is none here", hint=f"hpcenv attach {status.run} -- COMMAND"
        )
    chosen = node or nodes[0]
    step = [_python(run), "-I", str(run.folder.step), "attach", str(run.folder.path)]
    step += ["with-secrets" if secrets else "without-secrets", *command]
    env = slurm.clean_environment(environ)
    if run.submission.cluster == "slurm":
        argv = slurm.shell_argv(status.job_id, chosen, step, environ, tty=tty)
    else:
        argv = step
        env |= {LOCAL_NODE: chosen, LOCAL_NODES: ",".join(status.nodes), LOCAL_JOB: status.job_id}
    return Attachment(run=status.run, node=chosen, argv=tuple(argv), env=env)


def _nodes(status: RunStatus) -> tuple[str, ...]:
    """Return the nodes that train now."""
    verdict = status.verdict
    if status.state != "running":
        detail = f" ({status.detail})" if status.detail else ""
        raise RunNotRunning(
            f"{status.run} does not run", why=f"it is {status.state}{detail}", hint=f"hpcenv status {status.run}"
        )
    if verdict is None or verdict.result != "match" or verdict.attempt != status.attempt:
        raise RunNotRunning(
            f"{status.run} does not train yet",
            why="its nodes are still being checked",
            hint=f"hpcenv logs -f {status.run}",
        )
    return verdict.launched or tuple(node.node for node in verdict.nodes)


def _python(run: Run) -> str:
    """Return the interpreter that the batch script uses for its own steps: the nodes have it."""
    try:
        with open(run.folder.script, encoding="utf-8") as file:
            match = re.search(r"^python=(.+)$", file.read(1 << 20), re.MULTILINE)
        words = shlex.split(match[1]) if match else []
    except (OSError, ValueError):
        words = []
    return words[0] if len(words) == 1 else sys.executable


def attach(attachment: Attachment) -> int:
    """Start it on this terminal; return its exit status."""
    return process.talk(attachment.argv, env=attachment.env)
