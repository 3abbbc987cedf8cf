"""Cancelling runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders

from hpcenv.errors import (
    HpcenvError,
    ToolFailed,
)
from hpcenv.records.run_folder import RunFolder
from hpcenv.runs.cancel import cancel, cancel_all

Make = Callable[..., RunFolder]


def test_an_ended_run_is_left_alone(make: Make, tmp_path: Path, fake_slurm: Any) -> None:
    make("a")
    fake_slurm.answers("squeue", "7|COMPLETED|None|n1|0:01\n")
    assert cancel(tmp_path, "a", environ=fake_slurm.environ, pause=time.sleep, runs="runs").state == "completed"
    fake_slurm.replays("squeue", "squeue-nosuch")
    assert cancel(tmp_path, "a", environ=fake_slurm.environ, pause=time.sleep, runs="runs").state == "unknown"
    assert fake_slurm.calls("scancel") == []


def test_cancelling_waits_for_the_end(make: Make, tmp_path: Path, fake_slurm: Any) -> None:
    make("a")
    fake_slurm.answers("squeue", "7|RUNNING|None|n1|0:01\n")

    def pause(_seconds: float) -> None:
        fake_slurm.answers("squeue", "7|CANCELLED|None|n1|0:01\n")

    assert cancel(tmp_path, "a", environ=fake_slurm.environ, pause=pause, runs="runs").state == "cancelled"
    assert [call.argv for call in fake_slurm.calls("scancel")] == [("7",)]


@pytest.mark.parametrize("word", ["a", "runs/a", "7", None])
def test_a_job_is_ended_and_its_id_told_though_its_manifest_is_damaged(
    make: Make, tmp_path: Path, fake_slurm: Any, hpcenv: Any, word: str | None
) -> None:
    folder = make("a")
    folder.manifest.write_text(folder.manifest.read_text()[:40])
    words = ((word,) if word else ()) + ("--runs-dir", "runs")
    fake_slurm.answers("squeue", "7|RUNNING|None|n1|0:01\n")
    told = hpcenv("status", *words, cwd=tmp_path, environ=fake_slurm.environ).stdout
    assert " ".join(told.split()).startswith(f"a: running (`{folder.manifest}` is not JSON")
    assert "\n  job       7\n" in told

    fake_slurm.answers("squeue", "7|CANCELLED|None|n1|0:01\n")
    if word is None:
        asked = hpcenv("cancel", *words, cwd=tmp_path, environ=fake_slurm.environ)
        assert (asked.status, "the latest one is a (job 7)" in asked.stderr) == (2, True)
        assert f"hint: hpcenv cancel {folder.path}" in asked.stderr
        words = (str(folder.path),)
    done = hpcenv("cancel", *words, cwd=tmp_path, environ=fake_slurm.environ)
    assert (done.status, "the job id is from submission.json" in done.stdout) == (0, True), done.stderr


def test_cancelling_needs_no_manifest(make: Make, tmp_path: Path, fake_slurm: Any) -> None:
    make("a").manifest.unlink()
    fake_slurm.answers("squeue", "7|RUNNING|None|n1|0:01\n")

    def pause(_seconds: float) -> None:
        fake_slurm.answers("squeue", "7|CANCELLED|None|n1|0:01\n")

    assert cancel(tmp_path, "runs/a", environ=fake_slurm.environ, pause=pause).state == "cancelled"
    assert [call.argv for call in fake_slurm.calls("scancel")] == [("7",)]


def test_a_damaged_job_id_is_never_handed_to_scancel(make: Make, tmp_path: Path, fake_slurm: Any) -> None:
    make("a", "--me")
    fake_slurm.answers("squeue", "--me|RUNNING|None|n1|0:01\n")
    with pytest.raises(HpcenvError, match="is not a job id"):
        cancel(tmp_path, "a", environ=fake_slurm.environ, pause=time.sleep, runs="runs")
    assert fake_slurm.calls("scancel") == []


def test_a_chain_and_a_sweep_are_cancelled_with_all_of_their_jobs(tmp_path: Path, fake_slurm: Any) -> None:
    folders.make_run(tmp_path / "runs", "chain", "7", chain=("7", "8"))
    folders.make_sweep(tmp_path / "runs", "sw", ["9_0", "9_1"])
    jobs = ("7", "8", "9_0", "9_1")
    fake_slurm.answers("squeue", "".join(f"{job}|PENDING|None||0:00\n" for job in jobs))

    def pause(_seconds: float) -> None:
        fake_slurm.answers("squeue", "".join(f"{job}|CANCELLED|None||0:00\n" for job in jobs))

    found = cancel_all(tmp_path, ("chain", "sw"), environ=fake_slurm.environ, pause=pause, runs="runs")
    assert [one.state for one in found] == ["cancelled"] * 3
    # Of elements that are cancelled one by one before they started, Slurm keeps no record.
    assert [call.argv for call in fake_slurm.calls("scancel")] == [("7", "8", "9")]


def test_what_does_not_end_is_killed_and_then_named(
    tmp_path: Path, fake_slurm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    folders.make_run(tmp_path / "runs", "a", "7")
    fake_slurm.answers("squeue", "7|COMPLETING|None|n[1-2]|0:01\n")
    moment = [1000.0]
    # The clock is the process's, not ours: two minutes pass in the pauses.
    monkeypatch.setattr(time, "monotonic", lambda: moment[0])

    def pause(seconds: float) -> None:
        moment[0] += 5.0

    with pytest.raises(ToolFailed, match="1 of 1 runs have not ended") as caught:
        cancel_all(tmp_path, ("a",), environ=fake_slurm.environ, pause=pause, runs="runs")
    assert "a (job 7) is completing on n1, n2" in str(caught.value.why)
    asked = [call.argv for call in fake_slurm.calls("scancel")]
    assert asked[0] == ("7",)
    assert ("--signal=KILL", "--full", "7") in asked
    assert asked.index(("--signal=KILL", "--full", "7")) >= 2, "not before KillWait"


def test_jobs_that_are_over_do_not_keep_the_others(tmp_path: Path, fake_slurm: Any) -> None:
    folders.make_run(tmp_path / "runs", "a", "7", chain=("7", "8"))
    fake_slurm.answers("squeue", "8|RUNNING|None|n1|0:01\n")
    fake_slurm.answers(
        "scancel", err="scancel: error: Kill job error on job id 7: Invalid job id specified\n", status=1
    )

    def pause(_seconds: float) -> None:
        fake_slurm.answers("squeue", "8|CANCELLED|None|n1|0:01\n")

    folders.write(tmp_path / "runs" / "a" / "started.json", attempt=0, nodes=["n1"], job_id="8")
    found = cancel_all(tmp_path, ("a",), environ=fake_slurm.environ, pause=pause, runs="runs")
    assert found[0].state == "cancelled"
    fake_slurm.answers("squeue", "8|RUNNING|None|n1|0:01\n")
    fake_slurm.answers(
        "scancel", err="scancel: error: Kill job error on job id 8: Access/permission denied\n", status=1
    )
    with pytest.raises(ToolFailed, match="ended with status 1"):
        cancel_all(tmp_path, ("a",), environ=fake_slurm.environ, pause=pause, runs="runs")
