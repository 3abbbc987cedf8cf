"""The step `run-tasks`: start the training on all nodes with srun, and wait for its end, except on lost nodes.

Runs on: COMPUTE NODE (the batch node).

A node that loses power and restarts within seconds has lost its tasks. Slurm does not notice the loss, because the node
answers, and srun waits for these tasks until the time limit (seen with Slurm 24.11, 2026-11). So srun is ended a minute
after the first recorded failure of a node: the tasks of healthy nodes have ended by then (`SECONDS_AFTER_TERM`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from hpcenv import process
from hpcenv.container.manifest import open_manifest
from hpcenv.errors import HpcenvError
from hpcenv.judge import first_failure
from hpcenv.launch import node_exit
from hpcenv.launch.stopping import WARNING
from hpcenv.machine.this_node import ThisNode
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.outcome import NodeExit, StopRequest
from hpcenv.records.run_folder import RunFolder
from hpcenv.steps.this_step import REQUESTS, find_place, launched_nodes, say

# The time for nodes that still work after another node ended well, for example to write the last checkpoint (`srun
# --wait`); torchrun itself waits 300 s for such nodes (torch 2.13, exit_barrier_timeout).
SECONDS_FOR_SLOWER_NODES = 1800

# Added to each limit, because NFS may show the record of another node a minute late (nfs(5), acdirmax).
_SECONDS_FOR_SRUN = 60.0
_SECONDS_BETWEEN_LOOKS = 5.0

# Signals that Slurm sends to srun. A status of 1 comes from a task, not from SIGHUP.
_ENDED_SRUN = (signal.SIGTERM, signal.SIGKILL)


def run_tasks(run: RunFolder, environ: Mapping[str, str], *command: str) -> int:
    """Run srun with the tasks of all nodes; return the exit status of the rank that failed first.

    srun returns the highest status of all tasks. With --kill-on-bad-exit srun ends the other nodes,
    and the status of these nodes (143, 135 ...) is higher than the status of the failure.

    Args:
        command: srun and its arguments.
    """
    manifest = open_manifest(run, environ)
    place = find_place(run, manifest, environ)
    for number in REQUESTS:
        # This process does nothing on these signals. srun also gets these signals, so it must not inherit that they are
        # ignored.
        signal.signal(number, lambda _number, _frame: None)
    child = process.start(command)
    ends = SeenEnds(run, place)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = child.wait(timeout=_SECONDS_BETWEEN_LOOKS)
            break
        late = ends.late(time.monotonic())
        if late and time.time() > saving_until(run, manifest, place):
            say(f"hpcenv: {late}: srun still waits, and is ended")
            process.kill_session(child)
    return _status(node_exit.read_all(run, place), status if status >= 0 else 128 - status)


def _status(records: Sequence[NodeExit], of_srun: int) -> int:
    first = first_failure.first_status(records)
    if first is None:
        # After a request to stop, no rank has failed. The script may still end with its own status, which is kept.
        ended = [r for r in records if r.stopped and r.status != 0 and not r.asked_to_end]
        first = min(ended, key=lambda record: record.ended).status if ended else of_srun
        if not records and first in _ENDED_SRUN:
            # If a signal ended srun itself, for example on a full disk, the status is only the signal's number.
            first += 128
    return first


class SeenEnds:
    """When the first node ended and when the first node failed, as far as this process has seen."""

    def __init__(self, run: RunFolder, place: ThisNode) -> None:
        self._run = run
        self._place = place
        self._ended: float | None = None
        self._failed: float | None = None

    def late(self, now: float) -> str:
        """Read the records, and return as text for which nodes srun has waited too long; empty while srun may wait.

        Args:
            now: the time in seconds of the monotonic clock.
        """
        with contextlib.suppress(OSError):
            if not os.listdir(self._run.exits):
                return ""
        records = node_exit.read_all(self._run, self._place) if self._failed is None else ()
        if self._ended is None and records:
            self._ended = now
        if any(record.status != 0 for record in records):
            self._failed = now
        if self._failed is not None:
            is_late = now > self._failed + _SECONDS_FOR_SRUN
        else:
            is_late = self._ended is not None and now > self._ended + SECONDS_FOR_SLOWER_NODES + _SECONDS_FOR_SRUN
        return self._in_words() if is_late else ""

    def _in_words(self) -> str:
        nodes = launched_nodes(self._run, self._place)
        known = {record.node for record in node_exit.read_all(self._run, self._place)}
        missing = [node for node in nodes if node not in known]
        if not missing:
            return "all nodes have ended"
        others = "failed" if self._failed is not None else "ended"
        names = f"node {missing[0]}" if len(missing) == 1 else f"nodes {', '.join(missing)}"
        return f"{names} left no record of how the training ended, long after another node has {others}"


def saving_until(run: RunFolder, manifest: Manifest, place: ThisNode) -> float:
    """Return the end of the time to save a state, in seconds since the epoch; 0 if no request to stop was recorded."""
    until = 0.0
    for node in place.nodes:
        with contextlib.suppress(HpcenvError):
            request = load_record(StopRequest, run.stop_of(node))
            # TERM without a recorded reason comes from srun itself: it ends the other nodes if one node has failed.
            is_stop = request.reason in ("time-limit", "preemption") or request.signal == WARNING.name
            if request.attempt == place.attempt and is_stop:
                ends = request.asked + manifest.stop.grace if request.ends is None else request.ends
                until = max(until, ends)
    return until
