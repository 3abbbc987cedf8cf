"""A rank that takes more memory than its job has: the real kernel ends it, under the real Slurm, and the report says so.

Also what the report says of memory near the limit, and of memory that grows. A separate site, whose jobs are held to
their memory by control groups.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator

import pytest

from .conftest import HOST_PYTHON, Cluster, Project

pytestmark = [pytest.mark.cluster, pytest.mark.long]

INSTANCE = "memorytest"
MEGABYTES = 700

# Rank 1 takes a step more each time; who is left would wait for ever.
SCRIPT = """\
import os, sys, time
rank, taken = int(os.environ["RANK"]), []
print("rank", rank, "begins", flush=True)
while rank == 1:
    taken.append(b"x" * 20_000_000)
    time.sleep(0.02)
time.sleep(600)
"""

# CASE: what a training does with its memory.
USES = """\
import sys, time
import torch
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
case, taken, began = sys.argv[1], [], time.time()
if case == "near":
    taken.append(b"x" * 1_000_000_000)
while time.time() < began + (30 if case == "near" else 1000):
    # A cache is full when half of the time is over.
    if case == "leaks" or (case == "fills" and time.time() < began + 500):
        taken.append(b"x" * 150_000)
    time.sleep(0.2)
    optimizer.step()
"""


BOTH = pytest.mark.parametrize("site", ["24.11", "26.05"], indirect=True, scope="module")
ONE = pytest.mark.parametrize("site", ["24.11"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A site of one node with this version of Slurm."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCENV_TESTBED_INSTANCE", INSTANCE)
        cluster = Cluster()
        try:
            up = cluster.testbed("up", "--nodes", "1", "--proctrack", "cgroup", "--slurm", request.param, timeout=900)
            if up.status == 3:
                pytest.skip(f"NOT RUN: {up.stderr.strip()}")
            assert up.status == 0, up.text
            if "task/cgroup" not in cluster.must("scontrol", "show", "config"):
                pytest.skip("NOT RUN: this machine has no memory controller of cgroup v1 of its own")
            yield cluster
        finally:
            down = cluster.testbed("down")
        assert down.status == 0, down.text


@pytest.fixture(scope="module")
def project(site: Cluster) -> Project:
    found = Project(site, "/home/alice/memory")
    site.write(f"{found.folder}/hpcenv.toml", f'image = "host"\npython = "{HOST_PYTHON}"\n')
    site.write(f"{found.folder}/eats.py", SCRIPT)
    site.write(f"{found.folder}/uses.py", USES)
    found.must("lock", timeout=600)
    return found


@BOTH
def test_a_rank_that_the_kernel_killed_for_its_memory_is_called_so(project: Project) -> None:
    shape = ("--gpus", "0", "--nproc", "2", "--cpus", "2", "--mem", f"{MEGABYTES}M", "--time", "5", "--name", "eats")
    begin = time.monotonic()
    done = project.hpcenv("submit", "eats.py", *shape, "--wait", timeout=400)
    assert time.monotonic() - begin < 300, f"rank 0 waited: {done.text}"
    assert done.status == 137, done.text
    said = " ".join(done.text.split())
    assert "first failure: node n1, rank 1, SIGKILL for lack of memory; 1 other was cleaned up" in said, done.text
    assert "the kernel killed 1 process of this job for lack of memory" in said

    record = project.record("eats", "exits/n1.json")
    assert record["oom_kills"] == 1
    report = json.loads(project.hpcenv("report", "eats", "--json").stdout)["data"]
    assert (report["failure"]["cause"], report["failure"]["rank"]) == ("lack-of-memory", 1)

    found = project.json("diagnose", "eats")["data"]
    cause = (found["diagnoses"][0] if "diagnoses" in found else found)["cause"]
    assert cause is not None, found
    assert (cause["pattern"], cause["owner"]) == ("slurm-oom-kill", "user"), cause
    # The same from the log alone, as a support desk has it.
    words = "cp runs/eats/job.log /tmp/eats.log && hpcenv diagnose /tmp/eats.log --json"
    done = project.cluster.run("sh", "-c", words, cwd=project.folder)
    alone = json.loads(done.stdout)["data"]
    assert (alone["diagnoses"][0] if "diagnoses" in alone else alone)["cause"]["pattern"] == cause["pattern"]


@BOTH
def test_enough_memory_is_no_lack_of_it(project: Project) -> None:
    project.cluster.write(f"{project.folder}/fits.py", "print('x' * 10)\n")
    shape = ("--gpus", "0", "--nproc", "2", "--cpus", "2", "--mem", f"{MEGABYTES}M", "--time", "5", "--name", "fits")
    done = project.hpcenv("submit", "fits.py", *shape, "--wait", timeout=200)
    assert done.status == 0, done.text
    assert project.record("fits", "exits/n1.json")["oom_kills"] == 0, "counted, and none"


def start(project: Project, case: str, megabytes: int) -> None:
    shape = ("--gpus", "0", "--nproc", "1", "--cpus", "1", "--mem", f"{megabytes}M", "--time", "30", "--name", case)
    project.must("submit", "uses.py", *shape, "--", case)


def used(project: Project, case: str) -> list[str]:
    """Return the sentences about a run that has ended well."""
    done = project.hpcenv("wait", case, timeout=1300)
    assert done.status == 0, done.text
    use = project.json("report", case)["data"]["use"]
    print(f"{case}: {use['samples']} samples, {use['figures']}: {[one['text'] for one in use['sentences']]}")
    assert use["samples"] and not use["unknown"], use
    return [one["text"] for one in use["sentences"]]


@BOTH
@pytest.mark.timeout(1800)
def test_memory_near_the_limit_has_its_sentence(project: Project) -> None:
    start(project, "near", 1400)
    [said] = used(project, "near")
    assert re.fullmatch(r"peak memory 1\.[2-4] of 1\.5 GB of n1", said), said


@ONE
@pytest.mark.timeout(1800)
def test_memory_that_grows_has_its_sentence_and_a_cache_that_fills_has_none(project: Project) -> None:
    for case in ("leaks", "fills"):
        start(project, case, 2000)
    assert used(project, "fills") == []
    [said] = used(project, "leaks")
    assert re.fullmatch(r"memory grows by 1[3-7](\.\d)? MB in 100 steps since step \d+", said), said
