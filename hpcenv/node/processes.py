"""The processes below this one: torchrun, its ranks, and what they leave behind.

Runs on: COMPUTE NODE. Reads /proc (proc(5)); Linux only, as Slurm's nodes are.

torchrun gives each rank a session of its own (torch 2.13, subprocess_handler.py), so no
process group holds them all, and ranks whose torchrun was killed go on without it. Where
Slurm's cgroup does not end them, as on one's own machine, this does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent dies: prctl(2), Linux 3.4.

    Without it they would go to init, and nobody could tell whose they were.
    """
    import ctypes  # slow to load, and only the launch step needs it

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def below(pid: int) -> tuple[int, ...]:
    """Return the children of `pid`, their children and so on; not those that have ended."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (parent := _parent(int(entry))) is not None:
            children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            found.append(child)
            waiting.append(child)
    return tuple(found)


def _parent(pid: int) -> int | None:
    """Return the parent of a process that still runs: proc_pid_stat(5), fields 3 and 4."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(parent)


def ranks_below(pid: int) -> tuple[int, ...]:
    """Return the ranks that torchrun `pid` started, not what they started in turn.

    A rank is told by LOCAL_RANK in its environment: its parent, torchrun, has none, its
    own children (the workers of a data loader) inherit it.
    """
    return tuple(rank for rank in below(pid) if _has_rank(rank) and not _has_rank(_parent(rank)))


def _has_rank(pid: int | None) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(variable.startswith(b"LOCAL_RANK=") for variable in variables)


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to each; those that have ended meanwhile are fine."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end_rest(before: Iterable[int], *, grace: float = 2.0) -> int:
    """End what is left below this process, and return how many had to be killed.

    Args:
        before: processes that were there first and stay.
        grace: seconds to end by themselves, as a SIF's FUSE server does.
    """
    killed: set[int] = set()
    stays = set(before)
    deadline = time.monotonic() + grace
    while rest := set(below(os.getpid())) - stays:
        now = time.monotonic()
        if now > deadline + 5.0:
            break  # a process in the kernel's hands cannot be waited for
        if now > deadline:
            send(rest, signal.SIGKILL)
            killed |= rest
        time.sleep(0.02)
    return len(killed)
