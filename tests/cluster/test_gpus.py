"""GPUs of the nodes, as the real nvidia-ml-py reads them from the testbed's stand-in for NVML."""

from __future__ import annotations

import base64
import json
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stand_in_torch import GCC

from .conftest import Cluster, Project

pytestmark = pytest.mark.cluster

CONF = "/etc/stub-nvml.conf"


@pytest.fixture
def on_n2(cluster: Cluster) -> Iterator[Callable[[str], object]]:
    """Change what NVML says on n2, by a script for sed; as before when the test ends."""
    cluster.must("cp", CONF, "/run/nvml.before", node="n2", user="root")
    yield lambda script: cluster.must("sed", "-i", script, CONF, node="n2", user="root")
    cluster.must("cp", "/run/nvml.before", CONF, node="n2", user="root")


@pytest.fixture(scope="module")
def without_torch(cluster: Cluster) -> Project:
    """A project whose Python has no torch: what then uses the GPUs is not hpcenv's to say, their number is."""
    made = Project(cluster, f"/home/alice/hpcenv-tests/no-torch-{uuid.uuid4().hex[:6]}")
    cluster.must("python3", "-m", "venv", "--without-pip", f"{made.folder}/venv")
    spec = 'image = "host"\npython = "venv/bin/python"\n[policy]\n"torch.version" = "info"\n'
    cluster.write(f"{made.folder}/hpcenv.toml", spec)
    made.must("lock")
    return made


def verified(project: Project, *, status: int) -> dict[str, Any]:
    done = project.hpcenv("verify", "--nodes", "2", "--gpus", "8", "--json", timeout=600)
    assert done.status == status, done.text
    return dict(json.loads(done.stdout)["data"]["verdict"])


def blocking(verdict: dict[str, Any]) -> list[tuple[str, ...]]:
    names = ("node", "field", "result", "locked", "found")
    return [tuple(f[name] for name in names) for f in verdict["findings"] if f["severity"] == "must"]


def test_all_gpus_that_slurm_gave_are_there(without_torch: Project) -> None:
    verdict = verified(without_torch, status=0)
    facts = without_torch.record(verdict["run"], "facts/n1.json")["values"]
    assert facts["host.gpu-count"] == 8
    assert set(facts["host.gpu-models"]) == {"NVIDIA H100 80GB HBM3"}
    assert facts["host.gpu-sm-counts"] == ["132"] * 8


def test_one_gpu_less_than_slurm_gave_is_a_mismatch(without_torch: Project, on_n2: Callable[[str], object]) -> None:
    on_n2(r"0,/^\[gpu\]/{/^\[gpu\]/d}")  # its keys are then the driver's, and hpcenv does not ask for them
    verdict = verified(without_torch, status=90)
    rows = blocking(verdict)
    assert ("n2", "host.gpu-count", "mismatch", ">= 8", "7") in rows
    assert {row[0] for row in rows} == {"n2"}


def test_a_lost_gpu_is_named_and_what_it_hides_is_unknown(
    without_torch: Project, on_n2: Callable[[str], object]
) -> None:
    on_n2(r"0,/^uuid/s/^uuid/handle = !15\nuuid/")
    rows = blocking(verified(without_torch, status=90))
    assert ("n2", "host.gpu-count", "unknown", ">= 8", "GPU 0: GPU is lost") in rows
    assert ("n2", "gpu.lost", "mismatch", "an answer from each", "GPU 0: GPU is lost") in rows
    assert {row[0] for row in rows} == {"n2"}


def test_nodes_with_other_gpus_are_told(without_torch: Project, on_n2: Callable[[str], object]) -> None:
    on_n2("s/^name = .*/name = NVIDIA A100-SXM4-80GB/")
    rows = blocking(verified(without_torch, status=93))
    assert [(row[1], row[2]) for row in rows] == [("host.gpu-models", "mismatch")]


def test_a_cpu_build_of_torch_gets_gpus_only_where_it_is_allowed(
    sif_project: Project, on_n2: Callable[[str], object]
) -> None:
    words = ("submit", "examples/train.py", "--nodes", "2", "--gpus", "8", "--nproc", "1")
    refused = sif_project.hpcenv(*words)
    assert refused.status == 15
    assert "torch 2.13.0+cpu cannot use GPUs: it was built without CUDA and without ROCm" in refused.stderr
    assert "8 GPUs on each node would stay idle; the number comes from --gpus" in refused.stderr

    on_n2("s/^name = .*/name = NVIDIA A100-SXM4-80GB/")
    run = f"idle-{uuid.uuid4().hex[:6]}"
    done = sif_project.hpcenv(*words, "--allow-cpu-torch", "--wait", "--name", run, "--", "--steps", "2")
    assert done.status == 0, done.text
    assert "they are recorded, not compared" in done.text
    models = [sif_project.record(run, f"facts/{node}.json")["values"]["host.gpu-models"][0] for node in ("n1", "n2")]
    assert models == ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"]


