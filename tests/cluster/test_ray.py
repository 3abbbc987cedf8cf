"""`--launcher ray` with Ray of the index, on two nodes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
import uuid

import pytest

from tests import ray_world

from .conftest import HOST_PYTHON, ROOT, TESTBED, Cluster, Project, _project

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SITE = "lib/python3.11/site-packages"
SHAPE = ("--launcher", "ray", "--nodes", "2", "--gpus", "0", "--cpus", "2", "--time", "9")
# A training with Ray Train, one worker on each node; it waits until the test has looked at it.
TRAIN = """\
import os, pathlib, sys, time
import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

RUN = pathlib.Path(os.environ["HPCENV_RUN_FOLDER"])


def loop():
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    print("TRAINS", os.environ["HPCENV_NODE"], dist.get_world_size(), total.item(), flush=True)
    (RUN / ("trained-" + os.environ["HPCENV_NODE"])).touch()
    while not (RUN / "go").exists():
        time.sleep(0.2)


print("STARTS", len(ray.nodes()) if ray.is_initialized() else "-", flush=True)
TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD")).fit()
"""
# Says at its first line whether the cluster lets it in.
STRANGER = """\
import sys
from ray._raylet import GcsClient
try:
    print("IN", len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=20)))
except Exception as error:
    print("REFUSED", type(error).__name__, " ".join(str(error).split())[:300])
"""
# What is there of jobs: processes, files and sockets.
LEFT = (
    "ps -u alice -o args= | grep -E 'ray|gcs_server' | grep -v grep; find /tmp /dev/shm -user alice | grep -v hpcenv-2001;"
    " ss -xl | grep -E 'plasma|raylet|hpcenv-ray'; ss -tl | grep -E ':(1[0-9]|2[0-9]|3[0-2])[0-9]{3} .*users' ; true"
)


def unpack_ray(cluster: Cluster, folder: str) -> None:
    """Put Ray of the index into a folder of the testbed."""
    pack = ["tar", "c", "--exclude=*.pth", "-C", str(ray_world.site_packages()), "."]
    unpack = [str(TESTBED), "exec", "--node", "login", "--user", "alice", "--", "tar", "x", "-C", folder]
    with subprocess.Popen(pack, stdout=subprocess.PIPE) as packed:
        subprocess.run(unpack, stdin=packed.stdout, check=True, timeout=300)
    assert packed.returncode == 0


@pytest.fixture
def project(cluster: Cluster) -> Project:
    """A locked project, whose environment is hostenv's torch with Ray."""
    name = f"ray-{uuid.uuid4().hex[:6]}"
    venv = f"/home/alice/hpcenv-tests/{name}-env"
    made = _project(cluster, name, f'image = "host"\npython = "{venv}/bin/python"\n')
    cluster.must(HOST_PYTHON, "-m", "venv", "--without-pip", venv)
    unpack_ray(cluster, f"{venv}/{SITE}")
    cluster.write(f"{venv}/{SITE}/hostenv.pth", f"/shared/hostenv/{SITE}\n")
    cluster.write(f"{made.folder}/train.py", TRAIN)
    cluster.write(f"{made.folder}/stranger.py", STRANGER)
    made.must("lock", timeout=600)
    return made


@pytest.fixture
def image_project(cluster: Cluster, sif_project: Project) -> Project:
    """A locked project, whose environment is the test image with Ray in an overlay."""
    spec = cluster.must("cat", f"{sif_project.folder}/hpcenv.toml")
    made = _project(cluster, f"ray-{uuid.uuid4().hex[:6]}", f'overlay = "ray.sqsh:/opt/ray"\n{spec}')
    make = 'apptainer -q exec -B "$PWD" "$1" python3 -m venv --system-site-packages --without-pip "$PWD/venv"'
    cluster.must("sh", "-c", make, "sh", sif_project.sif(), cwd=made.folder)
    unpack_ray(cluster, f"{made.folder}/venv/{SITE}")
    pack = "mksquashfs venv ray.sqsh -quiet -no-progress && rm -r venv"
    cluster.must("sh", "-c", pack, cwd=made.folder, timeout=300)
    made.must("lock", "--no-wheels", timeout=600)
    return made


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", ["project", "image_project"])
def test_the_first_training_of_the_page(where: str, request: pytest.FixtureRequest, cluster: Cluster) -> None:
    """docs/how-to/ray.md as it is written: on the host, and in a SIF."""
    project: Project = request.getfixturevalue(where)
    page = (ROOT / "docs/how-to/ray.md").read_text(encoding="utf-8")
    script, command = (re.search(rf"^```{kind}\n(.*?)^```", page, re.M | re.S)[1] for kind in ("python", "sh"))  # type: ignore[index]
    cluster.write(f"{project.folder}/train.py", script)
    said = project.hpcenv(*shlex.split(command)[1:], timeout=600)
    assert said.status == 0, said.text
    log = project.must("logs")
    assert "hpcenv: Ray has 2 nodes: n1 n2" in log
    assert "rank 0 of 2: 3.0" in log
    assert "rank 1 of 2: 3.0" in log


