"""Jobs that must end before their training does: preempted, at the time limit, asked by hand."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from .conftest import HOST_PYTHON, Cluster, Project

pytestmark = pytest.mark.cluster

SHAPE = ("--nodes", "2", "--gpus", "0", "--nproc", "1", "--time", "10")
# A node has 16 CPUs, and a job gets one of them where it says nothing: two of these do not fit beside each other.
MOST_CPUS = 10
# The number of threads decides how sums are rounded. Slurm looks at time limits twice a minute: long enough for that.
TRAIN = ("--env", "OMP_NUM_THREADS=1", "--", "--steps", "50", "--log-every", "10", "--sleep-per-step", "0.8")


def wait_until(what: str, condition: Callable[[], bool], *, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.5)


def log(project: Project, run: str) -> str:
    return project.cluster.run("cat", f"{project.folder}/runs/{run}/job.log").stdout


def is_there(project: Project, run: str, name: str) -> bool:
    return project.cluster.run("test", "-e", f"{project.folder}/runs/{run}/{name}").status == 0


def wait_for_line(project: Project, run: str, text: str) -> None:
    wait_until(f"{text!r} in the log of {run}", lambda: text in log(project, run))


def submit(project: Project, script: str, run: str, *words: str) -> str:
    project.must("submit", script, *SHAPE, "--name", run, *words)
    return str(project.record(run, "submission.json")["job_id"])


def needs_most_cpus(cluster: Cluster) -> None:
    """Let a job of higher priority come, which needs what only the preempted one has."""
    shape = ("--nodes=2", "--ntasks-per-node=1", f"--cpus-per-task={MOST_CPUS}")
    cluster.must("sbatch", "--partition=high", *shape, "--output=/dev/null", "--wrap=sleep 1")


def end_in(cluster: Cluster, job: str, seconds: int) -> None:
    """Bring the time limit near: Slurm's own unit, for `--time`, is the minute."""
    cluster.must("scontrol", "update", f"JobId={job}", f"EndTime=now+{seconds}seconds")


def left_on(cluster: Cluster, word: str) -> str:
    """Processes on the nodes whose command line has `word`."""
    find = "for p in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $p 2>/dev/null | grep -F -- \"$1\"; done; true"
    return "".join(
        line
        for node in ("n1", "n2")
        for line in cluster.must("sh", "-c", find, "sh", word, node=node, user="root").splitlines()
        if "for p in" not in line and "grep" not in line
    )


def test_preempted_and_at_the_time_limit_both_end_with_the_loss_of_an_undisturbed_run(
    sif_project: Project, cluster: Cluster
) -> None:
    name = uuid.uuid4().hex[:6]
    still, preempted, limited = (f"{word}-{name}" for word in ("still", "preempted", "limited"))
    submit(sif_project, "examples/train.py", still, *TRAIN)
    submit(sif_project, "examples/train.py", preempted, "--cpus", str(MOST_CPUS), "--partition", "low-grace", *TRAIN)
    job = submit(sif_project, "examples/train.py", limited, "--grace", "60", *TRAIN)

    wait_for_line(sif_project, limited, "] step 10 ")
    end_in(cluster, job, 65)
    wait_for_line(sif_project, preempted, "] step 10 ")
    needs_most_cpus(cluster)
    wait_until("end of the first attempt", lambda: is_there(sif_project, limited, "finished.json"))
    # The second attempt has its whole time. Slurm looks at time limits twice a minute, so now is early enough.
    cluster.must("scontrol", "update", f"JobId={job}", "TimeLimit=10", user="root")
    for run in (still, preempted, limited):
        wait_for_line(sif_project, run, "final loss")
        wait_until(f"end of {run}", lambda run=run: is_there(sif_project, run, "finished.json"))

    losses = {run: re.findall(r"final loss .*", log(sif_project, run)) for run in (still, preempted, limited)}
    assert losses[preempted] == losses[limited] == losses[still] != []
    assert not is_there(sif_project, still, "attempts")
    for run, reason in ((preempted, "preemption"), (limited, "time-limit")):
        text = log(sif_project, run)
        assert re.search(r"resumed after step \d+", text), text
        before = sif_project.record(run, "attempts/0/finished.json")
        assert (before["stopped"], before["saved"], before["again"]) == (reason, True, True)
        assert before["status"] == 0
        for node in ("n1", "n2"):
            record = sif_project.record(run, f"attempts/0/exits/{node}.json")
            assert (record["stopped"], record["status"]) == (reason, 0)
            assert sif_project.record(run, f"attempts/0/stop/{node}.json")["reason"] == reason
        # Verified again, and that is what the second attempt ran on.
        assert sif_project.record(run, "attempts/0/verdict.json")["attempt"] == 0
        verdict = sif_project.record(run, "verdict.json")
        assert verdict["result"] == "match"
        assert verdict["attempt"] == 1
        assert sif_project.record(run, "finished.json")["stopped"] == ""


