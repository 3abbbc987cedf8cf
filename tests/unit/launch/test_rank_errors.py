"""How ranks ended: torchrun's record, torchelastic's error files, the end of standard error, cgroups."""

import json
import os

import pytest

from hpcenv.launch import rank_errors
from hpcenv.records.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    """The logs of local rank 1 on node n1, as torchrun lays them out."""
    path = tmp_path / "ranks" / "n1" / "77.0_ab12" / "attempt_0" / "1"
    path.mkdir(parents=True)
    return path


def row(**changes):
    return {"rank": 3, "local_rank": 1, "pid": 12, "status": 1, "ended": 100.5, "error_file": "/x"} | changes


def ranks_of(tmp_path, *rows, status=1, error=""):
    run = RunFolder(tmp_path)
    path = rank_errors.record_of(run, "n1")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema": 1, "status": status, "error": error, "ranks": list(rows)}))
    return rank_errors.read_ranks(run, "n1", status=status)


TRACEBACK = """\
Traceback (most recent call last):
  File "/job/train.py", line 3, in <module>
    main()
ValueError: bad batch 17
"""


# -- where the words come from ------------------------------------------------------------


def test_torchelastics_error_file_goes_first(tmp_path, folder):
    extra = {"py_callstack": TRACEBACK, "timestamp": "100"}
    (folder / "error.json").write_text(
        json.dumps({"message": {"message": "ValueError: bad batch 17", "extraInfo": extra}})
    )
    (folder / "stderr.log").write_text("Traceback (most recent call last):\nKeyError: 1\n")
    (found,) = ranks_of(tmp_path, row()).failed
    assert (found.rank, found.local_rank, found.pid, found.status, found.ended) == (3, 1, 12, 1, 100.5)
    assert (found.message, found.traceback, found.source) == (
        "ValueError: bad batch 17",
        TRACEBACK.strip(),
        "error-file",
    )
    assert found.log == "ranks/n1/77.0_ab12/attempt_0/1/stderr.log"


def test_without_one_the_last_traceback_of_standard_error_does(tmp_path, folder):
    (folder / "stderr.log").write_text(
        f"warning: x\nTraceback (most recent call last):\nKeyError: 1\n\n{TRACEBACK}bye\n\n"
    )
    (found,) = ranks_of(tmp_path, row()).failed
    assert (found.message, found.source) == ("ValueError: bad batch 17", "stderr")
    assert found.traceback == TRACEBACK + "bye"


def test_of_several_starts_of_the_ranks_the_last_one_counts(tmp_path, folder):
    (folder / "stderr.log").write_text("first\n")
    later = folder.parents[1] / "attempt_10" / "1"
    later.mkdir(parents=True)
    (folder.parents[1] / "attempt_9" / "1").mkdir(parents=True)
    (later / "stderr.log").write_text("last\n")
    (found,) = ranks_of(tmp_path, row()).failed
    assert (found.message, found.log) == ("last", "ranks/n1/77.0_ab12/attempt_10/1/stderr.log")


def test_the_name_of_a_signal(tmp_path, folder):
    found = ranks_of(tmp_path, row(status=137), row(rank=2, local_rank=0, status=139), status=137).failed
    assert [rank.signal for rank in found] == ["SIGKILL", "SIGSEGV"]
    # Nothing is known of rank 2: no folder.
    assert (found[1].log, found[1].message) == ("", "")


def test_a_launch_that_ended_well_has_nothing_to_tell(tmp_path):
    assert ranks_of(tmp_path, row(), status=0) == rank_errors.Ranks()


