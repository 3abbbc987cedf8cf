"""An attempt that another one has overtaken, or that its node's network has cut off."""

import json
import os
import time

import pytest

from hpcenv.launch import current_attempt
from hpcenv.machine.this_node import ThisNode
from hpcenv.records.files import load_record, save_record
from hpcenv.records.outcome import NodeExit
from hpcenv.records.submission import Submission

PLACE = ThisNode(node="n1", nodes=("n1", "n2"), attempt=0, job_id="77")


def overtake(run):
    """Let another attempt begin."""
    assert run.step("begin", SLURM_RESTART_COUNT="1").returncode == 0


def test_a_run_is_ours_until_another_attempt_or_job_begins(run):
    assert current_attempt.is_current_attempt(run.folder, PLACE), "nothing says otherwise"
    assert run.step("begin").returncode == 0
    assert current_attempt.is_current_attempt(run.folder, PLACE)
    run.folder.started.write_text("{")
    assert current_attempt.is_current_attempt(run.folder, PLACE), "a damaged record takes nothing away"
    overtake(run)
    assert not current_attempt.is_current_attempt(run.folder, PLACE)


def test_what_an_overtaken_attempt_says_stays_out_of_the_records_of_the_next_one(run):
    assert run.step("begin").returncode == 0
    overtake(run)
    run.open_gate(attempt=1, rendezvous="77.1")
    for done in (run.step("task"), run.step("finish", "1")):
        assert "writes no record: a later attempt has begun" in done.stderr
    assert not run.folder.finished.exists()
    assert not list(run.folder.exits.iterdir())
    assert run.step("task", SLURM_RESTART_COUNT="1").returncode == 0
    assert load_record(NodeExit, run.folder.exit_of("n1")).attempt == 1


def ended(watch, *, seconds):
    deadline = time.monotonic() + seconds
    while not watch.ended and time.monotonic() < deadline:
        time.sleep(0.01)
    return watch.ended


def test_nobody_waits_for_a_node_once_the_batch_script_has_ended(run):
    assert run.step("begin").returncode == 0
    watch = current_attempt.AttemptWatch(run.folder, PLACE, pause=0.02)
    assert not ended(watch, seconds=0.3)
    run.folder.finished.write_text("{}")
    assert ended(watch, seconds=20)


def test_nobody_waits_for_a_node_once_another_attempt_has_begun(run):
    assert run.step("begin").returncode == 0
    watch = current_attempt.AttemptWatch(run.folder, PLACE, pause=0.02)
    overtake(run)
    assert ended(watch, seconds=20)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("n1|idle|none\nn2|down*|Not responding\nn2|down*|Not responding\n", {"n2": "Not responding"}),
        ("n1|mixed*|none\nn2|mixed|none\n", {"n1": ""}),
        ("n1|drained|bad disk\nn2|draining|x|y\nn3|down|not of this job\n", {}),
        ("n1|down|a|b\nn2\n\n", {"n1": "a|b"}),
    ],
)
def test_which_nodes_slurm_has_lost(said, found, tmp_path):
    (tmp_path / "said").write_text(said)
    (tmp_path / "sinfo").write_text(f"#!/bin/sh\ncat {tmp_path}/said\n")
    (tmp_path / "sinfo").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert current_attempt.down_nodes(("n1", "n2"), environ) == found


def test_a_slurm_that_does_not_answer_has_lost_no_node(tmp_path):
    (tmp_path / "sinfo").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "sinfo").chmod(0o755)
    assert current_attempt.down_nodes(("n1",), {"PATH": f"{tmp_path}:{os.environ['PATH']}"}) == {}
    assert current_attempt.down_nodes(("n1",), {"PATH": "/nonexistent"}) == {}


def test_the_end_of_an_attempt_records_which_node_was_lost(run_of_two, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "sinfo").write_text("#!/bin/sh\necho 'n2|down*|Not responding'\n")
    (tools / "sinfo").chmod(0o755)
    run, path = run_of_two, f"{tools}:{os.environ['PATH']}"
    assert run.step("begin").returncode == 0
    assert run.step("finish", "0", PATH=path).returncode == 0
    assert json.loads(run.folder.finished.read_text())["down"] == {}
    assert run.step("finish", "143", PATH=path).returncode == 0
    finished = json.loads(run.folder.finished.read_text())
    assert (finished["status"], finished["down"]) == (143, {"n2": "Not responding"})


# -- a submission without an answer -------------------------------------------------------


def test_a_job_that_nobody_recorded_records_itself_and_one_that_was_recorded_does_not(run):
    assert run.step("begin").returncode == 0
    recorded = load_record(Submission, run.folder.submission)
    assert (recorded.job_id, recorded.run, recorded.nodes, recorded.command) == ("77", "r1", 1, ())

    by_login_node = Submission(schema=1, run="r1", cluster="slurm", job_id="76", submitted=1.0, command=("hpcenv",))
    save_record(by_login_node, run.folder.submission)
    assert run.step("begin").returncode == 0
    assert load_record(Submission, run.folder.submission) == by_login_node


def test_an_element_of_an_array_is_recorded_by_its_own_number_and_a_link_of_a_chain_not_at_all(run):
    assert run.step("begin", SLURM_ARRAY_JOB_ID="70", SLURM_ARRAY_TASK_ID="7").returncode == 0
    assert load_record(Submission, run.folder.submission).job_id == "70_7"
    run.folder.submission.unlink()
    run.save(chain=3)
    assert run.step("begin").returncode == 0
    assert not run.folder.submission.exists()
