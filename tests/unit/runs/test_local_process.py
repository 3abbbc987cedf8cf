"""The state of a run without Slurm: its process and its last record."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import run_folders as folders

from hpcenv.process import below, parent_of
from hpcenv.records.run_folder import RunFolder
from hpcenv.runs.entries import open_run
from hpcenv.runs.local_process import local_state
from hpcenv.runs.status import status

Make = Callable[..., RunFolder]


def test_a_local_run_that_was_asked_to_end_is_cancelled_and_keeps_its_time(make: Make, tmp_path: Path) -> None:
    folder = make("a", "local-999999999", cluster="local")
    submitted = json.loads(folder.submission.read_text())["submitted"]
    folders.write(folder.finished, status=143, time=submitted + 65.4, cancelled=True)
    found = status(tmp_path, "a", environ={}, runs="runs")
    assert (found.state, found.exit_status, found.elapsed) == ("cancelled", 143, "00:01:05")


def test_a_local_run_whose_process_is_gone_has_failed(make: Make, tmp_path: Path) -> None:
    make("a", "local-999999999", cluster="local")
    found = status(tmp_path, "a", environ={}, runs="runs")
    assert (found.state, found.exit_status) == ("failed", None)


def test_another_process_of_that_number_is_not_the_run(make: Make, tmp_path: Path) -> None:
    make("a", "local-1", cluster="local")
    assert status(tmp_path, "a", environ={}, runs="runs").state == "failed"


def test_a_run_whose_process_has_just_been_started_is_running(make: Make) -> None:
    """The kernel enters the command line of a process after its parent goes on: one look in three came too early."""
    run = open_run(make("a", "local-1", cluster="local").path)
    states = []
    for _ in range(40):
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)", str(run.folder.path)])
        try:
            job = replace(run.submission, job_id=f"local-{child.pid}", submitted=time.time())
            states.append(local_state(replace(run, submission=job)).state)
        finally:
            child.kill()
            child.wait()
    assert states == ["running"] * 40


def test_a_run_that_waits_for_gpus_is_pending_with_the_reason_until_its_process_is_gone(make: Make) -> None:
    run = open_run(make("a", "local-1", cluster="local").path)
    folders.write(run.folder.waiting, why="waits for 2 GPUs")
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)", str(run.folder.path)])
    waiting = replace(run, submission=replace(run.submission, job_id=f"local-{child.pid}"))
    try:
        found = local_state(waiting)
    finally:
        child.kill()
        child.wait()
    assert (found.state, found.reason) == ("pending", "waits for 2 GPUs")
    assert local_state(waiting).state == "failed"


def test_a_process_that_has_ended_is_not_the_run_though_nobody_has_waited_for_it(make: Make) -> None:
    run = open_run(make("a", "local-1", cluster="local").path)
    child = subprocess.Popen(["true", str(run.folder.path)])
    try:
        deadline = time.monotonic() + 60
        while parent_of(child.pid) is not None:
            assert time.monotonic() < deadline, "it did not end"
            time.sleep(0.01)
        job = replace(run.submission, job_id=f"local-{child.pid}")
        assert local_state(replace(run, submission=job)).state == "failed"
    finally:
        child.wait()


def test_a_thread_of_the_kernel_is_not_the_run(make: Make, tmp_path: Path) -> None:
    """It has no command line either."""
    thread = next(iter(_kernel_threads()), None)
    if thread is None:
        pytest.skip("NOT TESTED: no thread of the kernel is seen here (a container)")
    make("a", f"local-{thread}", cluster="local")
    assert status(tmp_path, "a", environ={}, runs="runs").state == "failed"


def _kernel_threads() -> Iterator[int]:
    """kthreadd has number 2; its children are the others."""
    for pid in (2, *below(2)):
        if Path(f"/proc/{pid}/cmdline").read_bytes() == b"" and parent_of(pid) in (0, 2):
            yield pid