DEAF = """\
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
print("began", flush=True)
while True:
    time.sleep(1)
"""

BY_SIGNAL = """\
import os, signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
print("began, attempt", os.environ["HPCENV_ATTEMPT"], flush=True)
while not asked:
    time.sleep(0.1)
print("saved by itself", flush=True)
sys.exit(3)
"""


@pytest.mark.long
def test_who_does_not_listen_is_killed_and_who_knows_only_signals_is_queued_again(
    host_project: Project, cluster: Cluster
) -> None:
    name = uuid.uuid4().hex[:6]
    deaf, by_signal = f"deaf-{name}", f"by-signal-{name}"
    cluster.write(f"{host_project.folder}/{deaf}.py", DEAF)
    cluster.write(f"{host_project.folder}/{by_signal}.py", BY_SIGNAL)
    first = submit(
        host_project, f"{deaf}.py", deaf, "--cpus", str(MOST_CPUS), "--partition", "low", "--requeue", "never"
    )
    always = ("--requeue", "always", "--stop-signal", "TERM")
    spec = cluster.must("cat", f"{host_project.folder}/hpcenv.toml")
    cluster.write(f"{host_project.folder}/hpcenv.toml", f"{spec}[submit]\nmax-requeues = 1\n")
    second = submit(host_project, f"{by_signal}.py", by_signal, *always)
    cluster.write(f"{host_project.folder}/hpcenv.toml", spec)

    wait_for_line(host_project, by_signal, "began, attempt 0")
    cluster.must("scancel", "--signal=USR2", second)
    wait_for_line(host_project, deaf, "began")
    needs_most_cpus(cluster)

    # GraceTime of `low` is 10 s; then it is gone from all nodes, and nothing of it is left.
    wait_until("the end of the deaf job", lambda: is_there(host_project, deaf, "finished.json"), seconds=60)
    wait_until("Slurm's end of it", lambda: first not in cluster.run("squeue", "-h", "-o", "%i").stdout.split())
    assert left_on(cluster, deaf) == ""
    assert host_project.record(deaf, "finished.json")["stopped"] == "preemption"
    assert host_project.record(deaf, "exits/n1.json")["stopped"] == "preemption"
    assert not is_there(host_project, deaf, "attempts")

    # The second attempt is asked too: once more is one more than max-requeues.
    wait_for_line(host_project, by_signal, "began, attempt 1")
    cluster.must("scancel", "--signal=USR2", second)
    wait_until("its end", lambda: second not in cluster.run("squeue", "-h", "-o", "%i").stdout.split())
    text = log(host_project, by_signal)
    assert text.count("saved by itself") == 4, text
    assert "the job is requeued" in text
    assert "(max-requeues)" in text
    before = host_project.record(by_signal, "attempts/0/finished.json")
    assert (before["stopped"], before["saved"], before["again"], before["status"]) == ("unknown", False, True, 3)
    finished = host_project.record(by_signal, "finished.json")
    assert (finished["stopped"], finished["again"], finished["status"]) == ("unknown", False, 3)


SAVER = """\
import time
from hpcenv import training
print("began", flush=True)
while not training.stop_requested():
    time.sleep(0.1)
training.saved()
"""


def test_who_saved_itself_and_is_not_gone_on_with_has_not_completed(host_project: Project, cluster: Cluster) -> None:
    name = uuid.uuid4().hex[:6]
    never, waits = f"never-{name}", f"waits-{name}"
    cluster.write(f"{host_project.folder}/saver.py", SAVER)
    first = submit(host_project, "saver.py", never, "--requeue", "never")
    second = submit(host_project, "saver.py", waits)
    after = cluster.must("sbatch", "--parsable", f"--dependency=afterok:{first}", "--output=/dev/null", "--wrap=true")
    for run, job in ((never, first), (waits, second)):
        wait_for_line(host_project, run, "began")
        cluster.must("scancel", "--signal=USR2", job)

    done = host_project.hpcenv("wait", never, timeout=60)
    words = "stopped after it saved its state; not requeued (--requeue never)"
    assert (done.status, done.stdout.startswith(f"first failure: {words}\n")) == (143, True), done.text
    state = " ".join(host_project.must("status", never).split())
    assert f"{never}: failed ({words}; 2 ranks, 0 joined a process group), exit status 143" in state
    # What follows does not go on with half a model.
    assert "DependencyNeverSatisfied" in cluster.must("squeue", "-h", "-o", "%r", "-j", after.strip())
    cluster.must("scancel", after.strip())

    # Cancelled in the queue, where it is for the second time: its first attempt's 0 says nothing of that.
    wait_until("its requeue", lambda: "PENDING" in cluster.run("squeue", "-h", "-o", "%T", "-j", second).stdout)
    assert "cancelled" in host_project.must("cancel", waits)
    done = host_project.hpcenv("wait", waits, timeout=60)
    assert (done.status, "the job was cancelled, while it waited to continue" in done.text) == (25, True), done.text


