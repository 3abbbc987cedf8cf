"""The state of a run from Slurm and from its folder; `unknown` where neither knows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders

from hpcenv.records.files import save_record
from hpcenv.records.outcome import NodeExit
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import SRUN_GAVE_UP, Finding, NodeVerdict, Verdict
from hpcenv.runs.entries import open_run
from hpcenv.runs.find import find_all
from hpcenv.runs.state import read_states
from hpcenv.runs.status import read_status, status
from hpcenv.runs.wait import exit_status_of

Make = Callable[..., RunFolder]


def verdict(folder: RunFolder, result: Any) -> None:
    nodes = (NodeVerdict(node="n1", result=result, compared=3),)
    made = Verdict(schema=1, run="a", attempt=0, result=result, nodes=nodes, findings=(), rendezvous=None, settings={})
    save_record(made, folder.verdict)


def test_slurm_forgot_the_job_but_the_batch_script_left_its_status(make: Make, tmp_path: Path, fake_slurm: Any) -> None:
    fake_slurm.replays("squeue", "squeue-nosuch")
    folders.write(make("a").finished, status=0, time=1.0)
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, found.exit_status, found.detail) == ("completed", 0, "from the run folder")


def test_slurm_forgot_the_job_and_nothing_was_left(make: Make, tmp_path: Path, fake_slurm: Any) -> None:
    make("a")
    fake_slurm.replays("squeue", "squeue-nosuch")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, found.exit_status, found.ended, found.gone) == ("unknown", None, False, True)


def test_an_element_that_scancel_ended_in_the_queue_is_cancelled(tmp_path: Path, fake_slurm: Any) -> None:
    """Slurm 24.11 keeps no record of it: `scancel 34_[1-2]` while 34_0 ran."""
    runs = tmp_path / "runs"
    sweep = folders.make_sweep(runs, "sweep", ["34_0", "34_1"], submitted=1.0, values=[{"lr": "1"}, {"lr": "2"}])
    fake_slurm.answers("squeue", "34_0|RUNNING|None|n1|0:30\n")
    assert status(tmp_path, "sweep/0001", environ=fake_slurm.environ, runs="runs").state == "unknown"
    folder = RunFolder(sweep / "0000")
    folders.write(folder.started, attempt=0, nodes=["n1"], job_id="34", submitted_as="34_0", node="n1", time=1.0)
    found = status(tmp_path, "sweep/0001", environ=fake_slurm.environ, runs="runs")
    assert (found.state, found.detail, found.quiet) == ("cancelled", "in the queue, before it started", True)


def test_an_element_is_cancelled_also_if_no_other_has_started(tmp_path: Path, fake_slurm: Any) -> None:
    """`scancel 34_1` while 34_0 waits, too: the list of the sweep asks Slurm for both."""
    folders.make_sweep(tmp_path / "runs", "sweep", ["34_0", "34_1"], submitted=1.0, values=[{"lr": "1"}, {"lr": "2"}])
    fake_slurm.answers("squeue", "34_0|PENDING|Priority||0:00\n")
    entries = find_all(tmp_path, ["sweep"], runs="runs")
    states = [state.state for state in read_states(entries, fake_slurm.environ)]
    assert states == ["pending", "cancelled"]


def test_one_that_started_and_is_unknown_to_slurm_was_not_cancelled(tmp_path: Path, fake_slurm: Any) -> None:
    runs = tmp_path / "runs"
    folders.make_sweep(runs, "sweep", ["34_0", "34_1"], submitted=1.0, values=[{"lr": "1"}, {"lr": "2"}])
    for number in ("0", "1"):
        folder = RunFolder(runs / "sweep" / f"000{number}")
        folders.write(folder.started, attempt=0, nodes=["n1"], job_id="34", submitted_as=f"34_{number}", time=1.0)
    fake_slurm.answers("squeue", "34_0|RUNNING|None|n1|0:30\n")
    assert status(tmp_path, "sweep/0001", environ=fake_slurm.environ, runs="runs").state == "unknown"


def test_munge_down_on_a_node_is_in_the_first_sentence(make: Make, tmp_path: Path, fake_slurm: Any) -> None:
    folder = make("a")
    said = f"{SRUN_GAVE_UP}: authentication failed, munged may be down there (srun: error: Zero Bytes)"
    finding = Finding(node="n2", field="facts", locked="reported", found=said, severity="must", result="unknown")
    nodes = (NodeVerdict(node="n1", result="match", compared=3), NodeVerdict(node="n2", result="unknown", compared=0))
    save_record(
        Verdict(
            schema=1,
            run="a",
            attempt=0,
            result="unknown",
            nodes=nodes,
            findings=(finding,),
            rendezvous=None,
            settings={},
        ),
        folder.verdict,
    )
    folders.write(folder.finished, status=91, time=1.0)
    fake_slurm.answers("squeue")
    fake_slurm.answers("sacct", "7|FAILED|91:0|n[1-2]|00:01:00\n")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, found.exit_status) == ("rejected", 91)
    assert f"n2, facts: {SRUN_GAVE_UP}: authentication failed, munged may be down there" in found.detail
    assert found.detail.count(SRUN_GAVE_UP) == 1


def test_ranks_that_joined_no_process_group_are_told(make: Make, tmp_path: Path, fake_slurm: Any) -> None:
    folder = make("a")
    manifest = folder.manifest.read_text().replace('"nproc_per_node": 1', '"nproc_per_node": 2')
    folder.manifest.write_text(manifest)
    fake_slurm.answers("squeue")
    fake_slurm.answers("sacct", "7|COMPLETED|0:0|n[1-2]|00:01:00\n")
    for node, alone in (("n1", True), ("n2", False)):
        ended = NodeExit(
            schema=1, run="a", node=node, attempt=0, status=0, signal="", started=0.0, ended=1.0, alone=alone
        )
        save_record(ended, folder.exit_of(node))
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, found.detail) == ("completed", "4 ranks, 0 joined a process group")


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
    folders.write(folder.finished, status=90, time=1.0)
    verdict(folder, "mismatch")
    fake_slurm.answers("squeue", "7|PENDING|BeginTime||0:00\n")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, found.exit_status, found.ended) == ("pending", None, False)


@pytest.mark.parametrize(
    ("code", "words"), [(90, "a node differs from the lockfile"), (91, "a node could not be checked in full")]
)
def test_the_gates_own_statuses_are_called_rejected(
    make: Make, tmp_path: Path, fake_slurm: Any, code: int, words: str
) -> None:
    folder = make("a")
    folders.write(folder.finished, status=code, time=1.0)
    verdict(folder, "mismatch" if code == 90 else "unknown")
    fake_slurm.answers("squeue", "7|FAILED|NonZeroExitCode|n1|0:01\n")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, found.exit_status, found.ended) == ("rejected", code, True)
    assert words in found.detail


def test_a_network_that_failed_its_check_is_no_difference_to_the_lockfile(
    make: Make, tmp_path: Path, fake_slurm: Any
) -> None:
    folder = make("a")
    folders.write(folder.finished, status=90, time=1.0)
    row = Finding(
        node="n1", field="net.reach", locked="", found="10.0.0.2: ENETUNREACH", result="mismatch", severity="must",
        owner="node",
    )  # fmt: skip
    nodes = (NodeVerdict(node="n1", result="mismatch", compared=3),)
    made = Verdict(
        schema=1, run="a", attempt=0, result="mismatch", nodes=nodes, findings=(row,), rendezvous=None, settings={}
    )
    save_record(made, folder.verdict)
    fake_slurm.answers("squeue", "7|FAILED|NonZeroExitCode|n1|0:01\n")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, found.detail) == (
        "rejected",
        "before training: a check failed: n1, net.reach: 10.0.0.2: ENETUNREACH",
    )


def test_a_script_that_ends_with_90_itself_is_not_called_rejected(make: Make, tmp_path: Path, fake_slurm: Any) -> None:
    folder = make("a")
    folders.write(folder.finished, status=90, time=1.0)
    verdict(folder, "match")
    fake_slurm.answers("squeue", "7|FAILED|NonZeroExitCode|n1|0:01\n")
    assert status(tmp_path, "a", environ=fake_slurm.environ, runs="runs").state == "failed"


@pytest.mark.parametrize(
    ("why", "state", "words"),
    [("time-limit", "timeout", "the time limit"), ("preemption", "preempted", "preempted"),
     ("unknown", "failed", "stop requested")],
)  # fmt: skip
def test_stopped_before_the_training_is_not_called_rejected(
    make: Make, tmp_path: Path, fake_slurm: Any, why: str, state: str, words: str
) -> None:
    folder = make("a")
    folders.write(folder.finished, status=91, time=1.0, stopped=why, before_training=True)
    fake_slurm.answers("squeue", "7|FAILED|NonZeroExitCode|n1|0:01\n")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, found.detail) == (state, f"stopped before the training started: {words}")
    assert found.failure is not None
    assert "before the training started" in found.failure.headline


def test_stopped_before_the_training_and_queued_again_says_so(make: Make, tmp_path: Path, fake_slurm: Any) -> None:
    folder = make("a")
    folders.write(folder.started, attempt=0, job_id="7", nodes=["n1"])
    folders.write(folder.finished, status=91, time=1.0, stopped="preemption", before_training=True, again=True)
    fake_slurm.answers("squeue", "7|PENDING|BeginTime||0:00\n")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, found.detail) == ("pending", "stopped before the training started: preempted; BeginTime")
    (folder.attempts / "0").mkdir(parents=True)
    for path in (folder.started, folder.finished):
        path.rename(folder.attempts / "0" / path.name)
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert found.earlier == ("attempt 0: stopped before the training started: preempted",)


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
    save_record(NodeExit(**record, ended=2.0, stopped=why, saved=True), folder.exit_of("n1"))
    end = {"stopped": why, "saved": True, "unfinished": True, "not_again": "--requeue never"}
    folders.write(folder.finished, status=143, time=1.0, **end)
    fake_slurm.answers("squeue", listed)
    fake_slurm.answers("sacct")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    told = f"{words} after it saved its state; not requeued (--requeue never)"
    assert (found.state, found.detail, exit_status_of(found), found.ended) == (state, told, 143, True)
    assert found.failure is not None
    assert found.failure.headline == told
    assert found.failure.notes == (f"to start again: hpcenv rerun {folder.path}",)
    # Recorded as going on, and Slurm did not queue it again: it has not completed either.
    folders.write(folder.finished, status=0, time=1.0, **{**end, "again": True})
    fake_slurm.answers("squeue", "7|COMPLETED|None|n1|0:01\n")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, exit_status_of(found), found.ended) == (state, 25, True)


@pytest.mark.parametrize("end", [
    {"status": 0, "stopped": "preemption", "saved": True, "unfinished": True},
    {"status": 91, "stopped": "preemption", "before_training": True}, {"status": 90},
])  # fmt: skip
@pytest.mark.parametrize("listed", ["7|CANCELLED|None||0:00\n", ""])
def test_cancelled_when_it_was_back_in_the_queue_says_nothing_of_the_attempt_before(
    make: Make, tmp_path: Path, fake_slurm: Any, end: dict[str, Any], listed: str
) -> None:
    folder = make("a")
    folders.write(folder.started, attempt=0, job_id="7", nodes=["n1"])
    folders.write(folder.finished, time=1.0, again=True, **end)
    verdict(folder, "mismatch" if end["status"] == 90 else "match")
    fake_slurm.answers("squeue", listed)
    fake_slurm.answers("sacct", listed and "7|CANCELLED by 1001|0:0|None assigned|00:00:00\n")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.exit_status, exit_status_of(found), found.quiet) == (None, 25, True)
    assert found.state == ("cancelled" if listed else "unknown")
    if listed:
        assert found.failure is not None
        assert found.failure.headline == "the job was cancelled, while it waited to continue"


@pytest.mark.parametrize(
    ("listed", "state"), [("COMPLETING", "completing"), ("CANCELLED", "cancelled"), ("FAILED", "rejected")]
)
def test_a_gate_that_could_not_tell_is_no_rejection_until_slurm_says_how_it_ended(
    make: Make, tmp_path: Path, fake_slurm: Any, listed: str, state: str
) -> None:
    """A job that is cancelled while it is checked may write such a verdict in its last second."""
    folder = make("a")
    folders.write(folder.finished, status=91, time=1.0)
    verdict(folder, "unknown")
    fake_slurm.answers("squeue", f"7|{listed}|None|n1|0:01\n")
    assert status(tmp_path, "a", environ=fake_slurm.environ, runs="runs").state == state


def test_cancelled_while_it_was_checked_and_forgotten_by_slurm(make: Make, tmp_path: Path, fake_slurm: Any) -> None:
    folders.write(make("a").finished, status=143, time=1.0, cancelled=True)
    fake_slurm.replays("squeue", "squeue-nosuch")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, found.exit_status) == ("cancelled", 143)


def test_damaged_records_of_the_job_do_not_hide_its_state(make: Make, tmp_path: Path, fake_slurm: Any) -> None:
    folder = make("a")
    folder.verdict.write_text("{")
    folders.write(folder.started, attempt="x", nodes=3)
    folder.finished.write_text("[]")
    folder.exits.mkdir()
    folder.exit_of("n1").write_text("")
    fake_slurm.answers("squeue", "7|RUNNING|None|n1|0:01\n")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, found.attempt, found.nodes, found.exits) == ("running", 0, ("n1",), ())
    assert "verdict.json` is not JSON" in found.detail


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
    folders.write(folder.finished, status=0, stopped="", saved=False, again=again)
    now = read_status(open_run(folder.path), fake_slurm.environ)
    assert (now.state, now.ended, now.quiet) == (state, False, False)
    assert now.detail.startswith("the batch script recorded status 0; ")
    assert "Unable to contact slurm controller" in now.detail


def test_a_job_that_a_line_of_setup_ended_says_which(make: Make, tmp_path: Path, fake_slurm: Any) -> None:
    folder = make("a")
    folders.write(folder.started, time=1.0)
    folders.write(folder.finished, status=94, stopped="", saved=False, again=False)
    fake_slurm.answers("squeue", "")
    fake_slurm.answers("sacct", "7|FAILED|94:0|n1|00:00:01\n")
    said = "error[setup-failed]: node n1: a line of `setup` ended with status 1: module load nosuch"
    folder.log.write_text(f"prolog\nerror of the module system\n{said}\nhint: ...\n")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert (found.state, found.detail, found.exit_status) == ("failed", said, 94)


def test_a_job_that_failed_before_its_first_step_says_why(make: Make, tmp_path: Path, fake_slurm: Any) -> None:
    folder = make("a")
    fake_slurm.answers("squeue", "")
    fake_slurm.answers("sacct", "7|FAILED|91:0|n1|00:00:01\n")
    said = f"error[run-folder-not-shared]: node n1 cannot read {folder.path}/code/step.py"
    folder.log.write_text(f"prolog\n{said}\nhint: ...\n")
    assert f"before its first step: {said}" in status(tmp_path, "a", environ=fake_slurm.environ, runs="runs").detail
