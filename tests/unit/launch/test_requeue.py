"""What comes after an attempt, and what a job that starts again finds."""

import dataclasses
import json

import pytest

from hpcenv.launch import previous_job, requeue
from hpcenv.machine.this_node import ThisNode
from hpcenv.records.codec import SCHEMA
from hpcenv.records.files import save_record, write_text
from hpcenv.records.manifest import StopOptions, WatchOptions
from hpcenv.records.outcome import NodeExit
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.submission import Submission
from hpcenv.records.verdict import NodeVerdict, Verdict


def record(node="n1", **words):
    values = {"schema": 1, "run": "r1", "attempt": 0, "status": 0, "signal": "", "started": 1.0, "ended": 2.0}
    return NodeExit(node=node, **{**values, **words})


def verdict(**results):
    nodes = tuple(NodeVerdict(node=node, result=result, compared=3) for node, result in results.items())
    return Verdict(
        schema=1, run="r1", attempt=0, result="mismatch", nodes=nodes, findings=(), rendezvous=None, settings={}
    )


@pytest.fixture
def judge(make_manifest):
    def judged(
        *exits,
        status=0,
        attempt=0,
        retried=0,
        next_link=False,
        verdict=None,
        retry_excluding=0,
        before="",
        chain=0,
        **options,
    ):
        manifest = dataclasses.replace(
            make_manifest(), stop=StopOptions(**options), retry_excluding=retry_excluding, chain=chain
        )
        return requeue.judge(
            *(manifest, exits, verdict),
            status=status,
            attempt=attempt,
            retried=retried,
            next_link=next_link,
            before=before,
        )

    return judged


STOPPED = {"stopped": "time-limit", "saved": True}


def test_what_ended_by_itself_is_not_queued_again(judge):
    assert judge(record()) == requeue.Ending()
    assert judge(record(status=7), status=7).again is False
    # It was cancelled, and saved itself on the way.
    assert judge(record(saved=True, asked_to_end="SIGTERM"), status=143).again is False


def test_stopped_and_saved_is_queued_again_whatever_its_status(judge):
    for status in (0, 1, 143):
        ending = judge(record(status=status, **STOPPED), record("n2", status=status), status=status)
        assert (ending.again, ending.stopped, ending.saved) == (True, "time-limit", True)


@pytest.mark.parametrize(
    ("requeues", "saved", "again"),
    [("saved", False, False), ("saved", True, True), ("always", False, True), ("never", True, False)],
)
def test_the_users_choice_counts(judge, requeues, saved, again):
    assert judge(record(stopped="preemption", saved=saved), requeue=requeues).again is again


@pytest.mark.parametrize(
    ("exits", "options", "not_again"),
    [
        (STOPPED, {"requeue": "never"}, "--requeue never"),
        (STOPPED, {"attempt": 20}, "max-requeues"),
        # Who knows only signals says nothing; the user did.
        ({"stopped": "preemption"}, {"requeue": "always", "attempt": 20}, "max-requeues"),
        # It may have come to its end by itself in that moment.
        ({"stopped": "time-limit"}, {"requeue": "never"}, ""),
        ({"stopped": "time-limit"}, {}, ""),
        (STOPPED, {}, ""),
        ({"saved": True}, {"requeue": "never"}, ""),
    ],
)
def test_a_training_that_has_more_to_do_and_is_not_gone_on_with_never_ends_with_0(judge, exits, options, not_again):
    ending = judge(record(**exits), **options)
    assert ending.not_again == not_again
    assert [ending.status(own) for own in (0, 3)] == [143 if not_again else 0, 3]
    if not_again:
        assert ending.why.endswith(f"the job is not requeued ({not_again})")