@pytest.mark.long
def test_a_chain_waits_for_its_next_job_and_is_no_longer_than_asked_for(
    host_project: Project, cluster: Cluster
) -> None:
    run = f"links-{uuid.uuid4().hex[:6]}"
    cluster.write(f"{host_project.folder}/saver.py", SAVER)
    first = submit(host_project, "saver.py", run, "--grace", "10", "--chain", "2")
    second = host_project.record(run, "submission.json")["chain"][1]
    cluster.must("scontrol", "hold", second, user="root")
    wait_for_line(host_project, run, "began")
    end_in(cluster, first, 30)
    wait_until("end of the first job", lambda: is_there(host_project, run, "finished.json"), seconds=120)
    wait_until("Slurm's end of it", lambda: first not in cluster.run("squeue", "-h", "-o", "%i").stdout.split())
    assert host_project.hpcenv("wait", run, "--timeout", "3s").status == 124
    assert host_project.must("status", run).startswith(f"{run}: pending")
    assert "it is pending" in host_project.hpcenv("clean", run, "--dry-run").text

    cluster.must("scontrol", "release", second, user="root")
    wait_until("its second job", lambda: log(host_project, run).count("began") == 4)
    end_in(cluster, second, 30)
    done = host_project.hpcenv("wait", run, timeout=150)
    words = "stopped at the time limit after it saved its state; not requeued (the last job of its chain)"
    assert (done.status, words in " ".join(done.stdout.split())) == (143, True), done.text
    assert f"{run}: timeout" in host_project.must("status", run)


# -- while the nodes are checked ----------------------------------------------------------

# The environment's Python: its check lasts as long as the file `hold` is there.
SLOW_PYTHON = f"""\
#!/bin/sh
while [ -e "${{0%/*}}/hold" ]; do sleep 0.1; done
exec {HOST_PYTHON} "$@"
"""


@pytest.fixture(scope="module")
def slow_project(cluster: Cluster) -> Project:
    """A project whose nodes are checked until somebody removes the file `hold`."""
    folder = f"/home/alice/hpcenv-tests/slow-{uuid.uuid4().hex[:6]}"
    cluster.write(f"{folder}/slow", SLOW_PYTHON)
    cluster.must("chmod", "+x", f"{folder}/slow")
    cluster.write(f"{folder}/ok.py", 'print("it trains", flush=True)\n')
    cluster.write(f"{folder}/hpcenv.toml", f'image = "host"\npython = "{folder}/slow"\n')
    project = Project(cluster, folder)
    project.must("lock", timeout=600)
    return project


@pytest.fixture
def held(slow_project: Project) -> Iterator[Callable[[], object]]:
    """Hold all checks of `slow_project` until the value is called."""
    hold = f"{slow_project.folder}/hold"
    slow_project.cluster.must("touch", hold)
    yield lambda: slow_project.cluster.must("rm", hold)
    slow_project.cluster.run("rm", "-f", hold)


def wait_for_check(project: Project, run: str, job: str) -> None:
    """Wait until the check has begun on both nodes; one that does not listen yet ends with the same status."""
    done = f"{project.folder}/runs/{run}/started.json"
    wait_until(f"start of {run}", lambda: project.cluster.run("test", "-e", done).status == 0)
    find = 'pgrep -u alice -f -- "$1" >/dev/null'
    for node in ("n1", "n2"):
        wait_until(
            f"check of {run} on {node}",
            lambda node=node: (
                project.cluster.run("sh", "-c", find, "sh", f"step.py check .*/{run}$", node=node, user="root").status
                == 0
            ),
        )


def wait_for_end(project: Project, run: str, *, seconds: float = 30) -> dict:
    wait_until(f"end of {run}", lambda: is_there(project, run, "finished.json"), seconds=seconds)
    return project.record(run, "finished.json")


