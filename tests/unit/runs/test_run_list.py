"""Many runs at once: one line each, and one question to Slurm for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import run_folders as folders

from hpcenv.errors import UsageError
from hpcenv.runs.find import find, find_run
from hpcenv.runs.run_list import list_lines


def lines(where: Path, fake_slurm: Any, **words: Any) -> dict[str, tuple[str, str]]:
    found = list_lines(where, environ=fake_slurm.environ, runs="runs", **words)
    return {line.run: (line.state, line.detail) for line in found.runs}


def test_the_newest_run_comes_first_and_slurm_is_asked_once(tmp_path: Path, fake_slurm: Any) -> None:
    for number in range(30):
        folders.make_run(tmp_path / "runs", f"r{number}", str(100 + number), submitted=float(number))
    folders.write(tmp_path / "runs" / "r3" / "finished.json", status=3, time=1.0)
    fake_slurm.answers("squeue", "129|RUNNING|None|n[1-2]|0:01\n128|PENDING|Priority||0:00\n")
    fake_slurm.answers("sacct", "103|FAILED|3:0|n1|00:00:01\n104|OUT_OF_MEMORY|0:125|n1|00:00:01\n")
    found = list_lines(tmp_path, environ=fake_slurm.environ, runs="runs")
    assert [line.run for line in found.runs] == [f"r{number}" for number in range(29, -1, -1)]
    by_name = {line.run: line for line in found.runs}
    assert (by_name["r29"].state, by_name["r29"].nodes) == ("running", 2)
    assert (by_name["r28"].state, by_name["r28"].detail) == ("pending", "Priority")
    assert (by_name["r3"].state, by_name["r3"].exit_status) == ("failed", 3)
    assert by_name["r4"].state == "out-of-memory"
    assert by_name["r5"].state == "unknown"
    assert (len(fake_slurm.calls("squeue")), len(fake_slurm.calls("sacct"))) == (1, 1)


def test_a_limit_asks_about_so_many_only_and_a_state_chooses(tmp_path: Path, fake_slurm: Any) -> None:
    for number in range(5):
        folders.make_run(tmp_path / "runs", f"r{number}", str(100 + number), submitted=float(number))
    fake_slurm.answers("squeue", "".join(f"{n}|RUNNING|None|n1|0:01\n" for n in (100, 104)))
    found = list_lines(tmp_path, environ=fake_slurm.environ, runs="runs", limit=2)
    assert ([line.run for line in found.runs], found.total) == (["r4", "r3"], 5)
    assert "--jobs=104,103" in fake_slurm.calls("squeue")[0].argv
    assert list(lines(tmp_path, fake_slurm, states=("running",))) == ["r4", "r0"]
    with pytest.raises(UsageError, match="not a state of a run"):
        lines(tmp_path, fake_slurm, states=("runing",))


def test_a_fingerprint_chooses_runs_and_one_that_cannot_be_read_is_no_match(tmp_path: Path, fake_slurm: Any) -> None:
    for number, content in enumerate(('fingerprint = "hpc1-a"\n', 'fingerprint = "hpc1-b"\n', "no TOML")):
        folder = folders.make_run(tmp_path / "runs", f"r{number}", str(100 + number), submitted=float(number))
        folder.lockfile.write_text(content)
    assert list(lines(tmp_path, fake_slurm, fingerprint="hpc1-b")) == ["r1"]
    assert list(lines(tmp_path, fake_slurm, fingerprint="hpc1-c")) == []


def test_a_damaged_run_is_a_line_and_hides_no_other(tmp_path: Path, fake_slurm: Any) -> None:
    folders.make_run(tmp_path / "runs", "good", "7")
    folders.make_run(tmp_path / "runs", "bad", "8").submission.write_text("{")
    (tmp_path / "runs" / "nothing").mkdir()
    (tmp_path / "runs" / "a-file").write_text("")
    fake_slurm.answers("squeue", "7|RUNNING|None|n1|0:01\n")
    found = lines(tmp_path, fake_slurm)
    assert found["good"] == ("running", "")
    assert found["bad"][0] == "unknown"
    assert "is not JSON" in found["bad"][1]
    assert set(found) == {"good", "bad"}


def test_a_reason_that_does_not_fit_follows_whole(tmp_path: Path, fake_slurm: Any, hpcenv: Any) -> None:
    reason = "ReqNodeNotAvail, UnavailableNodes:" + ",".join(f"node{number:04}" for number in range(20))
    for name, job_id in (("waits", "7"), ("runs-on", "123456")):
        folders.make_run(tmp_path / "runs", name, job_id)
    folders.make_run(tmp_path / "runs", "bad", "8").submission.write_text("{")
    fake_slurm.answers("squeue", f"7|PENDING|{reason}||0:00\n123456|PENDING|Priority||0:00\n")
    for columns in (80, 60):
        environ = {**fake_slurm.environ, "COLUMNS": str(columns)}
        done = hpcenv("list", "--runs-dir", "runs", cwd=tmp_path, environ=environ)
        lines = done.stdout.splitlines()
        assert lines[0].split() == ["RUN", "JOB", "STATE", "NODES", "ATTEMPT", "ELAPSED", "REASON"]
        assert max(map(len, lines)) <= columns, done.stdout
        place = next(number for number, line in enumerate(lines) if line.startswith("waits"))
        below = [line for line in lines[place + 1 :] if line.startswith(" ")]
        assert reason.replace(" ", "") in "".join(line.strip() for line in below).replace(" ", "")
        assert f"`{tmp_path}/runs/bad/submission.json`isnotJSON" in "".join(done.stdout.split())
    assert next(line for line in lines if line.startswith("runs-on")).split()[1] == "123456"


def test_a_long_name_stands_on_a_line_of_its_own(tmp_path: Path, fake_slurm: Any, hpcenv: Any) -> None:
    """On the testbed, rows had 82 columns after sessions that were started without a name."""
    long = "session-2026-11-28-125206-a1b2c3d4e5f6"
    for name, job_id in (("watched", "38"), (long, "1234567")):
        folders.make_run(tmp_path / "runs", name, job_id)
    fake_slurm.answers("squeue", "38|RUNNING|None|n1|0:07\n1234567|CONFIGURING|None|n1|10-00:00:00\n")
    lines = hpcenv("list", "--runs-dir", "runs", cwd=tmp_path, environ=fake_slurm.environ).stdout.splitlines()
    assert max(map(len, lines)) <= 80, lines
    assert next(line for line in lines if line.startswith("watched")).split()[:3] == ["watched", "38", "running"]
    assert lines[lines.index(long) + 1].split()[0] == "1234567"


def test_a_sweep_is_one_line_and_its_runs_are_found(tmp_path: Path, fake_slurm: Any) -> None:
    folders.make_sweep(tmp_path / "runs", "sw", ["9_0", "9_1", "9_2"], submitted=5.0)
    folders.make_run(tmp_path / "runs", "a", "7")
    fake_slurm.answers(
        "squeue", "9_1|RUNNING|None|n1|0:01\n9_2|PENDING|JobArrayTaskLimit||0:00\n7|PENDING|None||0:00\n"
    )
    fake_slurm.answers("sacct", "9_0|FAILED|1:0|n1|00:00:01\n")
    found = lines(tmp_path, fake_slurm)
    assert list(found) == ["sw", "a"]
    assert found["sw"] == ("running", "1 failed, 1 running, 1 pending")
    assert {name: state for name, (state, _) in lines(tmp_path, fake_slurm, sweep="sw").items()} == {
        "0000": "failed", "0001": "running", "0002": "pending",
    }  # fmt: skip
    assert find_run(tmp_path, "sw/0001", runs="runs").submission.job_id == "9_1"
    assert find_run(tmp_path, "9_2", runs="runs").folder.path.name == "0002"
    assert find(tmp_path, "9", runs="runs").folder == tmp_path / "runs" / "sw"
    with pytest.raises(UsageError, match="is a sweep of 3 runs"):
        find_run(tmp_path, None, runs="runs")


def test_without_a_project_settings_file_that_can_be_read_whole_runs_are_still_found(
    tmp_path: Path, fake_slurm: Any
) -> None:
    (tmp_path / "hpcenv.toml").write_text('image = 7\nnonsense = "x"\n[paths]\nruns = "elsewhere"\n')
    folders.make_run(tmp_path / "elsewhere", "a", "7")
    fake_slurm.answers("squeue", "7|RUNNING|None|n1|0:01\n")
    assert [line.run for line in list_lines(tmp_path, environ=fake_slurm.environ).runs] == ["a"]


def test_a_job_id_that_is_none_spoils_nothing(tmp_path: Path, fake_slurm: Any) -> None:
    folders.make_run(tmp_path / "runs", "a", "--me")
    folders.make_run(tmp_path / "runs", "b", "7")
    fake_slurm.answers("squeue", "7|RUNNING|None|n1|0:01\n")
    found = lines(tmp_path, fake_slurm)
    assert found == {"a": ("unknown", "`--me` is not a job id"), "b": ("running", "")}
    assert not any("--me" in word for word in fake_slurm.calls("squeue")[0].argv)


TWO_WAIT = "7|{}|None|n1|1:00\n8|PENDING|None||0:00\n9|PENDING|Dependency||0:00\n"
SAVED = {"status": 0, "stopped": "time-limit", "saved": True, "unfinished": True}


@pytest.mark.parametrize(
    ("squeue", "done", "state", "job"),
    [
        ("7|COMPLETED|None|n1|1:00\n8|RUNNING|None|n1|0:01\n9|PENDING|Dependency||0:00\n", None, "running", "8"),
        (TWO_WAIT.format("TIMEOUT"), {"status": 137, "stopped": "time-limit"}, "pending", "8"),
        (TWO_WAIT.format("COMPLETED"), {"status": 0}, "completed", "7"),
        # It has saved itself, and the next link goes on.
        (TWO_WAIT.format("COMPLETED"), SAVED, "pending", "8"),
        # What is over is over for the links that wait, too: they end at once.
        (TWO_WAIT.format("FAILED"), {"status": 7}, "failed", "7"),
        # A link that is back in the queue.
        ("7|PENDING|BeginTime||0:00\n8|PENDING|Dependency||0:00\n", {**SAVED, "again": True}, "pending", "7"),
        # Who was to go on was cancelled.
        ("7|COMPLETED|None|n1|1:00\n8|CANCELLED|None||0:00\n9|CANCELLED|None||0:00\n", SAVED, "cancelled", "8"),
        ("7|COMPLETED|None|n1|1:00\n", SAVED, "unknown", "8"),
    ],
)
def test_a_chain_stands_where_its_jobs_stand(
    tmp_path: Path, fake_slurm: Any, squeue: str, done: dict[str, Any] | None, state: str, job: str
) -> None:
    from hpcenv.runs.status import status
    from hpcenv.runs.wait import exit_status_of

    run = folders.make_run(tmp_path / "runs", "a", "7", chain=("7", "8", "9"))
    folders.write(run.started, attempt=0, nodes=["n1"], job_id="7")
    if done is not None:
        folders.write(run.finished, time=1.0, **done)
    fake_slurm.answers("squeue", squeue)
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, found.job_id) == (state, job)
    assert found.quiet is (state in ("completed", "failed", "cancelled", "unknown"))
    if found.quiet:
        assert (exit_status_of(found) == 0) is (state == "completed")


def test_a_job_that_was_cancelled_while_its_nodes_were_checked_was_not_rejected(
    tmp_path: Path, fake_slurm: Any
) -> None:
    run = folders.make_run(tmp_path / "runs", "a", "7")
    folders.write(run.finished, status=91, time=1.0)
    folders.write(run.verdict, result="unknown")
    fake_slurm.answers("squeue", "7|CANCELLED|None|n1|0:01\n")
    assert lines(tmp_path, fake_slurm) == {"a": ("cancelled", "")}
