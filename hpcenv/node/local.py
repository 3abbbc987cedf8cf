"""The part of Slurm that `--cluster local` needs: N emulated nodes on this machine.

Runs on: THIS MACHINE, from the run folder's copy of the code. It plays the batch script:
the same check, decide and launch steps, as one process per emulated node.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from hpcenv.adapters import process
from hpcenv.errors import NodeRejected, NodesUnknown
from hpcenv.node import processes
from hpcenv.node.manifest import open_manifest
from hpcenv.node.place import LOCAL_CANCELLED, LOCAL_JOB, LOCAL_NODE, LOCAL_NODES
from hpcenv.node.supervise import SECONDS_AFTER_TERM
from hpcenv.wire import RunFolder

# After one node's training fails, the others get this long to end by themselves, as
# `srun --wait=60` would give them; here everything is on one machine, so it is short.
_SECONDS_FOR_OTHERS = 20.0

# A step kills its own training SECONDS_AFTER_TERM after it was asked to end; one that is
# still there after this is killed itself.
_SECONDS_FOR_STEPS = SECONDS_AFTER_TERM + 10.0


def node_names(count: int) -> tuple[str, ...]:
    """Return the names of the emulated nodes."""
    return tuple(f"local{number}" for number in range(count))


def run_here(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Run all steps of a local run and return its exit status; leave no process behind."""
    manifest = open_manifest(run)
    nodes = node_names(manifest.nodes)
    job = {**environ, LOCAL_NODES: ",".join(nodes), LOCAL_JOB: f"local-{os.getpid()}"}
    tasks = _Tasks(run, job, nodes)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, tasks.stop)
    processes.adopt_orphans()
    before = processes.below(os.getpid())
    try:
        status = _steps(tasks, launches=bool(manifest.script))
    finally:
        processes.end_rest(before, grace=0.5)
    tasks.finish(status)
    return status


def _steps(tasks: _Tasks, *, launches: bool) -> int:
    if tasks.one("begin") != 0:
        return tasks.stopped or NodesUnknown.exit_status
    # As in the batch script: what the nodes found is judged by the next step.
    tasks.all("check", end_together=False)
    if tasks.stopped:
        return tasks.stopped
    status = tasks.one("decide")
    if tasks.stopped:
        return tasks.stopped
    if status != 0:
        # Whatever else ended it, for example a lack of memory: the gate could not tell.
        return status if status == NodeRejected.exit_status else NodesUnknown.exit_status
    return tasks.all("task", end_together=True) if launches else 0


class _Tasks:
    """Starts steps on the emulated nodes and waits for them, as srun does."""

    def __init__(self, run: RunFolder, environ: Mapping[str, str], nodes: Sequence[str]) -> None:
        self._run = run
        self._environ = environ
        self._nodes = nodes
        self._children: list[subprocess.Popen[bytes]] = []
        self._kill_at: float | None = None
        self.stopped = 0
        """128 + number of the signal that asked for the end; 0 while nobody did."""

    def one(self, step: str, *arguments: str) -> int:
        """Run a step on the first node."""
        return self._together(step, self._nodes[:1], arguments, end_together=False)

    def all(self, step: str, *, end_together: bool) -> int:
        """Run a step on every node; return the first status that is not 0, else 0."""
        return self._together(step, self._nodes, (), end_together=end_together)

    def finish(self, status: int) -> None:
        """Record the run's status: also, and above all, after it was asked to end."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self._environ = {**self._environ, LOCAL_CANCELLED: "yes" if self.stopped else ""}
        self._start("finish", self._nodes[0], str(status)).wait()

    def stop(self, number: int, _frame: FrameType | None) -> None:
        """Pass a signal that asks for the end on to the steps that run."""
        self.stopped = self.stopped or 128 + number
        self._end(number)

    def _together(self, step: str, nodes: Sequence[str], arguments: Sequence[str], *, end_together: bool) -> int:
        self._children = []
        for node in nodes:
            if not self.stopped:
                self._children.append(self._start(step, node, *arguments))
        if self.stopped:  # while one was being started, it could not be told
            self._end(self.stopped - 128)
        first_failure = self._wait(end_together=end_together)
        return first_failure or self.stopped

    def _wait(self, *, end_together: bool) -> int:
        first_failure, deadline = 0, None
        while any(child.poll() is None for child in self._children):
            first_failure = first_failure or self._failure()
            if first_failure and end_together and deadline is None:
                deadline = time.monotonic() + _SECONDS_FOR_OTHERS
            if deadline is not None and self._kill_at is None and time.monotonic() > deadline:
                self._end(signal.SIGTERM)
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                processes.send((c.pid for c in self._children if c.poll() is None), signal.SIGKILL)
            time.sleep(0.05)
        return first_failure or self._failure()

    def _failure(self) -> int:
        ended = (child.poll() for child in self._children)
        return next((_status_of(code) for code in ended if code), 0)

    def _end(self, number: int) -> None:
        if self._kill_at is None:
            self._kill_at = time.monotonic() + _SECONDS_FOR_STEPS
        for child in self._children:
            if child.poll() is None:
                child.send_signal(number)

    def _start(self, step: str, node: str, *arguments: str) -> subprocess.Popen[bytes]:
        return process.start(
            [sys.executable, "-I", str(self._run.step), step, str(self._run.path), *arguments],
            env={**self._environ, LOCAL_NODE: node},
            cwd=Path("/"),
        )


def _status_of(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode
