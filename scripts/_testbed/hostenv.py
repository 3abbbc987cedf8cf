"""The environment of jobs that use no container: bookworm's Python 3.11 with the same torch, on the shared directory.

Most nodes' own Python is newer than the one that the CPU wheel of torch is for, so the
interpreter of the test image is moved out of it: Python finds its standard library from the
place of its binary, and the nodes have the libraries that it links to.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from . import cache, image, rootfs
from .rootfs import Workshop

PYTHON_HOME = "/shared/python3.11"
HOSTENV = "/shared/hostenv"
_REVISION = 2


def hostenv(shop: Workshop, base: Path, wheels: Path) -> Path:
    """A directory with `python3.11` and `hostenv`, to be bound read-only below /shared.

    One for the nodes of every Slurm version: it is made where its Python comes from, on bookworm.
    """

    def build(target: Path) -> None:
        _move_python(base, target / "python3.11")
        (target / "hostenv").mkdir()
        binds = {target / "python3.11": PYTHON_HOME, target / "hostenv": HOSTENV, wheels: "/mnt"}
        # Made at its final path: a virtual environment's scripts and pyvenv.cfg hold absolute paths.
        venv = [f"{PYTHON_HOME}/bin/python3.11", "-m", "venv", "--without-pip", HOSTENV]
        pip = ["python3", "-m", "pip", "--python", f"{HOSTENV}/bin/python", "install", "--quiet"]
        pip += ["--find-links", "/mnt", *image.REQUIREMENTS]
        check = [f"{HOSTENV}/bin/python", "-c", "import ssl, ctypes, lzma, bz2, sqlite3, torch.distributed"]
        for number, words in enumerate((venv, pip, check)):
            scratch = target / f"scratch{number}"
            shop.runner.run(rootfs.sandbox_argv(base, scratch, binds, words), timeout=1200)
        for leftover in target.glob("scratch*"):
            shutil.rmtree(leftover)

    text = "\n".join(("hostenv", base.name, wheels.name, f"revision {_REVISION}"))
    return cache.entry(shop.instance.cache, "hostenv", text, build, shop.progress)


def _move_python(base: Path, target: Path) -> None:
    (target / "bin").mkdir(parents=True)
    (target / "lib").mkdir()
    shutil.copy2(base / "usr/bin/python3.11", target / "bin/python3.11")
    (target / "bin/python3").symlink_to("python3.11")
    shutil.copytree(base / "usr/lib/python3.11", target / "lib/python3.11", symlinks=True)
