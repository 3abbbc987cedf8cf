"""Scripts of each kind, as their users write them, run unchanged: plain DDP, FSDP2, Lightning, accelerate.

The first two need nothing but torch. Lightning and accelerate need an environment that takes a minute to make
(`scripts/testbed frameworks`), so their test is long.
"""

from __future__ import annotations

import re

import pytest

from .conftest import ROOT, Cluster, Project

pytestmark = pytest.mark.cluster

KINDS = ROOT / "tests" / "kinds"
FRAMEWORKS = "/shared/frameworks/bin/python"
SHAPE = ("--nodes", "2", "--gpus", "0", "--nproc", "2", "--cpus", "2", "--time", "10")
PLACES = {("0", "4", "n1"), ("1", "4", "n1"), ("2", "4", "n2"), ("3", "4", "n2")}


def submit(project: Project, *kinds: str) -> dict[str, str]:
    """Run them at the same time, on the same nodes; return their logs."""
    for kind in kinds:
        project.cluster.write(f"{project.folder}/{kind}.py", (KINDS / f"{kind}.py").read_text())
    for kind in kinds:
        project.must("submit", f"{kind}.py", *SHAPE, "--name", kind)
    done = project.hpcenv("wait", *kinds, timeout=400)
    logs = {kind: project.must("logs", kind) for kind in kinds}
    assert done.status == 0, done.text + "\n".join(logs.values())
    return logs


def trained(log: str) -> None:
    """All four ranks took part in one group, on both nodes, and the loss fell."""
    # Not only at the start of a line: of an unbuffered print torchrun may find the line before its end, and what
    # another node says then comes between the two.
    assert set(re.findall(r"\[\d\] rank (\d) of (\d) on (n\d)", log)) == PLACES, log
    seen = [float(loss) for loss in re.findall(r"\[0\] epoch \d loss ([0-9.]+) of", log)]
    assert len(seen) == 5, log
    assert seen[-1] < 0.2 * seen[0], seen


def ran_once(project: Project, run: str) -> None:
    """Nothing of the script queued the job again."""
    job = project.record(run, "submission.json")["job_id"]
    assert "Restarts=0" in project.cluster.must("scontrol", "show", "job", job)


@pytest.mark.long
def test_plain_ddp_and_fsdp2_run_unchanged_at_the_same_time(host_project: Project) -> None:
    logs = submit(host_project, "plain_ddp", "fsdp2")

    for log in logs.values():
        trained(log)
    # DDP: 256 examples over 4 ranks in batches of 16, summed over all, and one model in the end.
    assert "of 16 batches" in logs["plain_ddp"]
    weights = dict(re.findall(r"^\[(\d)\] weights ([0-9.]+)", logs["plain_ddp"], re.MULTILINE))
    assert set(weights) == {"0", "2"}
    assert weights["0"] == weights["2"]
    # FSDP2: every rank holds a quarter.
    held = set(re.findall(r"rank (\d) holds (\d+) of 32 rows", logs["fsdp2"]))
    assert held == {(str(rank), "8") for rank in range(4)}
    meetings = [host_project.record(run, "verdict.json")["rendezvous"] for run in logs]
    assert len({found["port"] for found in meetings}) == 2, "two jobs on the same nodes met at the same port"


@pytest.fixture(scope="module")
def frameworks(cluster: Cluster) -> Project:
    made = cluster.testbed("frameworks", timeout=500)
    assert made.status == 0, made.text
    project = Project(cluster, "/home/alice/hpcenv-tests/frameworks")
    cluster.write(f"{project.folder}/hpcenv.toml", f'image = "host"\npython = "{FRAMEWORKS}"\n')
    cluster.must("rm", "-rf", f"{project.folder}/runs")
    project.must("lock", timeout=600)
    return project


@pytest.mark.long
def test_lightning_and_accelerate_run_unchanged_and_do_not_think_that_srun_started_them(frameworks: Project) -> None:
    logs = submit(frameworks, "with_lightning", "with_accelerate")

    for run, log in logs.items():
        trained(log)
        ran_once(frameworks, run)
    # Under SLURMEnvironment Lightning takes ranks from srun, and queues the job again at SIGUSR1.
    assert set(re.findall(r"started by (\w+)", logs["with_lightning"])) == {"TorchElasticEnvironment"}
    assert "16 batches" in logs["with_lightning"]
    assert set(re.findall(r"started as (\w+)", logs["with_accelerate"])) == {"MULTI_CPU"}
    assert "of 16 batches" in logs["with_accelerate"]
