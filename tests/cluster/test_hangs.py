"""Ranks that hang on two nodes with two ranks each: the log names the rank and its line before the job ends."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import pytest

from .conftest import HOST_PYTHON, Cluster, Project, _project

pytestmark = [pytest.mark.cluster, pytest.mark.long]

SHAPE = ("--nodes", "2", "--gpus", "0", "--nproc", "2", "--time", "10")

SCRIPT = """\
import os, re, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, case = dist.get_rank(), sys.argv[1]
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([parameter], lr=0.1)
def step():
    dist.all_reduce(torch.ones(2))  # reduce
    optimizer.step()
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        time.sleep(1000)  # loads
for _ in range(3):
    step()
if case == "healthy":
    for _ in range(12):
        for _ in range(4):
            sum(range(5000000))
            sum(range(6000000))
        step()
    sys.exit(0)
if rank == 3:
    if case == "loader":
        for batch in torch.utils.data.DataLoader(Data()):
            pass
    elif case == "lock":
        re.match("(a+)+$", "a" * 64 + "b")  # holds
    elif case == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case == "ended":
        os._exit(0)
elif case == "skipped":
    dist.barrier()
step()
time.sleep(1000)
"""

ANSWERS = {
    "loader": "rank 3 never entered it: it is in DataLoader.__next__ (hang.py:{loads})",
    "lock": "it is in match (hang.py:{holds}), which holds Python's lock",
    "stopped": "rank 3 did not say whether it entered it: it is stopped",
    "skipped": "rank 3 called all_reduce in its place: it waits in all_reduce no. 4 (hang.py:{reduce})",
}


@pytest.fixture(scope="module")
def project(cluster: Cluster) -> Iterator[Project]:
    spec = f'image = "host"\npython = "{HOST_PYTHON}"\n[watch]\nstall-after = "10s"\n'
    made = _project(cluster, f"hang-{uuid.uuid4().hex[:6]}", spec)
    cluster.write(f"{made.folder}/hang.py", SCRIPT)
    made.must("lock", timeout=600)
    return made


def log(project: Project, run: str) -> str:
    return project.cluster.run("cat", f"{project.folder}/runs/{run}/job.log").stdout


@pytest.mark.parametrize("case", ANSWERS)
def test_the_log_names_the_rank_and_its_line(project: Project, case: str) -> None:
    lines = {line.rpartition("# ")[2]: number + 1 for number, line in enumerate(SCRIPT.splitlines()) if "# " in line}
    project.must("submit", "hang.py", *SHAPE, "--name", case, "--", case)
    until = time.monotonic() + 240
    while "hpcenv: the ranks hang: " not in log(project, case):
        assert time.monotonic() < until, log(project, case)
        time.sleep(1)
    [said] = [line for line in log(project, case).splitlines() if "hpcenv: the ranks hang: " in line]
    assert ANSWERS[case].format(**lines) in said
    assert ANSWERS[case].format(**lines) in " ".join(project.must("report", case).split())
    stacks = project.must("stacks", case)
    assert "in <module>" in stacks and "ranks " in stacks
    project.must("cancel", case)


def test_a_slow_healthy_run_gives_no_alarm(project: Project) -> None:
    project.must("submit", "hang.py", *SHAPE, "--name", "healthy", "--wait", "--", "healthy", timeout=600)
    assert "the ranks hang" not in log(project, "healthy")
