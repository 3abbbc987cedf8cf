"""Waiting until runs have ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders

from hpcenv.errors import (
    CannotStart,
    WaitTimeout,
)
from hpcenv.records.run_folder import RunFolder
from hpcenv.runs.cancel import cancel_all
from hpcenv.runs.clean import CleanRequest, plan_clean
from hpcenv.runs.find import find_all
from hpcenv.runs.wait import exit_status_of, wait, wait_for

Make = Callable[..., RunFolder]


def test_waiting_ends_when_slurm_forgot_the_job(make: Make, fake_slurm: Any) -> None:
    folder = make("a")
    fake_slurm.replays("squeue", "squeue-nosuch")
    pauses: list[float] = []
    last = wait(folder.path, environ=fake_slurm.environ, pause=pauses.append, on_status=lambda found: None)
    assert (last.state, last.gone) == ("unknown", True)
    assert len(pauses) >= 3, "accounting may need a moment"


def test_waiting_tells_every_change_once(make: Make, fake_slurm: Any) -> None:
    folder, states = make("a"), ["PENDING", "PENDING", "RUNNING", "COMPLETED"]
    fake_slurm.answers("sacct")
    told = []

    def pause(_seconds: float) -> None:
        fake_slurm.answers("squeue", f"7|{states.pop(0)}|None|n1|0:01\n")

    pause(0)
    wait(folder.path, environ=fake_slurm.environ, pause=pause, on_status=lambda found: told.append(found.state))
    assert told == ["pending", "running", "completed"]


def test_waiting_for_several_runs_ends_with_the_last_one(tmp_path: Path, fake_slurm: Any) -> None:
    for name, job in (("a", "7"), ("b", "8")):
        folders.make_run(tmp_path / "runs", name, job)
    answers = [
        "7|RUNNING|None|n1|0:01\n8|RUNNING|None|n1|0:01\n",
        "7|FAILED|None|n1|0:01\n8|RUNNING|None|n1|0:01\n",
        "8|COMPLETED|None|n1|0:01\n",
    ]
    fake_slurm.answers("sacct", "7|FAILED|7:0|n1|00:00:01\n8|COMPLETED|0:0|n1|00:00:01\n")
    told = []

    def pause(_seconds: float) -> None:
        fake_slurm.answers("squeue", answers.pop(0))

    pause(0)
    runs = find_all(tmp_path, ("a", "b", "a"), runs="runs")
    ended = wait_for(
        runs, environ=fake_slurm.environ, pause=pause, on_status=lambda one: told.append((one.run, one.state))
    )
    assert [(one.run, exit_status_of(one)) for one in ended] == [("a", 7), ("b", 0)]
    assert told == [("a", "running"), ("b", "running"), ("a", "failed"), ("b", "completed")]


def test_a_job_that_queues_itself_again_has_not_ended(tmp_path: Path, fake_slurm: Any) -> None:
    """Between its two attempts Slurm shows it as completing; its last step wrote that it goes on."""
    run = folders.make_run(tmp_path / "runs", "a", "7")
    folders.write(run.finished, status=90, time=1.0, again=True)
    folders.write(run.verdict, result="mismatch")
    answers = ["7|COMPLETING|None|n1|0:01\n", "7|PENDING|BeginTime||0:00\n", "7|COMPLETED|None|n1|0:01\n"]
    seen: list[str] = []

    def pause(_seconds: float) -> None:
        fake_slurm.answers("squeue", answers.pop(0))
        if not answers:
            folders.write(run.finished, status=0, time=2.0)
            folders.write(run.verdict, result="match")

    pause(0)
    found = find_all(tmp_path, ("a",), runs="runs")
    (ended,) = wait_for(found, environ=fake_slurm.environ, pause=pause, on_status=lambda one: seen.append(one.state))
    assert exit_status_of(ended) == 0
    assert seen[0] == "requeued"
    assert seen[-1] == "completed"


def test_a_squeue_that_fails_now_and_then_does_not_end_the_wait(tmp_path: Path, fake_slurm: Any) -> None:
    """A status that an attempt left behind is not believed: the job may be queued again."""
    run = folders.make_run(tmp_path / "runs", "a", "7")
    folders.write(run.finished, status=0, time=1.0)
    down = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
    fake_slurm.answers("squeue", err=down, status=1)
    seen: list[str] = []

    def pause(_seconds: float) -> None:
        fake_slurm.answers("squeue", "7|COMPLETED|None|n1|0:01\n")

    found = find_all(tmp_path, ("a",), runs="runs")
    wait_for(found, environ=fake_slurm.environ, pause=pause, on_status=lambda one: seen.append(one.state))
    assert seen == ["unknown", "completed"]
    assert len(fake_slurm.calls("squeue")) == 4, "asked three times before it is called unknown"


def test_a_wait_has_a_limit(tmp_path: Path, fake_slurm: Any) -> None:
    folders.make_run(tmp_path / "runs", "a", "7")
    fake_slurm.answers("squeue", "7|RUNNING|None|n1|0:01\n")
    with pytest.raises(WaitTimeout, match="1 run has not ended") as caught:
        wait_for(
            find_all(tmp_path, ("a",), runs="runs"),
            environ=fake_slurm.environ,
            pause=lambda _seconds: None,
            on_status=lambda _one: None,
            timeout=0.05,
        )
    assert caught.value.why == "`a` is running"
    assert caught.value.exit_status == 124


def test_a_chain_whose_next_job_waits_has_not_ended_and_can_be_cancelled(tmp_path: Path, fake_slurm: Any) -> None:
    run = folders.make_run(tmp_path / "runs", "a", "7", chain=("7", "8"))
    folders.start(run, ["n1"])
    folders.write(run.started, attempt=0, nodes=["n1"], job_id="7")
    folders.write(run.finished, status=0, time=1.0, stopped="time-limit", saved=True, unfinished=True)
    fake_slurm.answers("squeue", "7|COMPLETED|None|n1|1:00\n8|PENDING|JobHeldUser||0:00\n")
    fake_slurm.answers("sacct")
    where = {"environ": fake_slurm.environ, "runs": "runs"}
    with pytest.raises(WaitTimeout):
        found = find_all(tmp_path, ("a",), runs="runs")
        wait_for(found, environ=fake_slurm.environ, pause=lambda _s: None, on_status=lambda _one: None, timeout=0.05)
    named = CleanRequest(words=("a",), runs="runs")
    assert [one.why for one in plan_clean(tmp_path, named, environ=fake_slurm.environ, now=9e9).kept] == [
        "it is pending"
    ]

    def pause(_seconds: float) -> None:
        fake_slurm.answers("squeue", "7|COMPLETED|None|n1|1:00\n8|CANCELLED|None||0:00\n")

    (ended,) = cancel_all(tmp_path, ("a",), pause=pause, **where)
    assert [call.argv for call in fake_slurm.calls("scancel")] == [("7", "8")]
    assert (ended.state, ended.job_id, exit_status_of(ended)) == ("cancelled", "8", 25)


OWN = "squeue---format=%P|%Q|%S|%u|%V"


def _wait_shortly(start: Path, fake_slurm: Any) -> None:
    wait_for(
        find_all(start, ("a",), runs="runs"),
        environ=fake_slurm.environ,
        pause=lambda _seconds: None,
        on_status=lambda _one: None,
        timeout=4,
    )


def test_waiting_for_a_job_that_never_starts_ends_with_the_reason(tmp_path: Path, fake_slurm: Any) -> None:
    folders.make_run(tmp_path / "runs", "a", "7")
    fake_slurm.answers("squeue", "7|PENDING|QOSMaxWallDurationPerJobLimit||0:00\n")
    fake_slurm.answers(OWN, "batch|5|N/A|alice|2026-11-27T03:36:41\n")
    with pytest.raises(CannotStart, match="`a` does not start as it is") as caught:
        _wait_shortly(tmp_path, fake_slurm)
    assert "QOSMaxWallDurationPerJobLimit: a part of its request exceeds" in str(caught.value.why)
    assert "`hpcenv cancel a`" in str(caught.value.hint)
    assert fake_slurm.calls("scancel") == [], "an administrator may raise the limit"


def test_a_reason_for_a_moment_does_not_end_the_wait(tmp_path: Path, fake_slurm: Any) -> None:
    folders.make_run(tmp_path / "runs", "a", "7")
    fake_slurm.answers(OWN, "batch|5|N/A|alice|2026-11-27T03:36:41\n")
    fake_slurm.answers("sacct", "7|COMPLETED|0:0|n1|00:00:01\n")
    reasons = ["", *(8 * ["Priority", "BadConstraints"])]

    def pause(_seconds: float) -> None:
        reason = reasons.pop()
        fake_slurm.answers("squeue", f"7|PENDING|{reason}||0:00\n" if reason else "7|COMPLETED|None|n1|0:01\n")

    pause(0)
    found = find_all(tmp_path, ("a",), runs="runs")
    (status,) = wait_for(found, environ=fake_slurm.environ, pause=pause, on_status=lambda _one: None)
    assert status.state == "completed"


def test_a_job_for_several_partitions_is_waited_for(tmp_path: Path, fake_slurm: Any) -> None:
    """Slurm shows the reason of one of them; another one may start the job."""
    folders.make_run(tmp_path / "runs", "a", "7")
    fake_slurm.answers("squeue", "7|PENDING|QOSMaxWallDurationPerJobLimit||0:00\n")
    fake_slurm.answers(OWN, "short,long|5|N/A|alice|2026-11-27T03:36:41\n")
    with pytest.raises(WaitTimeout):
        _wait_shortly(tmp_path, fake_slurm)


@pytest.mark.parametrize(("kill", "error"), [("no", CannotStart), ("yes", WaitTimeout)])
def test_slurm_itself_cancels_a_job_whose_dependency_failed(
    kill: str, error: type[Exception], tmp_path: Path, fake_slurm: Any
) -> None:
    folder = folders.make_run(tmp_path / "runs", "a", "7")
    folder.script.write_text(f"#!/bin/bash\n#SBATCH --kill-on-invalid-dep={kill}\n")
    fake_slurm.answers("squeue", "7|PENDING|DependencyNeverSatisfied||0:00\n")
    fake_slurm.answers(OWN, "batch|5|N/A|alice|2026-11-27T03:36:41\n")
    with pytest.raises(error):
        _wait_shortly(tmp_path, fake_slurm)
