"""A CUDA image as a user makes it, its lock with proved wheels, and the line of the README on it: no rank starts.

`image init` resolves the packages on this machine, from the index that its pip is configured for. The testbed's nodes
have no network: the wheels lie in a folder that alice's pip takes for its index. Her GPUs are the testbed's stand-ins,
which NVML lists and which compute nothing: the job ends before the first rank. With --allow-cpu-torch the same line trains on
16 ranks with Gloo.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomlkit
from packaging.utils import canonicalize_name

from tests.conftest import hpcenv

from .conftest import IMAGE, ROOT, Cluster, Project
from .test_image_init import CACHE, PUSH, fabric_packages, index_of

# The first test waits for gigabytes of wheels, and for their image.
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]

TORCH, CUDA = "2.14.1", "13.0"
LINE = "hpcenv submit train.py --nodes 2 --gpus 8"
ALICE = 2001


def download(requirements: Path) -> Path:
    """The wheels of a requirements file with hashes, by this machine's pip; kept for the next time."""
    shelf = CACHE / f"wheels-cuda-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:16]}"
    if not shelf.is_dir():
        aside = shelf.with_name(f"{shelf.name}.{uuid.uuid4().hex[:6]}")
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(aside), "--no-deps"]
        argv += ["--require-hashes", "--only-binary", ":all:", "--requirement", str(requirements)]
        subprocess.run(argv, check=True, timeout=1200)
        try:
            aside.rename(shelf)
        except OSError:  # another process of the tests has downloaded the same
            shutil.rmtree(aside)
    return shelf


def make_index(wheels: Path, folder: Path) -> None:
    """A folder that pip takes for an index (PEP 503)."""
    (folder / "files").mkdir(parents=True)
    for wheel in sorted(wheels.glob("*.whl")):
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        shutil.copy(wheel, folder / "files")
        page = folder / "simple" / canonicalize_name(wheel.name.split("-")[0]) / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f'<a href="../../files/{wheel.name.replace("+", "%2B")}#sha256={digest}">{wheel.name}</a>\n')


def make_site(folder: Path, wheels: Path, packages: list[Path], *, pip: str = "") -> None:
    """Make what a build is given at /mnt: an index with the wheels, and a repository with packages of Debian.

    Args:
        pip: more lines for pip.conf.
    """
    make_index(wheels, folder / "index")
    (folder / "debs").mkdir()
    for path in packages:
        shutil.copy(path, folder / "debs")
    (folder / "debs" / "Packages").write_text(index_of(packages))
    (folder / "apt.sources").write_text("Types: deb\nURIs: file:/mnt/debs\nSuites: ./\nTrusted: yes\n")
    (folder / "pip.conf").write_text(f"[global]\nindex-url = file:///mnt/index/simple\n{pip}")


def give_to_alice(folder: Path) -> None:
    """Make a folder that root has written alice's. Links of other tests beside it may lead nowhere, or out of the testbed."""
    os.chown(folder.parent, ALICE, ALICE)
    for place, folders, files in os.walk(folder):
        for path in (Path(place), *(Path(place) / name for name in (*folders, *files))):
            os.chown(path, ALICE, ALICE, follow_symlinks=False)


