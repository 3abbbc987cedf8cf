"""^C at any moment after hpcenv/__main__.py has begun: no traceback, whatever is being imported or done."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

COMMANDS = (
    ("--help",),
    ("status",),
    ("lock", "--no-wheels"),
    ("submit", "train.py", "--nproc", "1", "--gpus", "0", "--dry-run"),
)


def _catches(pid: int) -> bool | None:
    """Return whether a process has a handler for SIGINT; None if it is over."""
    try:
        found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else bool(int(found[1], 16) & 1 << (signal.SIGINT - 1))


def _wait_for(pid: int, catches: bool) -> None:
    while (now := _catches(pid)) is not None and now != catches:
        time.sleep(0.001)


def _seconds(words: tuple[str, ...], *, cwd: Path, environ: dict[str, str]) -> float:
    """Return how long a command takes on this machine."""
    began = time.monotonic()
    argv = [sys.executable, "-m", "hpcenv", *words]
    subprocess.run(argv, cwd=cwd, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=100)
    return time.monotonic() - began


def _interrupted(words: tuple[str, ...], seconds: float, *, cwd: Path, environ: dict[str, str]) -> tuple[int, str]:
    """Return status and standard error of a command that gets ^C so long after __main__.py has begun."""
    argv = [sys.executable, "-m", "hpcenv", *words]
    child = subprocess.Popen(argv, cwd=cwd, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    # Python has a handler of its own from its start on; the first line of __main__.py takes it away.
    _wait_for(child.pid, True)
    _wait_for(child.pid, False)
    time.sleep(seconds)
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=100)
    return child.returncode, stderr


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(12, marks=pytest.mark.timeout(300)),
        pytest.param(200, marks=(pytest.mark.long, pytest.mark.timeout(3000))),
    ],
)
def test_an_interrupt_at_a_random_moment_gives_no_traceback(count: int, project: Path, fake_slurm: Any) -> None:
    seed = time.time_ns()
    moments, answered = random.Random(seed), 0
    fake_slurm.answers("sacct", "")
    lasts = {words: _seconds(words, cwd=project, environ=fake_slurm.environ) for words in COMMANDS}
    for number in range(count):
        words = COMMANDS[number % len(COMMANDS)]
        seconds = moments.uniform(0.0, lasts[words])
        status, stderr = _interrupted(words, seconds, cwd=project, environ=fake_slurm.environ)
        where = f"seed {seed}, number {number}: {words} after {seconds:.4f} s"
        assert "Traceback" not in stderr, f"{where}\n{stderr}"
        assert "KeyboardInterrupt" not in stderr, f"{where}\n{stderr}"
        answered += status in (130, -signal.SIGINT)
    assert answered >= count // 4, "most commands were over before the interrupt"
