"""A real conda environment: archives that are built here, a channel on disk, and rattler, the library of pixi.

rattler (`py-rattler`, in the dev extra) indexes the channel, solves, writes pixi.lock and installs, as pixi does. No
network is used. What stands in for conda-forge's Python is a package whose `bin/python` leads to the Python of the
tests, with a `pyvenv.cfg`, so that the environment is its prefix.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard
from probe_world import SITE, b64

SUBDIR = "linux-aarch64" if os.uname().machine == "aarch64" else "linux-64"
PYTHON_VERSION = "{}.{}.{}".format(*sys.version_info[:3])
_NOARCH = json.dumps({"noarch": {"type": "python"}, "package_metadata_version": 1}).encode()
PLACEHOLDER = "/opt/placeholder_" + "x" * 200


@dataclass(frozen=True, kw_only=True)
class Package:
    """One archive to build.

    `files` and `links` are by path in the prefix; PLACEHOLDER in a file becomes the prefix. A `noarch` package has its
    Python files under `site-packages/`.
    """

    name: str
    version: str = "1.0"
    build: str = "h0_0"
    files: Mapping[str, bytes] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    depends: Sequence[str] = ()
    noarch: bool = False


def python_package() -> Package:
    home = os.path.dirname(os.path.realpath(sys.executable))
    cfg = f"home = {home}\ninclude-system-site-packages = false\nversion = {PYTHON_VERSION}\n"
    short = "python{}.{}".format(*sys.version_info[:2])
    links = {"bin/python": os.path.realpath(sys.executable), "bin/python3": "python", f"bin/{short}": "python"}
    return Package(
        name="python", version=PYTHON_VERSION, build="0_cpython", files={"pyvenv.cfg": cfg.encode()}, links=links
    )


def dist_package(
    name: str,
    dist: str,
    version: str = "1.0",
    build: str = "py_0",
    more: Mapping[str, bytes] | None = None,
    *,
    noarch: bool = False,
) -> Package:
    """A package with one Python distribution, as conda-build leaves it: INSTALLER says `conda`."""
    info = f"{dist}-{version}.dist-info"
    files = {
        f"{dist}/__init__.py": f"__version__ = '{version}'\n".encode(),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/INSTALLER": b"conda\n",
        **(more or {}),
    }
    rows = [f"{path},{b64(data)},{len(data)}" for path, data in files.items()] + [f"{info}/RECORD,,"]
    files[f"{info}/RECORD"] = "".join(f"{row}\n" for row in rows).encode()
    placed = {f"{'site-packages' if noarch else SITE}/{path}": data for path, data in files.items()}
    return Package(name=name, version=version, build=build, files=placed, depends=["python"], noarch=noarch)


def build(package: Package, channel: Path) -> Path:
    """Write one .conda archive into a channel: a zip of two tar archives, packed with zstd."""
    subdir = "noarch" if package.noarch else SUBDIR
    stem = f"{package.name}-{package.version}-{package.build}"
    paths = [
        {
            "_path": path,
            "path_type": "hardlink",
            "sha256": hashlib.sha256(data).hexdigest(),
            "size_in_bytes": len(data),
            **({"file_mode": "text", "prefix_placeholder": PLACEHOLDER} if PLACEHOLDER.encode() in data else {}),
        }
        for path, data in sorted(package.files.items())
    ]
    empty = hashlib.sha256(b"").hexdigest()
    paths += [
        {"_path": path, "path_type": "softlink", "sha256": empty, "size_in_bytes": 0} for path in sorted(package.links)
    ]
    index = {
        "name": package.name,
        "version": package.version,
        "build": package.build,
        "build_number": 0,
        "subdir": subdir,
        "depends": list(package.depends),
        "timestamp": 1700000000000,
        **({"noarch": "python"} if package.noarch else {}),
    }
    info = {
        "info/index.json": json.dumps(index).encode(),
        "info/paths.json": json.dumps({"paths": paths, "paths_version": 1}).encode(),
        "info/files": "".join(f"{entry['_path']}\n" for entry in paths).encode(),
        "info/about.json": b"{}",
        **({"info/link.json": _NOARCH} if package.noarch else {}),
    }
    (channel / "noarch").mkdir(parents=True, exist_ok=True)
    target = channel / subdir / f"{stem}.conda"
    target.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("metadata.json", json.dumps({"conda_pkg_format_version": 2}))
        archive.writestr(f"pkg-{stem}.tar.zst", _packed(package.files, package.links))
        archive.writestr(f"info-{stem}.tar.zst", _packed(info, {}))
    return target


def _packed(files: Mapping[str, bytes], links: Mapping[str, str]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for path, data in files.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(data), 0o644
            archive.addfile(member, io.BytesIO(data))
        for path, place in links.items():
            member = tarfile.TarInfo(path)
            member.type, member.linkname = tarfile.SYMTYPE, place
            archive.addfile(member)
    return zstandard.compress(out.getvalue())


@dataclass(frozen=True)
class CondaEnvironment:
    """What was installed: the prefix, the lockfile that rattler wrote, and the records."""

    prefix: Path
    lock: Path
    records: Sequence[Any]

    @property
    def python(self) -> Path:
        return self.prefix / "bin/python"


def install(folder: Path, packages: Sequence[Package], environment: str = "default") -> CondaEnvironment:
    """Build packages, solve, write `pixi.lock`, and install from it."""
    return asyncio.run(_install(folder, [python_package(), *packages], environment))


async def _install(folder: Path, packages: Sequence[Package], environment: str) -> CondaEnvironment:
    import rattler

    channel = folder / "channel"
    for package in packages:
        build(package, channel)
    await rattler.index.index_fs(channel, write_zst=False, write_shards=False)
    address = rattler.Channel(channel.as_uri())
    specs = [f"{package.name} =={package.version} {package.build}" for package in packages]
    records = await rattler.solve([address], specs, platforms=[SUBDIR, "noarch"])
    platform = rattler.LockPlatform(SUBDIR)
    lock = rattler.LockFile([platform])
    lock.set_channels(environment, [rattler.LockChannel(channel.as_uri())])
    for record in records:
        lock.add_conda_package(environment, platform, record)
    lock.to_path(folder / "pixi.lock")
    prefix = folder / "env"
    await rattler.install(records, target_prefix=prefix, cache_dir=folder / "cache", show_progress=False)
    return CondaEnvironment(prefix, folder / "pixi.lock", records)
