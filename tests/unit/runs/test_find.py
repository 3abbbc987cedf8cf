"""Finding a run by its folder, its name or its job id."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders

from hpcenv.errors import (
    RecordInvalid,
    RunNotFound,
)
from hpcenv.records.run_folder import RunFolder
from hpcenv.runs.find import find_all, find_run

Make = Callable[..., RunFolder]


def test_a_run_is_found_by_folder_name_job_id_and_as_the_latest(make: Make, tmp_path: Path) -> None:
    make("old", "7", submitted=1.0)
    make("new", "8", submitted=2.0)
    for word, name in ((None, "new"), ("latest", "new"), ("old", "old"), ("7", "old"), ("runs/old", "old"), (str(tmp_path / "runs/new/"), "new")):  # fmt: skip
        assert find_run(tmp_path, word, runs="runs").manifest.run == name


def test_a_name_goes_before_a_job_id_and_the_newest_job_before_an_old_one(make: Make, tmp_path: Path) -> None:
    make("8", "1")
    make("a", "8", submitted=3.0)
    make("b", "9", submitted=1.0)
    make("c", "9", submitted=2.0)
    assert find_run(tmp_path, "8", runs="runs").manifest.run == "8"
    assert find_run(tmp_path, "9", runs="runs").manifest.run == "c"


def test_a_folder_whose_submission_is_not_recorded_is_told_and_never_replaced_by_another(
    make: Make, tmp_path: Path
) -> None:
    make("done")
    half = make("half", submitted=9.0)
    half.submission.unlink()
    # `hpcenv cancel` after a submission that got no answer must not end the run before it.
    for word in (None, "half", "runs/half"):
        with pytest.raises(RunNotFound, match="was not submitted") as caught:
            find_run(tmp_path, word, runs="runs")
        assert "`hpcenv status half`" in str(caught.value.hint)
    assert find_run(tmp_path, "done", runs="runs").manifest.run == "done"


def test_a_damaged_run_is_told_and_never_replaced_by_another(make: Make, tmp_path: Path) -> None:
    make("good", "7", submitted=1.0)
    bad = make("bad", "8", submitted=2.0)
    bad.manifest.write_text('{"schema": 1, "run": ')
    for word in (None, "bad"):
        with pytest.raises(RecordInvalid, match="is not JSON"):
            find_run(tmp_path, word, runs="runs")
    assert find_run(tmp_path, "7", runs="runs").manifest.run == "good"


def test_no_run_says_where_it_was_looked_for(make: Make, tmp_path: Path) -> None:
    make("a")
    with pytest.raises(RunNotFound) as caught:
        find_run(tmp_path, "nosuch", runs="runs")
    assert str(tmp_path / "runs") in str(caught.value.why)


def test_a_folder_that_may_not_be_looked_into_is_not_missing(make: Make, tmp_path: Path) -> None:
    folder = make("theirs").path
    program = (
        "import os, sys, pathlib\n"
        "from hpcenv.errors import FileUnusable\n"
        "from hpcenv.runs import find\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "try: find.find(pathlib.Path('/'), sys.argv[1])\n"
        "except FileUnusable as error: print(error.what, error.why)\n"
    )
    folder.parent.chmod(0)
    try:
        done = subprocess.run([sys.executable, "-c", program, folder], text=True, capture_output=True)
    finally:
        folder.parent.chmod(0o755)
    assert done.stdout == f"cannot look into `{folder}` Permission denied\n", done.stderr


def test_a_run_that_is_not_there_has_a_hint(make: Make, tmp_path: Path, hpcenv: Any) -> None:
    make("a")
    make("metrics-20261127-beef")
    done = hpcenv("status", "nosuch", "--runs-dir", "runs", cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == "hint: `hpcenv list --runs-dir runs` lists the runs"
    for word, near in (("metric", "metrics-20261127-beef"), ("metrics-20261128-beef", "metrics-20261127-beef")):
        done = hpcenv("logs", word, "--runs-dir", "runs", cwd=tmp_path)
        assert done.stderr.splitlines()[-1].startswith(f"hint: perhaps you meant `{near}`; ")


@pytest.mark.parametrize("words", [("list",), ("clean", "--older-than", "1d")])
def test_a_folder_of_runs_that_is_not_there_is_not_an_empty_one(tmp_path: Path, hpcenv: Any, words: Any) -> None:
    done = hpcenv(*words, "--runs-dir", "/nonexist", cwd=tmp_path)
    assert (done.status, done.stderr.splitlines()[0]) == (
        16, "error[run-not-found]: the folder of runs `/nonexist` does not exist",
    )  # fmt: skip
    outside = hpcenv(*words, cwd=tmp_path)
    assert (outside.status, outside.stderr.splitlines()[0]) == (
        16, "error[run-not-found]: no runs: this is not a project",
    )  # fmt: skip


def test_a_run_that_does_not_exist_spoils_all(tmp_path: Path, fake_slurm: Any) -> None:
    folders.make_run(tmp_path / "runs", "a", "7")
    with pytest.raises(RunNotFound):
        find_all(tmp_path, ("a", "b"), runs="runs")
