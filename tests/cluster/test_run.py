"""`hpcenv run` in a real allocation: the gate before, the status of the command, a terminal; and shares of real nodes."""

from __future__ import annotations

import re

import pytest

from .conftest import Cluster, Project

pytestmark = pytest.mark.cluster

VICTIM = "/shared/hostenv/lib/python3.11/site-packages/numpy/version.py"
IN_ALLOCATION = r"""
hpcenv run -- sh -c 'echo "AT $SLURMD_NODENAME $(command -v python)"; exit 5'; echo "STATUS $?"
hpcenv run --nodes 3 -- true; echo "STATUS $?"
script -qec "hpcenv run --pty -- sh -c 'test -t 0 && echo TERMINAL on \$SLURMD_NODENAME'" /dev/null; echo "STATUS $?"
"""
PATCH = 'sed "0,/version/s//versiom/" "$1" > /run/patched && mount --bind /run/patched "$1"'


def test_a_command_runs_on_the_nodes_of_an_allocation_behind_the_gate(cluster: Cluster, host_project: Project) -> None:
    salloc = ("salloc", "--nodes=2", "--cpus-per-task=2", "--time=5")
    done = cluster.run(*salloc, "bash", "-c", IN_ALLOCATION, cwd=host_project.folder)
    lines = done.text.replace("\r", "").splitlines()
    assert [line for line in lines if line.startswith("STATUS")] == ["STATUS 5", "STATUS 2", "STATUS 0"], done.text
    assert sorted(line for line in lines if line.startswith("AT")) == [
        "AT n1 /shared/hostenv/bin/python", "AT n2 /shared/hostenv/bin/python"
    ]  # fmt: skip
    assert "2 nodes match the lockfile, checked in" in done.text
    assert "TERMINAL on n1" in done.text
    cluster.must("sh", "-c", PATCH, "sh", VICTIM, node="n2", user="root")
    try:
        done = cluster.run(*salloc, "hpcenv", "run", "--", "touch", "started", cwd=host_project.folder, accepts=False)
    finally:
        cluster.must("umount", VICTIM, node="n2", user="root")
    assert done.status == 90, done.text
    assert "error[node-rejected]: the command was not started: a node differs from the lockfile" in done.text
    assert re.search(r"n2 +packages\.numpy", done.text), done.text
    assert cluster.run("test", "-e", f"{host_project.folder}/started").status != 0


def test_the_share_of_real_nodes_and_of_their_partition(cluster: Cluster, host_project: Project) -> None:
    cluster.write(f"{host_project.folder}/share.py", "print(1)\n")
    words = ("submit", "share.py", "--gpus", "2", "--allow-cpu-torch", "--dry-run", "--partition", "low")
    plan = host_project.json(*words)["data"]
    assert "#SBATCH --cpus-per-task=4\n" in plan["script"]
    assert (
        "requested on each node, as scontrol shows it: 4 CPUs (2 of the 8 GPUs of n1, which has 16 CPUs); left to "
        "Slurm's default: memory (the cluster does not count memory: SelectTypeParameters=CR_CORE)"
    ) in plan["notes"]
    update = ("scontrol", "update", "partition=low")
    cluster.must(*update, "JobDefaults=DefCpuPerGPU=3,DefMemPerGPU=100", user="root")
    try:
        plan = host_project.json(*words)["data"]
    finally:
        cluster.must(*update, "JobDefaults=", user="root")
    assert plan["manifest"]["cpus_origin"] == "2 GPUs x DefCpuPerGPU=3 of partition low"
    assert "#SBATCH --cpus-per-task=6\n" in plan["script"]
