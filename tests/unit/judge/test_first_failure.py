"""The first failure in words: which of many it was, and who is to blame for the rest."""

import dataclasses

import pytest

from hpcenv.judge.first_failure import first_failure, first_status, render
from hpcenv.launch.rank_errors import count_oom_kills, oom_since
from hpcenv.records.outcome import NodeExit, RankExit

LOST = "RuntimeError: Connection closed by peer [10.0.0.1]:1"


def rank(number, status=1, ended=100.0, **changes):
    base = RankExit(rank=number, local_rank=number % 2, pid=1, status=status, ended=ended)
    return dataclasses.replace(base, **changes)


def raised(number, message, ended=100.0, **changes):
    traceback = f"Traceback (most recent call last):\n{message}"
    return rank(number, ended=ended, message=message, traceback=traceback, source="stderr", **changes)


def node(name, *ranks, status=None, ended=103.0, **changes):
    status = (ranks[0].status if ranks else 0) if status is None else status
    base = NodeExit(schema=1, run="r1", node=name, attempt=0, status=status, signal="", started=0.0, ended=ended)
    return dataclasses.replace(base, ranks=ranks, **changes)


def told(*exits, state="failed", nodes=("n1", "n2"), **changes):
    found = first_failure(exits, nodes=nodes, nproc=2, state=state, **changes)
    return None if found is None else found.headline


# -- which one ----------------------------------------------------------------------------


def test_the_rank_that_ended_first_of_all_nodes():
    n1 = node(
        "n1",
        raised(0, LOST, 100.2),
        rank(1, 143, 100.4, signal="SIGTERM"),
        status=143,
        asked_to_end="SIGTERM",
        asked_at=103.0,
    )
    n2 = node("n2", rank(3, 7), rank(2, 143, 100.1, signal="SIGTERM"))
    assert told(n1, n2) == "node n2, rank 3, exit 7; 3 others were cleaned up"
    assert first_status([n1, n2]) == 7


def test_a_lost_peer_is_never_the_first_of_failures_close_to_each_other():
    # The clock of n2 is late by 0.3 s.
    n1, n2 = node("n1", raised(0, LOST, 100.0)), node("n2", raised(3, "ValueError: nan", 100.3))
    assert told(n1, n2).startswith("node n2, rank 3, exit 1, ValueError: nan; ")


def test_a_lost_peer_that_nobody_else_explains_is_told():
    n1, n2 = node("n1", raised(0, LOST)), node("n2", raised(3, LOST, 100.5))
    assert told(n1, n2).startswith("node n1, rank 0, exit 1, RuntimeError: Connection closed by peer")
    # Nor is one explained by what happens long after it.
    n2 = node("n2", raised(3, "KeyError: 1", 160.0))
    assert told(n1, n2).startswith("node n1, rank 0")


def test_an_abort_while_python_ends_is_told_as_what_it_is():
    at_exit = "terminate called without an active exception"
    aborted = rank(0, 134, signal="SIGABRT", message=at_exit, source="stderr")
    told_first = first_failure((node("n1", aborted),), nodes=("n1",), nproc=1)
    assert told_first is not None and told_first.headline == "node n1, rank 0, SIGABRT"
    assert "while Python ends" in told_first.notes[0] and "destroy_process_group()" in told_first.notes[0]
    thrown = dataclasses.replace(aborted, message="what():  a C++ exception")
    other = first_failure((node("n1", thrown),), nodes=("n1",), nproc=1)
    assert other is not None and other.notes == ()


def test_a_full_disk_is_named_before_what_failed_of_it():
    full = "0 bytes are free on the file system of /runs/a"
    n1 = node("n1", raised(0, "OSError: No space left on device"), full=full)
    n2 = node("n2", raised(3, LOST, 100.2))
    headline = told(n1, n2)
    assert headline.startswith(f"the disk of the run folder is full: {full}; then node n1, rank 0, exit 1, OSError")
    assert first_status([n1, n2]) == 1
    assert told(node("n1", full=full), state="completed", nodes=("n1",)) is None


def test_who_failed_before_it_was_asked_to_end_counts():
    n1 = node("n1", rank(0, 139, 100.0, signal="SIGSEGV"), status=143, asked_to_end="SIGTERM", asked_at=102.0)
    n2 = node("n2", raised(3, LOST, 100.1))
    assert told(n1, n2) == "node n1, rank 0, SIGSEGV; 1 other was cleaned up"
    assert first_status([n1, n2]) == 139


