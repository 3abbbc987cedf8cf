"""uv.lock, version 1; the dependencies of the project's own packages are followed. Pure.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.utils import canonicalize_name

from hpcenv.errors import LockfileInvalid
from hpcenv.locking.pins.pin import Pin, PinSelection, basename, describe_error, sorted_hashes


def select_pins(path: Path, data: Mapping[str, Any], selection: PinSelection) -> Iterator[Pin]:
    """Yield the packages of a uv.lock.

    The dependencies are followed twice: once for the packages that every installation has, and once with those of
    optional groups, which an installation may have.

    Raises:
        LockfileInvalid: it is no uv.lock of version 1.
    """
    if data.get("version") != 1:
        raise LockfileInvalid(
            f"`{path}` is neither a pylock.toml nor a uv.lock of version 1", why=f"version = {data.get('version')!r}"
        )
    try:
        walk = _UvWalk(data["package"], selection)
        must = walk.reached(everything=False)
        may = walk.reached(everything=True)
        for number in sorted(may):
            pin = _uv_pin(walk.packages[number], f"{path.name} package[{number}]")
            yield replace(pin, required=number in must - walk.roots)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise LockfileInvalid(f"`{path}` is not a uv.lock that hpcenv can read", why=describe_error(error)) from error


class _UvWalk:
    """The packages of a uv.lock as a graph; a node is an index into `packages`."""

    def __init__(self, packages: Sequence[Mapping[str, Any]], selection: PinSelection) -> None:
        self.packages = packages
        self.selection = selection
        self.roots = {n for n, entry in enumerate(packages) if _is_own(entry)}
        if not self.roots:
            raise ValueError("it contains no project to start from")
        self._named: dict[str, list[int]] = {}
        for number, entry in enumerate(packages):
            self._named.setdefault(entry["name"], []).append(number)

    def reached(self, *, everything: bool) -> set[int]:
        """Return the packages that the projects need, with the selected or with all extras and groups."""
        seen: set[tuple[int, str]] = set()
        todo: list[tuple[int, str]] = []
        for root in self.roots:
            todo.append((root, ""))
            entry = self.packages[root]
            extras, groups = entry.get("optional-dependencies", {}), entry.get("dev-dependencies", {})
            todo += [(root, extra) for extra in extras if everything or extra in self.selection.extras]
            todo += [(root, "group:" + group) for group in groups if everything or group in self.selection.groups]
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            todo += self._next(*node)
        return {number for number, _ in seen}

    def _next(self, number: int, part: str) -> Iterator[tuple[int, str]]:
        entry = self.packages[number]
        if part.startswith("group:"):
            edges = entry["dev-dependencies"][part[6:]]
        elif part:
            edges = entry.get("optional-dependencies", {}).get(part, ())
        else:
            edges = entry.get("dependencies", ())
        for edge in edges:
            marker = Marker(edge["marker"]) if "marker" in edge else None
            if not self.selection.holds(marker, extra=""):
                continue
            for target in self._named.get(edge["name"], ()):
                if self._is_meant(edge, self.packages[target]):
                    yield from ((target, extra) for extra in ("", *edge.get("extra", ())))

    def _is_meant(self, edge: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
        if "version" in edge and edge["version"] != entry.get("version"):
            return False
        if "source" in edge and edge["source"] != entry.get("source"):
            return False
        markers = entry.get("resolution-markers")
        return not markers or any(self.selection.holds(Marker(marker), extra="") for marker in markers)


def _is_own(entry: Mapping[str, Any]) -> bool:
    """Return whether a package is a project of the workspace: a directory, not a package of an index."""
    source = entry.get("source", {})
    return "virtual" in source or "editable" in source


def _uv_pin(entry: Mapping[str, Any], source: str) -> Pin:
    artifacts = [*entry.get("wheels", ()), *([entry["sdist"]] if "sdist" in entry else ())]
    files = [(basename(a.get("filename") or a.get("url") or a.get("path") or ""), a.get("hash", "")) for a in artifacts]
    version = entry.get("version")
    if version is not None and not isinstance(version, str):
        raise TypeError(f"version is {version!r}")
    return Pin(
        name=canonicalize_name(entry["name"]),
        version=version,
        hashes=sorted_hashes(value for _, value in files if value),
        files=tuple(sorted((name, value[7:]) for name, value in files if name and value.startswith("sha256:"))),
        source=source,
    )
