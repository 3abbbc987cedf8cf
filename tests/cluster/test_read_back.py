"""Settings that the host's stack ignores, and a plugin that is found first but is the wrong one: named by the gate.

The environment is a folder of small compiled libraries with the names of the real ones: what the loader finds, and what
the libraries read, is found on the nodes as for a real torch. Nothing is started, so no GPU can be tried (cuda.start).
"""

from __future__ import annotations

import io
import subprocess
import tarfile
import uuid
from pathlib import Path
from typing import Any

import pytest
from probe_world import Venv
from torch_world import ANSWERS, build_library, install_cuda_torch

from .conftest import TESTBED, Cluster, Project

pytestmark = pytest.mark.cluster

NCCL = "nccl/lib/libnccl.so.2"
READS = 'const char *names[] = {"NCCL_DEBUG", "NCCL_IB_HCA", "NCCL_NET_PLUGIN", "NCCL_SOCKET_IFNAME"};'
SAYS = 'const char *hello(void) {{ return "Initializing aws-ofi-nccl {}"; }}'
SPEC = """\
image = "host"
python = "venv/bin/python"
[policy]
"torch.version" = "info"
"cuda.start" = "info"
[env]
LD_LIBRARY_PATH = "{folder}/first:{folder}/second"
NCCL_IB_HCA = "=mlx5_7"
NCCL_IB_CUDA_SUPPORT = "1"
FI_MR_CACHE_MONITOR = "kdreg2"
"""


def copied(cluster: Cluster, source: Path, folder: str) -> None:
    """Copy a folder of this machine to the shared file system of the testbed."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        tar.add(source, arcname=".")
    words = [str(TESTBED), "exec", "--node", "login", "--user", "alice", "--", "tar", "-x", "-C", folder]
    subprocess.run(words, input=data.getvalue(), check=True, timeout=60)


@pytest.fixture(scope="module")
def project(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = Project(cluster, f"/home/alice/hpcenv-tests/read-back-{uuid.uuid4().hex[:6]}")
    world = tmp_path_factory.mktemp("world")
    env = Venv(world / "venv")
    extension = install_cuda_torch(env, answers={**ANSWERS, NCCL: ANSWERS[NCCL] + READS})
    cluster.must("python3", "-m", "venv", "--without-pip", f"{made.folder}/venv")
    ask = "import sysconfig as s; print(s.get_path('purelib')); print(s.get_config_var('SOABI'))"
    site, suffix = cluster.must(f"{made.folder}/venv/bin/python", "-c", ask).split()
    extension.rename(extension.with_name(f"_C.{suffix}.so"))
    copied(cluster, env.site, site)
    build_library(world / "plugins/first/libnccl-net.so", SAYS.format("1.8.1-aws"))
    build_library(world / "plugins/second/libnccl-net.so", SAYS.format("1.18.0"))
    copied(cluster, world / "plugins", made.folder)
    cluster.write(f"{made.folder}/hpcenv.toml", SPEC.format(folder=made.folder))
    made.must("lock")
    return made


@pytest.mark.long
def test_what_is_ignored_and_the_wrong_plugin_are_named_before_the_training(project: Project) -> None:
    verdict: dict[str, Any] = project.json("verify", "--nodes", "2", "--gpus", "1")["data"]["verdict"]
    said = " ".join(project.cluster.must("cat", f"{project.folder}/runs/{verdict['run']}/job.log").split())
    folder = project.folder
    # The plugin that is found first, and the one that was meant.
    assert f"NCCL takes {folder}/first/libnccl-net.so (aws-ofi-nccl 1.8.1-aws)" in said
    assert f"not {folder}/second/libnccl-net.so (aws-ofi-nccl 1.18.0)" in said
    # What the host has not, and what no library of this environment reads.
    assert "FI_MR_CACHE_MONITOR=kdreg2" in said
    assert "has no effect: without the module kdreg2" in said
    assert "NCCL_IB_HCA==mlx5_7" in said
    assert "(/sys/class/infiniband: no active port)" in said
    assert "NCCL_IB_CUDA_SUPPORT=1" in said
    assert "no library reads it" in said
    read = {effect["name"]: effect["took_effect"] for effect in verdict["network"]["effects"]}
    assert read == {"FI_MR_CACHE_MONITOR": "no", "NCCL_IB_HCA": "no"}
