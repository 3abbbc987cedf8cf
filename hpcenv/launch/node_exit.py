"""The exit records of nodes. If the ranks are tasks of srun, the node's record is made from the records of its tasks.

Runs on: COMPUTE NODE. Standard library only.

Later steps and commands read one record for each node. So each task writes `exits/tasks/NODE.LOCAL-RANK.json` at its
end, and then makes the node's record from all task records. Tasks of one node may end at the same time. The lock
between these tasks is a Unix socket with an abstract name (unix(7)). The kernel removes the socket when its process
ends.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from hpcenv.errors import HpcenvError
from hpcenv.launch import reserve
from hpcenv.machine.this_node import ThisNode
from hpcenv.records.codec import encode_record
from hpcenv.records.files import load_record
from hpcenv.records.outcome import NodeExit
from hpcenv.records.run_folder import RunFolder

_SECONDS_TO_WAIT = 10.0
_SECONDS_BETWEEN_TRIES = 0.02


def write(record: NodeExit, run: RunFolder, this_node: ThisNode, local_rank: int, *, count: int) -> bool:
    """Write the record of one task, and the node's record; return whether each task of the node has a record.

    Args:
        record: record of the task.
        run: the run folder.
        this_node: this node and this attempt.
        local_rank: local rank of the task.
        count: number of tasks of this node.

    Raises:
        OSError: a record cannot be written.
    """
    folder = run.exits / "tasks"
    folder.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(run, this_node):
        (folder / f"{this_node.node}.{local_rank}.json").write_text(encode_record(record), "utf-8")
        found = read_tasks(run, this_node, count=count)
        reserve.write(run, this_node.node, encode_record(merge(found)), run.exit_of(this_node.node))
    return len(found) == count


def read_all(run: RunFolder, this_node: ThisNode) -> tuple[NodeExit, ...]:
    """Return the existing records of this attempt's nodes."""
    found = []
    for node in this_node.nodes:
        try:
            record = load_record(NodeExit, run.exit_of(node))
        except HpcenvError:
            continue
        if record.attempt == this_node.attempt:
            found.append(record)
    return tuple(found)


def read_tasks(run: RunFolder, this_node: ThisNode, *, count: int) -> tuple[NodeExit, ...]:
    """Return the existing records of this attempt's tasks on this node."""
    found = []
    for local_rank in range(count):
        try:
            record = load_record(NodeExit, run.exits / "tasks" / f"{this_node.node}.{local_rank}.json")
        except HpcenvError:
            continue
        if record.attempt == this_node.attempt:
            found.append(record)
    return tuple(found)


def merge(records: Sequence[NodeExit]) -> NodeExit:
    """Return the record of a node, made from the records of its tasks. Pure.

    If a task refused to start, the record of the node shows the end of this task. If no task refused, the record shows
    the task that failed first by itself. A task that was asked to end comes last, because another task caused its end.
    """
    failed = sorted((record for record in records if record.status != 0), key=_failed_at)
    by_itself = [record for record in failed if not record.asked_to_end]
    refused = [record for record in failed if record.refused]
    base = (refused or by_itself or failed or list(records))[0]
    ended = [record for record in failed if record.asked_to_end]
    ordered = [base, *(record for record in (*by_itself, *ended) if record is not base)]
    kills = [record.oom_kills for record in records]
    return replace(
        base,
        started=min(record.started for record in records),
        ended=max(record.ended for record in records),
        ranks=tuple(rank for record in ordered for rank in record.ranks),
        stopped=next((record.stopped for record in (base, *records) if record.stopped), ""),
        saved=any(record.saved for record in records),
        # All tasks are in one cgroup.
        oom_kills=None if None in kills else max(kill for kill in kills if kill is not None),
        changed=next((record.changed for record in records if record.changed), ()),
        not_looked_again=next((record.not_looked_again for record in records if record.not_looked_again), ""),
        detail=next((record.detail for record in (base, *records) if record.detail), ""),
        refused=any(record.refused for record in records),
        port_errors=next((record.port_errors for record in records if record.port_errors), ()),
        port_errors_unknown=next((record.port_errors_unknown for record in records if record.port_errors_unknown), ""),
        differences=next((record.differences for record in records if record.differences), ()),
        full=next((record.full for record in records if record.full), ""),
        tasks=len(records),
    )


def _failed_at(record: NodeExit) -> float:
    first = next(iter(record.ranks), None)
    return record.ended if first is None or first.ended is None else first.ended


@contextmanager
def _one_at_a_time(run: RunFolder, this_node: ThisNode) -> Iterator[None]:
    """Wait until no other task of this node is in the block, but only for some seconds."""
    parts = (str(os.geteuid()), str(run.path), this_node.job_id, this_node.node)
    name = "\0hpcenv-exit-" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:40]
    until = time.monotonic() + _SECONDS_TO_WAIT
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mutex:
        while time.monotonic() < until:
            try:
                mutex.bind(name)
                break
            except OSError:
                time.sleep(_SECONDS_BETWEEN_TRIES)
        yield