def found_on_nodes(cluster: Cluster) -> list[list[str]]:
    """Return the lines of LEFT for each node. A killed job of another test may have left files of torchrun in /tmp."""
    return [sorted(cluster.run("sh", "-c", LEFT, node=node, user="root").stdout.splitlines()) for node in ("n1", "n2")]


def wait_for(cluster: Cluster, *paths: str) -> None:
    script = 'for n in $(seq 1000); do for p; do [ -e "$p" ] || { sleep 0.3; continue 2; }; done; exit; done; exit 1'
    cluster.must("bash", "-c", script, "bash", *paths, timeout=400)


def options_of(cluster: Cluster, node: str) -> list[dict[str, str]]:
    """Return the options of each raylet's `ray start` on a node."""
    shown = cluster.must("sh", "-c", "ps -u alice -ww -o args= | grep 'ray start' | grep -v grep", node=node)
    lines = [line for line in shown.splitlines() if "entry.py" in line]
    return [dict(word[2:].partition("=")[::2] for word in line.split() if word.startswith("--")) for line in lines]


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_two_trainings_of_ray_train_on_the_same_nodes_a_stranger_and_what_is_left(
    project: Project, cluster: Cluster
) -> None:
    folders = [f"{project.folder}/runs/{name}" for name in ("one", "two")]
    before = found_on_nodes(cluster)
    for name in ("one", "two"):
        project.must("submit", "train.py", *SHAPE, "--name", name)
        wait_for(cluster, f"{project.folder}/runs/{name}/trained-n1", f"{project.folder}/runs/{name}/trained-n2")
    for node in ("n1", "n2"):
        one, two = options_of(cluster, node)
        assert {value for name, value in one.items() if name.endswith("port")}.isdisjoint(
            value for name, value in two.items() if name.endswith("port")
        )
        assert one["temp-dir"] != two["temp-dir"]
        for each in (one, two):
            above = each["temp-dir"].rpartition("/")[0]
            assert cluster.must("stat", "-c", "%a", above, f"{above}/token", node=node) == "700\n600\n"
            assert cluster.run("ls", above, node=node, user="bob").status != 0

    (head,) = [each for each in options_of(cluster, "n1") if "port" in each][:1]
    address, token = f"{head['node-ip-address']}:{head['port']}", head["temp-dir"].replace("/r", "/token")
    said = {}
    for name, words in {
        "with": ("RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN_PATH={token}"),
        "without": ("RAY_AUTH_MODE=disabled",),
        "wrong": ("RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN={'0' * 64}"),
    }.items():
        python = f"{project.folder}-env/bin/python"
        said[name] = cluster.run("env", *words, python, f"{project.folder}/stranger.py", address, node="n1").stdout
    assert said["with"].startswith("IN 2"), said
    assert said["without"].startswith("REFUSED"), said
    assert said["wrong"].startswith("REFUSED"), said
    print(said)

    cluster.must("touch", f"{folders[0]}/go")
    assert project.hpcenv("wait", "one", timeout=300).status == 0, project.hpcenv("logs", "one").text
    assert len(options_of(cluster, "n2")) == 1, "the other job goes on"
    cluster.must("touch", f"{folders[1]}/go")
    assert project.hpcenv("wait", "two", timeout=300).status == 0, project.hpcenv("logs", "two").text
    for name in ("one", "two"):
        log = project.must("logs", name)
        assert log.index("hpcenv verdict: match") < log.index("Ray has 2 nodes: n1 n2") < log.index("STARTS")
        assert "TRAINS n1 2 3.0" in log
        assert "TRAINS n2 2 3.0" in log
    assert found_on_nodes(cluster) == before


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_node_whose_ray_dies_is_named_and_a_cancel_leaves_nothing(project: Project, cluster: Cluster) -> None:
    run, before = f"{project.folder}/runs/dies", found_on_nodes(cluster)
    project.must("submit", "train.py", *SHAPE, "--name", "dies")
    wait_for(cluster, f"{run}/trained-n1", f"{run}/trained-n2")
    cluster.must("pkill", "-9", "-x", "raylet", node="n2", user="root")
    assert project.hpcenv("wait", "dies", timeout=300).status == 1
    failure = project.json("status", "dies")["data"]["failure"]
    assert failure["node"] == "n2", failure
    assert failure["message"] == "raylet ended with 137", failure
    assert "raylet.out" in cluster.must("ls", f"{run}/ranks/n2/ray-logs")

    run = f"{project.folder}/runs/stops"
    project.must("submit", "train.py", *SHAPE, "--name", "stops")
    wait_for(cluster, f"{run}/trained-n1", f"{run}/trained-n2")
    project.must("cancel", "stops")
    end = time.monotonic() + 120
    while cluster.must("squeue", "-h", "-u", "alice").strip():
        assert time.monotonic() < end
        time.sleep(1)
    assert found_on_nodes(cluster) == before
    assert json.loads(cluster.must("cat", f"{run}/verdict.json"))["result"] == "match"
