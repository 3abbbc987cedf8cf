"""What is known of a run: from Slurm and from its folder, and `unknown` where neither tells."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders

from hpcenv import wire
from hpcenv.errors import FileUnusable, HpcenvError, RecordInvalid, RunNotFound
from hpcenv.steps.cancel import cancel
from hpcenv.steps.logs import LogTail, Selection, follow_log, read_log, read_selected
from hpcenv.steps.report import report
from hpcenv.steps.runs import find_run, find_submitted, open_run, read_status
from hpcenv.steps.status import status, wait
from hpcenv.steps.wait import exit_status_of
from hpcenv.wire import Environment, Manifest, NodeExit, NodeVerdict, RunFolder, Submission, Verdict

Make = Callable[..., RunFolder]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Make a run folder as `submit` leaves it."""

    def run(name: str, job_id: str = "7", submitted: float = 1.0, cluster: Any = "slurm") -> RunFolder:
        folder = RunFolder(tmp_path / "runs" / name)
        manifest = Manifest(
            schema=1, run=name, run_folder=str(folder.path), cluster=cluster, nodes=1, nproc_per_node=1, gpus_per_node=0,
            cpus_per_task=0, backend="gloo", environment=Environment(kind="host", python="/p"), script="/s.py", script_sha256="0",
            args=(), workdir="/", settings=(), expectations=(), packages=(), probe_level="full", lockfile="l",
            lockfile_sha256="0", hpcenv_version="0",
        )  # fmt: skip
        wire.write(manifest, folder.manifest)
        record = Submission(
            schema=1, run=name, cluster=cluster, job_id=job_id, submitted=submitted, command=("hpcenv",)
        )
        wire.write(record, folder.submission)
        return folder

    return run


def write(path: Path, **record: Any) -> None:
    wire.write_text(json.dumps({"schema": 1, **record}), path)


def verdict(folder: RunFolder, result: Any) -> None:
    nodes = (NodeVerdict(node="n1", result=result, compared=3),)
    made = Verdict(schema=1, run="a", attempt=0, result=result, nodes=nodes, findings=(), rendezvous=None, settings={})
    wire.write(made, folder.verdict)


# -- finding a run ------------------------------------------------------------------------


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


def test_a_copy_of_a_run_is_no_run(make: Make, tmp_path: Path) -> None:
    make("done")
    shutil.copytree(tmp_path / "runs" / "done", tmp_path / "runs" / "copy", ignore=lambda *_: ["submission.json"])
    assert find_run(tmp_path, None, runs="runs").manifest.run == "done"
    with pytest.raises(RunNotFound, match="was not submitted") as caught:
        find_run(tmp_path, "runs/copy")
    assert "it is a copy of" in str(caught.value.why)


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


# -- status -------------------------------------------------------------------------------


def test_slurm_forgot_the_job_but_the_batch_script_left_its_status(make: Make, tmp_path: Path, fake_slurm: Any) -> None:
    fake_slurm.replays("squeue", "squeue-nosuch")
    write(make("a").finished, status=0, time=1.0)
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, found.exit_status, found.detail) == ("completed", 0, "from the run folder")


def test_slurm_forgot_the_job_and_nothing_was_left(make: Make, tmp_path: Path, fake_slurm: Any) -> None:
    make("a")
    fake_slurm.replays("squeue", "squeue-nosuch")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, found.exit_status, found.ended, found.gone) == ("unknown", None, False, True)


@pytest.mark.parametrize("name", ["cancelled", "cancelled-running"])
def test_a_cancelled_job_has_no_exit_status_of_success(make: Make, tmp_path: Path, fake_slurm: Any, name: str) -> None:
    """sacct writes 0:0 for it (recorded on Slurm 24.11)."""
    fake_slurm.replays("squeue", "squeue-nosuch")
    fake_slurm.replays("sacct", f"sacct-{name}")
    job_id = (fake_slurm.folder / "sacct.out").read_text().partition("|")[0]
    make("a", job_id)
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, found.exit_status) == ("cancelled", None)


