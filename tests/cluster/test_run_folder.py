"""What happens to the run folder while its job waits or runs: its disk is full, it is gone, something in it is gone.

Also: elements of an array that somebody cancels in the queue, and munge down on the login node or on a compute node.
"""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .conftest import Cluster, Project

pytestmark = pytest.mark.cluster

SHAPE = ("--nodes", "2", "--gpus", "0", "--nproc", "1", "--cpus", "2", "--time", "5", "--requeue", "never")
MACHINES = ("login", "n1", "n2")

SCRIPT = """
import os, time
import torch
from hpcenv import training

for step in range(1, 600):
    training.save({"step": step}, step)
    print("step", step, "of rank", os.environ["RANK"], flush=True)
    time.sleep(0.3)
"""


@dataclass(frozen=True)
class Trial:
    """A project with a script that trains for minutes."""

    project: Project
    cluster: Cluster

    def start(self, *words: str) -> str:
        run = f"trial-{uuid.uuid4().hex[:6]}"
        self.project.must("submit", "steps.py", *SHAPE, "--name", run, *words)
        return run

    def path(self, run: str, name: str = "") -> str:
        return f"{self.project.folder}/runs/{run}/{name}"

    def job(self, run: str) -> str:
        return str(self.project.record(run, "submission.json")["job_id"])

    def until_it_trains(self, run: str) -> None:
        for _ in range(240):
            if "step 3 of" in self.cluster.run("cat", self.path(run, "job.log")).stdout:
                return
            time.sleep(0.5)
        raise AssertionError(self.cluster.run("cat", self.path(run, "job.log")).stdout)

    def report(self, run: str) -> str:
        """The report on one line."""
        return " ".join(self.project.hpcenv("report", run).stdout.split())


@pytest.fixture
def trial(host_project: Project, cluster: Cluster) -> Iterator[Trial]:
    host_project.cluster.write(f"{host_project.folder}/steps.py", SCRIPT)
    yield Trial(host_project, cluster)
    cluster.run("scancel", "--user=alice")


