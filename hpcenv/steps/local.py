"""Run a job without Slurm (`--cluster local`), with N emulated nodes on this machine.

Runs on: THIS MACHINE, from the run folder's copy of the code. This module replaces the batch script and
srun. The module runs the same check, decide and launch steps, with one process per emulated node.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from hpcenv import process
from hpcenv.container.manifest import open_manifest
from hpcenv.errors import HpcenvError, NodeRejected, NodesUnknown
from hpcenv.launch import processes, starts
from hpcenv.launch.supervise import SECONDS_AFTER_TERM
from hpcenv.machine import free_gpus, gpus
from hpcenv.machine.this_node import LOCAL_CANCELLED, LOCAL_JOB, LOCAL_NODE, LOCAL_NODES, LOCAL_TASK
from hpcenv.records.codec import SCHEMA
from hpcenv.records.files import write_text
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.smoke import inside
from hpcenv.steps.this_step import say

# If the training failed on one node, the other nodes have this time to end by themselves. If a node ended well, the
# other nodes may continue without a limit.
_SECONDS_FOR_OTHERS = 20.0

# A step kills its training SECONDS_AFTER_TERM after the request to end. A step that still runs after
# this time is killed.
_SECONDS_FOR_STEPS = SECONDS_AFTER_TERM + 10.0

# The time for the last step. This step only reads and writes a few small files.
_SECONDS_TO_RECORD = 120.0


def node_names(count: int) -> tuple[str, ...]:
    """Return the names of the emulated nodes."""
    return tuple(f"local{number}" for number in range(count))


def run_here(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Run all steps of a local run and return its exit status. No process is left running."""
    manifest = open_manifest(run, environ)
    nodes = node_names(manifest.nodes)
    job = {**environ, LOCAL_NODES: ",".join(nodes), LOCAL_JOB: f"local-{os.getpid()}"}
    tasks = _Tasks(run, job, nodes)
    for number in process.END_SIGNALS:
        signal.signal(number, tasks.stop)
    # `submit` starts this process with these signals blocked, so an early cancel is also recorded as a cancel.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, process.END_SIGNALS)
    processes.adopt_orphans()
    before = process.below(os.getpid())
    try:
        count = manifest.nproc_per_node if starts.starts_one_rank(manifest) else 1
        status = _take_gpus(run, manifest, tasks) or _steps(tasks, launches=manifest.launches, count=count)
    finally:
        processes.end_rest(before, grace=0.5)
    tasks.finish(status)
    return status


def _take_gpus(run: RunFolder, manifest: Manifest, tasks: _Tasks) -> int:
    """Wait until this run has its GPUs; return 0, or the exit status of the run if it cannot have the GPUs."""
    if not manifest.gpus_per_node:
        return 0
    told = ""

    def wait(why: str) -> None:
        nonlocal told
        if why != told:
            told = why
            say(f"hpcenv: {why}")
            write_text(json.dumps({"schema": SCHEMA, "why": why}) + "\n", run.waiting, durable=False)

    try:
        tasks.use(
            free_gpus.take(
                manifest.gpus_per_node,
                tasks.environ,
                look=lambda: gpus.read(environ=tasks.environ),
                on_wait=wait,
                stopped=lambda: tasks.stopped,
            )
        )
    except HpcenvError as error:
        say(f"error[{error.code}]: {error}")
        return error.exit_status
    finally:
        run.waiting.unlink(missing_ok=True)
    return tasks.stopped


def _steps(tasks: _Tasks, *, launches: bool, count: int) -> int:
    if tasks.one("begin") != 0:
        return tasks.stopped or NodesUnknown.exit_status
    # As in the batch script, the next step judges the results of the check.
    tasks.all("check", end_together=False)
    if tasks.stopped:
        return tasks.stopped
    status = tasks.one("decide")
    if tasks.stopped:
        return tasks.stopped
    if status != 0:
        # Any other status, for example after a lack of memory, means that the nodes could not be checked.
        return status if status == NodeRejected.exit_status else NodesUnknown.exit_status
    status = _inside(tasks) or _smoke(tasks)
    if status != 0:
        return status
    return tasks.all("task", end_together=True, tasks=count) if launches else 0


