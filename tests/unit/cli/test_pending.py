"""A run that waits says why: in `status`, `wait`, `logs -f`; on a terminal in one line that is renewed."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders
from error_text import unwrapped

from hpcenv.cli._pending import PendingLine
from hpcenv.runs.find import find_one
from hpcenv.runs.status import RunStatus, read_status

WORDS = "waiting: pending for 00:0"
REASON = "(Priority: jobs with a higher priority go first); 1 job before it in the queue of partition batch"
OWN = "squeue---format=%P|%Q|%S|%u|%V"


@pytest.fixture
def project(tmp_path: Path, fake_slurm: Any) -> Path:
    (tmp_path / "hpcenv.toml").write_text('image = "host"\n')
    folders.make_run(tmp_path / "runs", "waiting", "10")
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - 121))
    fake_slurm.answers("squeue", "10|PENDING|Priority||0:00\n")
    fake_slurm.answers(OWN, f"batch|5|2026-11-27T04:17:00|alice|{since}\n")
    fake_slurm.answers("squeue---format=%i|%Q|%u|%r", "9|7|bob|Resources\n10|5|alice|Priority\n")
    return tmp_path


def _asked(fake_slurm: Any) -> int:
    """Return how often Slurm was asked for the job's place."""
    return sum("--format=%P|%Q|%S|%u|%V" in call.argv for call in fake_slurm.calls("squeue"))


def test_status_has_reason_place_and_expected_start(project: Path, fake_slurm: Any, hpcenv: Any) -> None:
    done = hpcenv("status", cwd=project, environ=fake_slurm.environ)
    assert done.stdout.startswith("waiting: pending (Priority: jobs with a higher priority go first)\n")
    text = " ".join(done.stdout.split())
    assert "queue for 00:0" in text
    assert "; 1 job before it in the queue of partition batch; Slurm expects to start it at 2026-11-27 04:17:00" in text
    data = hpcenv("status", "--json", cwd=project, environ=fake_slurm.environ).envelope["data"]
    assert (data["detail"], data["queue"]["before"], data["queue"]["start"]) == ("Priority", 1, "2026-11-27T04:17:00")


@pytest.mark.parametrize("words", [("wait",), ("logs", "-f")])
def test_in_a_log_the_line_stands_once_and_slurm_is_asked_once(
    words: tuple[str, ...], project: Path, fake_slurm: Any
) -> None:
    argv = [sys.executable, "-m", "hpcenv", *words, "waiting"]
    process = subprocess.Popen(argv, cwd=project, env=fake_slurm.environ, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while _asked(fake_slurm) == 0 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(6)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    first, *rest = unwrapped(said).splitlines()
    assert first.startswith(WORDS)
    assert REASON in first
    assert "pending" not in " ".join(rest)
    assert f"hint: to look again: `hpcenv {' '.join(words)} waiting`; to cancel it: `hpcenv cancel waiting`" in rest
    assert process.returncode == 130
    assert _asked(fake_slurm) == 1
    assert len(fake_slurm.calls("squeue")) >= 4, "the state itself was asked for more often"


@pytest.mark.parametrize("words", [("wait",), ("logs", "-f")])
def test_a_run_that_is_cancelled_before_it_starts_ends_the_wait(
    words: tuple[str, ...], project: Path, fake_slurm: Any, hpcenv: Any
) -> None:
    fake_slurm.answers("squeue", "")
    fake_slurm.answers("sacct", "10|CANCELLED|0:0|None assigned|00:00:00\n")
    done = hpcenv(*words, "waiting", cwd=project, environ=fake_slurm.environ)
    assert done.status == 25, done.stderr
    assert "waiting: cancelled (before it started (hpcenv cancel, scancel, or a dependency that can" in done.stderr
    assert done.stderr.endswith("exit status 25: run waiting was cancelled\n")


def test_on_a_terminal_the_line_is_renewed_and_gone_when_the_run_starts(project: Path, fake_slurm: Any) -> None:
    own, terminal = pty.openpty()
    environ = {**fake_slurm.environ, "COLUMNS": "200"}
    argv = [sys.executable, "-m", "hpcenv", "wait", "waiting", "--timeout", "12s"]
    process = subprocess.Popen(argv, cwd=project, env=environ, stderr=terminal, stdout=subprocess.DEVNULL)
    os.close(terminal)
    deadline, said = time.monotonic() + 60, b""
    while said.count(WORDS.encode()) < 3 and time.monotonic() < deadline:
        said += os.read(own, 4096)
    assert said.count(b"\r\x1b[K" + WORDS.encode()) >= 3
    assert b"\n" not in said
    fake_slurm.answers("squeue", "10|RUNNING|None|n1|0:01\n")
    while b"running" not in said and time.monotonic() < deadline:
        said += os.read(own, 4096)
    assert b"\r\x1b[Kwaiting: running\r\n" in said
    process.wait(timeout=60)
    os.close(own)


def test_on_80_columns_the_expected_start_is_not_cut_off(project: Path, fake_slurm: Any) -> None:
    own, terminal = pty.openpty()
    environ = {**fake_slurm.environ, "COLUMNS": "80"}
    argv = [sys.executable, "-m", "hpcenv", "wait", "waiting", "--timeout", "12s"]
    process = subprocess.Popen(argv, cwd=project, env=environ, stderr=terminal, stdout=subprocess.DEVNULL)
    os.close(terminal)
    deadline, said = time.monotonic() + 60, b""
    while b"04:17" not in said and time.monotonic() < deadline:
        said += os.read(own, 4096)
    process.kill()
    process.wait(timeout=60)
    os.close(own)
    assert re.search(rb"waiting: pending for 00:0\d:\d\d \(Priority\); 1 before it; start 2026-11-27 04:17", said)


def test_the_line_is_repeated_every_ten_minutes_and_slurm_asked_every_minute(
    project: Path, fake_slurm: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    line = PendingLine(fake_slurm.environ, clock=lambda: now[0])
    status: RunStatus = read_status(find_one(project, None), fake_slurm.environ)
    for now[0] in range(0, 1801, 10):
        line.see(status)
    said = capsys.readouterr().err.splitlines()
    assert all(one.startswith(WORDS) and REASON in one for one in said)
    assert len(said) == 4
    assert _asked(fake_slurm) == 31


@pytest.mark.long
@pytest.mark.parametrize("words", [("wait",), ("logs", "-f"), ("logs", "-f", "--json")])
def test_a_job_that_slurm_does_not_start_ends_each_command_that_waits(
    words: tuple[str, ...], project: Path, fake_slurm: Any, hpcenv: Any
) -> None:
    """After half a minute. Without the end, a script waits for ever."""
    fake_slurm.answers("squeue", "10|PENDING|QOSMaxWallDurationPerJobLimit||0:00\n")
    done = hpcenv(*words, "waiting", cwd=project, environ=fake_slurm.environ)
    assert done.status == 31, done.stderr
    assert "`waiting` does not start as it is" in done.stdout + done.stderr
