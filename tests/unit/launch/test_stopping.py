"""What Slurm says about the end of a job, in its own words (`scontrol show job -o`, Slurm 24.11)."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest

from hpcenv.launch import stopping
from hpcenv.launch.stopping import JobEnd, Stop, parse_answer
from hpcenv.machine import job_cgroup
from hpcenv.machine.this_node import ThisNode
from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import StopOptions
from hpcenv.records.outcome import StopRequest

NOW = time.mktime(time.strptime("2026-11-20T16:01:31", "%Y-%m-%dT%H:%M:%S"))


def said(**words):
    values = {
        "JobId": "4", "JobName": "b1", "JobState": "RUNNING", "Reason": "None", "Requeue": "1", "Restarts": "0",
        "TimeLimit": "00:10:00", "StartTime": "2026-11-20T16:01:12", "EndTime": "2026-11-20T16:11:12",
        "PreemptEligibleTime": "2026-11-20T16:01:12", "PreemptTime": "None", "SuspendTime": "None",
    }  # fmt: skip
    return " ".join(f"{name}={value}" for name, value in {**values, **words}.items()) + "\n"


def answer(warned=True, grace=60, **words):
    return parse_answer(said(**words), warned=warned, grace=grace, now=NOW)


def test_a_preemption_is_told_by_its_time_and_ends_with_its_grace_time():
    words = {"PreemptTime": "2026-11-20T16:01:27", "EndTime": "2026-11-20T16:01:57"}
    for warned in (True, False):
        assert answer(warned=warned, **words) == JobEnd(reason="preemption", ends=NOW + 26)


def test_a_preemption_before_this_start_of_the_job_does_not_count():
    assert answer(PreemptTime="2026-11-20T16:00:00", EndTime="2026-11-20T16:02:00").reason == "time-limit"


@pytest.mark.parametrize(("left", "reason"), [(30, "time-limit"), (119, "time-limit"), (121, "unknown")])
def test_a_warning_near_the_end_is_of_the_time_limit(left, reason):
    ends = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(NOW + left))
    assert answer(EndTime=ends).reason == reason


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"JobState": "TIMEOUT"}, "time-limit"),
        ({"JobState": "COMPLETING", "Reason": "TimeLimit"}, "time-limit"),
        ({"JobState": "COMPLETING"}, "cancelled"),
        ({"JobState": "CANCELLED"}, "cancelled"),
        ({}, "unknown"),
        ({"EndTime": "Unknown"}, "unknown"),
        ({"EndTime": "9999-99-99T99:99:99"}, "unknown"),
    ],
)
def test_term_alone_is_what_the_state_says(words, reason):
    assert answer(warned=False, **words).reason == reason


def test_words_that_are_no_job_say_nothing():
    assert parse_answer("slurm_load_jobs error: Invalid job id specified", warned=True, grace=60, now=NOW) == JobEnd(
        reason="unknown"
    )


def fake_scontrol(folder, text):
    folder.mkdir(exist_ok=True)
    (folder / "scontrol").write_text(f"#!/bin/sh\ncat <<'X'\n{text}X\n")
    (folder / "scontrol").chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


@pytest.fixture
def make_stop(make_manifest, tmp_path):
    def make(environ, **options):
        manifest = dataclasses.replace(
            make_manifest(), run_folder=str(tmp_path / "run"), stop=StopOptions(**options), cluster="slurm"
        )
        return Stop(manifest, ThisNode(node="n1", nodes=("n1", "n2"), attempt=0, job_id="77"), environ)

    return make


def wait_for(condition):
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def request(tmp_path):
    return load_record(StopRequest, tmp_path / "run" / "stop" / "n1.json")


def test_a_warning_is_told_at_once_and_its_reason_when_slurm_has_answered(make_stop, tmp_path):
    later = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 20))
    stop = make_stop(fake_scontrol(tmp_path / "bin", "sleep 0.3\n" + said(EndTime=later)), signal="TERM", grace=30)
    assert (stop.stopped, stop.saved) == ("", False)
    stop.begin(stopping.WARNING)
    assert request(tmp_path).signal == "SIGUSR2"
    assert stop.attend() is True
    wait_for(lambda: stop.attend() and stop.answer is not None)
    assert (request(tmp_path).reason, stop.stopped) == ("time-limit", "time-limit")
    assert 15 < stop.ends - time.time() < 21
    assert stop.signal_for_ranks == signal.SIGTERM


def test_term_waits_for_the_answer_and_a_cancel_is_no_stop(make_stop, tmp_path):
    stop = make_stop(fake_scontrol(tmp_path / "bin", said(JobState="COMPLETING")))
    stop.begin(signal.SIGTERM)
    wait_for(stop.attend)
    assert (request(tmp_path).reason, stop.stopped) == ("cancelled", "")


def test_without_scontrol_a_warning_ends_after_the_grace_that_was_asked_for(make_stop, tmp_path):
    stop = make_stop({"PATH": str(tmp_path)}, grace=30)
    stop.begin(stopping.WARNING)
    wait_for(lambda: stop.attend() and stop.answer is not None)
    assert (stop.stopped, request(tmp_path).reason) == ("unknown", "unknown")
    assert 25 < stop.ends - time.time() <= 30


def test_a_folder_that_cannot_be_written_does_not_stop_the_stop(make_stop, tmp_path):
    stop = make_stop({"PATH": str(tmp_path)})
    (tmp_path / "run").write_text("a file")
    stop.begin(stopping.WARNING)
    wait_for(lambda: stop.attend() and stop.answer is not None)
    assert (stop.stopped, stop.saved) == ("unknown", False)


def test_what_serves_the_containers_files_ignores_what_ends_a_job(tmp_path):
    (tmp_path / "bin").mkdir()
    real = tmp_path / "bin" / "squashfuse_ll"
    real.write_text('#!/bin/sh\necho "$@"\nfor s in TERM USR2 HUP INT QUIT USR1; do kill -$s $$; done\necho lives\n')
    real.chmod(0o755)
    (tmp_path / "first").mkdir()
    first = stopping.fuse_that_outlives(tmp_path / "first", {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"})
    if first is None:
        pytest.skip("NOT CHECKED: this process is in a cgroup of Slurm, or nothing may be executed here")
    done = subprocess.run([f"{first}/squashfuse_ll", "-o", "a b"], capture_output=True, text=True, timeout=20)
    assert done.stdout == "-o a b\nlives\n"


def test_without_squashfuse_nothing_is_put_before_it(tmp_path):
    if not any(os.path.exists(f"{place}/squashfuse_ll") for place in ("/usr/local/bin", "/usr/bin", "/bin")):
        assert stopping.fuse_that_outlives(tmp_path, {"PATH": str(tmp_path)}) is None


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        ("0::/system.slice/slurmstepd.scope/job_7/step_1/user/task_0\n", True),
        ("0::/system.slice/slurmstepd.scope/s5K1KKYAYG5D00/step_0/user/task_0\n", True),
        ("7:freezer:/slurm_n1/uid_1000/job_7/step_0\n5:memory:/\n", True),
        ("5:memory:/slurm/uid_1000/job_7/step_0\n7:freezer:/\n", False),
        ("0::/user.slice/user-1000.slice/session-1.scope\n", False),
    ],
)
def test_slurm_follows_a_process_by_its_cgroup(text, follows):
    assert job_cgroup.is_followed(text) is follows


SUPERVISE = """
import dataclasses, os, signal, subprocess, sys
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest
from hpcenv.launch import processes, stopping, supervise
from hpcenv.machine.this_node import ThisNode
from pathlib import Path
manifest = load_record(Manifest, Path(sys.argv[1]))
stop = stopping.Stop(manifest, ThisNode(node="n1", nodes=("n1",), attempt=0, job_id="77"), dict(os.environ))
processes.adopt_orphans()
with supervise.caught_signals() as signals:
    child = subprocess.Popen(["sh", "-c", sys.argv[2]], start_new_session=True)
    status = supervise.supervise(child, signals, stop=stop)