def test_a_signal_counts_128_and_more(make: Make, tmp_path: Path, fake_slurm: Any) -> None:
    make("a")
    fake_slurm.answers("squeue")
    fake_slurm.answers("sacct", "7|FAILED|0:9|n1|00:01:00\n")
    assert status(tmp_path, "a", environ=fake_slurm.environ, runs="runs").exit_status == 137


def test_a_job_that_was_requeued_does_not_show_its_former_end(make: Make, tmp_path: Path, fake_slurm: Any) -> None:
    folder = make("a")
    write(folder.finished, status=90, time=1.0)
    verdict(folder, "mismatch")
    fake_slurm.answers("squeue", "7|PENDING|BeginTime||0:00\n")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, found.exit_status, found.ended) == ("pending", None, False)


@pytest.mark.parametrize(("code", "words"), [(90, "a node is not as locked"), (91, "could not tell on every node")])
def test_the_gates_own_statuses_are_called_rejected(
    make: Make, tmp_path: Path, fake_slurm: Any, code: int, words: str
) -> None:
    folder = make("a")
    write(folder.finished, status=code, time=1.0)
    verdict(folder, "mismatch" if code == 90 else "unknown")
    fake_slurm.answers("squeue", "7|FAILED|NonZeroExitCode|n1|0:01\n")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, found.exit_status, found.ended) == ("rejected", code, True)
    assert words in found.detail


def test_a_script_that_ends_with_90_itself_is_not_called_rejected(make: Make, tmp_path: Path, fake_slurm: Any) -> None:
    folder = make("a")
    write(folder.finished, status=90, time=1.0)
    verdict(folder, "match")
    fake_slurm.answers("squeue", "7|FAILED|NonZeroExitCode|n1|0:01\n")
    assert status(tmp_path, "a", environ=fake_slurm.environ, runs="runs").state == "failed"


@pytest.mark.parametrize(
    ("why", "state", "words"),
    [("time-limit", "timeout", "the time limit"), ("preemption", "preempted", "preempted"),
     ("unknown", "failed", "asked to stop")],
)  # fmt: skip
def test_stopped_before_the_training_is_not_called_rejected(
    make: Make, tmp_path: Path, fake_slurm: Any, why: str, state: str, words: str
) -> None:
    folder = make("a")
    write(folder.finished, status=91, time=1.0, stopped=why, before_training=True)
    fake_slurm.answers("squeue", "7|FAILED|NonZeroExitCode|n1|0:01\n")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, found.detail) == (state, f"stopped before the training began: {words}")
    assert found.failure is not None
    assert "before the training started" in found.failure.headline


def test_stopped_before_the_training_and_queued_again_says_so(make: Make, tmp_path: Path, fake_slurm: Any) -> None:
    folder = make("a")
    write(folder.started, attempt=0, job_id="7", nodes=["n1"])
    write(folder.finished, status=91, time=1.0, stopped="preemption", before_training=True, again=True)
    fake_slurm.answers("squeue", "7|PENDING|BeginTime||0:00\n")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, found.detail) == ("pending", "stopped before the training began: preempted; BeginTime")
    (folder.attempts / "0").mkdir(parents=True)
    for path in (folder.started, folder.finished):
        path.rename(folder.attempts / "0" / path.name)
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert found.earlier == ("attempt 0: stopped before the training began: preempted",)