def test_who_was_asked_to_end_has_not_failed():
    asked = {"asked_to_end": "SIGTERM", "asked_at": 100.0}
    n1 = node("n1", rank(0, 143, 100.1, signal="SIGTERM"), **asked)
    # Under proctrack/linuxproc a rank gets the signal before the launch step does.
    n2 = node("n2", rank(2, 143, 99.9, signal="SIGTERM"), **asked)
    assert told(n1, n2, state="cancelled") == "the job was cancelled; 2 ranks were cleaned up"
    assert first_status([n1, n2]) is None
    assert told(n1, n2, state="") == "node n1 was asked to end by SIGTERM"


def test_what_fails_because_slurm_ends_the_job_is_not_the_reason():
    n1 = node("n1", raised(0, LOST, 99.95))
    n2 = node("n2", rank(2, 143, 100.2), asked_to_end="SIGTERM", asked_at=100.0)
    assert told(n1, n2, state="timeout") == "the job reached its time limit; 2 ranks were cleaned up"
    # A minute before it, it is.
    n1 = node("n1", raised(0, "KeyError: 1", 40.0), ended=99.9)
    assert told(n1, n2, state="timeout").startswith("node n1, rank 0, exit 1, KeyError: 1")


@pytest.mark.parametrize(
    ("why", "words"), [("time-limit", "the job reached its time limit"), ("preemption", "the job was preempted")]
)
def test_a_job_that_was_asked_to_save_itself(why, words):
    exits = [node(name, rank(n, 143, signal="SIGTERM"), stopped=why) for n, name in enumerate(("n1", "n2"))]
    assert told(*exits, state="") == f"{words}; 2 ranks were cleaned up"
    saved = [node(name, stopped=why, saved=True) for name in ("n1", "n2")]
    assert told(*saved, state="") == f"{words}; the script saved its state"


def test_a_rank_that_fails_while_it_saves_is_told_beside_it():
    n1 = node("n1", raised(0, "OSError: disk full"), stopped="time-limit")
    found = first_failure([n1, node("n2")], nodes=("n1", "n2"), nproc=2, state="timeout")
    assert found.notes == ("node n1: rank 0 failed while stopping: OSError: disk full",)


# -- lack of memory, nodes, torchrun ------------------------------------------------------


@pytest.mark.parametrize(
    "step",
    [
        "system.slice/slurmstepd.scope/job_7/step_0",  # 24.11, and 26.05.2 with CgroupJobIdPaths=yes
        "system.slice/slurmstepd.scope/s5K1KKYAYG5D00/step_0",  # 26.05
    ],
)
def test_a_rank_that_lacks_memory_is_named_with_slurm_24_11_and_26_05(tmp_path, step):
    """From a recorded tree of cgroup v2, before the training and after it."""
    own, counts = f"0::/{step}/user/task_0\n", []
    (tmp_path / step).mkdir(parents=True)
    for killed in (0, 1):
        (tmp_path / step / "memory.events").write_text(f"low 0\nhigh 0\nmax 9\noom {killed}\noom_kill {killed}\n")
        counts.append(count_oom_kills(own, tmp_path))
    n2 = node("n2", rank(3, 137, signal="SIGKILL"), oom_kills=oom_since(*counts))
    assert told(node("n1"), n2) == "node n2, rank 3, SIGKILL for lack of memory"


def test_a_kill_for_lack_of_memory_is_named():
    n2 = node("n2", rank(3, 137, signal="SIGKILL"), oom_kills=1)
    found = first_failure([node("n1"), n2], nodes=("n1", "n2"), nproc=2, state="failed")
    assert (found.headline, found.cause) == ("node n2, rank 3, SIGKILL for lack of memory", "lack-of-memory")
    assert found.notes == ("node n2: the kernel killed 1 process of this job for lack of memory",)
    # Slurm knows it too, where nothing can be read on the node.
    assert "for lack of memory" in told(node("n1"), dataclasses.replace(n2, oom_kills=None), state="out-of-memory")
    assert told(node("n1"), dataclasses.replace(n2, oom_kills=None)) == "node n2, rank 3, SIGKILL"


def test_a_node_that_left_nothing_is_named_with_what_slurm_says():
    found = first_failure([node("n1", raised(0, LOST))], nodes=("n1", "n2"), nproc=2, state="node-fail")
    assert found.headline == "node failure: node n2 left no record; then rank 0 on node n1 lost its peer"
    assert (found.cause, found.node) == ("node-failure", "n2")
    found = first_failure([node("n1", raised(0, LOST))], nodes=("n1", "n2"), nproc=2, state="failed")
    assert found.headline.startswith("node n2 left no record of how the training ended; then rank 0 on node n1")


