"""The processes of the ranks below one agent: whether they run, and whether all have ended.

Runs on: COMPUTE NODE. Linux only: it reads /proc (proc(5)), and no file of the run folder, so it may look often.
"""

from __future__ import annotations

import os
import time

from hpcenv.node.launch import processes
from hpcenv.process import parent_of

# Until all ranks are known, each look reads the parent of every process of the node.
_SECONDS_BETWEEN_SEARCHES = 0.5


class RankProcesses:
    """The ranks that one agent starts, each once."""

    def __init__(self, agent: int, *, count: int) -> None:
        """Look for `count` ranks below the process `agent`."""
        self._agent = agent
        self._count = count
        self._ranks: set[int] = set()
        self._next = 0.0

    @property
    def seen(self) -> bool:
        """Whether a rank has been seen. With torchrun, the agents of all nodes have met by then."""
        return bool(self._ranks)

    def look(self) -> None:
        """Look for ranks that are not known yet."""
        now = time.monotonic()
        if len(self._ranks) < self._count and now >= self._next:
            self._next = now + _SECONDS_BETWEEN_SEARCHES
            self._ranks.update(processes.ranks_below(self._agent))

    def have_ended(self) -> bool:
        """Whether all ranks are known, and none of them runs or still gives back what it had."""
        return len(self._ranks) >= self._count and not self.run()

    def run(self) -> bool:
        """Whether a rank that is known runs, or still gives back what it had."""
        return any(_is_there(rank) for rank in self._ranks)


def _is_there(pid: int) -> bool:
    """Return whether a process has memory and open files: a zombie has none, unless another of its threads still ends.

    The kernel gives back memory, files and devices before a thread becomes a zombie (do_exit, Linux 6.1).
    """
    if parent_of(pid) is not None:
        return True
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False
