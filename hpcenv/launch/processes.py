"""The descendants of this process: torchrun, its ranks, and processes that they leave running.

Runs on: COMPUTE NODE. Linux only: it reads /proc (proc(5)).

torchrun starts each rank in a separate session (torch 2.13, subprocess_handler.py). So there is no
process group with all ranks, and ranks keep running if torchrun is killed. Slurm ends such ranks through its cgroup.
Without Slurm, this module ends such ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable

from hpcenv.incontainer import proc
from hpcenv.process import below, parent_of

_PR_SET_CHILD_SUBREAPER = 36
_MARKS = frozenset({b"LOCAL_RANK", b"HPCENV_RAY_SCRIPT"})


def adopt_orphans() -> None:
    """Make this process the new parent of each descendant whose parent ends (prctl(2), Linux 3.4).

    Without this call, init would become the parent of these descendants, and this process could no longer find them.
    """
    import ctypes  # slow to load, and only the launch step needs it

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def ranks_below(pid: int) -> tuple[int, ...]:
    """Return the ranks that torchrun `pid` started, without the processes that the ranks started.

    A rank has LOCAL_RANK in its environment, and its parent, torchrun, does not. The children of
    a rank, for example the workers of a data loader, inherit the variable. The script of Ray, which has another
    variable (incontainer/ray_node.py), counts as a rank, too.
    """
    return tuple(rank for rank in below(pid) if _has_rank(rank) and not _has_rank(parent_of(rank)))


def _has_rank(pid: int | None) -> bool:
    return pid is not None and not _MARKS.isdisjoint(proc.variables(pid))


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to each process; ignore processes that have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end_rest(before: Iterable[int], *, grace: float = 2.0) -> int:
    """Wait for the remaining descendants of this process, kill the rest, and return how many were killed.

    Args:
        before: processes that ran before the training. These processes and their descendants are not killed.
        grace: seconds in which the processes may end by themselves, as the FUSE server of a SIF does.
    """
    killed: set[int] = set()
    before = set(before)
    deadline = time.monotonic() + grace
    while rest := set(below(os.getpid())) - before.union(*map(below, before)):
        now = time.monotonic()
        if now > deadline + 5.0:
            break  # a process that hangs in the kernel does not end
        if now > deadline:
            send(rest, signal.SIGKILL)
            killed |= rest
        time.sleep(0.02)
    return len(killed)