@pytest.mark.parametrize("state", ["timeout", "cancelled"])
def test_a_node_that_was_lost_goes_before_the_end_that_others_waited_for(state):
    """n2 loses power: srun waits for it until the time limit, or until somebody cancels the job."""
    says = "node n2 left no record of how the training ended; then rank 0 on node n1 lost its peer"
    assert told(node("n1", raised(0, LOST)), state=state) == says
    # Nothing failed before it: Slurm killed n2 before its record was written.
    asked = node("n1", rank(0, 143, signal="SIGTERM"), status=143, asked_to_end="SIGTERM", asked_at=99.9)
    assert told(asked, state="timeout").startswith("the job reached its time limit")


@pytest.mark.parametrize("silent", [(), ("n1",)])
@pytest.mark.parametrize("slurm", [{"state": "timeout"}, {"stopped": "time-limit"}])
def test_a_node_that_hangs_in_the_check_until_the_time_limit_is_named(silent, slurm):
    found = first_failure((), nodes=(), nproc=2, silent=silent, **slurm)
    if silent:
        assert found.headline.startswith("node n1 gave no facts, and others did, until the time limit")
        assert (found.cause, found.node) == ("no-facts", "n1")
    else:
        assert (found.headline, found.cause) == (
            "the job reached its time limit, before the training started",
            "time-limit",
        )


@pytest.mark.parametrize("other", [{"ended": 90.0, "status": 1}, {"status": 143, "asked_to_end": "SIGTERM"}])
@pytest.mark.parametrize("stopped", ["", "preemption"])
def test_a_node_that_refused_to_start_is_the_first_failure_whatever_others_recorded(other, stopped):
    refused = node("n2", status=90, ended=99.0, detail="the SIF changed on node n2", refused=True, stopped=stopped)
    exits = [node("n1", **other), refused]
    assert first_status(exits) == 90
    assert told(*exits, nodes=(), down={"n1": "Not responding"}) == "the SIF changed on node n2"


def test_a_missing_record_is_only_a_note_where_a_rank_says_what_was_wrong():
    found = first_failure([node("n1", raised(0, "KeyError: 1"))], nodes=("n1", "n2"), nproc=2, state="failed")
    assert found.headline.startswith("node n1, rank 0, exit 1, KeyError: 1")
    assert found.notes == ("node n2: no record of its end",)


def test_a_job_that_runs_is_not_said_to_miss_records():
    assert told(state="running", over=False) is None
    assert told(node("n1", rank(0, 7)), state="running", over=False) == "node n1, rank 0, exit 7"


def test_torchrun_that_failed_before_there_were_ranks():
    n1 = node("n1", status=1, detail="RendezvousTimeoutError: x")
    assert told(n1, node("n2")) == "node n1, torchrun ended with exit 1, RendezvousTimeoutError: x"


def test_what_kept_torchrun_from_being_started_is_not_said_to_be_torchruns_end():
    n1 = node("n1", status=91, detail="node n1 cannot read the secret `FOO`")
    assert told(n1, node("n2")) == "node n1 cannot read the secret `FOO`"


def test_whether_a_kill_was_for_lack_of_memory_may_not_be_known():
    killed = rank(3, 137, signal="SIGKILL")
    note = "node n2: could not read whether the kernel killed processes for lack of memory"

    def notes(**changes):
        found = first_failure([node("n1"), node("n2", killed, **changes)], nodes=("n1", "n2"), nproc=2, state="failed")
        return found.notes

    assert notes(oom_kills=None) == (note,)
    assert notes(oom_kills=0) == ()
    assert notes(oom_kills=None, stopped="preemption") == ()
    other = [node("n1"), node("n2", rank(3, 7), oom_kills=None)]
    assert first_failure(other, nodes=("n1", "n2"), nproc=2).notes == ()


@pytest.mark.parametrize(
    ("stopped", "cause", "words"),
    [
        ("time-limit", "time-limit", "the job reached its time limit, before the training started"),
        ("preemption", "preemption", "the job was preempted, before the training started"),
        ("unknown", "asked-to-end", "the job was asked to stop, before the training started"),
        (
            "idle",
            "idle",
            "hpcenv ended the job, because no GPU and no CPU was in use (--idle-end), before the training started",
        ),
    ],
)
def test_who_was_stopped_before_the_training_left_no_records_to_miss(stopped, cause, words):
    found = first_failure([], nodes=("n1", "n2"), nproc=2, stopped=stopped)
    assert (found.headline, found.cause) == (words, cause)


