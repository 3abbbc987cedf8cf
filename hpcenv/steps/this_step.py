"""What all steps share: the log, the node and attempt, exit statuses given as text, and signals.

Runs on: COMPUTE NODE. Every step loads this module while the job waits, so this module imports little.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Mapping

from hpcenv.errors import HpcenvError, NodeRejected, NodesUnknown, UsageError
from hpcenv.launch.previous_job import number_in_chain
from hpcenv.machine.this_node import ThisNode, find_this_node
from hpcenv.records.files import load_record, read_json
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import Verdict

# NFS may show a file written by another node only after its attribute cache expires (nfs(5): acregmax 60 s, acdirmax 60
# s; the first lookup of a name is always fresh, so this wait is rarely needed).
SECONDS_FOR_FILES = 20.0

# The signals that ask a job to stop or end: Slurm's warning, the signal that a user may send, and TERM.
REQUESTS = (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM)


def say(text: str) -> None:
    """Write a line to the log of the job."""
    print(text, file=sys.stderr, flush=True)


def find_place(run: RunFolder, manifest: Manifest, environ: Mapping[str, str]) -> ThisNode:
    """Return the node and attempt of this step; the jobs of a chain share one count of attempts."""
    place = find_this_node(environ, cluster=manifest.cluster)
    if manifest.chain < 2:
        return place

    number = number_in_chain(run, job_id=place.job_id, restarts=place.restarts)
    return ThisNode(node=place.node, nodes=place.nodes, attempt=number, job_id=place.job_id, restarts=place.restarts)


def launched_nodes(run: RunFolder, place: ThisNode) -> tuple[str, ...]:
    """Return the nodes that train, without nodes that a spare node replaces. Without a verdict, return all nodes."""
    with contextlib.suppress(HpcenvError):
        return load_record(Verdict, run.verdict).launched or place.nodes
    return place.nodes


def started_at(run: RunFolder) -> float | None:
    """Return when the current attempt began, in seconds since the epoch; None if the time cannot be read."""
    try:
        return float(read_json(run.started)["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def end_in_order() -> None:
    """Turn a request to end into an exception. This exception ends the probe and removes the probe's folder.

    The batch script sees the signal in the exit status, even if it came before this call.
    """
    for number in REQUESTS:
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))


def read_status(word: str) -> int:
    """Return the exit status that the batch script passes as text.

    Raises:
        UsageError: the text is not a number.
    """
    if not re.fullmatch("[0-9]+", word):
        raise UsageError(f"`{word}` is not an exit status")
    return int(word)


def exit_status(verdict: Verdict) -> int:
    """Return the exit status of the gate for a verdict."""
    return {"match": 0, "mismatch": NodeRejected.exit_status, "unknown": NodesUnknown.exit_status}[verdict.result]
