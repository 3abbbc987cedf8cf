"""Find the ranks that a program starts, and see how each rank ends.

Runs on: inside the image (or in a bare host environment), in the agent of `--launcher none`. Linux, standard library
only, Python 3.8 to 3.14.

A rank is a descendant of this process with RANK and LOCAL_RANK in its environment. The parent of a rank does not have
these variables. The launchers of torch, accelerate and DeepSpeed set these variables, and so do scripts that start
ranks without MPI. A rank is a child of the program, so only the program gets the exit status of the rank. But until the
program takes this status, the kernel keeps the rank as a zombie, and proc(5) shows the status to the same user
(`exit_code` of /proc/PID/stat). torchrun takes the status ten times a second (torch 2.13, monitor_interval). If a
program takes the status before this module reads it, the status is lost. Then only the exception of the rank is known,
because the start hook records it (start_hook/session.py).
"""

from __future__ import annotations

import os
import select
import time
from typing import Any, Dict, List, Optional, Tuple

# Seconds between searches for new ranks, while not all ranks of a node are known and running.
_SECONDS_BETWEEN_SEARCHES = 0.25
# The statuses of ranks that their launcher ended because another rank had failed: TERM, then KILL.
_ENDED_BY_LAUNCHER = (143, 137)


class Rank:
    """One rank. `status` is None while the rank runs, or if the program took the status before this module read it."""

    def __init__(self, pid: int, rank: int, local_rank: int, restart: str) -> None:
        self.pid = pid
        self.rank = rank
        self.local_rank = local_rank
        self.restart = restart
        self.status = None  # type: Optional[int]
        self.ended = None  # type: Optional[float]
        self.descriptor = _open(pid)


class RankWatch:
    """Watches the ranks below this process. Call `look` after each `wait`.

    Args of the constructor:
        count: number of expected ranks.
        proc: the module proc.py, in the folder of this file.
    """

    def __init__(self, count: int, proc: Any) -> None:
        self._count = count
        self._proc = proc
        self._ranks = {}  # type: Dict[int, Rank]
        self._searched = float("-inf")

    def wait(self, seconds: float) -> None:
        """Wait for this number of seconds, or until a rank ends."""
        poll = select.poll()
        for rank in self._ranks.values():
            if rank.ended is None and rank.descriptor >= 0:
                poll.register(rank.descriptor, select.POLLIN)
        poll.poll(seconds * 1000)

    def look(self) -> None:
        """Record new ranks, and ranks that have ended."""
        running = [rank for rank in self._ranks.values() if rank.ended is None]
        for rank in running:
            state, code = self._proc.state(rank.pid)
            if state in ("Z", "X", ""):
                rank.ended = time.time()
                rank.status = None if code is None or state != "Z" else _status(code)
                if rank.descriptor >= 0:
                    os.close(rank.descriptor)
        now = time.monotonic()
        if len(running) < self._count and now - self._searched >= _SECONDS_BETWEEN_SEARCHES:
            self._searched = now
            self._search()

    def failed(self, errors: str) -> List[Dict[str, Any]]:
        """Return the failed ranks as rows for the agent's record, the first one first.

        A rank without a known status counts as failed only if its start hook wrote an error.

        Args:
            errors: folder where the start hook of a rank writes its error.
        """
        self.look()
        newest = {}  # type: Dict[int, Rank]
        for rank in sorted(self._ranks.values(), key=lambda rank: rank.ended or 0.0):
            newest[rank.rank] = rank
        failed = [rank for rank in newest.values() if rank.ended and (rank.status or self._left_error(rank, errors))]
        failed.sort(key=lambda rank: (rank.status in _ENDED_BY_LAUNCHER, rank.ended or 0.0))
        return [
            {
                "rank": rank.rank,
                "local_rank": rank.local_rank,
                "pid": rank.pid,
                "status": rank.status,
                "ended": rank.ended,
                "error_file": "",
            }
            for rank in failed
        ]

    def _left_error(self, rank: Rank, errors: str) -> bool:
        place = os.path.join(errors, "attempt_%s" % rank.restart, str(rank.local_rank), "error.json")
        return rank.status is None and os.path.isfile(place)

    def _search(self) -> None:
        for pid, parent in self._proc.descendants(os.getpid()):
            if pid in self._ranks:
                continue
            variables = self._proc.variables(pid)
            if b"LOCAL_RANK" not in variables or b"LOCAL_RANK" in self._proc.variables(parent):
                continue
            try:
                numbers = int(variables[b"RANK"]), int(variables[b"LOCAL_RANK"])
            except (KeyError, ValueError):
                continue
            restart = variables.get(b"TORCHELASTIC_RESTART_COUNT", b"0").decode("ascii", "replace")
            self._ranks[pid] = Rank(pid, numbers[0], numbers[1], restart)


def _open(pid: int) -> int:
    """Return a descriptor that becomes readable when the process ends (pidfd_open(2)); -1 without a descriptor."""
    try:
        return int(os.pidfd_open(pid))  # type: ignore[attr-defined,unused-ignore]  # Python 3.9, Linux 5.3
    except (AttributeError, OSError):
        return -1


def _status(code: int) -> int:
    return 128 + os.WTERMSIG(code) if os.WIFSIGNALED(code) else os.WEXITSTATUS(code)