def test_what_torchrun_itself_failed_of(tmp_path):
    assert ranks_of(tmp_path, error="RendezvousTimeoutError: \n x").detail == "RendezvousTimeoutError: x"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{", '{"ranks": 3}', '{"ranks": [3, null, []]}', "[" * 100000, '{"error": ["x"], "ranks": {}}'],
)
def test_a_record_that_is_none_tells_nothing(tmp_path, text):
    path = rank_errors.record_of(RunFolder(tmp_path), "n1")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert rank_errors.read_ranks(RunFolder(tmp_path), "n1", status=1).failed == ()


def test_wrong_values_in_a_record_are_unknown(tmp_path):
    (found,) = ranks_of(tmp_path, row(rank="3", local_rank=True, pid=None, status="7", ended="now")).failed
    assert (found.rank, found.local_rank, found.pid, found.status, found.ended) == (-1, -1, -1, None, None)


@pytest.mark.parametrize("make", [lambda p: p.mkdir(), os.mkfifo, lambda p: p.symlink_to("/nowhere")])
def test_what_is_no_file_is_not_waited_for(tmp_path, folder, make):
    make(folder / "stderr.log")
    make(folder / "error.json")
    (found,) = ranks_of(tmp_path, row()).failed
    assert (found.message, found.traceback, found.source) == ("", "", "")


@pytest.mark.parametrize(
    "data",
    [
        "[]",
        "7",
        '{"message": 7}',
        '{"message": {"message": ["x"], "extraInfo": {"py_callstack": 7}}}',
        '{"message": {}}',
    ],
)
def test_an_error_file_of_another_shape_is_as_good_as_none(tmp_path, folder, data):
    (folder / "error.json").write_text(data)
    (folder / "stderr.log").write_text("last words\n")
    (found,) = ranks_of(tmp_path, row()).failed
    assert (found.message, found.source) == ("last words", "stderr")


def test_long_texts_are_cut(tmp_path, folder):
    (folder / "stderr.log").write_text(f"Traceback (most recent call last):\n{'  at x' * 20000}\nE: {'m' * 20000}\n")
    (found,) = ranks_of(tmp_path, row()).failed
    assert len(found.message) == 500
    assert len(found.traceback) == 16 * 1024


# -- standard error -----------------------------------------------------------------------


def test_torchs_prefix_is_taken_away_and_ends_the_traceback():
    lines = "".join(f"[rank3]: {line}\n" for line in [*TRACEBACK.splitlines(), "hint one", "hint two"])
    message, traceback = rank_errors.from_stderr(f"x\n{lines}Exception ignored in: y\n", status=1)
    assert message == "ValueError: bad batch 17"
    assert traceback == f"{TRACEBACK}hint one\nhint two"


def test_the_words_of_sys_exit_are_the_last_line():
    notice = "[W1120 16:26:23.224185877 socket.cpp:207] [c10d] The hostname cannot be retrieved. err=-3\n"
    assert rank_errors.from_stderr(f"loading\nno data here\n\n{notice}", status=1) == ("no data here", "")
    assert rank_errors.from_stderr(notice, status=7) == ("", "")


def test_a_traceback_that_was_survived_is_not_the_reason():
    text = TRACEBACK + "".join(f"step {n}\n" for n in range(40))
    assert rank_errors.from_stderr(text, status=7) == ("step 39", "")
    # After an exception Python ends with 1, whatever other threads write then.
    assert rank_errors.from_stderr(text, status=1)[0] == "ValueError: bad batch 17"


def test_a_script_that_shows_its_traceback_and_ends_with_a_status_of_its_own():
    assert rank_errors.from_stderr(TRACEBACK, status=7) == ("ValueError: bad batch 17", TRACEBACK.strip())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Fatal Python error: Segmentation fault\n\nCurrent thread\n", "Fatal Python error: Segmentation fault"),
        ("terminate called after throwing an instance of 'c10::Error'\n  what():  bad\n", "what(): bad"),
        ("a warning of long ago\n", ""),
    ],
)
def test_of_a_signal_only_the_words_of_who_died_count(text, message):
    assert rank_errors.from_stderr(text, status=134) == (message, "")


# -- cgroups ------------------------------------------------------------------------------


# Recorded names: Slurm 22.05 to 25.11; 26.05; 26.05.2 with CgroupJobIdPaths=yes; built with --enable-multiple-slurmd.
STEPS = (
    "system.slice/slurmstepd.scope/job_7/step_1",
    "system.slice/slurmstepd.scope/s5K1KKYAYG5D00/step_0",
    "system.slice/slurmstepd.scope/job_7/step_batch",
    "system.slice/n1_slurmstepd.scope/sEX9M8H6JEHJ00/step_0",
)


@pytest.mark.parametrize("name", STEPS)
def test_kills_are_counted_in_the_cgroup_of_the_step_version_2(tmp_path, name):
    step = tmp_path / name
    step.mkdir(parents=True)
    (step / "memory.events").write_text("low 0\nhigh 0\nmax 41\noom 3\noom_kill 2\noom_group_kill 0\n")
    own = f"0::/{name}/user/task_0\n"
    assert rank_errors.count_oom_kills(own, tmp_path) == 2


def test_kills_are_counted_in_the_cgroups_of_the_step_version_1(tmp_path):
    step = tmp_path / "memory/slurm/uid_1000/job_7/step_1"
    (step / "task_0").mkdir(parents=True)
    (step / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    (step / "task_0" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    own = "12:cpuset:/\n5:memory:/slurm/uid_1000/job_7/step_1/task_0\n"
    assert rank_errors.count_oom_kills(own, tmp_path) == 3


@pytest.mark.parametrize(
    "own",
    [
        "",
        "0::/\n",
        "0::/user.slice/session-1.scope\n",
        "5:memory:/\n",
        "nonsense",
        "0::/job_7/step_1\n",
        "0::/s5K1KKYAYG5DIL/step_0\n",
        "0::/system.slice/s5K1KKYAYG5D00/x\n",
    ],
)
def test_outside_of_a_jobs_own_cgroup_nobody_can_tell(tmp_path, own):
    assert rank_errors.count_oom_kills(own, tmp_path) is None


def test_unknown_before_or_after_is_unknown():
    assert [rank_errors.oom_since(None, 1), rank_errors.oom_since(1, None), rank_errors.oom_since(1, 3)] == [
        None,
        None,
        2,
    ]