def test_one_that_was_told_to_end_by_hand_and_saved_itself_has_more_to_do(judge):
    """`scontrol requeue`: its script ends with 0, and the next start must go on with it."""
    ending = judge(record(saved=True, asked_to_end="SIGTERM"), record("n2", asked_to_end="SIGTERM"))
    assert (ending.stopped, ending.unfinished, ending.again, ending.status(0)) == ("", True, False, 143)
    # Who says nothing may have come to its end in that moment.
    assert judge(record(asked_to_end="SIGTERM")).status(0) == 0


def test_one_that_saved_itself_when_srun_ended_it_after_another_node_failed_was_not_told_to_end_by_hand(judge):
    ending = judge(record(saved=True, asked_to_end="SIGTERM", asked_at=3.0), record("n2", status=1), status=1)
    assert ending == requeue.Ending(saved=True)


def test_one_that_could_not_be_queued_again_has_not_ended_well_but_a_chain_goes_on(judge):
    ending = judge(record(**STOPPED))
    refused = requeue.after_refusal(ending, "scontrol says no", next_link=False)
    assert (refused.again, refused.not_again, refused.status(0)) == (False, "scontrol says no", 143)
    followed = requeue.after_refusal(ending, "scontrol says no", next_link=True)
    assert (followed.again, followed.not_again, followed.status(0)) == (False, "", 0)
    rejected = requeue.after_refusal(requeue.Ending(again=True, without=("n2",)), "no", next_link=True)
    assert (rejected.again, rejected.not_again, rejected.status(90)) == (False, "", 90)


def test_no_more_often_than_asked_for(judge):
    assert judge(record(**STOPPED), attempt=1, max_requeues=2).again is True
    last = judge(record(**STOPPED), attempt=2, max_requeues=2)
    assert last.again is False
    assert "(max-requeues)" in last.why


def test_one_node_that_knows_why_is_enough(judge):
    assert judge(record(stopped="unknown"), record("n2", **STOPPED)).stopped == "time-limit"
    assert judge(record(stopped="unknown")).stopped == "unknown"


def test_at_the_time_limit_the_next_job_of_a_chain_goes_on_and_after_a_preemption_the_same(judge):
    preempted = record(stopped="preemption", saved=True)
    assert judge(record(**STOPPED), next_link=True, chain=2).again is False
    assert judge(preempted, next_link=True, chain=2).again is True
    for ending in (
        judge(record(**STOPPED), next_link=True, chain=2, requeue="never"),
        judge(preempted, next_link=True, chain=2, requeue="never"),
        judge(preempted, next_link=True, chain=2, attempt=20),
    ):
        assert (ending.again, ending.not_again, ending.status(0)) == (False, "", 0)
        assert ending.why.endswith("the next job of the chain continues")


def test_a_chain_is_no_more_jobs_than_asked_for(judge):
    for requeues in ("saved", "always"):
        last = judge(record(**STOPPED), chain=2, requeue=requeues)
        assert (last.again, last.not_again, last.status(0)) == (False, "the last job of its chain", 143)
    assert judge(record(stopped="preemption", saved=True), chain=2).again is True
    assert judge(status=91, before="time-limit", requeue="always", chain=2).again is False


def test_after_a_rejection_the_nodes_that_differ_are_left_out(judge):
    found = verdict(n1="match", n2="mismatch", n3="unknown")
    ending = judge(status=90, verdict=found, retry_excluding=2, retried=1)
    assert (ending.again, ending.without) == (True, ("n2", "n3"))
    assert judge(status=90, verdict=found).again is False
    enough = judge(status=90, verdict=found, retry_excluding=2, retried=2)
    assert enough.again is False
    assert "(--retry-excluding)" in enough.why
    assert judge(status=91, verdict=None, retry_excluding=1).again is False


