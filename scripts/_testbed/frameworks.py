"""A second environment of jobs without a container: the same torch, with other libraries for training beside it.

On demand only (`scripts/testbed frameworks`): most tests need no framework, and CI has little
time. It is installed like any other, so that every file is where its package's RECORD says
(not so with a .pth file that borrows hostenv's packages); then torch's large files become hard
links to hostenv's.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from pathlib import Path

from . import cache, image, locked, rootfs
from .hostenv import PYTHON_HOME
from .instance import Layout
from .rootfs import Workshop

FRAMEWORKS = "/shared/frameworks"
REQUIREMENTS = ("lightning", "accelerate", "deepspeed", "transformers", "webdataset", "jax")
# It has no wheels. Nothing is compiled: with torch's Gloo, training on CPU needs none of its operators.
_FROM_SOURCE = ("deepspeed",)
_IMPORTS = "import torch, lightning, accelerate, deepspeed, transformers, webdataset, jax"
_REVISION = 4
_WORTH_IT = 1 << 16


def install(shop: Workshop, layout: Layout) -> None:
    """Put the environment on the shared directory, made before if it is not in the cache."""
    place = shop.instance.shared / "frameworks"
    ready = _frameworks(shop, Path(layout.hostenv))
    note = place / ".made-from"
    if note.is_file() and note.read_text() == ready.name:
        shop.progress.say(f"{FRAMEWORKS} is there")
        return
    shutil.rmtree(place, ignore_errors=True)
    # Links again, so that it takes no space; a state directory on another file system gets a copy.
    copy = ["cp", "--archive", "--link", str(ready / "frameworks"), str(place)]
    if shop.runner.run(copy, timeout=300, check=False).status != 0:
        shutil.rmtree(place, ignore_errors=True)
        shop.runner.run([word for word in copy if word != "--link"], timeout=300)
    note.write_text(ready.name)
    versions = (ready / "versions").read_text().split()
    shop.progress.say(f"{FRAMEWORKS}/bin/python has {', '.join(versions)}, and the torch of hostenv")


def _frameworks(shop: Workshop, hostenv: Path) -> Path:
    # Found in the cache already: the layout's own hostenv is made from these.
    base, torch = rootfs.image_root(shop), image.torch_wheels(shop)
    lock = locked.read(shop.instance, f"python{image.PYTHON}", "frameworks")

    def build(target: Path) -> None:
        wheels, made = target / "wheels", target / "frameworks"
        wheels.mkdir()
        made.mkdir()
        image.build_wheels(shop, wheels, _FROM_SOURCE, {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}, lock)
        # torch is named too, so that what is chosen fits to it; it comes from where it lies.
        lie = ["--find-links", str(torch), "--find-links", str(wheels)]
        image.download_wheels(shop, wheels, image.PYTHON, [*lie, *image.REQUIREMENTS, *REQUIREMENTS], lock)
        binds = {hostenv / "python3.11": PYTHON_HOME, made: FRAMEWORKS, wheels: "/mnt"}
        python = f"{FRAMEWORKS}/bin/python"
        venv = [f"{PYTHON_HOME}/bin/python3.11", "-m", "venv", "--without-pip", FRAMEWORKS]
        pip = ["python3", "-m", "pip", "--python", python, "install", "--quiet", "--find-links", "/mnt"]
        pip += [*image.REQUIREMENTS, *REQUIREMENTS]
        for number, words in enumerate((venv, pip, [python, "-c", _IMPORTS])):
            scratch = target / f"scratch{number}"
            shop.runner.run(rootfs.sandbox_argv(base, scratch, binds, words), timeout=600)
        _share(made / "lib", hostenv / "hostenv" / "lib")
        for leftover in (*target.glob("scratch*"), wheels):
            shutil.rmtree(leftover)
        found = made.glob("lib/python3*/site-packages/*.dist-info")
        names = sorted(one.name.removesuffix(".dist-info").replace("-", "==", 1) for one in found)
        (target / "versions").write_text("\n".join(name for name in names if name.startswith(REQUIREMENTS)) + "\n")

    text = "\n".join(
        ("frameworks", hostenv.name, base.name, torch.name, *REQUIREMENTS, lock.key, f"revision {_REVISION}")
    )
    return cache.entry(shop.instance.cache, "frameworks", text, build, shop.progress)


def _share(ours: Path, theirs: Path) -> None:
    """Replace large files by hard links to equal ones; not sources, whose bytecode knows their time of change."""
    for place, _, names in os.walk(ours):
        for name in names:
            path = Path(place) / name
            twin = theirs / path.relative_to(ours)
            if name.endswith((".py", ".pyc")) or path.is_symlink() or path.stat().st_size < _WORTH_IT:
                continue
            if twin.is_file() and filecmp.cmp(path, twin, shallow=False):
                aside = path.with_name(f"{name}.link")
                os.link(twin, aside)
                aside.rename(path)
