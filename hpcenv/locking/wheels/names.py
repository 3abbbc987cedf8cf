"""Names and versions of packages and wheels, in a normal form that can be compared.

Runs on: LOGIN NODE, also in the process beside pip: standard library only.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Any

from hpcenv.locking.wheels.proof import InstalledDist, KnownFile

# How the names of files end: wheels, and source archives that pip builds.
WHEELS = (".whl",)
SOURCES = (".tar.gz", ".zip")

_VERSIONS: dict[str, str] = {}


def package_key(dist: InstalledDist | KnownFile) -> tuple[str, str]:
    """Return a package's name and version in normal form."""
    return normal_name(dist.name), normal_version(dist.version)


def fits(dist: InstalledDist, filename: str) -> bool:
    """Return whether a wheel's file name has the installed name, version, build and tags."""
    wheel = parse_wheel_name(filename)
    if wheel is None or (wheel.name, wheel.version) != package_key(dist):
        return False
    return not dist.tags or (wheel.build == dist.build and wheel.tags == frozenset(dist.tags))


@dataclass(frozen=True, slots=True)
class WheelName:
    """The parts of a wheel's file name; `build` is "" if the name has no build."""

    name: str
    version: str
    build: str
    tags: frozenset[str]


def parse_wheel_name(filename: str) -> WheelName | None:
    """Return the parts of a wheel's file name (PEP 427); None if the text is not the name of a wheel."""
    parts = filename.removesuffix(".whl").split("-")
    if not filename.endswith(".whl") or len(parts) not in (5, 6) or "/" in filename:
        return None
    pythons, abis, platforms = (part.lower().split(".") for part in parts[-3:])
    if len(pythons) * len(abis) * len(platforms) > 1000:
        return None
    tags = frozenset(f"{p}-{a}-{s}" for p in pythons for a in abis for s in platforms)
    return WheelName(normal_name(parts[0]), normal_version(parts[1]), parts[2] if len(parts) == 6 else "", tags)


def is_of_package(filename: str, package: tuple[str, str]) -> bool:
    """Return whether a file name starts with this name and version.

    The whole name is not parsed, which would be slow.
    """
    parts = filename.split("-", 2)
    return len(parts) == 3 and (normal_name(parts[0]), normal_version(parts[1])) == package


def is_source_of(filename: str, package: tuple[str, str]) -> bool:
    """Return whether a file is a source archive of this name and version (named as in PEP 625 or with hyphens)."""
    ending = next((one for one in SOURCES if filename.endswith(one)), None)
    if ending is None or "/" in filename:
        return False
    name, _, version = filename.removesuffix(ending).rpartition("-")
    return (normal_name(name), normal_version(version)) == package


def normal_name(name: str) -> str:
    """Return a project's name in normal form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def normal_version(text: str) -> str:
    """Return a version in normal form (PEP 440): `1.0` and `1.0.0` become equal, and so do `2.0-rc1` and `2.0rc1`."""
    known = _VERSIONS.get(text)
    if known is None:
        module = _packaging_module("version")
        try:
            key = module.Version(text)
        except ValueError:
            return text
        public = str(key).partition("+")
        head = re.match(r"((?:\d+!)?\d+(?:\.\d+)*)(.*)", public[0])
        assert head is not None
        known = re.sub(r"(\.0)+$", "", head[1]) + head[2] + public[1] + public[2]
        _VERSIONS[text] = known
    return known


def _packaging_module(name: str) -> Any:
    """Return a module of `packaging`, or of the copy inside pip if only pip is installed."""
    try:
        return importlib.import_module(f"packaging.{name}")
    except ImportError:
        return importlib.import_module(f"pip._vendor.packaging.{name}")
