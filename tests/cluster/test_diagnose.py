"""Failures that are provoked on real nodes, and what `hpcenv diagnose RUN` says: pattern, owner, rank, node, line.

Where one rank fails, it is on the second node, while the others wait for it.
HPCENV_RECORD_LOGS=1 writes the logs of these runs to tests/logs/testbed (tests/unit/runs/diagnose/test_examples.py).
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from .conftest import ROOT, Cluster, Project

pytestmark = pytest.mark.cluster

SCRIPT = """\
import datetime, os, sys, time
import torch, torch.distributed as dist

SECONDS = datetime.timedelta(seconds=6)
RANK = int(os.environ["RANK"])

def train(steps):
    for step in range(steps):
        dist.all_reduce(torch.ones(1))
        if RANK == 0:
            print("step", step, flush=True)
        time.sleep(0.2)

def exception():
    dist.init_process_group("gloo")
    train(2)
    if RANK == 3:
        raise ValueError("loss is nan")
    train(1)

def module():
    import einops_of_another_project

def disk():
    dist.init_process_group("gloo")
    train(2)
    if RANK == 1:
        torch.save({"model": torch.zeros(1 << 20)}, "/mnt/small/model.pt")
    train(1)

# 6818 is the port of slurmd, which every node has in use.
def port_in_use():
    dist.TCPStore("127.0.0.1", 6818, world_size=1, is_master=True, timeout=SECONDS)

def port_of_another():
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:6818", rank=0, world_size=1, timeout=SECONDS)

def wrong_port():
    host, port = os.environ["MASTER_ADDR"], 27311
    if RANK == 0:
        dist.TCPStore(host, port, world_size=4, is_master=True, timeout=4 * SECONDS)
    dist.TCPStore(host, port + 1, world_size=4, is_master=False, timeout=SECONDS)

def killed():
    dist.init_process_group("gloo")
    train(3000)

def cut():
    dist.init_process_group("gloo", timeout=2 * SECONDS)
    train(3000)

def time_limit():
    dist.init_process_group("gloo")
    train(3000)

if __name__ == "__main__":
    globals()[sys.argv[1]]()