@pytest.mark.parametrize(
    ("why", "state", "words"),
    [("time-limit", "timeout", "stopped at the time limit"), ("preemption", "preempted", "stopped by a preemption"),
     ("unknown", "failed", "stopped")],
)  # fmt: skip
@pytest.mark.parametrize("listed", ["7|FAILED|NonZeroExitCode|n1|0:01\n", "7|COMPLETED|None|n1|0:01\n", ""])
def test_stopped_and_saved_and_not_gone_on_with_is_not_completed(
    make: Make, tmp_path: Path, fake_slurm: Any, why: Any, state: str, words: str, listed: str
) -> None:
    folder = make("a")
    verdict(folder, "match")
    record = {"schema": 1, "run": "a", "node": "n1", "attempt": 0, "status": 0, "signal": "", "started": 1.0}
    wire.write(NodeExit(**record, ended=2.0, stopped=why, saved=True), folder.exit_of("n1"))
    end = {"stopped": why, "saved": True, "unfinished": True, "not_again": "--requeue never"}
    write(folder.finished, status=143, time=1.0, **end)
    fake_slurm.answers("squeue", listed)
    fake_slurm.answers("sacct")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    told = f"{words} after it saved itself; not queued again (--requeue never)"
    assert (found.state, found.detail, exit_status_of(found), found.ended) == (state, told, 143, True)
    assert found.failure is not None
    assert found.failure.headline == told
    assert found.failure.notes == (f"to begin anew: hpcenv rerun {folder.path}",)
    # Recorded as going on, and Slurm did not queue it again: it has not completed either.
    write(folder.finished, status=0, time=1.0, **{**end, "again": True})
    fake_slurm.answers("squeue", "7|COMPLETED|None|n1|0:01\n")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, exit_status_of(found), found.ended) == (state, 1, True)


@pytest.mark.parametrize("end", [
    {"status": 0, "stopped": "preemption", "saved": True, "unfinished": True},
    {"status": 91, "stopped": "preemption", "before_training": True}, {"status": 90},
])  # fmt: skip
@pytest.mark.parametrize("listed", ["7|CANCELLED|None||0:00\n", ""])
def test_cancelled_when_it_was_back_in_the_queue_says_nothing_of_the_attempt_before(
    make: Make, tmp_path: Path, fake_slurm: Any, end: dict[str, Any], listed: str
) -> None:
    folder = make("a")
    write(folder.started, attempt=0, job_id="7", nodes=["n1"])
    write(folder.finished, time=1.0, again=True, **end)
    verdict(folder, "mismatch" if end["status"] == 90 else "match")
    fake_slurm.answers("squeue", listed)
    fake_slurm.answers("sacct", listed and "7|CANCELLED by 1001|0:0|None assigned|00:00:00\n")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.exit_status, exit_status_of(found), found.quiet) == (None, 1, True)
    assert found.state == ("cancelled" if listed else "unknown")
    if listed:
        assert found.failure is not None
        assert found.failure.headline == "the job was cancelled, while it waited to go on"


@pytest.mark.parametrize(
    ("listed", "state"), [("COMPLETING", "completing"), ("CANCELLED", "cancelled"), ("FAILED", "rejected")]
)
def test_a_gate_that_could_not_tell_is_no_rejection_until_slurm_says_how_it_ended(
    make: Make, tmp_path: Path, fake_slurm: Any, listed: str, state: str
) -> None:
    """Whoever is cancelled while it is checked may write such a verdict in its last second."""
    folder = make("a")
    write(folder.finished, status=91, time=1.0)
    verdict(folder, "unknown")
    fake_slurm.answers("squeue", f"7|{listed}|None|n1|0:01\n")
    assert status(tmp_path, "a", environ=fake_slurm.environ, runs="runs").state == state


def test_cancelled_while_it_was_checked_and_forgotten_by_slurm(make: Make, tmp_path: Path, fake_slurm: Any) -> None:
    write(make("a").finished, status=143, time=1.0, cancelled=True)
    fake_slurm.replays("squeue", "squeue-nosuch")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, found.exit_status) == ("cancelled", 143)


def test_a_local_run_that_was_asked_to_end_is_cancelled_and_keeps_its_time(make: Make, tmp_path: Path) -> None:
    folder = make("a", "local-999999999", cluster="local")
    submitted = json.loads(folder.submission.read_text())["submitted"]
    write(folder.finished, status=143, time=submitted + 65.4, cancelled=True)
    found = status(tmp_path, "a", environ={}, runs="runs")
    assert (found.state, found.exit_status, found.elapsed) == ("cancelled", 143, "00:01:05")


def test_damaged_records_of_the_job_do_not_hide_its_state(make: Make, tmp_path: Path, fake_slurm: Any) -> None:
    folder = make("a")
    folder.verdict.write_text("{")
    write(folder.started, attempt="x", nodes=3)
    folder.finished.write_text("[]")
    folder.exits.mkdir()
    folder.exit_of("n1").write_text("")
    fake_slurm.answers("squeue", "7|RUNNING|None|n1|0:01\n")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, found.attempt, found.nodes, found.exits) == ("running", 0, ("n1",), ())
    assert "verdict.json` is not JSON" in found.detail


