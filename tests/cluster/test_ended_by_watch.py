"""Runs that hpcenv itself ends on two nodes: they hang, or do nothing. The reason is in the log, the status, the report."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator

import pytest

from .conftest import HOST_PYTHON, Cluster, Project, _project

pytestmark = [pytest.mark.cluster, pytest.mark.long]

SHAPE = ("--nodes", "2", "--gpus", "0", "--nproc", "1", "--time", "20", "--grace", "5")

HANG_ONCE = """\
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([parameter], lr=0.1)
first = os.environ["HPCENV_ATTEMPT"] == "0"
for step in range(4):
    if step == 3 and first and dist.get_rank() == 1:
        time.sleep(1000)  # forgets
    dist.all_reduce(torch.ones(2))
    optimizer.step()
print("trained", flush=True)
"""


@pytest.fixture(scope="module")
def project(cluster: Cluster) -> Iterator[Project]:
    spec = (
        f'image = "host"\npython = "{HOST_PYTHON}"\n[watch]\nsample = "5s"\nstall-after = "10s"\non-stall = "requeue"\n'
    )
    made = _project(cluster, f"ended-{uuid.uuid4().hex[:6]}", spec)
    cluster.write(f"{made.folder}/hang_once.py", HANG_ONCE)
    cluster.write(f"{made.folder}/sleep.py", "import time\ntime.sleep(1000)\n")
    made.must("lock", timeout=600)
    return made


def test_a_run_that_hangs_is_queued_again_and_trains_to_its_end(project: Project) -> None:
    done = project.hpcenv("submit", "hang_once.py", *SHAPE, "--name", "again", "--wait", timeout=900)
    log = project.cluster.run("cat", f"{project.folder}/runs/again/job.log").stdout
    line = 1 + HANG_ONCE.splitlines().index("        time.sleep(1000)  # forgets")
    assert f"rank 1 never entered it: it is in <module> (hang_once.py:{line})" in log
    assert "the ranks hang: the job is requeued" in log
    assert (done.status, log.count("trained")) == (0, 2), log
    ended = json.loads(project.cluster.run("cat", f"{project.folder}/runs/again/attempts/0/finished.json").stdout)
    assert (ended["stopped"], ended["again"], ended["not_again"]) == ("hang", True, "")


def test_a_run_that_does_nothing_ends_with_its_reason(project: Project) -> None:
    done = project.hpcenv("submit", "sleep.py", *SHAPE, "--name", "idle", "--idle-end", "30s", "--wait", timeout=600)
    assert done.status not in (0, 1), done
    log = project.cluster.run("cat", f"{project.folder}/runs/idle/job.log").stdout
    assert "hpcenv: idle: no GPU and no CPU was in use for " in log
    assert project.record("idle", "finished.json")["stopped"] == "idle"
    for words in (("status", "idle"), ("report", "idle"), ("diagnose", "idle")):
        told = " ".join(project.hpcenv(*words).stdout.split())
        assert "no GPU and no CPU was in use" in told, (words, told)