@pytest.mark.parametrize(
    ("before", "requeues", "again"),
    [
        ("preemption", "saved", True), ("unknown", "saved", True), ("time-limit", "saved", False),
        ("time-limit", "always", True), ("preemption", "never", False),
    ],
)  # fmt: skip
def test_stopped_before_the_training_nothing_was_lost_but_the_same_time_is_no_more(judge, before, requeues, again):
    ending = judge(status=91, before=before, requeue=requeues, retry_excluding=1)
    assert (ending.stopped, ending.before, ending.saved, ending.again, ending.without) == (
        *(before, True, False, again),
        (),
    )
    assert "before the training started" in ending.why
    last = judge(status=91, before=before, requeue="always", attempt=2, max_requeues=2)
    assert (last.again, "(max-requeues)" in last.why) == (False, True)


def test_a_chain_goes_on_after_a_time_limit_before_the_training(judge):
    ending = judge(status=91, before="time-limit", requeue="always", next_link=True)
    assert (ending.again, ending.stopped) == (False, "time-limit")
    assert "the next job of the chain continues" in ending.why


def test_cancelled_before_the_training_is_the_end(judge):
    found = verdict(n1="unknown")
    assert judge(status=143, before="cancelled", requeue="always") == requeue.Ending(cancelled=True)
    assert judge(status=91, before="cancelled", verdict=found, retry_excluding=1) == requeue.Ending(cancelled=True)


# -- acting -------------------------------------------------------------------------------

SCONTROL = """#!/bin/sh
echo "$@" >> {folder}/calls
case "$1 $2" in
  "show job") echo "JobId=77 JobState={state} Restarts={restarts} ExcNodeList={excluded}" ;;
  "show config") printf 'PreemptMode = REQUEUE\\nPreemptType             = preempt/{kind}\\n' ;;
  "show partition") echo "PartitionName=low PreemptMode={mode}" ;;
  requeue*) exit {status} ;;
esac
"""