"""


def line_of(text: str) -> str:
    """Return where a text stands in the script, as a diagnosis says it."""
    return f"provoked.py:{SCRIPT[: SCRIPT.index(text)].count(chr(10)) + 1}"


@dataclass(frozen=True)
class Expected:
    """What a diagnosis must say; a tuple of ranks or nodes where each of them is right."""

    pattern: str
    owner: str
    ranks: tuple[int | None, ...]
    nodes: tuple[str, ...]
    code: str


# kind -> what its diagnosis must say.
SHORT = {
    "exception": Expected("python-exception", "unknown", (3,), ("n2",), line_of("raise ValueError")),
    "module": Expected("python-module-missing", "user", (0,), ("n1", "n2"), line_of("import einops")),
    "disk": Expected("checkpoint-not-written", "user", (1,), ("n2",), line_of("torch.save")),
    "port_in_use": Expected(
        "torch-address-in-use", "user", (0,), ("n1", "n2"), line_of('TCPStore("127.0.0.1", 6818')
    ),
}  # fmt: skip
ONE_RANK = ("--nodes", "1", "--nproc", "1")
SHAPE = ("--nodes", "2", "--gpus", "0", "--nproc", "2", "--cpus", "2", "--time", "5")


@dataclass(frozen=True)
class Provoked:
    """The project whose runs fail, and the names of its runs."""

    project: Project
    prefix: str

    def start(self, kind: str, *words: str) -> str:
        run = f"{self.prefix}-{kind.replace('_', '-')}"
        self.project.must("submit", "provoked.py", *SHAPE, *words, "--name", run, "--", kind)
        return run

    def runs_no_more(self, run: str) -> bool:
        """Wait until the attempt is over; Slurm may queue the job again, and it then waits for the node."""
        job = str(self.project.record(run, "submission.json")["job_id"])
        for _ in range(200):
            if self.project.cluster.must("squeue", "-h", "-j", job, "-o", "%T").strip() in ("", "PENDING"):
                return True
            time.sleep(1)
        return False

    def log(self, run: str) -> str:
        return self.project.cluster.run("cat", f"{self.project.folder}/runs/{run}/job.log").stdout

    def until_it_trains(self, run: str) -> None:
        for _ in range(240):
            if "step 2" in self.log(run):
                return
            time.sleep(0.5)
        raise AssertionError(f"{run} never trained:\n{self.log(run)}")

    def diagnosed(self, run: str, *, seconds: float = 120) -> dict[str, Any]:
        done = self.project.hpcenv("wait", run, timeout=seconds)
        assert done.status not in (0, 124), done.text
        return self.diagnosed_now(run)

    def diagnosed_now(self, run: str) -> dict[str, Any]:
        found = self.project.json("diagnose", run)["data"]
        self.record(run)
        return dict(found["diagnoses"][0] if "diagnoses" in found else found)

    def record(self, run: str) -> None:
        if not os.environ.get("HPCENV_RECORD_LOGS"):
            return
        text = self.log(run).replace(self.project.folder, "/project").replace("/shared/hostenv", "/env")
        head = f"# hpcenv example log: recorded on the testbed by tests/cluster/test_diagnose.py, {time.strftime('%Y-%m-%d')}\n"
        name = run.removeprefix(f"{self.prefix}-")
        (ROOT / "tests" / "logs" / "testbed").mkdir(exist_ok=True)
        (ROOT / "tests" / "logs" / "testbed" / f"{name}.log").write_text(
            head + re.sub(r"/tmp/[\w/.-]+", "/tmp/x", text)
        )


@pytest.fixture(scope="module")
def provoked(cluster: Cluster, host_project: Project) -> Iterator[Provoked]:
    cluster.write(f"{host_project.folder}/provoked.py", SCRIPT)
    mount = "mkdir -p /mnt/small && mount -t tmpfs -o size=64k,mode=1777 none /mnt/small"
    cluster.must("sh", "-c", mount, node="n2", user="root")
    yield Provoked(host_project, f"provoked-{uuid.uuid4().hex[:6]}")
    cluster.run("umount", "/mnt/small", node="n2", user="root")


@pytest.fixture(scope="module")
def short_runs(provoked: Provoked) -> dict[str, str]:
    """The short cases, submitted together: they share the two nodes."""
    words = {"disk": ("--nproc", "1"), "module": ONE_RANK, "port_in_use": ONE_RANK}
    return {kind: provoked.start(kind, *words.get(kind, ())) for kind in SHORT}


def must_say(found: dict[str, Any], expected: Expected) -> None:
    cause = found["cause"]
    assert cause is not None, found
    assert (cause["pattern"], cause["owner"], cause["code"]) == (expected.pattern, expected.owner, expected.code), found
    assert cause["rank"] in expected.ranks, found
    assert cause["node"] in expected.nodes, found


@pytest.mark.parametrize("kind", SHORT)
def test_a_failure_is_diagnosed_with_its_line_rank_and_node(
    kind: str, provoked: Provoked, short_runs: dict[str, str]
) -> None:
    found = provoked.diagnosed(short_runs[kind])
    must_say(found, SHORT[kind])
    assert found["cause"]["line"] > 0, "the line of the log"


# -- the slow ones ------------------------------------------------------------------------


@pytest.mark.long
def test_ranks_that_use_another_port_than_rank_0_are_told_so(provoked: Provoked) -> None:
    found = provoked.diagnosed(provoked.start("wrong_port"))
    code = line_of("dist.TCPStore(host, port + 1")
    must_say(found, Expected("torch-rendezvous-connect", "user", (1, 2, 3), ("n1", "n2"), code))


@pytest.mark.long
def test_another_service_at_the_port_of_the_rendezvous_is_told(provoked: Provoked) -> None:
    found = provoked.diagnosed(provoked.start("port_of_another", *ONE_RANK))
    code = line_of('dist.init_process_group("gloo", init_method')
    must_say(found, Expected("torch-store-not-torch", "user", (0,), ("n1", "n2"), code))


@pytest.mark.long
def test_a_rank_that_was_killed_is_named(provoked: Provoked) -> None:
    run = provoked.start("killed")
    provoked.until_it_trains(run)
    job = str(provoked.project.record(run, "submission.json")["job_id"])
    done = provoked.project.cluster.testbed("fault", "kill", "rank3", "--job", job)
    assert done.status == 0, done.text
    must_say(provoked.diagnosed(run), Expected("rank-killed", "user", (3,), ("n2",), ""))


@pytest.mark.long
def test_the_time_limit_is_named(provoked: Provoked) -> None:
    run = provoked.start("time_limit", "--time", "1")
    found = provoked.diagnosed(run, seconds=300)
    must_say(found, Expected("slurm-time-limit", "user", (None, 0, 1, 2, 3), ("", "n1", "n2"), ""))


@pytest.mark.long
def test_a_network_that_was_cut_is_named(provoked: Provoked) -> None:
    run = provoked.start("cut")
    provoked.until_it_trains(run)
    testbed = provoked.project.cluster.testbed
    assert testbed("fault", "cut", "n2").status == 0
    try:
        found = provoked.diagnosed_now(run) if provoked.runs_no_more(run) else {}
    finally:
        provoked.project.cluster.run("scancel", "--user=alice")
        assert testbed("fault", "heal", "n2").status == 0
    assert found["cause"]["owner"] == "node", found