@pytest.fixture
def small_disk(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Mount one small ext4 on all machines at the same place; the value makes it and returns its folder."""
    mounted: list[tuple[str, str]] = []

    def make(*options: str) -> str:
        disk, folder = tmp_path / "disk", f"/home/alice/small-{uuid.uuid4().hex[:6]}"
        disk.write_bytes(b"")
        subprocess.run(["truncate", "--size=40M", disk], check=True)
        subprocess.run(["mkfs.ext4", "-q", "-F", *options, disk], check=True)
        loop = subprocess.run(["losetup", "--find", "--show", disk], check=True, capture_output=True, text=True)
        device = loop.stdout.strip()
        number = device.removeprefix("/dev/loop")
        mounted.append((device, folder))
        for machine in MACHINES:
            script = f"mkdir -p {folder}; test -e {device} || mknod {device} b 7 {number}; mount {device} {folder}"
            cluster.must("sh", "-c", f"{script} && chown alice {folder}", node=machine, user="root")
        return folder

    yield make
    cluster.run("scancel", "--user=alice")
    time.sleep(2)
    for device, folder in mounted:
        for machine in MACHINES:
            cluster.run("umount", "--lazy", folder, node=machine, user="root")
        subprocess.run(["losetup", "--detach", device], check=True)


@pytest.mark.parametrize(
    ("options", "fill", "named"),
    [
        ((), "head -c 60M /dev/zero > fill", "bytes are free on the file system of"),
        (("-N", "900"), "for i in $(seq 2000); do : > f$i || break; done", "no inodes are free on the file system of"),
    ],
    ids=["blocks", "inodes"],
)
def test_a_full_disk_is_named_first_and_the_end_is_recorded(
    trial: Trial, small_disk: Callable[..., str], options: tuple[str, ...], fill: str, named: str
) -> None:
    folder = small_disk(*options)
    trial.cluster.must("cp", "-r", f"{trial.project.folder}/lockfiles", f"{trial.project.folder}/steps.py", folder)
    spec = trial.cluster.must("cat", f"{trial.project.folder}/hpcenv.toml")
    trial.cluster.write(f"{folder}/hpcenv.toml", f'{spec}[submit]\nassume-shared = true\npreflight = "off"\n')
    there = Trial(Project(trial.cluster, folder), trial.cluster)
    run = there.start()
    there.until_it_trains(run)
    trial.cluster.run("bash", "-c", fill, cwd=folder)
    began = time.monotonic()
    done = there.project.hpcenv("wait", run, timeout=200)
    assert time.monotonic() - began < 60
    assert done.status == 1, done.text  # that of the rank that could not save
    report = there.report(run)
    assert report.startswith("first failure: the disk of the run folder is full: "), report
    assert named in report.split(";")[0]
    assert f"{run}: failed, exit status 1" in report
    # The ranks of the other node fail alike, or Slurm ends them after the first failure: then with TERM.
    ends = sorted(one["status"] for one in there.project.json("status", run)["data"]["exits"])
    assert ends in ([1, 1], [1, 143]), ends
    assert there.project.record(run, "finished.json")["status"] == 1


@pytest.mark.parametrize("when", ["queued", "running"])
def test_a_job_whose_folder_is_gone_is_found_by_its_id(
    trial: Trial, all_nodes_busy: Callable[[], None], when: str
) -> None:
    if when == "running":
        all_nodes_busy()
    run = trial.start()
    job = trial.job(run)
    if when == "running":
        trial.until_it_trains(run)
    # A run that still writes can add a file to a folder that is being removed.
    trial.cluster.must("sh", "-c", 'for _ in 1 2 3 4 5 6; do rm -rf "$1" && exit; done; exit 1', "sh", trial.path(run))
    state = "pending" if when == "queued" else "running"
    assert trial.project.must("status", job).startswith(f"{run}: {state} (its run folder is gone)\n")
    for command in ("wait", "report", "logs"):
        refused = trial.project.hpcenv(command, job)
        assert refused.status == 16
        assert f"the folder of run `{run}` is gone" in refused.stderr
        assert f"`hpcenv cancel {job}` cancels it" in refused.stderr
    assert trial.project.must("cancel", job).startswith(f"{run}: cancelled (its run folder is gone)\n")
    assert job not in trial.cluster.must("squeue", "-h", "-o", "%i").split()


@pytest.mark.parametrize("lost", ["manifest.json", "code"])
def test_what_a_waiting_run_lost_is_in_the_first_sentence(
    trial: Trial, all_nodes_busy: Callable[[], None], lost: str
) -> None:
    run = trial.start()
    trial.cluster.must("rm", "-rf", trial.path(run, lost))
    all_nodes_busy()
    assert trial.project.hpcenv("wait", run).status == 91
    file = "code/step.py" if lost == "code" else lost
    report = trial.report(run)
    assert report.startswith(f"{run}: failed (before its first step: error[run-folder-not-shared]: node n"), report
    assert f"cannot read {trial.path(run, file)}" in report
    assert trial.project.hpcenv("logs", run).status in (0, 18)


def test_elements_of_an_array_cancelled_in_the_queue_are_cancelled(trial: Trial) -> None:
    trial.cluster.write(f"{trial.project.folder}/short.py", "import time; time.sleep(5)\n")
    run = f"trial-{uuid.uuid4().hex[:6]}"
    words = ("--array", "0-3", "--max-parallel", "1", "--nodes", "1", "--gpus", "0", "--nproc", "1")
    trial.project.must("submit", "short.py", *words, "--name", run)
    job = trial.project.json("status", run)["data"]["sweep"]["job_id"]
    # Slurm 24.11 sometimes cancels element 0, too, while it is in the queue (seen: 10 of 25 with plain sbatch).
    trial.cluster.must(
        "sh", "-c", f"until squeue -h -r -j {job}_0 -o %T | grep -q RUNNING; do sleep 0.2; done", timeout=60
    )
    trial.cluster.must("scancel", f"{job}_[1-3]")
    assert trial.project.hpcenv("wait", run, timeout=200).status == 25
    states = [one["state"] for one in trial.project.json("status", run)["data"]["runs"]]
    assert states == ["completed", "cancelled", "cancelled", "cancelled"]


@pytest.fixture
def munge_down(cluster: Cluster) -> Iterator[Callable[[str], None]]:
    broken: list[str] = []

    def stop(machine: str) -> None:
        broken.append(f"munged@{machine}")
        done = cluster.testbed("fault", "kill", broken[-1])
        assert done.status == 0, done.text

    yield stop
    for target in broken:
        assert cluster.testbed("fault", "heal", target).status == 0


def test_munge_down_on_the_login_node_is_named_in_seconds(trial: Trial, munge_down: Callable[[str], None]) -> None:
    run = trial.start()
    munge_down("login")
    commands = {
        ("submit", "steps.py", *SHAPE): 15,
        ("verify", "--nodes", "1"): 15,
        ("status", run): 0,
        ("cancel", run): 9,
        ("attach", run): 23,
        ("report", run): 0,
    }
    for words, status in commands.items():
        began = time.monotonic()
        done = trial.project.hpcenv(*words)
        seconds = time.monotonic() - began
        assert (done.status, seconds < 10) == (status, True), f"{words}: {seconds:.1f} s\n{done.text}"
        words = " ".join(done.text.split())
        assert "Slurm cannot check who you are: munge does not work on this machine" in words, done.text


@pytest.mark.long  # srun tries for two minutes
def test_munge_down_on_a_node_is_in_the_first_sentence(trial: Trial, munge_down: Callable[[str], None]) -> None:
    munge_down("n2")
    run = trial.start()
    assert trial.project.hpcenv("wait", run, timeout=300).status == 91
    report = trial.report(run)
    assert "munge service is wrong" in report.partition(".")[0], report
    state = report.partition(f"{run}: rejected (before training: ")[2]
    assert "n2, facts: srun could not start on this node: authentication failed, munged may be down" in state[:200]