@pytest.fixture
def scontrol(tmp_path):
    def make(**words):
        values = {"state": "RUNNING", "restarts": 0, "excluded": "(null)", "kind": "partition_prio", "mode": "REQUEUE"}
        text = SCONTROL.format(folder=tmp_path, **{**values, "status": 0, **words})
        (tmp_path / "scontrol").write_text(text)
        (tmp_path / "scontrol").chmod(0o755)
        return {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_PARTITION": "low"}

    return make


def calls(tmp_path):
    return [line for line in (tmp_path / "calls").read_text().splitlines() if not line.startswith("show")]


PLACE = ThisNode(node="n1", nodes=("n1", "n2"), attempt=0, job_id="77")


def test_a_job_is_queued_again(scontrol, tmp_path):
    assert requeue.queue_again(PLACE, scontrol(), without=()) == requeue.Queued(done=True)
    assert calls(tmp_path) == ["requeue 77"]


def test_without_nodes_and_without_those_that_were_left_out_before(scontrol, tmp_path):
    assert requeue.queue_again(PLACE, scontrol(excluded="n[7-8]"), without=("n1", "n2")).problem == ""
    assert calls(tmp_path) == ["requeue 77", "update JobId=77 ExcNodeList=n[7-8],n1,n2"]


def test_a_refusal_is_told_unless_slurm_was_first(scontrol):
    refused = requeue.queue_again(PLACE, scontrol(status=1), without=())
    assert (refused.done, "ended with status 1" in refused.problem) == (False, True)
    for first in ({"state": "PENDING"}, {"restarts": 1}):
        assert requeue.queue_again(PLACE, scontrol(status=1, **first), without=()) == requeue.Queued(done=True)
    nowhere = requeue.queue_again(PLACE, {"PATH": "/nowhere"}, without=())
    assert nowhere == requeue.Queued(done=False, problem="scontrol is not on PATH")


@pytest.mark.parametrize(
    ("words", "does"), [({}, True), ({"mode": "CANCEL"}, False), ({"mode": "OFF"}, False), ({"kind": "qos"}, False)]
)
def test_slurm_queues_a_preempted_job_again_where_it_says_so(scontrol, words, does):
    assert requeue.slurm_does_it(scontrol(**words)) is does


# -- what is found ------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "run")


def finished(run, *, attempt=None, **words):
    path = run.finished if attempt is None else run.attempts / str(attempt) / "finished.json"
    write_text(json.dumps({"schema": SCHEMA, "status": 0, "time": 1.0, **words}), path)


def look(make_manifest, run, *, chain=3, attempt=0):
    manifest = dataclasses.replace(make_manifest(), chain=chain)
    return previous_job.read_previous_job(manifest, run, attempt=attempt)


def test_a_chain_goes_on_until_the_run_is_over(make_manifest, run):
    assert look(make_manifest, run).over is False  # the first job, or a node failed
    finished(run, stopped="time-limit")
    assert look(make_manifest, run).over is False
    finished(run, status=0, stopped="")
    assert look(make_manifest, run) == previous_job.PreviousJob(
        over=True, why="the run has already completed: this job has nothing to do"
    )
    finished(run, status=7, stopped="")
    assert (look(make_manifest, run).over, look(make_manifest, run).status) == (True, 7)
    assert look(make_manifest, run, chain=0).over is False
    run.finished.write_text("[")
    assert look(make_manifest, run).over is False


def test_a_job_that_slurm_starts_once_more_after_it_completed_does_nothing(make_manifest, run):
    finished(run, attempt=0, stopped="preemption", again=True, by="scontrol")
    finished(run, status=0, stopped="", again=False)
    assert look(make_manifest, run, chain=0, attempt=2).over is True
    # Slurm repeats a requeue of its own too, when the script took long to end.
    for record in ({"stopped": "preemption", "again": True, "by": "slurm"}, {"status": 91, "stopped": ""}):
        finished(run, attempt=0, **record)
        assert look(make_manifest, run, chain=0, attempt=2).over is True
    finished(run, status=7, stopped="", again=False)
    assert look(make_manifest, run, chain=0, attempt=2).over is False


def test_who_is_the_last_job_of_a_chain(make_manifest, run):
    manifest = dataclasses.replace(make_manifest(), chain=2)
    assert requeue.has_next_link(run, manifest, "7") is False
    submission = Submission(
        schema=1, run="r1", cluster="slurm", job_id="7", submitted=1.0, command=("hpcenv",), chain=("7", "8")
    )
    save_record(submission, run.submission)
    assert [requeue.has_next_link(run, manifest, job) for job in ("7", "8", "9")] == [True, False, False]


def test_retries_are_counted_over_attempts(run):
    assert requeue.read_retries(run) == 0
    requeue.note_retry(run, PLACE, ("n2",))
    requeue.note_retry(run, PLACE, ("n3",))
    assert requeue.read_retries(run) == 2
    run.excluded.write_text('{"retries": "many"}')
    assert requeue.read_retries(run) == 0


@pytest.mark.parametrize(
    ("on_stall", "again", "not_again"),
    [("stop", False, "[watch] on-stall"), ("requeue", True, "")],
)
def test_ranks_that_hang_cannot_save_and_are_queued_again_only_where_asked_for(
    make_manifest, on_stall, again, not_again
):
    manifest = dataclasses.replace(make_manifest(), watch=WatchOptions(on_stall=on_stall))
    ending = requeue.judge(
        *(manifest, [record(status=137, stopped="hang")], None), status=137, attempt=0, retried=0, next_link=False
    )
    assert (ending.again, ending.not_again, ending.stopped) == (again, not_again, "hang")
    assert ending.why.startswith("the ranks hang: ")


def test_a_run_that_does_nothing_is_not_queued_again(make_manifest):
    manifest = dataclasses.replace(make_manifest(), stop=StopOptions(requeue="always"), watch=WatchOptions(idle_end=60))
    ending = requeue.judge(
        *(manifest, [record(status=0, stopped="idle")], None), status=0, attempt=0, retried=0, next_link=False
    )
    assert (ending.again, ending.not_again, ending.status(0)) == (False, "--idle-end", 143)
    assert ending.why == "no GPU and no CPU was in use: the job is not requeued (--idle-end)"
