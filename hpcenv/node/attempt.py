"""Whether this attempt still is the run's, and which of its nodes Slurm has lost.

Runs on: COMPUTE NODE. Standard library only.

A node that loses its network goes on: Slurm takes it for dead, queues the job again, and it may
train elsewhere already while ranks and batch script of the attempt before still run there. They
must not write into the records of the next one, and they should end.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping, Sequence

from hpcenv.adapters import process
from hpcenv.errors import HpcenvError
from hpcenv.node.place import Place
from hpcenv.wire import RunFolder

_SECONDS_TO_ASK = 10.0
_SECONDS_BETWEEN_LOOKS = 5.0
# A file that is there at one look and not at the next was moved aside by the attempt that begins.
_LOOKS = 2
_LONGEST_REASON = 200


def is_ours(run: RunFolder, place: Place) -> bool:
    """Whether the run folder still belongs to this attempt; yes where that cannot be read."""
    try:
        started = json.loads(run.started.read_text(encoding="utf-8"))
        return (started["attempt"], started["job_id"]) == (place.attempt, place.job_id)
    except (OSError, ValueError, KeyError, TypeError):
        return True


class Watch:
    """Looks now and then whether the job still waits for this node.

    It does not once the batch script has ended, or another attempt has begun: then nobody else
    ends the ranks here, if the network that Slurm would need for that is gone.

    Attributes:
        over: nobody waits any more.
    """

    def __init__(self, run: RunFolder, place: Place, *, pause: float = _SECONDS_BETWEEN_LOOKS) -> None:
        self.over = False
        self._run = run
        self._place = place
        self._pause = pause
        # A file system that hangs must not hold up who waits for torchrun.
        threading.Thread(target=self._look, name="hpcenv-watch", daemon=True).start()

    def _look(self) -> None:
        seen = 0
        while seen < _LOOKS:
            time.sleep(self._pause)
            ended = os.path.exists(self._run.finished) or not is_ours(self._run, self._place)
            seen = seen + 1 if ended else 0
        self.over = True


def down_nodes(nodes: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the nodes that Slurm holds for down or does not hear from, each with Slurm's reason.

    Empty where it does not answer.
    """
    sinfo = shutil.which("sinfo", path=environ.get("PATH"))
    if sinfo is None or not nodes:
        return {}
    argv = [sinfo, "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N|%T|%E"]
    try:
        said = process.run(argv, timeout=_SECONDS_TO_ASK, env=environ).stdout
    except HpcenvError:
        return {}
    found = {}
    for line in said.splitlines():
        node, state, reason = [*line.strip().split("|", 2), "", ""][:3]
        # sinfo(1), NODE STATE CODES: a `*` stands for a node that does not respond.
        if node in nodes and re.match(r"down|fail|error|unknown|.*\*", state, re.IGNORECASE):
            found[node] = "" if reason == "none" else reason[:_LONGEST_REASON]
    return found
