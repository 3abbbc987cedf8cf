"""Waiting, cancelling, reading one rank's lines, and going into a running run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders

from hpcenv.errors import RunNotFound, RunNotRunning, StillGoing, ToolFailed, UsageError
from hpcenv.steps.attach import plan_attach
from hpcenv.steps.cancel import cancel_all
from hpcenv.steps.clean import CleanRequest, plan_clean
from hpcenv.steps.logs import RankNodes, Selection, follow_selected, read_selected
from hpcenv.steps.runs import find_all, find_run
from hpcenv.steps.status import status
from hpcenv.steps.wait import exit_status_of, wait_for

# -- wait ---------------------------------------------------------------------------------


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
    with pytest.raises(StillGoing, match="1 run has not ended") as caught:
        wait_for(
            find_all(tmp_path, ("a",), runs="runs"),
            environ=fake_slurm.environ,
            pause=lambda _seconds: None,
            on_status=lambda _one: None,
            timeout=0.05,
        )
    assert caught.value.why == "a is running"
    assert caught.value.exit_status == 124


def test_a_run_that_does_not_exist_spoils_all(tmp_path: Path, fake_slurm: Any) -> None:
    folders.make_run(tmp_path / "runs", "a", "7")
    with pytest.raises(RunNotFound):
        find_all(tmp_path, ("a", "b"), runs="runs")


def test_the_first_failure_is_told(tmp_path: Path, fake_slurm: Any) -> None:
    from hpcenv.wire import RankExit

    run = folders.make_run(tmp_path / "runs", "a", "7", nodes=2)
    folders.start(run, ["n1", "n2"])
    rank = RankExit(rank=1, local_rank=0, pid=5, status=7, ended=1.5, message="ValueError: no", source="error-file")
    folders.end(run, "n2", 7, ranks=(rank,))
    folders.end(run, "n1", 143, asked_to_end="SIGTERM", asked_at=1.6)
    fake_slurm.answers("squeue", "7|FAILED|NonZeroExitCode|n[1-2]|0:01\n")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert found.failure is not None
    assert found.failure.headline.startswith("node n2, rank 1, exit 7, ValueError: no")


def test_a_chain_whose_next_job_waits_has_not_ended_and_can_be_cancelled(tmp_path: Path, fake_slurm: Any) -> None:
    run = folders.make_run(tmp_path / "runs", "a", "7", chain=("7", "8"))
    folders.start(run, ["n1"])
    folders.write(run.started, attempt=0, nodes=["n1"], job_id="7")
    folders.write(run.finished, status=0, time=1.0, stopped="time-limit", saved=True, unfinished=True)
    fake_slurm.answers("squeue", "7|COMPLETED|None|n1|1:00\n8|PENDING|JobHeldUser||0:00\n")
    fake_slurm.answers("sacct")
    where = {"environ": fake_slurm.environ, "runs": "runs"}
    with pytest.raises(StillGoing):
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
    assert (ended.state, ended.job_id, exit_status_of(ended)) == ("cancelled", "8", 1)


# -- cancel -------------------------------------------------------------------------------


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


# -- logs ---------------------------------------------------------------------------------


LOG = "hpcenv verdict: match\n[0] zero\n[1] one\n[2] [0] two\n[3] three\n[1] uno\n[12] twelve\nsrun: [1] no rank\n[1] last"


def selected(run: Any, **chosen: Any) -> str:
    return "".join(read_selected(run, Selection(**chosen)))


def test_the_lines_of_ranks_and_of_nodes(tmp_path: Path) -> None:
    folder = folders.make_run(tmp_path / "runs", "a", nodes=2, nproc_per_node=2)
    folder.log.write_text(LOG)
    # torchrun numbers nodes by the text of their addresses.
    folders.start(folder, ["n2", "n1"], nproc=2)
    run = find_run(tmp_path, "a", runs="runs")
    assert selected(run) == LOG
    assert selected(run, ranks=(1,)) == "[1] one\n[1] uno\n[1] last"
    assert selected(run, ranks=(0, 2)) == "[0] zero\n[2] [0] two\n"
    assert selected(run, node="n2") == "[0] zero\n[1] one\n[1] uno\n[1] last"
    assert selected(run, node="n1", ranks=(1, 3)) == "[3] three\n"
    assert RankNodes(run).of(3) == ("n1", 1)
    with pytest.raises(UsageError, match="no rank 4"):
        selected(run, ranks=(4,))
    with pytest.raises(UsageError, match="is no node") as caught:
        selected(run, node="n7")
    assert caught.value.why == "its nodes: n1, n2"


def test_ranks_are_numbered_by_the_text_of_addresses(tmp_path: Path) -> None:
    """As torch 2.13 sorts its nodes: 10.0.0.10 comes before 10.0.0.9."""
    names = [f"n{number}" for number in range(1, 11)]
    folder = folders.make_run(tmp_path / "runs", "a", nodes=10, nproc_per_node=1)
    folders.start(folder, names)
    where = RankNodes(find_run(tmp_path, "a", runs="runs"))
    assert [where.of(rank) for rank in (0, 1, 2, 9)] == [("n1", 0), ("n10", 0), ("n2", 0), ("n9", 0)]


def test_a_line_longer_than_memory_should_hold_goes_with_its_rank(tmp_path: Path) -> None:
    folder = folders.make_run(tmp_path / "runs", "a", nodes=1, nproc_per_node=2)
    folder.log.write_text("[0] " + "x" * 3_000_000 + "\n[1] y\n")
    run = find_run(tmp_path, "a", runs="runs")
    assert len(selected(run, ranks=(0,))) == 3_000_005
    assert selected(run, ranks=(1,)) == "[1] y\n"


def rank_file(folder: Any, node: str, local: int, restart: int = 0) -> Path:
    path = folder.ranks / node / "7.0_x" / f"attempt_{restart}" / str(local) / "stderr.log"
    path.parent.mkdir(parents=True)
    return path


def test_standard_error_comes_from_the_ranks_own_files(tmp_path: Path) -> None:
    folder = folders.make_run(tmp_path / "runs", "a", nodes=2, nproc_per_node=2)
    folders.start(folder, ["n1", "n2"], nproc=2)
    rank_file(folder, "n1", 1).write_text("a\nb")
    rank_file(folder, "n2", 0).write_text("c\n")
    run = find_run(tmp_path, "a", runs="runs")
    assert selected(run, err=True) == "[1] a\n[2] c\n[1] b"
    assert selected(run, err=True, ranks=(2,)) == "[2] c\n"
    assert selected(run, err=True, node="n1") == "[1] a\n[1] b"


def test_where_two_nodes_have_one_address_no_rank_is_guessed(tmp_path: Path) -> None:
    folder = folders.make_run(tmp_path / "runs", "a", nodes=2, nproc_per_node=1)
    folders.start(folder, ["local0", "local1"])
    text = folder.env_of("local1").read_text().replace('"local_address": "10.0.0.2"', '"local_address": "10.0.0.1"')
    folder.env_of("local1").write_text(text)
    rank_file(folder, "local1", 0).write_text("x\n")
    run = find_run(tmp_path, "a", runs="runs")
    assert RankNodes(run).of(1) is None
    assert selected(run, err=True) == "[local1, local rank 0] x\n"


def test_following_goes_on_through_a_requeue(tmp_path: Path) -> None:
    folder = folders.make_run(tmp_path / "runs", "a", nodes=1, nproc_per_node=2)
    run = find_run(tmp_path, "a", runs="runs")
    steps, asked = iter(range(100)), iter(range(100))

    def pause(_seconds: float) -> None:
        step = next(steps)
        if step < 20:
            with open(folder.log, "a") as log:
                log.write(f"[0] {step}\n[1] {step}\n")
        if step == 5:
            folders.start(folder, ["n1"], nproc=2)
        if step == 10:
            # What `begin` does when the job starts again.
            for path in folder.of_one_attempt():
                if path.exists():
                    path.rename(tmp_path / path.name)

    pieces = follow_selected(run, Selection(ranks=(1,)), ended=lambda: next(asked) > 8, pause=pause)
    assert "".join(pieces) == "".join(f"[1] {step}\n" for step in range(20))


# -- attach -------------------------------------------------------------------------------


def test_a_shell_is_a_step_beside_the_training(tmp_path: Path, fake_slurm: Any) -> None:
    folder = folders.make_run(tmp_path / "runs", "a", "7", nodes=2)
    folders.start(folder, ["n1", "n2"])
    folder.script.write_text("#!/bin/bash\nset -u\npython='/a b/python'\n")
    fake_slurm.answers("squeue", "7|RUNNING|None|n[1-2]|0:01\n")
    where = {"environ": fake_slurm.environ | {"SLURM_JOB_ID": "1"}, "runs": "runs"}
    planned = plan_attach(tmp_path, "a", node="n2", command=("echo", "$(id)"), **where)
    assert shlex.join(planned.argv).endswith(
        f"srun --jobid=7 --overlap --nodelist=n2 --nodes=1 --ntasks=1 '/a b/python' -I {folder.step} "
        f"attach {folder.path} without-secrets echo '$(id)'"
    )
    assert "SLURM_JOB_ID" not in planned.env
    shell = plan_attach(tmp_path, "a", tty=True, secrets=True, **where)
    assert shell.node == "n1"
    assert "--pty" in shell.argv
    assert shell.argv[-1] == "with-secrets"
    with pytest.raises(UsageError, match="a shell needs a terminal"):
        plan_attach(tmp_path, "a", **where)
    with pytest.raises(UsageError, match="`n3` does not train"):
        plan_attach(tmp_path, "a", node="n3", command=("x",), **where)


@pytest.mark.parametrize(("word", "why"), [("PENDING", "it is pending (Priority)"), ("COMPLETED", "it is completed")])
def test_only_a_run_that_runs_can_be_entered(tmp_path: Path, fake_slurm: Any, word: str, why: str) -> None:
    folders.make_run(tmp_path / "runs", "a", "7")
    fake_slurm.answers("squeue", f"7|{word}|{'Priority' if word == 'PENDING' else 'None'}|n1|0:01\n")
    (tmp_path / "runs" / "a" / "job.log").write_text("")
    with pytest.raises(RunNotRunning) as caught:
        plan_attach(tmp_path, "a", environ=fake_slurm.environ, command=("x",), runs="runs")
    assert caught.value.why == why


def test_a_run_that_is_still_checked_cannot_be_entered(tmp_path: Path, fake_slurm: Any) -> None:
    folder = folders.make_run(tmp_path / "runs", "a", "7")
    folders.start(folder, ["n1"])
    folders.write(folder.started, attempt=1, nodes=["n1"], job_id="7")
    fake_slurm.answers("squeue", "7|RUNNING|None|n1|0:01\n")
    with pytest.raises(RunNotRunning, match="does not train yet"):
        plan_attach(tmp_path, "a", environ=fake_slurm.environ, command=("x",), runs="runs")
