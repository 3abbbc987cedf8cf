"""hpcenv as users install it: the wheel of this checkout, in a virtual environment on the shared directory.

The environment with the dependencies is cached. Every other wheel gets a copy of its own, and `venv` is a
link to the newest: who runs meets one of them as a whole, and a job goes on with the one that submitted it.
"""

from __future__ import annotations

import email
import hashlib
import os
import re
import shutil
import sys
import zipfile
from email.message import Message
from pathlib import Path
from tempfile import TemporaryDirectory

import tomllib

from . import cache, image, locked, machine, rootfs
from .errors import TestbedError
from .instance import VENV, Instance, Layout
from .rootfs import Workshop

_REVISION = 1
_VENVS = "venvs"
_COMPLETE = ".complete"
# Environments: the one that is installed, and those of jobs that were submitted before.
_KEPT = 3


def install(shop: Workshop, layout: Layout) -> None:
    """Build the wheel, make the environment if its dependencies changed, and put the wheel into it."""
    if not (shop.instance.checkout / "pyproject.toml").is_file():
        shop.progress.say(f"hpcenv is NOT installed: {shop.instance.checkout} has no pyproject.toml yet")
        return
    with shop.progress.phase("hpcenv: building and installing its wheel"):
        built = _build(shop)
        recipe = _venv_recipe(shop, Path(layout.node_root), _metadata(built))
        name = hashlib.sha256(f"{recipe}\n{hashlib.sha256(built.read_bytes()).hexdigest()}".encode()).hexdigest()[:16]
        if not (_shelf(shop) / _VENVS / name / _COMPLETE).is_file():
            _make(shop, layout, built, recipe, name)
        switch(_shelf(shop), name)
        remove_old(_shelf(shop))
    version = installed_version(shop.instance)
    shop.progress.say(f"hpcenv {version} is installed in {VENV}")


def prepare(shop: Workshop, node_root: Path) -> None:
    """Make the environment's cache entry before there is a machine to install into."""
    if (shop.instance.checkout / "pyproject.toml").is_file():
        shop.instance.state.mkdir(parents=True, exist_ok=True)
        built = _build(shop)
        _cached_venv(shop, node_root, built, _venv_recipe(shop, node_root, _metadata(built)))


def installed_version(instance: Instance) -> str | None:
    """The version in the shared environment, None if there is none."""
    for info in sorted((instance.shared / "hpcenv/venv").glob("lib/python3*/site-packages/hpcenv-*.dist-info")):
        return str(_headers((info / "METADATA").read_text())["Version"])
    return None


def _build(shop: Workshop) -> Path:
    """The wheel of the checkout, by pip, with the build requirements from the cache."""
    project = tomllib.loads((shop.instance.checkout / "pyproject.toml").read_text())
    backend = [str(word) for word in project.get("build-system", {}).get("requires", ["setuptools"])]
    tools = _build_tools(shop, backend)
    target = shop.instance.state / "wheel"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    argv = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    argv += ["--wheel-dir", str(target), str(shop.instance.checkout)]
    # Without hatch_build.py: its man pages need hpcenv's own dependencies, which this Python may not have.
    words = {"HATCH_BUILD_NO_HOOKS": "true", "PATH": f"{tools}/bin:{shop.runner.environment['PATH']}"}
    shop.runner.run(argv, timeout=300, extra={"PYTHONPATH": str(tools), **words})
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise TestbedError(f"expected one wheel of {shop.instance.checkout}, got {[one.name for one in wheels]}")
    return wheels[0]


def _build_tools(shop: Workshop, requirements: list[str]) -> Path:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    lock = locked.read(shop.instance, f"python{python}")

    def build(target: Path) -> None:
        with TemporaryDirectory() as wheels:
            image.download_wheels(shop, Path(wheels), python, requirements, lock)
            # --target, not a virtual environment: Debian has no ensurepip without python3-venv.
            argv = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target)]
            shop.runner.run([*argv, "--no-index", "--find-links", wheels, *requirements], timeout=600)

    text = "\n".join(["build tools", sys.version, *requirements, lock.key])
    return cache.entry(shop.instance.cache, "build", text, build, shop.progress)


