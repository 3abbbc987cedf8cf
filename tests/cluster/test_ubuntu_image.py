"""The recipe for Ubuntu 22.04, built: its packages and names, its Python 3.10, and the newer pip beside its own (22.0.2).

debootstrap makes the base from Ubuntu's archive, and apt fetches the packages. torch is a small wheel: this machine has no
CPU build of it for Python 3.10.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.recipes.test_init import write_wheel

from .conftest import Cluster
from .test_cuda_image import give_to_alice
from .test_image_init import CACHE, debian_packages, index_of

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]

FABRIC = ("libibverbs1", "ibverbs-providers", "librdmacm1")
PACKAGES = ("ca-certificates", "python3", "python3-pip", "python3-venv", *FABRIC, "libgl1")


def ubuntu() -> Path:
    """A root of Ubuntu 22.04 without Python, made once."""
    root = CACHE / "image-ubuntu-jammy"
    if not root.is_dir():
        if shutil.which("debootstrap") is None:
            pytest.skip("NOT CHECKED: no debootstrap on PATH (Debian package of this name)")
        aside = root.with_name(f"{root.name}.{uuid.uuid4().hex[:6]}")
        # Debian 12 has no keyring of Ubuntu's archive. What comes without a signature runs in a container only.
        argv = ["debootstrap", "--variant=minbase", "--no-check-gpg", "--components=main,universe", "jammy", aside]
        subprocess.run(argv, check=True, capture_output=True, timeout=1800)
        aside.rename(root)
    return root


@pytest.fixture(scope="module")
def folder(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """alice's folder with the base as a SIF, a lock, and what her site would give."""
    root = ubuntu()
    packages = debian_packages("ubuntu-debs", PACKAGES, root)
    inside = f"/home/alice/hpcenv-tests/ubuntu-{uuid.uuid4().hex[:6]}"
    place = Path(json.loads(cluster.testbed("status", "--json").stdout)["state"]) / inside.lstrip("/")
    wheels, debs = place / "site" / "wheels", place / "site" / "debs"
    for one in (wheels, debs):
        one.mkdir(parents=True)
    digests = {
        name: write_wheel(wheels, file)
        for name, file in {
            "torch==2.13.0+cpu": "torch-2.13.0+cpu-cp310-cp310-linux_x86_64.whl",
            "tiny==1.0": "tiny-1.0-py3-none-any.whl",
        }.items()
    }
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels, "pip"]
    subprocess.run(argv, check=True, timeout=300)
    for path in packages:
        shutil.copy(path, debs)
    (debs / "Packages").write_text(index_of(packages))
    (place / "site" / "apt.sources").write_text("Types: deb\nURIs: file:/mnt/debs\nSuites: ./\nTrusted: yes\n")
    (place / "site" / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /mnt/wheels\n")
    lock = "".join(f"{name} --hash=sha256:{digest}\n" for name, digest in digests.items())
    (place / "requirements.txt").write_text(lock)
    without = ("--exclude=./dev/*", "--exclude=./var/cache/apt/archives/*.deb")
    subprocess.run(["tar", "-C", root, "-cf", place / "base.tar", *without, "."], check=True, timeout=300)
    give_to_alice(place)
    made = "mkdir base && tar -C base -xf base.tar && apptainer build --mksquashfs-args '-comp gzip -Xcompression-level 1' base.sif base"
    done = cluster.run("sh", "-ec", made, cwd=inside, timeout=900)
    assert done.status == 0, done.text[-4000:]
    yield inside
    cluster.run("sh", "-c", f"chmod -R u+w {inside}; rm -rf {inside}", timeout=600)


def test_the_recipe_for_ubuntu_builds(cluster: Cluster, folder: str) -> None:
    words = ("--os", "ubuntu22.04", "--base", "base.sif", "--pylock", "requirements.txt", "--apt", "libgl1")
    links = ("env", "PIP_NO_INDEX=1", f"PIP_FIND_LINKS={folder}/site/wheels")
    done = cluster.run(*links, "hpcenv", "image", "init", *words, cwd=folder)
    assert done.status == 0, done.text
    assert "torch 2.13.0, CPU only, Python 3.10, 2 packages" in done.stdout
    site = ("--bind", f"{folder}/site:/mnt:ro")
    build = ("apptainer", "build", "--mksquashfs-args", "-comp gzip -Xcompression-level 1", *site, "u.sif", "image.def")
    done = cluster.run(*build, cwd=f"{folder}/image", timeout=1200)
    assert done.status == 0, done.text[-4000:]

    look = (
        "import ctypes, json, sys\n"
        "from importlib.metadata import version\n"
        "[ctypes.CDLL(name) for name in ('libibverbs.so.1', 'librdmacm.so.1', 'libGL.so.1')]\n"
        "report = json.load(open('/usr/share/hpcenv/pip-report.json'))\n"
        "system = dict(line.split()[:2] for line in open('/usr/share/hpcenv/dpkg-packages.txt'))\n"
        "print(json.dumps([sys.version_info[:2], sys.prefix, version('torch'), len(report['install']),"
        " 'libgl1' in system, 'python3-pip' in system, 'VERSION_CODENAME=jammy' in open('/etc/os-release').read()]))"
    )
    run = ("apptainer", "-q", "exec", "--cleanenv", "image/u.sif", "python3", "-c", look)
    inside = json.loads(cluster.must(*run, cwd=folder))
    # The distribution's pip is in the first stage only.
    assert inside == [[3, 10], "/opt/venv", "2.13.0+cpu", 2, True, False, True]