def test_a_local_run_whose_process_is_gone_has_failed(make: Make, tmp_path: Path) -> None:
    make("a", "local-999999999", cluster="local")
    found = status(tmp_path, "a", environ={}, runs="runs")
    assert (found.state, found.exit_status) == ("failed", None)


def test_another_process_of_that_number_is_not_the_run(make: Make, tmp_path: Path) -> None:
    make("a", "local-1", cluster="local")
    assert status(tmp_path, "a", environ={}, runs="runs").state == "failed"


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


# -- cancel -------------------------------------------------------------------------------


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
    words = ((word,) if word else ()) + ("--runs", "runs")
    fake_slurm.answers("squeue", "7|RUNNING|None|n1|0:01\n")
    told = hpcenv("status", *words, cwd=tmp_path, environ=fake_slurm.environ).stdout
    assert told.startswith(f"a: running (`{folder.manifest}` is not JSON")
    assert "\n  job       7\n" in told

    fake_slurm.answers("squeue", "7|CANCELLED|None|n1|0:01\n")
    done = hpcenv("cancel", *words, cwd=tmp_path, environ=fake_slurm.environ)
    assert (done.status, "its job is known from submission.json" in done.stdout) == (0, True), done.stderr


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
    with pytest.raises(HpcenvError, match="is no job id"):
        cancel(tmp_path, "a", environ=fake_slurm.environ, pause=time.sleep, runs="runs")
    assert fake_slurm.calls("scancel") == []


