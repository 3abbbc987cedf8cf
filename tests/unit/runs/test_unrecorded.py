"""Runs whose submission got no answer: they are listed, Slurm is asked for them, and clean takes what never queued."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders

from hpcenv.records.run_folder import RunFolder
from hpcenv.runs.clean import CleanRequest, clean, plan_clean
from hpcenv.runs.run_list import list_lines
from hpcenv.submission.submit import make_folder

NEVER = "never queued, according to Slurm; `hpcenv clean a` removes it"
DOWN = "slurm_load_jobs error: Unable to contact slurm controller\n"


@pytest.fixture
def lost(tmp_path: Path) -> Path:
    """Two runs, the newer one without a record of its submission."""
    folders.make_run(tmp_path / "runs", "before", "7", submitted=1.0)
    run = folders.make_run(tmp_path / "runs", "a")
    run.submission.unlink()
    make_old(run.path)
    return tmp_path


def make_old(folder: Path) -> None:
    hour_ago = time.time() - 3600
    os.utime(folder, (hour_ago, hour_ago))


def lines(where: Path, fake_slurm: Any) -> dict[str, tuple[str, str]]:
    return {run.run: (run.state, run.detail) for run in list_lines(where, environ=fake_slurm.environ, runs="runs").runs}


def plan(where: Path, fake_slurm: Any, *words: str, **rules: Any) -> Any:
    request = CleanRequest(words=words, runs="runs", **rules)
    return plan_clean(where, request, environ=fake_slurm.environ, now=time.time())


def test_what_never_queued_says_so_and_goes(lost: Path, fake_slurm: Any, hpcenv: Any) -> None:
    assert lines(lost, fake_slurm)["a"] == ("not-queued", NEVER)
    (call,) = [call for call in fake_slurm.calls("squeue") if "--name=a" in call.argv]
    assert "--format=%F|%T|%Z" in call.argv
    for words in ((), ("a",), ("runs/a",)):
        status = hpcenv("status", *words, "--runs-dir", "runs", cwd=lost, environ=fake_slurm.environ)
        assert status.stdout.splitlines()[0] == f"a: not-queued ({NEVER})"
    as_json = hpcenv("status", "a", "--json", "--runs-dir", "runs", cwd=lost, environ=fake_slurm.environ).envelope[
        "data"
    ]
    assert (as_json["run"], as_json["state"], as_json["detail"]) == ("a", "not-queued", NEVER)
    cancelled = hpcenv("cancel", "--runs-dir", "runs", cwd=lost, environ=fake_slurm.environ)
    assert "`hpcenv status a`" in cancelled.stderr
    assert fake_slurm.calls("scancel") == [], "the run before it is not what was meant"
    found = plan(lost, fake_slurm, "a")
    assert [(one.name, one.why) for one in found.runs] == [("a", "not-queued")]
    clean(found, environ=fake_slurm.environ)
    assert os.listdir(lost / "runs") == ["before"]


def test_what_was_killed_before_anything_was_queued_goes(lost: Path, fake_slurm: Any, hpcenv: Any) -> None:
    killed = RunFolder(lost / "runs" / "killed")
    make_folder(killed.path)
    assert lines(lost, fake_slurm)["killed"][0] == "unknown", "it may be under way"
    make_old(killed.path)
    assert lines(lost, fake_slurm)["killed"] == ("not-queued", "never started; `hpcenv clean killed` removes it")
    for word in ("killed", "runs/killed"):
        status = hpcenv("status", word, "--runs-dir", "runs", cwd=lost, environ=fake_slurm.environ)
        assert status.stdout.startswith("killed: not-queued"), status.stderr
    found = plan(lost, fake_slurm, "killed")
    assert [(one.name, one.why) for one in found.runs] == [("killed", "not-queued")]
    clean(found, environ=fake_slurm.environ)
    assert not killed.path.exists()
    (lost / "runs" / "notes").mkdir()
    assert "notes" not in lines(lost, fake_slurm)


def test_a_job_that_slurm_has_keeps_its_folder(lost: Path, fake_slurm: Any) -> None:
    found = plan(lost, fake_slurm, "a")
    assert found.runs
    fake_slurm.answers("squeue", f"12|PENDING|{lost}/runs/a\n")
    assert lines(lost, fake_slurm)["a"] == (
        "pending", "job 12; its submission was not recorded; `scancel 12` cancels it",
    )  # fmt: skip
    assert [one.why for one in plan(lost, fake_slurm, "a").kept] == ["it is pending"]
    done = clean(found, environ=fake_slurm.environ)
    assert (done.removed, [one.why for one in done.kept]) == ((), ["it is pending"]), "asked again before it is removed"


def test_while_nobody_can_tell_it_stays(lost: Path, fake_slurm: Any) -> None:
    fake_slurm.answers("squeue", err=DOWN, status=1)
    state, detail = lines(lost, fake_slurm)["a"]
    assert state == "unknown"
    assert "whether it is queued" in detail
    assert plan(lost, fake_slurm, "a").runs == ()


def test_a_submission_under_way_is_left_alone(lost: Path, fake_slurm: Any) -> None:
    os.utime(lost / "runs" / "a")
    state, detail = lines(lost, fake_slurm)["a"]
    assert state == "unknown"
    assert "may still be in progress" in detail
    assert plan(lost, fake_slurm, "a").runs == ()


def test_what_ran_without_a_record_goes_only_by_name(lost: Path, fake_slurm: Any) -> None:
    folders.write(lost / "runs" / "a" / "started.json", attempt=0, nodes=["n1"], job_id="7")
    make_old(lost / "runs" / "a")
    assert lines(lost, fake_slurm)["a"] == ("unknown", "it ran, but its submission was not recorded")
    assert plan(lost, fake_slurm, older_than=10.0).runs == ()
    assert [one.name for one in plan(lost, fake_slurm, "a").runs] == ["a"]


def test_a_name_that_is_none_is_no_word_for_squeue(lost: Path, fake_slurm: Any) -> None:
    path = lost / "runs" / "a" / "manifest.json"
    path.write_text(path.read_text().replace('"run": "a"', '"run": "a,--me"'))
    assert lines(lost, fake_slurm)["a"][0] == "unknown"
    assert not any("--me" in word for call in fake_slurm.calls("squeue") for word in call.argv)


# -- sweeps -------------------------------------------------------------------------------


@pytest.fixture
def lost_sweep(tmp_path: Path) -> Path:
    """A sweep of four runs without a record of its submission."""
    folder = folders.make_sweep(tmp_path / "runs", "sw", [f"9_{n}" for n in range(4)])
    for path in folder.glob("*/submission.json"):
        path.unlink()
    make_old(folder)
    return tmp_path


def test_a_sweep_that_never_queued_says_so_and_goes(lost_sweep: Path, fake_slurm: Any) -> None:
    assert lines(lost_sweep, fake_slurm)["sw"] == ("not-queued", NEVER.replace("clean a", "clean sw"))
    fake_slurm.answers("squeue", f"9|PENDING|{lost_sweep}/runs/sw\n9|RUNNING|{lost_sweep}/runs/sw\n")
    assert lines(lost_sweep, fake_slurm)["sw"][0] == "running"
    assert plan(lost_sweep, fake_slurm, "sw").runs == ()
    fake_slurm.answers("squeue")
    clean(plan(lost_sweep, fake_slurm, "sw"), environ=fake_slurm.environ)
    assert os.listdir(lost_sweep / "runs") == []


def test_runs_of_a_sweep_that_have_not_begun_are_of_the_array_of_those_that_have(
    lost_sweep: Path, fake_slurm: Any
) -> None:
    """One element began and wrote its own record; the others must not be taken for nothing."""
    folders.make_run(lost_sweep / "runs" / "sw", "0001", "9_1", run="sw/0001")
    fake_slurm.answers("squeue", "9_1|COMPLETED|None|n1|0:01\n9_2|PENDING|None||0:00\n9_3|RUNNING|None|n1|0:01\n")
    fake_slurm.answers("sacct", "9_0|FAILED|1:0|n1|00:00:01\n9_1|COMPLETED|0:0|n1|00:00:01\n")
    assert lines(lost_sweep, fake_slurm)["sw"] == ("running", "1 failed, 1 completed, 1 pending, 1 running")
    assert plan(lost_sweep, fake_slurm, "sw").runs == (), "it would go from under those that wait"
    from hpcenv.runs.status import status
    from hpcenv.submission.sweep_job import read_sweep

    assert status(lost_sweep, "sw/0002", environ=fake_slurm.environ, runs="runs").state == "pending"
    assert status(lost_sweep, "9_3", environ=fake_slurm.environ, runs="runs").state == "running"
    whole = read_sweep(lost_sweep / "runs" / "sw", fake_slurm.environ)
    assert [(one.job_id, one.state.state) for one in whole.elements] == [
        ("9_0", "failed"), ("9_1", "completed"), ("9_2", "pending"), ("9_3", "running"),
    ]  # fmt: skip
    assert whole.problems == ()