def test_a_status_that_torch_does_not_know():
    assert told(node("n1", rank(0, None), status=1), node("n2")) == "node n1, rank 0, exit status unknown"
    assert first_status([node("n1", rank(0, None), status=1)]) == 1


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("timeout", "the job reached its time limit, before the training started"),
        ("out-of-memory", "the job ran out of memory, says Slurm, before the training started"),
        ("failed", None),
        ("completed", None),
        ("no-such-word", None),
    ],
)
def test_before_the_training_only_slurm_has_something_to_say(state, words):
    assert told(state=state, nodes=()) == words


def test_a_training_that_ended_well_has_no_failure():
    assert told(node("n1"), node("n2"), state="completed") is None
    assert first_status([node("n1"), node("n2")]) is None


# -- words for people ---------------------------------------------------------------------


def test_the_words_of_the_issue():
    n2 = node("n2", raised(3, "RuntimeError: loss is nan", status=7, log="ranks/n2/x/attempt_0/1/stderr.log"))
    found = first_failure([node("n1", raised(0, LOST, 100.1)), n2], nodes=("n1", "n2"), nproc=2, state="failed")
    assert render(found).splitlines() == [
        "first failure: node n2, rank 3, exit 7, RuntimeError: loss is nan; 1 other was",
        "  cleaned up",
        "  Traceback (most recent call last):",
        "  RuntimeError: loss is nan",
        "  log: ranks/n2/x/attempt_0/1/stderr.log",
    ]


def test_a_last_line_is_shown_as_what_it_is():
    n1 = node("n1", rank(0, 1, message="no data here", source="stderr"))
    found = first_failure([n1], nodes=("n1",), nproc=2, state="failed")
    assert render(found) == "first failure: node n1, rank 0, exit 1\n  its standard error ends with: no data here"


def test_what_a_rank_says_cannot_steer_a_terminal_or_flood_it():
    evil = "\x1b]0;owned\x07\u202e\r" + "x" * 5000
    lines = "\n".join(["Traceback (most recent call last):", *[evil] * 500])
    n1 = node("n1\x1b[2J", rank(0, 1, message=evil, traceback=lines, log=evil), signal=evil, detail=evil)
    found = first_failure([n1], nodes=(n1.node, "n2\x1b"), nproc=2, state="failed")
    text = render(found)
    assert all(line.isprintable() for line in text.split("\n"))
    assert all(one.isprintable() for one in (found.headline, found.node, found.message, found.log, *found.notes))
    assert len(text) < 40 * 500 + 10000
    assert "Traceback" in text


def test_long_tracebacks_keep_their_beginning_and_their_end():
    lines = ["Traceback (most recent call last):", *[f"  frame {n}" for n in range(500)], "E: x"]
    n1 = node("n1", rank(0, 1, message="E: x", traceback="\n".join(lines), source="stderr"))
    shown = first_failure([n1], nodes=("n1",), nproc=2, state="failed").traceback.splitlines()
    assert (len(shown), shown[0], shown[1], shown[-1]) == (40, lines[0], "  ...", "E: x")


# -- nodes that Slurm has lost ------------------------------------------------------------

DOWN = {"n2": "Not responding"}


def test_a_node_that_slurm_lost_is_the_reason_whatever_it_recorded_itself():
    asked = node("n1", status=143, asked_to_end="SIGTERM", asked_at=100.0)
    late = node("n2", status=1, ended=130.0, detail="RendezvousConnectionError: The connection has failed")
    said = "node failure: node n2, says Slurm: Not responding; 2 others were cleaned up"
    assert told(asked, late, down=DOWN) == said
    assert told(asked, down=DOWN) == said
    assert told(node("n1", raised(0, LOST)), down=DOWN).startswith("node failure: node n2, says Slurm: Not responding")
    assert told(asked, late, down={"n9": "of another job"}).startswith("node n2, torchrun ended with exit 1")


def test_a_rank_that_failed_by_itself_is_the_reason_also_when_a_node_is_lost_later():
    failed = node("n1", raised(1, "ValueError: no data"))
    assert told(failed, down=DOWN).startswith("node n1, rank 1, exit 1, ValueError: no data")