def _metadata(built: Path) -> Message:
    with zipfile.ZipFile(built) as archive:
        name = next(one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        return _headers(archive.read(name).decode())


def _headers(text: str) -> Message:
    return email.message_from_string(text)


def _venv_recipe(shop: Workshop, node_root: Path, metadata: Message) -> str:
    needs = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    lock = locked.read(shop.instance, f"python{_python_version(node_root)}")
    return "\n".join(["hpcenv venv", node_root.name, *needs, lock.key, f"revision {_REVISION}"])


def _cached_venv(shop: Workshop, node_root: Path, built: Path, recipe: str) -> Path:
    def build(target: Path) -> None:
        _build_venv(shop, target, node_root, built)

    return cache.entry(shop.instance.cache, "venv", recipe, build, shop.progress)


def _build_venv(shop: Workshop, target: Path, node_root: Path, built: Path) -> None:
    python = _python_version(node_root)
    wheels, shared = target / "wheels", target / "shared"
    wheels.mkdir()
    shared.mkdir()
    lock = locked.read(shop.instance, f"python{python}")
    image.download_wheels(shop, wheels, python, [str(built)], lock)
    binds = {shared: "/shared", wheels: "/mnt"}
    pip = ["python3", "-m", "pip", "--python", f"{VENV}/bin/python", "install", "--quiet", "--find-links", "/mnt"]
    steps = [
        ["python3", "-m", "venv", "--without-pip", VENV],
        [*pip, f"/mnt/{built.name}"],
        # Only the dependencies are kept: the wheel itself is put in afterwards, like every later one.
        [
            "python3",
            "-m",
            "pip",
            "--python",
            f"{VENV}/bin/python",
            "uninstall",
            "--quiet",
            "--yes",
            built.name.split("-")[0],
        ],
    ]
    for number, words in enumerate(steps):
        shop.runner.run(rootfs.sandbox_argv(node_root, target / f"scratch{number}", binds, words), timeout=600)
    for leftover in target.glob("scratch*"):
        shutil.rmtree(leftover)


def _python_version(node_root: Path) -> str:
    target = (node_root / "usr/bin/python3").readlink().name
    found = re.fullmatch(r"python(3\.\d+)", target)
    if found is None:
        raise TestbedError(f"cannot tell the Python version of {node_root}", why=f"usr/bin/python3 is {target}")
    return found.group(1)


def _make(shop: Workshop, layout: Layout, built: Path, recipe: str, name: str) -> None:
    """An environment with this wheel, at the place where it stays: its programs name their interpreter."""
    ready = _cached_venv(shop, Path(layout.node_root), built, recipe)
    target = _shelf(shop) / _VENVS / name
    shutil.rmtree(target, ignore_errors=True)  # of an install that was interrupted
    target.parent.mkdir(parents=True, exist_ok=True)
    shop.runner.run(["cp", "--archive", "--reflink=auto", ready / "shared/hpcenv/venv", target], timeout=300)
    shutil.copy2(built, target / built.name)
    python = f"{shelf_in_node()}/{_VENVS}/{name}/bin/python"
    pip = ["python3", "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "--quiet"]
    pip += ["--no-index", "--no-deps", f"{shelf_in_node()}/{_VENVS}/{name}/{built.name}"]
    machine.run_inside(shop.instance, shop.runner, "login", pip, timeout=120)
    (target / built.name).unlink()
    (target / _COMPLETE).touch()


def switch(shelf: Path, name: str) -> None:
    """Let the programs on PATH be those of this environment, at one moment."""
    link, aside = shelf / "venv", shelf / f".venv-{name}"
    aside.unlink(missing_ok=True)
    aside.symlink_to(Path(_VENVS) / name)
    if link.is_dir() and not link.is_symlink():
        # As installs before this one left it; its jobs find the new one at the same path.
        shutil.rmtree(shelf / _VENVS / "before", ignore_errors=True)
        link.rename(shelf / _VENVS / "before")
    aside.rename(link)
    os.utime(shelf / _VENVS / name / _COMPLETE)


def remove_old(shelf: Path) -> None:
    """Remove what is incomplete and all but the newest environments: jobs may still run from the others."""
    current = os.readlink(shelf / "venv")
    kept: list[tuple[float, Path]] = []
    for one in (shelf / _VENVS).iterdir():
        if one.name == Path(current).name:
            continue
        try:
            kept.append(((one / _COMPLETE).stat().st_mtime, one))
        except FileNotFoundError:
            shutil.rmtree(one, ignore_errors=True)
    for _, one in sorted(kept, reverse=True)[_KEPT - 1 :]:
        shutil.rmtree(one, ignore_errors=True)


def _shelf(shop: Workshop) -> Path:
    return shop.instance.shared / "hpcenv"


def shelf_in_node() -> str:
    """The directory of the environments as the machines see it."""
    return str(Path(VENV).parent)
