"""Read from /proc about processes of this user: children, environment and state (proc(5)).

Runs on: inside the image (or in a bare host environment), and on COMPUTE NODE (launch/processes.py). Linux,
standard library only, Python 3.8 to 3.14. agent.py loads it as a file, because nothing of hpcenv can be imported there.
"""

from __future__ import annotations

import os
from typing import Dict, List, Optional, Tuple


def children(pid: int) -> List[int]:
    """Return the children of a process (proc_pid_task_tid_children(5)); none if it is gone."""
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
    """Return the environment that a process started with; empty if it is gone, or is another user's."""
    try:
        with open("/proc/%d/environ" % pid, "rb") as file:
            return dict(item.split(b"=", 1) for item in file.read().split(b"\0") if b"=" in item)
    except OSError:
        return {}


def start_ticks(pid: int) -> int:
    """Return when a process was started, in clock ticks since boot: proc_pid_stat(5), field 22. -1 if it is gone."""
    try:
        with open("/proc/%d/stat" % pid, encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return -1


def state(pid: int) -> Tuple[str, Optional[int]]:
    """Return the state of a process and its wait status: proc_pid_stat(5), fields 3 and 52. "" if it is gone."""
    try:
        with open("/proc/%d/stat" % pid, encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "", None
    try:
        return fields[0], int(fields[49])
    except (IndexError, ValueError):
        return fields[0] if fields else "", None