# A library of the node that --nv brings into the container, with none of the symbols that torch needs. $1 is its name.
BROKEN = """
mkdir -p /run/broken && base64 -d > "/run/broken/$1.6" && cd /run/broken && echo /run/broken > conf
/usr/sbin/ldconfig -X -C cache -f conf && (cat /etc/apptainer/nvliblist.conf && echo "$1") > list
mount --bind cache /etc/ld.so.cache && mount --bind list /etc/apptainer/nvliblist.conf
"""
MENDED = "umount /etc/ld.so.cache /etc/apptainer/nvliblist.conf; rm -rf /run/broken"


@pytest.mark.skipif(GCC is None, reason="NOT RUN: no C compiler")
def test_a_broken_library_of_nv_on_one_node_ends_the_job_after_one_attempt(
    sif_project: Project, cluster: Cluster, tmp_path: Path
) -> None:
    """The check does not start torch with --nv: the start gate does, and n1, which srun ends then, was not asked to stop."""
    library = tmp_path / "libstdc++.so.6"
    words = [str(GCC), "-shared", "-xc", "/dev/null", f"-Wl,-soname,{library.name}", "-o", str(library)]
    subprocess.run(words, check=True)
    run = f"broken-{uuid.uuid4().hex[:6]}"
    shape = ("--nodes", "2", "--gpus", "8", "--nproc", "1", "--allow-cpu-torch", "--requeue", "always", "--time", "10")
    content = base64.b64encode(library.read_bytes()).decode()
    cluster.must("sh", "-ec", BROKEN, "sh", "libstdc++.so", stdin=content, node="n2", user="root")
    try:
        done = sif_project.hpcenv("submit", "examples/train.py", *shape, "--wait", "--name", run, timeout=400)
    finally:
        cluster.must("sh", "-c", MENDED, node="n2", user="root")
    assert done.status == 91, done.text
    assert "world_size" not in done.stdout, "a line of train.py ran"
    assert "hpcenv: node n2: loaded.differs (must): locked read, loaded torch cannot be imported" in done.stdout
    finished = sif_project.record(run, "finished.json")
    assert (finished["status"], finished["again"], finished["before_training"]) == (91, False, False)
    assert cluster.run("test", "-e", f"{sif_project.folder}/runs/{run}/attempts").status == 1
    found = sif_project.json("diagnose", run)["data"]
    cause = (found["diagnoses"][0] if "diagnoses" in found else found)["cause"]
    assert (cause["pattern"], cause["node"]) == ("gate-start-refused", "n2")


SHOWS_CPUS = (
    "import os\nprint('CPUS', os.environ['LOCAL_RANK'], sorted(os.sched_getaffinity(0)), flush=True)\nimport torch\n"
)
# The machine has no PCI device for the GPUs of the stand-in: files in their place say which CPUs are near.
NEAR = """
mount -t tmpfs none /sys/bus/pci/devices
number=0
for bus in $1; do
  mkdir -p "/sys/bus/pci/devices/$bus"
  echo $((number % 2)) > "/sys/bus/pci/devices/$bus/local_cpulist"
  number=$((number + 1))
done
"""


def test_ranks_run_on_the_cpus_near_their_gpus(host_project: Project, cluster: Cluster) -> None:
    cluster.write(f"{host_project.folder}/near.py", SHOWS_CPUS)
    words = ("submit", "near.py", "--nodelist", "n1", "--gpus", "2", "--allow-cpu-torch", "--time", "5", "--wait")
    conf = cluster.must("grep", "^bus = ", CONF, node="n1").splitlines()
    buses = [line.removeprefix("bus = 0000") for line in conf][:2]
    cluster.must("sh", "-c", NEAR, "sh", " ".join(buses), node="n1", user="root")
    try:
        done = host_project.hpcenv(*words, "--name", "near")
    finally:
        cluster.must("umount", "/sys/bus/pci/devices", node="n1", user="root")
    assert done.status == 0, done.text
    assert "ranks bound to the CPUs near their GPUs: 2 of 2 of a node" in done.text
    assert {line.partition("CPUS ")[2] for line in done.text.splitlines() if "CPUS " in line} == {"0 [0]", "1 [1]"}
    assert host_project.record("near", "facts/n1.json")["rank_cpus"] == {"cpus": ["0", "1"], "gpus": buses, "why": ""}
    assert host_project.record("near", "determinism/attempt-0/rank-1.json")["cpus"] == "1"
