"""Exports run for real: two nodes under podman-compose, and the pod of the Job under `podman kube play`.

The image is locked and exported on the testbed, with Apptainer. podman runs on this machine, with runc: the testbed's
machines have no /sys/fs/cgroup. tests/unit/exports shows the same of the check alone.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml

from .conftest import Cluster, Project

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]

PYTHON = os.environ.get("HPCENV_TEST_EXPORTS_PYTHON") or sys.executable
PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "elsewhere.md"
TRAIN = """\
import os, sys, torch, torch.distributed as dist
import hpcenv.training
import parts.beside
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("TRAINS", int(total), os.environ["PRICE"], sys.argv[1:], flush=True)
dist.destroy_process_group()
"""
WORDS = ("--gpus", "0", "--nproc", "1", "--cpus", "1", "--mem", "2G", "--env", "PRICE=5$x")
ARGS = ("--", "--lr", "3e-4", "a $(b)")
# Small: the default of podman is above what this machine may have.
CONTAINERS = """\
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_backend = "netavark"
[containers]
log_driver = "k8s-file"
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
"""


@dataclass(frozen=True)
class Podman:
    """podman with its own storage, and the image of the testbed in it."""

    program: Path
    environ: dict[str, str]

    def run(self, *words: str, cwd: Path | None = None, status: int | None = 0) -> str:
        argv = [str(self.program), *words]
        return self.start(argv, cwd, status)

    def compose(self, *words: str, cwd: Path) -> str:
        argv = [str(Path(PYTHON).with_name("podman-compose")), "--podman-path", str(self.program), *words]
        return self.start(argv, cwd, None)

    def start(self, argv: list[str], cwd: Path | None, status: int | None) -> str:
        done = subprocess.run(argv, env=self.environ, cwd=cwd, text=True, capture_output=True, timeout=1800)
        assert status is None or done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def volume(self, name: str) -> Path:
        """Make a volume; return where its content is."""
        self.run("volume", "create", name)
        return Path(self.run("volume", "inspect", "-f", "{{.Mountpoint}}", name).strip())

    def statuses(self) -> dict[str, int]:
        lines = self.run("ps", "-a", "--format", "{{.Names}} {{.ExitCode}}").splitlines()
        return {name: int(code) for name, code in (line.split() for line in lines)}


@pytest.fixture(scope="module")
def project(cluster: Cluster, sif_project: Project) -> Project:
    """The locked image with a separate script: podman 4.3 cannot read a text that begins with a tab."""
    folder = f"{sif_project.folder}-elsewhere"
    cluster.must("mkdir", folder)
    cluster.must("cp", "-r", "hpcenv.toml", "lockfiles", folder, cwd=sif_project.folder)
    cluster.write(f"{folder}/train_elsewhere.py", TRAIN)
    cluster.write(f"{folder}/parts/beside.py", "")
    return Project(cluster, folder)


@pytest.fixture(scope="module")
def place(cluster: Cluster, project: Project) -> Path:
    """The project's folder, as this machine sees it."""
    return Path(json.loads(cluster.testbed("status", "--json").stdout)["state"]) / project.folder.lstrip("/")


def export(project: Project, place: Path, *words: str) -> Path:
    name = f"out-{uuid.uuid4().hex[:6]}"
    project.must("submit", "train_elsewhere.py", *WORDS, *words, "--export", name, *ARGS)
    return place / name