processes.end_rest((), grace=0)
print(stop.stopped, stop.saved, status, flush=True)
"""

RANK = """
import os, signal, sys, time
told = open(sys.argv[1], "a", buffering=1)
def hear(number, _frame):
    told.write(signal.Signals(number).name + "\\n")
    if number == signal.SIGUSR1 and sys.argv[2] == "listens":
        open(os.path.join(sys.argv[3], "saved-n1"), "w").close()
        os._exit(0)
for number in (signal.SIGUSR1, signal.SIGTERM): signal.signal(number, hear)
told.write("ready\\n")
while True: time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("manner", "told", "ended"),
    [
        ("listens", ["ready", "SIGUSR1"], "unknown True 0"),
        ("deaf", ["ready", "SIGUSR1", "SIGTERM"], "unknown False 137"),
    ],
)
def test_ranks_are_asked_in_the_users_way_and_killed_when_the_grace_is_over(
    make_manifest, tmp_path, manner, told, ended
):
    manifest = dataclasses.replace(
        make_manifest(), run_folder=str(tmp_path), cluster="local", stop=StopOptions(signal="USR1", grace=5)
    )
    save_record(manifest, tmp_path / "manifest.json")
    (tmp_path / "rank.py").write_text(RANK)
    program = f"LOCAL_RANK=0 {sys.executable} {tmp_path}/rank.py {tmp_path}/told {manner} {tmp_path}/stop & wait $!"
    child = subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, str(tmp_path / "manifest.json"), program], stdout=subprocess.PIPE, text=True
    )
    wait_for(lambda: (tmp_path / "told").exists() and "ready" in (tmp_path / "told").read_text())
    child.send_signal(stopping.WARNING)
    out, _ = child.communicate(timeout=30)
    assert out.strip() == ended
    assert (tmp_path / "told").read_text().split() == told


# Slurm's answer: it comes after the ranks have ended.
SCONTROL = """#!/bin/sh
sleep 1
echo "JobId=77 JobState=RUNNING Reason=None PreemptTime=2026-11-23T22:00:05 StartTime=2026-11-23T22:00:00"
"""


@pytest.mark.parametrize(("cluster", "ended"), [("local", "unknown True 0"), ("slurm", "preemption True 0")])
@pytest.mark.parametrize("number", ["USR2", "TERM"])
def test_ranks_that_save_and_end_before_the_next_look_were_stopped(make_manifest, tmp_path, cluster, ended, number):
    """With proctrack/linuxproc they have Slurm's signal as early as the launch step."""
    manifest = dataclasses.replace(make_manifest(), run_folder=str(tmp_path), cluster=cluster)
    save_record(manifest, tmp_path / "manifest.json")
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    program = f"kill -{number} $PPID; mkdir -p {tmp_path}/stop; : > {tmp_path}/stop/saved-n1; exit 0"
    done = subprocess.run(
        [sys.executable, "-c", SUPERVISE, str(tmp_path / "manifest.json"), program],
        env={**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    # Without Slurm, TERM is a cancel.
    assert done.stdout.strip() == ("True 0" if (cluster, number) == ("local", "TERM") else ended), done.stderr
