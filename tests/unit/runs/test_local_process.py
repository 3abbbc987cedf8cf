"""The state of a run without Slurm: its process and its last record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import run_folders as folders

from hpcenv.records.run_folder import RunFolder
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
