"""Processes as /proc shows them: children, environment, and the end of a process whose parent has not waited for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from hpcenv.incontainer import proc

PARENT = "import subprocess, sys; sys.exit(subprocess.run(['sleep', '60']).returncode)"


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has started another one."""
    with subprocess.Popen([sys.executable, "-c", PARENT], env={**os.environ, "LOCAL_RANK": "3"}) as child:
        while not proc.children(child.pid):
            time.sleep(0.01)
        yield child
        subprocess.run(["kill", *(str(pid) for pid, _ in proc.descendants(child.pid)), str(child.pid)], check=True)


def test_each_descendant_has_its_parent(parent: subprocess.Popen[bytes]) -> None:
    (grandchild,) = proc.children(parent.pid)
    assert parent.pid in proc.children(os.getpid())
    assert {(parent.pid, os.getpid()), (grandchild, parent.pid)} <= set(proc.descendants(os.getpid()))


def test_the_environment_and_the_state(parent: subprocess.Popen[bytes]) -> None:
    assert proc.variables(parent.pid)[b"LOCAL_RANK"] == b"3"
    assert proc.state(parent.pid)[0] in ("R", "S", "D")


def test_a_process_that_has_ended_keeps_its_status_until_it_is_waited_for() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(7)"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert proc.state(child.pid) == ("Z", 7 << 8)
    child.wait()
    assert proc.state(child.pid) == ("", None)
    assert (proc.children(child.pid), proc.variables(child.pid)) == ([], {})
