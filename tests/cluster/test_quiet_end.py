"""The last lines of a log are the script's: the node that has the store of the rendezvous ends last."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from .conftest import HOST_PYTHON, ROOT, Cluster, Project

pytestmark = pytest.mark.cluster

TRAIN = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
if os.environ["RANK"] == "0":
    print("final loss 0.25", flush=True)
"""

# Imported by every Python below it: on the node without the store, the agent leaves the rendezvous three seconds late.
LATE = """
import sys, time
if "is_host=0" in " ".join(sys.orig_argv) and "agent.py" in " ".join(sys.orig_argv):
    import torch.distributed.elastic.rendezvous.dynamic_rendezvous as dynamic
    leave = dynamic.DynamicRendezvousHandler.shutdown
    def late(self):
        time.sleep(3)
        return leave(self)
    dynamic.DynamicRendezvousHandler.shutdown = late
"""
FRAMES = ("frame #", "Rendezvous", "Broken pipe")


def test_the_agent_with_the_store_waits_for_one_that_leaves_late(cluster: Cluster, host_project: Project) -> None:
    folder = f"{host_project.folder}/late"
    for name in ("agent.py", "proc.py", "rendezvous_store.py"):
        cluster.write(f"{folder}/{name}", (ROOT / "hpcenv/incontainer" / name).read_text(encoding="utf-8"))
    cluster.write(f"{folder}/train.py", TRAIN)
    cluster.write(f"{folder}/late/sitecustomize.py", LATE)
    first = cluster.must("getent", "ahostsv4", "n1", node="n1").split()[0]

    def run(node: str) -> str:
        options = f"--nnodes=2 --nproc_per_node=1 --rdzv_backend=c10d --rdzv_endpoint={first}:29871 --rdzv_id=late"
        conf = f"--rdzv_conf=is_host={int(node == 'n1')} --local_addr={node} --max_restarts=0 --log_dir=/tmp/late"
        shell = f"GLOO_SOCKET_IFNAME=eth0 PYTHONPATH={folder}/late exec timeout 150 {HOST_PYTHON} agent.py"
        done = cluster.run("sh", "-c", f"{shell} /tmp/late.json -- {options} {conf} -- train.py", node=node, cwd=folder)
        assert done.status == 0, done.text
        return done.text

    with ThreadPoolExecutor() as pool:
        said = "".join(pool.map(run, ("n1", "n2")))
    assert "final loss 0.25" in said
    assert not [word for word in FRAMES if word in said], said


RUNS = 50 if os.environ.get("HPCENV_TEST_LONG") else 1


def test_the_last_line_of_a_log_is_the_scripts(cluster: Cluster, host_project: Project) -> None:
    """HPCENV_TEST_LONG=1: fifty runs."""
    cluster.write(f"{host_project.folder}/quiet.py", TRAIN)
    for _ in range(RUNS):
        host_project.must("submit", "quiet.py", "--nodes", "2", "--gpus", "0", "--nproc", "2", "--wait", "--time", "10")
        log = cluster.must("sh", "-c", 'cat "$(ls -td runs/*/ | head -1)job.log"', cwd=host_project.folder)
        assert log.splitlines()[-1] == "[0] final loss 0.25", log


def test_ranks_that_join_no_process_group_are_told(cluster: Cluster, host_project: Project) -> None:
    cluster.write(f"{host_project.folder}/lone.py", "print('done')\n")
    shape = ("--nodes", "2", "--gpus", "0", "--nproc", "2", "--time", "10")
    host_project.must("submit", "lone.py", *shape, "--name", "lone", "--wait")
    report = host_project.must("report", "lone")
    assert report.splitlines()[0] == "lone: completed (4 ranks, 0 joined a process group), exit status 0"