def _inside(tasks: _Tasks) -> int:
    """Run the checks inside the environment, if the run requests them; return 0 if the training may start."""
    if not tasks.inside_asked():
        return 0
    tasks.all("inside", end_together=False)
    status = tasks.stopped or tasks.one("inside-judge")
    if tasks.stopped or status == 0:
        return tasks.stopped
    return status if status == NodeRejected.exit_status else NodesUnknown.exit_status


def _smoke(tasks: _Tasks) -> int:
    """Run the smoke test, if one is planned; return 0 if the training may start."""
    if not tasks.smoke_planned():
        return 0
    tasks.all("smoke", end_together=False)
    status = tasks.stopped or tasks.one("smoke-judge")
    if status == 0 and tasks.pairs_wanted():
        tasks.all("smoke-pairs", end_together=False)
        status = tasks.stopped or tasks.one("smoke-judge")
    if tasks.stopped or status == 0:
        return tasks.stopped
    return status if status == NodeRejected.exit_status else NodesUnknown.exit_status


class _Tasks:
    """Starts steps on the emulated nodes and waits for them, as srun does."""

    def __init__(self, run: RunFolder, environ: Mapping[str, str], nodes: Sequence[str]) -> None:
        self._run = run
        self.environ = environ
        self._nodes = nodes
        self._held = free_gpus.HeldGpus()
        self._children: list[subprocess.Popen[bytes]] = []
        self._kill_at: float | None = None
        self.stopped = 0
        """128 + the number of the signal that asked this run to end; 0 if there was no such signal."""

    def inside_asked(self) -> bool:
        """Whether the run requests checks inside the environment."""
        return bool(inside.asked(open_manifest(self._run, self.environ)))

    def smoke_planned(self) -> bool:
        """Whether the decide step planned a smoke test."""
        return self._run.smoke_plan.exists()

    def pairs_wanted(self) -> bool:
        """Whether pairs of nodes must be tested to find out where the smoke test failed."""
        return self._run.smoke_pairs.exists()

    def use(self, held: free_gpus.HeldGpus | None) -> None:
        """Give GPUs to the steps. A step that outlives this process keeps its GPUs."""
        if held is None:
            return
        self._held = held
        if held.note:
            say(f"hpcenv: {held.note}")
        if held.uuids:
            self.environ = {**self.environ, free_gpus.VARIABLE: ",".join(held.uuids)}

    def one(self, step: str, *arguments: str) -> int:
        """Run a step on the first node."""
        return self._together(step, self._nodes[:1], arguments, end_together=False)

    def all(self, step: str, *, end_together: bool, tasks: int = 1) -> int:
        """Run a step on every node, in one or more tasks; return the first status that is not 0, else 0."""
        return self._together(step, self._nodes, (), end_together=end_together, tasks=tasks)

    def finish(self, status: int) -> None:
        """Record the exit status of the run, even after a request to end."""
        for number in process.END_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        self.environ = {**self.environ, LOCAL_CANCELLED: "yes" if self.stopped else ""}
        record = self._start("finish", self._nodes[0], str(status))
        try:
            record.wait(timeout=_SECONDS_TO_RECORD)
        except subprocess.TimeoutExpired:
            process.kill_session(record)

    def stop(self, number: int, _frame: FrameType | None) -> None:
        """Forward a signal that requests the end to the running steps."""
        self.stopped = self.stopped or 128 + number
        self._end(number)

    def _together(
        self, step: str, nodes: Sequence[str], arguments: Sequence[str], *, end_together: bool, tasks: int = 1
    ) -> int:
        self._children = []
        for node in nodes:
            for task in range(tasks):
                if not self.stopped:
                    self._children.append(self._start(step, node, *arguments, task=task))
        if self.stopped:  # the signal arrived while a step was being started
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

    def _start(self, step: str, node: str, *arguments: str, task: int = 0) -> subprocess.Popen[bytes]:
        return process.start(
            [sys.executable, "-I", str(self._run.step), step, str(self._run.path), *arguments],
            env={**self.environ, LOCAL_NODE: node, LOCAL_TASK: str(task)},
            cwd=Path("/"),
            pass_fds=self._held.files,
        )


def _status_of(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode
