"""What breaks under a run: a rank, torchrun's start on a node, slurmd, a node's network, slurmctld.

In each case the run ends (or goes on) within a time that is named here, `report` begins with what broke first, nothing
of the run is left on a node, no allocation is held, and what was written before is still there.

The times: torchrun notices a dead rank within a second, and srun ends the other nodes at once (`--kill-on-bad-exit`).
Of a node that does not answer slurmctld learns after SlurmdTimeout (40 s in the testbed, 300 s by default, slurm.conf(5)),
at its next look, every third of that. It then ends the job and queues it again; a cut-off node cannot be told, but ends
its ranks when it sees that the batch script has ended (launch/current_attempt.py, within 10 s, and 25 s more for ranks that do not
listen). A step's end takes KillWait (30 s) at most.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from .conftest import Cluster, Done, Project, before_step

pytestmark = pytest.mark.cluster

SHAPE = ("--nodes", "2", "--gpus", "0", "--nproc", "2", "--cpus", "2", "--time", "5")

# A rank, torchrun or the launch step dies: noticed at once; the rest of it is a loaded machine.
SECONDS_TO_END = 60
SLURMD_TIMEOUT, KILL_WAIT = 40, 30
# Noticed at a look, every third of the timeout; then the job's end.
SECONDS_TO_LOSE_A_NODE = SLURMD_TIMEOUT * 4 / 3 + KILL_WAIT + 30
# Until slurmctld has heard the node again and ends there what it had given up, the srun that waits there among it: 55 s
# seen, and 160 s on a loaded machine, then KillWait. The ranks have ended long before.
SECONDS_TO_COME_BACK = 240 + KILL_WAIT
# The batch node ends a step at most two minutes after a node's recorded failure (steps/run_tasks.py).
SECONDS_TO_END_A_STEP = 120 + 30
# Two looks 5 s apart at the batch script's end, 25 s from TERM to KILL (launch/current_attempt.py, launch/supervise.py).
SECONDS_TO_GIVE_UP = 10 + 25 + 10

# Ranks that wait for a lost peer would wait for half an hour (gloo); what ends them is not their own doing.
SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
from hpcenv import training

steps, seconds = int(sys.argv[1]), float(sys.argv[2])
dist.init_process_group("gloo")
weight, begin = torch.zeros(1), 0
path = training.resume_path()
if path is not None:
    state = torch.load(path)
    weight, begin = state["weight"], state["step"]
for step in range(begin + 1, steps + 1):
    grad = torch.ones(1)
    dist.all_reduce(grad)
    weight = weight + grad
    if dist.get_rank() == 0:
        training.save({"weight": weight, "step": step}, step)
        print("step", step, "weight", float(weight), flush=True)
    time.sleep(seconds)
if dist.get_rank() == 0:
    print("final", float(weight), flush=True)
dist.destroy_process_group()
"""


def until(what: str, condition: Callable[[], object], *, seconds: float) -> float:
    """Wait, and return how long it took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.5)
    return time.monotonic() - begin


class Faulty:
    """A project whose runs are broken, and the testbed that is broken for it."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.cluster = project.cluster

    def fault(self, *words: str) -> None:
        done = self.cluster.testbed("fault", *words)
        assert done.status == 0, done.text

    def start(self, *, steps: int, seconds: float = 0.2, words: tuple[str, ...] = ()) -> str:
        run = f"faults-{uuid.uuid4().hex[:6]}"
        self.project.must("submit", "faults.py", *SHAPE, "--name", run, *words, "--", str(steps), str(seconds))
        return run

    def path(self, run: str, name: str = "") -> str:
        return f"{self.project.folder}/runs/{run}/{name}"

    def job(self, run: str) -> str:
        return str(self.project.record(run, "submission.json")["job_id"])

    def log(self, run: str) -> str:
        return self.cluster.run("cat", self.path(run, "job.log")).stdout

    def steps(self, run: str) -> list[int]:
        return [int(step) for step in re.findall(r"^\[0\] step (\d+) weight", self.log(run), re.MULTILINE)]

    def checkpoints(self, run: str) -> set[str]:
        return set(self.cluster.run("ls", self.path(run, "checkpoints")).stdout.split())

    def until_it_trains(self, run: str) -> None:
        until(f"{run} trains: {self.log(run)}", lambda: len(self.steps(run)) >= 3, seconds=120)

    def exists(self, run: str, name: str) -> bool:
        return self.cluster.run("test", "-e", self.path(run, name)).status == 0

    def processes(self, run: str, node: str) -> list[str]:
        """The run's processes on a node, which may have no network."""
        done = self.cluster.run("ps", "-u", "alice", "-o", "pid=,args=", node=node, user="root")
        assert done.status in (0, 1), done.text  # 1: she has none
        said = done.stdout.splitlines()
        return [line for line in said if f"/runs/{run}/" in line or "faults.py" in line]

    def until_nothing_is_left(self, run: str, *, nodes: tuple[str, ...] = ("n1", "n2"), seconds: float = 30) -> float:
        begin = time.monotonic()
        while left := [line for node in nodes for line in self.processes(run, node)]:
            assert time.monotonic() - begin < seconds, "\n".join([f"still there after {seconds} s:", *left])
            time.sleep(0.5)
        return time.monotonic() - begin

    def until_no_allocation(self, run: str, *, seconds: float = 40) -> None:
        job = self.job(run)
        until(
            "squeue is empty", lambda: job not in self.cluster.must("squeue", "-h", "-o", "%i").split(), seconds=seconds
        )

    def must_have_kept(self, run: str, steps: list[int], checkpoints: set[str]) -> None:
        """Lines and checkpoints of before the fault."""
        assert steps, "nothing was written before the fault"
        assert self.steps(run)[: len(steps)] == steps
        assert checkpoints <= self.checkpoints(run)
        # Complete, all of them: what was being written when the rank died has no checkpoint's name.
        last = max(name for name in self.checkpoints(run) if name.startswith("step-"))
        load = "import sys, torch; print(torch.load(sys.argv[1])['step'])"
        said = self.cluster.must("/shared/hostenv/bin/python", "-c", load, self.path(run, f"checkpoints/{last}"))
        assert int(said) == int(re.sub(r"\D", "", last.removesuffix(".pt")))

    def first_words(self, run: str) -> str:
        """The first sentence of the report, on one line."""
        done = self.project.hpcenv("report", run)
        return " ".join(done.stdout.split("\n\n")[0].split("\n  its standard")[0].split())


@pytest.fixture(scope="module")
def faulty(host_project: Project) -> Faulty:
    host_project.cluster.write(f"{host_project.folder}/faults.py", SCRIPT)
    return Faulty(host_project)


@pytest.fixture(autouse=True)
def healed(cluster: Cluster) -> Iterator[None]:
    """Whatever a test broke is whole for the next one, and for other files' tests."""
    yield
    cluster.run("scancel", "--user=alice")
    for machine in ("ctl", "n1", "n2"):
        done = cluster.testbed("fault", "heal", machine)
        assert done.status == 0, done.text
    until(
        "idle nodes", lambda: set(cluster.run("sinfo", "-h", "-N", "-o", "%t").stdout.split()) == {"idle"}, seconds=90
    )


def ends(faulty: Faulty, run: str, *, seconds: float) -> Done:
    """Wait for a run that fails; it must never pass for completed."""
    begin = time.monotonic()
    done = faulty.project.hpcenv("wait", run, timeout=seconds + 60)
    assert time.monotonic() - begin < seconds, f"{run} took {time.monotonic() - begin:.0f} s"
    assert done.status not in (0, 124), done.text
    assert faulty.project.json("status", run)["data"]["state"] == "failed"
    return done


# -- in CI --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "begins"),
    [
        # A killed rank is in every run of the tests: test_failures.py.
        pytest.param("rank3", "node n2, rank 3, SIGKILL; 3 others were cleaned up", marks=pytest.mark.long),
        ("agent@n2", "node n2 left no record of how the training ended"),
        pytest.param("torchrun", "node n2, torchrun ended with SIGKILL", marks=pytest.mark.long),
    ],
)
def test_a_killed_rank_launch_step_or_torchrun_ends_the_run_at_once(kind: str, begins: str, faulty: Faulty) -> None:
    run = faulty.start(steps=600)
    faulty.until_it_trains(run)
    if kind == "torchrun":
        find = ("pgrep", "--full", f"agent.py {faulty.path(run)}")
        faulty.cluster.must("kill", "-KILL", faulty.cluster.must(*find, node="n2", user="root").split()[0], node="n2")
    else:
        faulty.fault("kill", kind, "--job", faulty.job(run))
    steps, checkpoints = faulty.steps(run)[:-1], faulty.checkpoints(run)

    assert ends(faulty, run, seconds=SECONDS_TO_END).status == 137
    faulty.until_nothing_is_left(run, seconds=10)
    faulty.until_no_allocation(run)
    assert "final" not in faulty.log(run)
    faulty.must_have_kept(run, steps, checkpoints)
    assert faulty.first_words(run).startswith(f"first failure: {begins}"), faulty.first_words(run)


def test_without_slurmctld_the_training_goes_on_to_its_end_and_the_files_tell_it(faulty: Faulty) -> None:
    run = faulty.start(steps=25, words=("--nproc", "1"))
    faulty.until_it_trains(run)
    faulty.fault("kill", "slurmctld")
    at_fault = len(faulty.steps(run))
    assert not faulty.exists(run, "finished.json"), "it ended before slurmctld did"
    # squeue tries for MessageTimeout, 30 s in the testbed: the training is over before it has given up.
    status = faulty.project.json("status", run)["data"]
    assert faulty.exists(run, "finished.json")
    faulty.fault("heal", "ctl")
    assert len(faulty.steps(run)) == 25 > at_fault
    assert "[0] final 50.0\n" in faulty.log(run)
    assert faulty.project.record(run, "finished.json")["status"] == 0

    # Slurm could not be asked then whether it agrees: the run was not over, and the reason was given.
    assert status["state"] == "completing"
    assert "the batch script recorded status 0" in status["detail"]
    assert "squeue" in status["detail"]
    assert [one["status"] for one in status["exits"]] == [0, 0]

    faulty.until_nothing_is_left(run, seconds=10)
    # Slurm's own daemon on the node reports the end again every 15 s, each time for up to MessageTimeout.
    faulty.until_no_allocation(run, seconds=100)
    assert faulty.project.hpcenv("wait", run, "--timeout", "60s").status == 0
    assert faulty.project.json("status", run)["data"]["state"] == "completed"
    assert "failure" not in faulty.first_words(run)


# -- the slow ones ------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("how", ["network", "slurmd"])
def test_a_lost_node_ends_the_attempt_and_the_next_one_goes_on_from_the_checkpoint(how: str, faulty: Faulty) -> None:
    # Without slurmd Slurm has lost the node, but the ranks have not lost each other: they train until Slurm ends them.
    run = faulty.start(steps=100, seconds=0.2 if how == "network" else 1.0)
    faulty.until_it_trains(run)
    faulty.fault("cut", "n2") if how == "network" else faulty.fault("kill", "slurmd@n2")
    steps, checkpoints = faulty.steps(run), faulty.checkpoints(run)
    job = faulty.job(run)

    def is_queued_again() -> bool:
        return faulty.cluster.must("squeue", "-h", "-j", job, "-o", "%T").strip() == "PENDING"

    until("the job is requeued", is_queued_again, seconds=SECONDS_TO_LOSE_A_NODE)
    faulty.until_nothing_is_left(run, nodes=("n1",), seconds=5)
    faulty.until_nothing_is_left(run, nodes=("n2",), seconds=SECONDS_TO_GIVE_UP)
    assert faulty.first_words(run).startswith("attempt 0: node failure: node n2, says Slurm: Not responding")
    assert faulty.project.json("status", run)["data"]["state"] in ("pending", "requeued")

    faulty.fault("heal", "n2")
    assert faulty.project.hpcenv("wait", run, "--timeout", "150s", timeout=200).status == 0, faulty.log(run)
    faulty.until_no_allocation(run)
    faulty.until_nothing_is_left(run)
    faulty.must_have_kept(run, steps, checkpoints)
    assert "[0] final 400.0\n" in faulty.log(run)
    assert faulty.project.record(run, "started.json")["attempt"] == 1
    assert faulty.project.record(run, "attempts/0/finished.json")["down"] == {"n2": "Not responding"}


@pytest.mark.long
def test_a_lost_batch_node_is_named_too_and_its_processes_end(faulty: Faulty) -> None:
    run = faulty.start(steps=60, words=("--requeue", "never"))
    faulty.until_it_trains(run)
    faulty.fault("cut", "n1")
    time.sleep(2)
    steps, checkpoints = faulty.steps(run), faulty.checkpoints(run)
    job = faulty.job(run)
    account = ("sacct", "-X", "-n", "-P", "-j", job, "-o", "State")
    until("Slurm's end", lambda: "NODE_FAIL" in faulty.cluster.must(*account), seconds=SECONDS_TO_LOSE_A_NODE)
    done = faulty.project.hpcenv("wait", run, "--timeout", "60s", timeout=100)
    assert done.status not in (0, 124), done.text
    assert faulty.first_words(run).startswith("first failure: node failure: node n1"), faulty.first_words(run)
    faulty.until_nothing_is_left(run, nodes=("n2",), seconds=KILL_WAIT + 10)
    faulty.fault("heal", "n1")
    # Rank 0 waits for its peers there, and nothing but its own timeout would end it: slurmctld does, once it hears n1.
    faulty.until_nothing_is_left(run, seconds=SECONDS_TO_COME_BACK)
    faulty.until_no_allocation(run)
    faulty.must_have_kept(run, steps, checkpoints)


@pytest.mark.long
def test_without_slurmctld_a_submission_is_refused_and_leaves_nothing(faulty: Faulty) -> None:
    faulty.fault("kill", "slurmctld")
    run = f"faults-{uuid.uuid4().hex[:6]}"
    words = ("submit", "faults.py", *SHAPE, "--name", run)
    refused = faulty.project.hpcenv(*words, "--", "3", "0", timeout=200)
    assert refused.status == 15, refused.text
    assert "error[submit-rejected]" in refused.stderr
    assert "Unable to contact slurm controller" in refused.stderr
    assert not faulty.exists(run, "")

    faulty.fault("heal", "ctl")
    assert "0" not in faulty.cluster.must("squeue", "-h", "-o", "%i %j")
    again = faulty.project.hpcenv(*words, "--wait", "--", "3", "0", timeout=200)
    assert again.status == 0, again.text


@pytest.mark.long
@pytest.mark.parametrize("then", ["goes on", "is killed"])
def test_a_submission_that_slurmctld_does_not_answer_is_known_once_it_runs_or_was_never_queued(
    then: str, faulty: Faulty
) -> None:
    run = f"faults-{uuid.uuid4().hex[:6]}"
    words = ("submit", "faults.py", *SHAPE, "--name", run)
    faulty.fault("stop", "slurmctld")
    uncertain = faulty.project.hpcenv(*words, "--", "3", "0", timeout=200)
    assert "error[submit-uncertain]" in uncertain.stderr, uncertain.text
    assert f"squeue --name={run}" in uncertain.stderr
    assert faulty.exists(run, "job.sbatch"), "the job may be queued: its folder must stay"

    if then == "is killed":
        # It never read the request.
        faulty.fault("kill", "slurmctld")
    faulty.fault("heal", "ctl")
    if then == "goes on":
        until("the job is recorded", lambda: faulty.exists(run, "submission.json"), seconds=60)
        assert faulty.project.hpcenv("wait", run, "--timeout", "120s", timeout=200).status == 0
        jobs = faulty.cluster.must("sacct", "-X", "-n", "-P", "--name", run, "-o", "JobID").split()
        assert jobs == [faulty.job(run)], "recorded once"
        assert faulty.project.json("status", run)["data"]["state"] == "completed"
    else:
        assert run not in faulty.cluster.must("squeue", "-h", "-o", "%j").split()
        faulty.cluster.must("touch", "-d", "1 hour ago", faulty.path(run))
        assert "never queued, according to Slurm" in faulty.project.hpcenv("status", run).stdout
        assert faulty.project.hpcenv("clean", run, "--yes").status == 0
        assert not faulty.exists(run, "")
    again = faulty.project.hpcenv(*words[:-1], f"{run}-again", "--wait", "--", "3", "0", timeout=200)
    assert again.status == 0, again.text


@pytest.mark.long
def test_a_node_that_loses_power_and_is_back_at_once_does_not_hold_the_run_until_the_time_limit(faulty: Faulty) -> None:
    """srun waits for the tasks of the node, which has forgotten them; Slurm does not notice, because the node answers."""
    run = faulty.start(steps=600, words=("--time", "20"))
    faulty.until_it_trains(run)
    steps, checkpoints = faulty.steps(run)[:-1], faulty.checkpoints(run)
    faulty.fault("kill", "n2")
    time.sleep(1)
    faulty.fault("heal", "n2")

    ends(faulty, run, seconds=SECONDS_TO_END_A_STEP)
    faulty.until_nothing_is_left(run, seconds=10)
    faulty.until_no_allocation(run)
    faulty.must_have_kept(run, steps, checkpoints)
    says = "first failure: node n2 left no record of how the training ended"
    assert faulty.first_words(run).startswith(says), faulty.first_words(run)
    cause = faulty.project.json("diagnose", run)["data"]["diagnoses"][0]["cause"]
    assert (cause["pattern"], cause["node"]) == ("node-no-record", "n2"), cause


@pytest.mark.long
def test_a_node_that_hangs_in_the_check_is_named_and_not_the_time_limit(faulty: Faulty) -> None:
    """The time limit of the job comes before those of the check: there is no verdict that could name the node."""
    run = f"faults-{uuid.uuid4().hex[:6]}"
    does = 'if [ "$SLURMD_NODENAME" = n1 ]; then exec sleep 600; fi'
    site = before_step(faulty.project, "check", does)
    faulty.project.must("submit", "faults.py", *SHAPE, "--name", run, *site, "--", "3", "0")
    until("n2 gave its facts", lambda: faulty.exists(run, "facts/n2.json"), seconds=60)
    faulty.cluster.must("scontrol", "update", f"JobId={faulty.job(run)}", "EndTime=now+5seconds")

    done = faulty.project.hpcenv("wait", run, "--timeout", "150s", timeout=200)
    assert done.status not in (0, 124), done.text
    assert not faulty.exists(run, "verdict.json")
    begins = "first failure: node n1 gave no facts, and others did, until the time limit"
    assert faulty.first_words(run).startswith(begins), faulty.first_words(run)
    cause = faulty.project.json("diagnose", run)["data"]["diagnoses"][0]["cause"]
    assert (cause["pattern"], cause["node"]) == ("node-no-facts", "n1"), cause
    faulty.until_nothing_is_left(run)
    faulty.until_no_allocation(run)