@pytest.fixture(scope="module")
def podman(cluster: Cluster, place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    if os.geteuid() != 0 or not Path(PYTHON).with_name("podman-compose").exists():
        pytest.skip("NOT RUN: podman needs root here, and podman-compose beside HPCENV_TEST_EXPORTS_PYTHON")
    if not all(map(shutil.which, ("podman", "runc", "skopeo"))):
        pytest.skip("NOT RUN: podman, runc or skopeo is not installed")
    folder = tmp_path_factory.mktemp("podman")
    (folder / "containers.conf").write_text(CONTAINERS)
    program = folder / "podman"
    storage = f"--root {folder}/root --runroot {folder}/run --storage-driver overlay"
    program.write_text(f'#!/bin/sh\nexec podman {storage} "$@"\n')
    program.chmod(0o755)
    digest = tomllib.loads((place / "lockfiles/default.lock.toml").read_text())["container"]["manifest-digest"]
    cache = Path(json.loads(cluster.testbed("status", "--json").stdout)["cache"])
    layout = next(path for path in cache.glob("image-*/index.json") if digest in path.read_text()).parent
    target = f"containers-storage:[overlay@{folder}/root+{folder}/run]registry:5000/hpcenv/torch@{digest}"
    subprocess.run(["skopeo", "copy", "-q", f"oci:{layout}:2.13.0-cpu", target], check=True, timeout=1800)
    made = Podman(program, {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf")})
    (folder / "Dockerfile").write_text(
        f"FROM registry:5000/hpcenv/torch@{digest}\n"
        "RUN python3 -c \"import numpy.version as v; print(file=open(v.__file__, 'a'))\"\n"
    )
    made.run("build", "-q", "--isolation", "chroot", "-t", "localhost/changed", str(folder))
    yield made
    made.run("pod", "rm", "-fa", status=None)
    made.run("rm", "-fa", status=None)
    made.run("volume", "rm", "-fa", status=None)
    subprocess.run(["umount", f"{folder}/root/overlay"], check=False, capture_output=True)


def test_two_nodes_train_under_compose(podman: Podman, project: Project, place: Path) -> None:
    folder = export(project, place, "--nodes", "2", "--format", "compose")
    said = podman.compose("up", cwd=folder)
    assert said.count("hpcenv verdict: match") == 2, said
    assert said.count("TRAINS 2 5$x ['--lr', '3e-4', 'a $(b)']") == 2, said
    assert sorted(podman.statuses().values()) == [0, 0]
    podman.compose("down", cwd=folder)


def test_with_one_package_changed_no_container_trains(podman: Podman, project: Project, place: Path) -> None:
    folder = export(project, place, "--nodes", "2", "--format", "compose")
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    for service in compose["services"].values():
        service["image"] = "localhost/changed"
    (folder / "compose.yaml").write_text(yaml.safe_dump(compose))
    said = podman.compose("up", cwd=folder)
    assert said.count("packages.numpy.content-sha256  MISMATCH") == 2, said
    assert "TRAINS" not in said
    assert sorted(podman.statuses().values()) == [90, 90]
    podman.compose("down", cwd=folder)


@pytest.mark.parametrize(("image", "status"), [("", 0), ("localhost/changed", 90)])
def test_the_pod_of_the_job_runs(podman: Podman, project: Project, place: Path, image: str, status: int) -> None:
    folder = export(project, place, "--format", "kubernetes", "--volume", "team:/team")
    shutil.copytree(folder / "code", podman.volume("team"), dirs_exist_ok=True)
    pod = pod_of(folder)
    if image:
        pod["spec"]["containers"][0]["image"] = image
    ended, said = play(podman, folder, pod)
    assert ended == status, said
    assert ("TRAINS 1 5$x ['--lr', '3e-4', 'a $(b)']" in said) == (status == 0), said
    assert ("MISMATCH" in said) == (status == 90)
    podman.run("volume", "rm", "-f", "team")


def test_a_run_of_slurm_is_a_pod_with_its_code_in_a_config_map(podman: Podman, project: Project, place: Path) -> None:
    """With the line of docs/how-to/elsewhere.md for a run that is there."""
    project.must("submit", "train_elsewhere.py", *WORDS, "--name", "first", "--wait", *ARGS)
    (typed,) = re.findall(r"`(hpcenv rerun RUN .*?)`", PAGE.read_text(encoding="utf-8"))
    project.must(*shlex.split(typed.replace("RUN", "first"))[1:])
    folder = place / "elsewhere"
    pod = pod_of(folder)
    (code,) = (one["configMap"] for one in pod["spec"]["volumes"] if one["name"] == "code")
    # Kubernetes makes the folders that the paths name; podman 4.3 does not.
    content = podman.volume(code["name"])
    for item in code["items"]:
        (content / item["path"]).parent.mkdir(parents=True, exist_ok=True)
    ended, said = play(podman, folder, pod)
    assert "TRAINS 1 5$x ['--lr', '3e-4', 'a $(b)']" in said
    assert ended == 0
    assert (content / "source/parts/beside.py").is_file()


def pod_of(folder: Path) -> dict[str, Any]:
    """Return the pod that the Job of an export starts."""
    job = next(one for one in yaml.safe_load_all((folder / "kubernetes.yaml").read_text()) if one["kind"] == "Job")
    template = job["spec"]["template"]
    metadata = {"name": "trial", **template["metadata"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def play(podman: Podman, folder: Path, pod: dict[str, Any]) -> tuple[int, str]:
    """Run a pod with the ConfigMaps of an export; return how it ended, and what it said."""
    path = folder / "pod.yaml"
    path.write_text(f"{(folder / 'configmaps.yaml').read_text()}---\n{json.dumps(pod)}")
    podman.run("kube", "play", str(path))
    ended = podman.run("wait", "trial-training").split()[-1]
    said = podman.run("logs", "trial-training")
    podman.run("kube", "down", str(path), status=None)
    return int(ended), said
