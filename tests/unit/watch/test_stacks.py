"""A rank that computes is asked for its stacks: it goes on, however often it is asked."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcenv.incontainer import proc
from hpcenv.records.hangs import RankStacks
from hpcenv.watch import stacks

HEAD = """
import os, re, sys, threading, time
from hpcenv.incontainer.start_hook.stacks import begin_stacks
begin_stacks(sys.argv[1], 0)
while not os.path.exists(sys.argv[1] + "/rank-0.mark"):
    time.sleep(0.05)
"""
# Frames come and go all the time, in three threads.
COMPUTES = (
    HEAD
    + """
def deep(number):
    return number if number == 0 else deep(number - 1) + 1
def computes():
    while True:
        deep(50)
        sum(one for one in range(200))
        exec("def made():\\n    return 1\\nmade()")
for _ in range(2):
    threading.Thread(target=computes, daemon=True).start()
computes()
"""
)
HOLDS_THE_LOCK = HEAD + 're.match("(a+)+$", "a" * 64 + "b")  # holds\n'


@pytest.fixture
def rank(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen([sys.executable, "-c", request.param, str(tmp_path)])
    until = time.monotonic() + 30
    while not (tmp_path / "rank-0.mark").exists() and time.monotonic() < until:
        time.sleep(0.05)
    yield started
    started.kill()
    started.wait()


def look(folder: Path) -> RankStacks:
    (found,) = stacks.look([folder])
    return found


@pytest.mark.parametrize("rank", [COMPUTES], indirect=True)
def test_a_rank_that_computes_survives_thousands_of_looks(rank: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """A handler that reads frames while they change ended such a rank with SIGSEGV after about 1000 looks."""
    (mark,) = stacks._marks(tmp_path)
    for _ in range(4000):
        assert stacks._ask(tmp_path, mark) == ""
        assert rank.poll() is None
        time.sleep(0.0015)
    found = look(tmp_path)
    assert found.unknown == "torch is not imported"
    assert len(found.threads) == 2
    assert {frame.function for stack in (found.stack, *found.threads) for frame in stack} >= {"computes"}


@pytest.mark.parametrize("rank", [HOLDS_THE_LOCK], indirect=True)
def test_a_call_that_holds_the_lock_is_seen_without_the_lock(rank: subprocess.Popen[bytes], tmp_path: Path) -> None:
    time.sleep(0.5)
    found = look(tmp_path)
    assert found.unknown == "a C call holds Python's lock"
    assert [frame.function for frame in found.stack][-1] == "<module>"
    assert rank.poll() is None


@pytest.mark.parametrize("rank", [COMPUTES], indirect=True)
def test_a_rank_that_computes_never_gets_the_second_signal(rank: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """The second signal is for a rank whose lock is held; a stopped rank does not get it either."""
    rank.send_signal(signal.SIGSTOP)
    found = look(tmp_path)
    assert found.unknown == "no answer in 5 s"
    assert proc.state(rank.pid)[0] == "T"
    rank.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    assert rank.poll() is None