def test_a_folder_that_may_not_be_looked_into_is_not_missing(make: Make, tmp_path: Path) -> None:
    folder = make("theirs").path
    program = (
        "import os, sys, pathlib\n"
        "from hpcenv.errors import FileUnusable\n"
        "from hpcenv.steps import runs\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "try: runs.find(pathlib.Path('/'), sys.argv[1])\n"
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
    done = hpcenv("status", "nosuch", "--runs", "runs", cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == "hint: `hpcenv list --runs runs` names the runs that are there"


@pytest.mark.parametrize("words", [("list",), ("clean", "--older-than", "1d")])
def test_a_folder_of_runs_that_is_not_there_is_not_an_empty_one(tmp_path: Path, hpcenv: Any, words: Any) -> None:
    done = hpcenv(*words, "--runs", "/nonexist", cwd=tmp_path)
    assert (done.status, done.stderr.splitlines()[0]) == (
        16, "error[run-not-found]: there is no folder of runs `/nonexist`",
    )  # fmt: skip
    outside = hpcenv(*words, cwd=tmp_path)
    assert (outside.status, outside.stderr.splitlines()[0]) == (
        16, "error[run-not-found]: no runs: this is no project",
    )  # fmt: skip


def test_a_damaged_record_has_a_hint(make: Make) -> None:
    folder = make("a")
    folder.manifest.write_text("{")
    with pytest.raises(RecordInvalid) as caught:
        open_run(folder.path)
    assert "`hpcenv list`" in str(caught.value.hint)
    folder.submission.write_text("{")
    with pytest.raises(RecordInvalid, match="submission.json"):
        find_submitted(folder.path, str(folder.path))


# -- report and logs ----------------------------------------------------------------------


@pytest.mark.parametrize(("count", "lines"), [(0, ()), (2, ("b", "c")), (9, ("a", "b", "c"))])
def test_the_end_of_the_log(make: Make, tmp_path: Path, fake_slurm: Any, count: int, lines: tuple[str, ...]) -> None:
    make("a").log.write_bytes(b"a\nb\nc\n")
    assert report(tmp_path, "a", environ=fake_slurm.environ, runs="runs", lines=count).last_lines == lines


def test_a_log_that_is_not_there_yet(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound) as caught:
        list(read_log(RunFolder(tmp_path), "my run"))
    assert caught.value.why == "the job has not started"
    assert caught.value.hint == "hpcenv status 'my run'"


def test_a_log_that_is_gone_is_not_one_that_is_not_there_yet(make: Make, tmp_path: Path) -> None:
    folder = make("a")
    folders.start(folder, ["n1"])
    run = find_run(tmp_path, "a", runs="runs")
    with pytest.raises(FileUnusable, match="is gone") as caught:
        list(read_selected(run, Selection(ranks=(0,)), word="a"))
    assert caught.value.hint == "hpcenv status a"
    kept = folder.ranks / "n1" / "7.0_x" / "attempt_0" / "0" / "stderr.log"
    kept.parent.mkdir(parents=True)
    kept.write_text("Killed\n")
    with pytest.raises(FileUnusable, match="is gone") as caught:
        list(read_selected(run, Selection()))
    assert caught.value.hint == f"hpcenv logs --err {folder.path}"
    assert "".join(read_selected(run, Selection(err=True))) == "[0] Killed\n"


def test_a_log_is_read_byte_for_byte_as_far_as_it_is_text(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_bytes("größe\r\n50%\r100%\r\n".encode() + b"\xff\x0c\n")
    assert "".join(read_log(RunFolder(tmp_path), "a")) == "größe\r\n50%\r100%\r\n\ufffd\x0c\n"


def test_following_gives_whole_lines_and_whole_characters(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    tail = LogTail(path)
    assert tail.read() == ""
    with open(path, "ab", buffering=0) as log:
        log.write("one\ntw".encode())
        assert tail.read() == "one\n"
        log.write("o ü".encode()[:-1])
        assert tail.read() == ""
        assert tail.read() == "two ", "a part only when the file stands still, without half a character"
        log.write("ü".encode()[1:] + b"\n")
        assert tail.read() == "ü\n"
        log.write(b"end \xc3")
        assert (tail.read(), tail.read(), tail.read()) == ("", "end ", "")
    assert tail.rest() == "\ufffd"


def test_a_log_that_was_emptied_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text("a long first line\n")
    tail = LogTail(path)
    assert tail.read() == "a long first line\n"
    path.write_text("new\n")
    assert tail.read() == "new\n"


def test_following_shows_what_is_written_until_the_end(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    over = threading.Event()

    def job() -> None:
        with open(path, "a", encoding="utf-8") as log:
            for number in range(20):
                log.write(f"line {number}\n")
                log.flush()
                time.sleep(0.01)
            log.write("no newline at the end")
        over.set()

    worker = threading.Thread(target=job)
    worker.start()
    text = "".join(follow_log(path, ended=over.is_set, pause=lambda seconds: time.sleep(seconds / 50)))
    worker.join()
    assert text == "".join(f"line {number}\n" for number in range(20)) + "no newline at the end"


def test_a_run_folder_opens_by_itself(make: Make) -> None:
    run = open_run(make("a").path)
    assert run.submission.job_id == "7"
    assert read_status(run, {"PATH": ""}).state == "unknown"


@pytest.mark.parametrize(
    ("accounting", "again", "state"),
    [("7|RUNNING|0:0|n1|00:00:05\n", False, "completing"), ("7|RUNNING|0:0|n1|00:00:05\n", True, "running"), ("", False, "unknown")],
)  # fmt: skip
def test_a_run_that_ended_while_the_controller_is_down_is_not_over_and_what_its_files_say_is_told(
    make: Make, fake_slurm: Any, accounting: str, again: bool, state: str
) -> None:
    folder = make("a")
    fake_slurm.answers("squeue", err="slurm_load_jobs error: Unable to contact slurm controller\n", status=1)
    fake_slurm.answers("sacct", accounting)
    before = read_status(open_run(folder.path), fake_slurm.environ)
    assert (before.state, "batch script" in before.detail) == ("running" if accounting else "unknown", False)
    write(folder.finished, status=0, stopped="", saved=False, again=again)
    now = read_status(open_run(folder.path), fake_slurm.environ)
    assert (now.state, now.ended, now.quiet) == (state, False, False)
    assert now.detail.startswith("the batch script recorded status 0; ")
    assert "Unable to contact slurm controller" in now.detail