def test_asked_to_stop_or_cancelled_while_the_nodes_are_checked(
    slow_project: Project, held: Callable[[], object], cluster: Cluster
) -> None:
    name = uuid.uuid4().hex[:6]
    asked, cancelled = f"asked-{name}", f"cancelled-{name}"
    words = ("--requeue", "never", "--retry-excluding", "1")
    first, second = (submit(slow_project, "ok.py", run, *words) for run in (asked, cancelled))
    for run, job in ((asked, first), (cancelled, second)):
        wait_for_check(slow_project, run, job)

    done = slow_project.hpcenv("cancel", cancelled)
    assert f"{cancelled}: cancelled" in done.stdout
    assert "rejected" not in done.text
    # Written by the batch script, which Slurm gives KillWait: no verdict, because a verdict could not be relied on.
    end = wait_for_end(slow_project, cancelled)
    assert (end["cancelled"], end["status"], end["again"]) == (True, 143, False)
    assert slow_project.must("status", cancelled).startswith(f"{cancelled}: cancelled")
    assert not is_there(slow_project, cancelled, "verdict.json")

    cluster.must("scancel", "--signal=USR2", first)
    done = slow_project.hpcenv("wait", asked, timeout=60)
    assert (done.status, "stopped before the training started: stop requested" in done.text) == (91, True), done.text
    end = slow_project.record(asked, "finished.json")
    assert (end["stopped"], end["before_training"], end["again"]) == ("unknown", True, False)
    assert not is_there(slow_project, asked, "excluded.json")
    assert "the job was asked to stop, before the training started" in slow_project.hpcenv("report", asked).stdout


@pytest.mark.long
def test_at_the_time_limit_while_the_nodes_are_checked_the_chain_goes_on(
    slow_project: Project, held: Callable[[], object], cluster: Cluster
) -> None:
    run = f"limited-{uuid.uuid4().hex[:6]}"
    job = submit(slow_project, "ok.py", run, "--grace", "10", "--chain", "2")
    wait_for_check(slow_project, run, job)
    # Slurm looks twice a minute, and warns when it would be too late at its next look.
    end_in(cluster, job, 30)
    wait_for_line(slow_project, run, "the time limit, before the training started: the next job of the chain continues")
    held()
    wait_until(f"end of {run}", lambda: "it trains" in log(slow_project, run), seconds=60)
    assert slow_project.hpcenv("wait", run, timeout=60).status == 0
    assert slow_project.record(run, "started.json")["attempt"] == 1
    end = slow_project.record(run, "attempts/0/finished.json")
    assert (end["stopped"], end["before_training"], end["again"]) == ("time-limit", True, False)
    said = " ".join(slow_project.hpcenv("report", run).stdout.split())
    assert "link 1 of 2" in said
    assert "the job reached its time limit, before the training started" in said


def test_what_has_finished_is_not_trained_again_when_slurm_starts_it_again(
    slow_project: Project, cluster: Cluster
) -> None:
    run = f"done-{uuid.uuid4().hex[:6]}"
    job = submit(slow_project, "ok.py", run)
    assert slow_project.hpcenv("wait", run, timeout=120).status == 0
    cluster.must("scontrol", "requeue", job)
    cluster.start_again_soon(job)
    wait_for_line(slow_project, run, "the run has already completed: this job has nothing to do")
    assert slow_project.hpcenv("wait", run, timeout=60).status == 0
    assert log(slow_project, run).count("it trains") == 2
    assert not is_there(slow_project, run, "attempts")


@pytest.mark.long
def test_preempted_while_the_nodes_are_checked_is_trained_once(
    slow_project: Project, held: Callable[[], object], cluster: Cluster
) -> None:
    run = f"checked-{uuid.uuid4().hex[:6]}"
    job = submit(slow_project, "ok.py", run, "--cpus", str(MOST_CPUS), "--partition", "low")
    wait_for_check(slow_project, run, job)
    needs_most_cpus(cluster)
    # Long before GraceTime (10 s): a script that outlives the preemption is queued again once more by Slurm 24.11.
    wait_for_line(slow_project, run, "preempted, before the training started: the job is requeued")
    held()
    wait_until("its training", lambda: "it trains" in log(slow_project, run))
    assert slow_project.hpcenv("wait", run, timeout=120).status == 0
    wait_until("Slurm's end of it", lambda: job not in cluster.run("squeue", "-h", "-o", "%i").stdout.split())
    assert log(slow_project, run).count("it trains") == 2
    assert "attempt 0: stopped before the training started: preempted" in slow_project.must("report", run)