@pytest.fixture(scope="module")
def project(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """alice's project with the recipe, the examples, her index, and the SIF that she builds."""
    host, name = IMAGE.removeprefix("docker://").split("/", 1)
    digest = cluster.must("python3", "-", host, name, stdin=PUSH).strip()
    here = tmp_path_factory.mktemp("cuda")
    words = ("image", "init", "--torch", TORCH, "--cuda", CUDA, "--base", f"{host}/hpcenv/base@{digest}")
    done = hpcenv(*words, cwd=here, environ=dict(os.environ), timeout=600)
    assert done.status == 0, done.stderr
    wheels = download(here / "image" / "requirements.lock")

    inside = f"/home/alice/hpcenv-tests/cuda-{uuid.uuid4().hex[:6]}"
    folder = Path(json.loads(cluster.testbed("status", "--json").stdout)["state"]) / inside.lstrip("/")
    shutil.copytree(here / "image", folder / "image")
    make_site(folder / "image" / "site", wheels, fabric_packages())
    shutil.copy(ROOT / "examples" / "train.py", folder)
    shutil.copytree(ROOT / "examples" / "data", folder / "data")
    store = f"{inside}/store"
    spec = f'image = "image/image.def"\nplain-http = ["{host}"]\n[paths]\nstore = "{store}"\n'
    (folder / "hpcenv.toml").write_text(spec)
    give_to_alice(folder)
    made = Project(cluster, inside)
    build = ("image", "build", "image/image.def", "--bind", "image/site:/mnt:ro", "--plain-http", host)
    made.must(*build, timeout=1800)
    yield made
    cluster.run("sh", "-c", f"chmod -R u+w {inside}; rm -rf {inside}", timeout=600)


@pytest.fixture(scope="module")
def locked(project: Project) -> dict:
    """The lock, with alice's index as pip's default one."""
    index = f"PIP_INDEX_URL=file://{project.folder}/image/site/index/simple"
    done = project.cluster.run("env", index, "hpcenv", "lock", cwd=project.folder, timeout=900)
    assert done.status == 0, done.text
    return tomlkit.parse(project.cluster.must("cat", f"{project.folder}/lockfiles/default.lock.toml")).unwrap()


def test_each_wheel_of_a_cuda_image_is_proved(project: Project, locked: dict) -> None:
    wheels = {one["name"]: one["wheel"] for one in locked["packages"]["dist"]}
    resolved = project.cluster.must("cat", f"{project.folder}/image/requirements.lock").replace("\\\n", "")
    by_pip = dict(re.findall(r"^(\S+)==\S+ +--hash=sha256:(\S+)$", resolved, re.M))
    assert {name: wheel["sha256"] for name, wheel in wheels.items()} == by_pip
    assert {wheel["proof"] for wheel in wheels.values()} == {"record"}
    assert locked["torch"]["cuda"] == CUDA
    for library in ("cudart", "cudnn", "nccl", "cublas"):
        assert re.fullmatch(r"[\d.]+", locked["libs"][library]["version"]), library
    project.must("lock", "--check", "--require-hashes", timeout=600)


@pytest.mark.parametrize("level", [(), ("--preflight", "off")], ids=["default", "off"])
def test_the_line_of_the_readme_ends_with_90_where_torch_sees_no_gpu(
    project: Project, locked: dict, level: tuple[str, ...]
) -> None:
    assert LINE in (ROOT / "README.md").read_text()
    done = project.cluster.run(*LINE.split(), "--wait", *level, cwd=project.folder, timeout=1500)
    assert done.status == 90, done.text
    assert "torch sees 0 of 8 GPUs in the container on n" in done.text
    assert "final loss" not in done.text


def test_the_line_trains_on_16_ranks_where_a_cpu_is_allowed(project: Project, locked: dict) -> None:
    done = project.cluster.run(*LINE.split(), "--allow-cpu-torch", cwd=project.folder, timeout=300)
    assert done.status == 0, done.text
    assert "2 nodes x 8 GPUs = 16 ranks" in done.text
    run = re.search(r"submitted (\S+):", done.text)[1]
    waited = project.hpcenv("wait", run, timeout=1500)
    log = project.cluster.must("cat", f"{project.folder}/runs/{run}/job.log")
    assert waited.status == 0, waited.text + log[-4000:]

    assert "hpcenv verdict: match: 2 nodes" in log
    assert "GPUs: not tried (--allow-cpu-torch)" in log
    verdict = project.record(run, "verdict.json")
    assert [row for row in verdict["findings"] if row["severity"] == "must"] == []
    facts = project.record(run, "facts/n2.json")["values"]
    assert facts["host.gpu-count"] == 8
    started = dict(re.findall(r"rank (\d+)  local_rank \d+  world_size 16  host (n[12])", log))
    assert sorted(map(int, started)) == list(range(16))
    assert sorted(started.values()) == ["n1"] * 8 + ["n2"] * 8
    last, first = map(float, re.search(r"final loss ([\d.]+) \(first ([\d.]+)\)", log).groups())
    assert last < first - 0.5
