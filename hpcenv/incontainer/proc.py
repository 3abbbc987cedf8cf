"""Read from /proc about processes of this user: children, environment and state (proc(5)).

Runs on: inside the image (or in a bare host environment), and on COMPUTE NODE (launch/processes.py). Linux,
standard library only, Python 3.8 to 3.14. agent.py loads this module from its file, because modules of hpcenv cannot be
imported in the image.
"""

from __future__ import annotations

import os
from typing import Dict, List, Optional, Tuple


def children(pid: int) -> List[int]:
    """Return the children of a process (proc_pid_task_tid_children(5)); none if the process has ended."""
    found = []  # type: List[int]
    try:
        for thread in os.listdir("/proc/%d/task" % pid):
            with open("/proc/%d/task/%s/children" % (pid, thread), encoding="ascii") as file:
                found += [int(word) for word in file.read().split()]
    except (OSError, ValueError):
        pass
    return found


def descendants(pid: int) -> List[Tuple[int, int]]:
    """Return all descendants of a process, each with its parent, including ended ones."""
    found = []  # type: List[Tuple[int, int]]
    for child in children(pid):
        found += [(child, pid), *descendants(child)]
    return found


def variables(pid: int) -> Dict[bytes, bytes]:
    """Return the environment with which a process started; empty if it has ended or belongs to another user."""
    try:
        with open("/proc/%d/environ" % pid, "rb") as file:
            return dict(item.split(b"=", 1) for item in file.read().split(b"\0") if b"=" in item)
    except OSError:
        return {}


def _stat(pid: int) -> List[str]:
    """Return the fields of proc_pid_stat(5) from field 3 on; none if the process has ended."""
    try:
        with open("/proc/%d/stat" % pid, encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def state(pid: int) -> Tuple[str, Optional[int]]:
    """Return the state of a process (field 3; empty if it has ended) and its wait status (field 52)."""
    fields = _stat(pid)
    return fields[0] if fields else "", int(fields[49]) if len(fields) > 49 else None


def runs(pid: int, start: int) -> bool:
    """Return whether the process that was started at `start` still runs.

    `start` is in clock ticks since boot (field 22). The start times are compared, because another process may later get
    the same process id. A process that has ended, but whose parent has not waited for it (a zombie), does not run.
    """
    fields = _stat(pid)
    return len(fields) > 19 and fields[0] not in "ZX" and int(fields[19]) == start


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of the children that it waited for (fields 14 to 17); 0 if it has ended.

    So the sum over a tree of processes includes the time of ended processes, and counts each time only once.
    """
    return sum(map(int, _stat(pid)[11:15])) / os.sysconf("SC_CLK_TCK")
