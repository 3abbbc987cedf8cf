"""Reading run folders: whole, damaged, copied."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcenv.errors import (
    RecordInvalid,
    RunNotFound,
)
from hpcenv.records.run_folder import RunFolder
from hpcenv.runs.entries import open_run
from hpcenv.runs.find import find_run, find_submitted
from hpcenv.runs.status import read_status

Make = Callable[..., RunFolder]


def test_a_copy_of_a_run_is_no_run(make: Make, tmp_path: Path) -> None:
    make("done")
    shutil.copytree(tmp_path / "runs" / "done", tmp_path / "runs" / "copy", ignore=lambda *_: ["submission.json"])
    assert find_run(tmp_path, None, runs="runs").manifest.run == "done"
    with pytest.raises(RunNotFound, match="was not submitted") as caught:
        find_run(tmp_path, "runs/copy")
    assert "it is a copy of" in str(caught.value.why)


def test_a_damaged_record_has_a_hint(make: Make) -> None:
    folder = make("a")
    folder.manifest.write_text("{")
    with pytest.raises(RecordInvalid) as caught:
        open_run(folder.path)
    assert "`hpcenv list`" in str(caught.value.hint)
    folder.submission.write_text("{")
    with pytest.raises(RecordInvalid, match="submission.json"):
        find_submitted(folder.path, str(folder.path))


def test_a_run_folder_opens_by_itself(make: Make) -> None:
    run = open_run(make("a").path)
    assert run.submission.job_id == "7"
    assert read_status(run, {"PATH": ""}).state == "unknown"
