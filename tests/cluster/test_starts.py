"""The usual ways to start a training: a script, a module, a console script, tasks of srun, and `accelerate launch`.

Each of them waits for the same verdict, gives the same losses, and names the rank that failed first.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator

import pytest

from .conftest import Cluster, Project
from .test_kinds import FRAMEWORKS

pytestmark = pytest.mark.cluster

TRAIN = """\
import argparse, os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def main():
    words = argparse.ArgumentParser()
    words.add_argument("--fail", type=int, default=-1)
    asked = words.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(f"HERE rank {rank} of {dist.get_world_size()} local {os.environ['LOCAL_RANK']} on {os.environ['HPCENV_NODE']}"
          f" task {os.environ.get('SLURM_PROCID', '-')} args {sys.argv[1:]}", flush=True)
    torch.manual_seed(7)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    for step in range(4):
        x = torch.randn(16, 8, generator=data)
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"LOSS {step} {total.item().hex()}", flush=True)
        if step == 2 and rank == asked.fail:
            raise ValueError(f"rank {rank} fails on purpose")
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""

SHAPE = ("--nodes", "2", "--gpus", "0", "--nproc", "2", "--cpus", "2", "--time", "10", "--env", "OMP_NUM_THREADS=1")
# accelerate itself takes the numbers of the nodes as arguments (accelerate 1.15, commands/launch.py).
ACCELERATE = (
    *("launch", "--multi_gpu", "--num_machines", "{nnodes}", "--machine_rank", "{node_rank}", "--num_processes"),
    *("{world_size}", "--main_process_ip", "{master_addr}", "--main_process_port", "{master_port}", "--same_network"),
    *("--mixed_precision", "no", "--dynamo_backend", "no"),
)
TEED = ("--tee", "3", "--log_dir", "{log_dir}")
WAYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "script": (("train.py",), ()),
    "module": (("-m", "package.train"), ()),
    "entry": (("--entry", "train-here"), ()),
    "srun": (("train.py", "--launcher", "srun"), ()),
    "accelerate": (
        ("--entry", "accelerate", "--launcher", "none", "--expand"),
        (*ACCELERATE, "train.py"),
    ),
    "accelerate-teed": (
        ("--entry", "accelerate", "--launcher", "none", "--expand"),
        (*ACCELERATE, *TEED, "train.py"),
    ),
    "torchrun-by-itself": (("--entry", "torchrun", "--launcher", "none"), ("train.py",)),
}
SITE = "/shared/frameworks/lib/python3.11/site-packages"
METADATA = "Metadata-Version: 2.1\nName: train-here\nVersion: 1.0\n"


def losses(text: str) -> list[str]:
    return re.findall(r"LOSS \d (\S+)", text)


@pytest.fixture
def with_entry(cluster: Cluster) -> Iterator[Project]:
    """A project whose environment has accelerate, and a package with the console script `train-here`."""
    made = cluster.testbed("frameworks", timeout=500)
    assert made.status == 0, made.text
    info = f"{SITE}/train_here-1.0.dist-info"
    files = {f"{SITE}/train_here.py": TRAIN, f"{info}/METADATA": METADATA}
    files |= {f"{info}/entry_points.txt": "[console_scripts]\ntrain-here = train_here:main\n"}
    files |= {f"{info}/RECORD": "".join(f"{path[len(SITE) + 1 :]},,\n" for path in (*files, f"{info}/RECORD"))}
    program = "/shared/frameworks/bin/train-here"
    for path, text in {**files, program: f"#!{FRAMEWORKS}\nimport train_here\ntrain_here.main()\n"}.items():
        cluster.write(path, text, user="root")
    cluster.must("chmod", "755", program, user="root")
    project = Project(cluster, f"/home/alice/hpcenv-tests/starts-{uuid.uuid4().hex[:6]}")
    cluster.write(f"{project.folder}/hpcenv.toml", f'image = "host"\npython = "{FRAMEWORKS}"\n')
    for path in ("train.py", "package/train.py"):
        cluster.write(f"{project.folder}/{path}", TRAIN)
    cluster.write(f"{project.folder}/package/__init__.py", "")
    project.must("lock", timeout=300)
    yield project
    cluster.must("rm", "-rf", info, f"{SITE}/train_here.py", program, user="root")


RANK = """\
import os, time
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "HPCENV_NODE")
print("HERE", *(os.environ.get(name) for name in names), bool(os.environ.get("MASTER_ADDR")), flush=True)
time.sleep(1)
if os.environ["RANK"] == "3":
    raise ValueError("rank 3 fails on purpose")
time.sleep(60)
"""


def test_tasks_of_srun_are_ranks_behind_the_gate(host_project: Project, cluster: Cluster) -> None:
    """The short one of the long test below: numbers, gate, first failure and logs with `--launcher srun`."""
    cluster.write(f"{host_project.folder}/rank.py", RANK)
    done = host_project.hpcenv("submit", "rank.py", "--launcher", "srun", *SHAPE, "--name", "by-srun", "--wait")
    assert done.status == 1, done.text
    log = host_project.must("logs", "by-srun")
    assert set(re.findall(r"\[(\d)\] HERE (.*)", log)) == {
        ("0", "0 0 4 0 n1 True"), ("1", "1 1 4 1 n1 True"), ("2", "2 0 4 2 n2 True"), ("3", "3 1 4 3 n2 True")
    }, log  # fmt: skip
    assert log.index("match") < log.index("HERE"), log
    failure = host_project.json("status", "by-srun")["data"]["failure"]
    assert (failure["node"], failure["rank"]) == ("n2", 3), failure
    assert failure["message"] == "ValueError: rank 3 fails on purpose", failure
    assert set(re.findall(r"HERE (\d)", host_project.must("logs", "by-srun", "--node", "n2"))) == {"2", "3"}


@pytest.mark.long
def test_every_way_to_start_waits_for_the_gate_gives_the_same_losses_and_names_the_first_failure(
    with_entry: Project,
) -> None:
    for way, (words, arguments) in WAYS.items():
        with_entry.must("submit", *words, *SHAPE, "--name", way, "--", *arguments)
        with_entry.must("submit", *words, *SHAPE, "--name", f"{way}-fails", "--", *arguments, "--fail", "3")
    with_entry.hpcenv("wait", *WAYS, *(f"{way}-fails" for way in WAYS), timeout=900)

    found = {}
    for way in WAYS:
        log = with_entry.must("logs", way)
        found[way] = losses(log)
        assert len(found[way]) == 4, log
        assert set(re.findall(r"HERE rank (\d of 4 local \d on n\d)", log)) == {
            "0 of 4 local 0 on n1", "1 of 4 local 1 on n1", "2 of 4 local 0 on n2", "3 of 4 local 1 on n2"
        }, log  # fmt: skip
        assert with_entry.record(way, "verdict.json")["result"] == "match"
        assert log.index("match") < log.index("HERE rank"), log
        assert ("task 3" in log) == (way == "srun"), log
    assert len({tuple(values) for values in found.values()}) == 1, found

    for way in WAYS:
        failure = with_entry.json("status", f"{way}-fails")["data"]["failure"]
        assert (failure["node"], failure["rank"]) == ("n2", 3), (way, failure)
        assert failure["message"] == "ValueError: rank 3 fails on purpose", (way, failure)
        assert "in main" in failure["traceback"], (way, failure)
