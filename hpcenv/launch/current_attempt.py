"""Check whether this process belongs to the current attempt of the run, and find the nodes that Slurm has lost.

Runs on: COMPUTE NODE. Standard library only.

A node that loses its network keeps running. Slurm marks this node as down and requeues the job. Then the next attempt
may already train on other nodes while processes of the old attempt still run. The old processes must not write into the
records of the next attempt, and they should end.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Mapping, Sequence

from hpcenv import process
from hpcenv.errors import HpcenvError
from hpcenv.machine.this_node import ThisNode
from hpcenv.records.files import read_json
from hpcenv.records.run_folder import RunFolder

_SECONDS_TO_ASK = 10.0
_SECONDS_BETWEEN_LOOKS = 5.0
# An attempt has ended if two checks in a row say so. A new attempt moves files, and one check may happen between two
# moves.
_LOOKS = 2
_LONGEST_REASON = 200


def is_current_attempt(run: RunFolder, this_node: ThisNode) -> bool:
    """Return whether the run folder still belongs to this attempt; True if the start record cannot be read."""
    try:
        started = read_json(run.started)
        return (started["attempt"], started["job_id"]) == (this_node.attempt, this_node.job_id)
    except (OSError, ValueError, KeyError, TypeError):
        return True


def silent_nodes(run: RunFolder, nodes: Sequence[str]) -> tuple[str, ...]:
    """Return the nodes without facts from the check, if other nodes have facts."""
    silent = tuple(node for node in nodes if not os.path.lexists(run.facts_of(node)))
    return () if len(silent) == len(nodes) else silent


class AttemptWatch:
    """A thread that checks whether the attempt of this node has ended.

    The attempt has ended if its batch script has ended, or a later attempt has begun. If the node has lost its network,
    Slurm cannot end the ranks here, so the launch step ends the ranks.

    Attributes:
        ended: whether the attempt has ended.
    """

    def __init__(self, run: RunFolder, this_node: ThisNode, *, pause: float = _SECONDS_BETWEEN_LOOKS) -> None:
        self.ended = False
        self._run = run
        self._this_node = this_node
        self._pause = pause
        # The check runs in a thread, because a file system that hangs must not block the wait for torchrun.
        threading.Thread(target=self._look, name="hpcenv-watch", daemon=True).start()

    def _look(self) -> None:
        seen = 0
        while seen < _LOOKS:
            time.sleep(self._pause)
            ended = os.path.exists(self._run.finished) or not is_current_attempt(self._run, self._this_node)
            seen = seen + 1 if ended else 0
        self.ended = True


def down_nodes(nodes: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the nodes that are down for Slurm or do not respond, each with Slurm's reason.

    The result is empty if sinfo is missing or fails.
    """
    sinfo = shutil.which("sinfo", path=environ.get("PATH"))
    if sinfo is None or not nodes:
        return {}
    argv = [sinfo, "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N|%T|%E"]
    try:
        stdout = process.run(argv, timeout=_SECONDS_TO_ASK, env=environ).stdout
    except HpcenvError:
        return {}
    down = {}
    for line in stdout.splitlines():
        node, state, reason = [*line.strip().split("|", 2), "", ""][:3]
        # sinfo(1), NODE STATE CODES: `*` marks a node that does not respond.
        if node in nodes and re.match(r"down|fail|error|unknown|.*\*", state, re.IGNORECASE):
            down[node] = "" if reason == "none" else reason[:_LONGEST_REASON]
    return down
