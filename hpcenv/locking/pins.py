"""Read what another tool pinned, and compare it with what is installed.

Runs on: LOGIN NODE. For `hpcenv lock --from pylock.toml|requirements.txt|uv.lock`.

    pins = read_pins(Path("uv.lock"), environment=marker_environment(facts), extras=("train",))
    differences = cross_check(pins, dists, find_wheels(dists, ...))

Each of the three formats lists what *may* be installed, for several platforms at a time. A pin counts only if its
marker is true in the environment that is examined, which is not the one that runs hpcenv. A package that only an extra
or dependency group needs, and that was not selected, may be absent; if it is installed, it must agree.

    pylock.toml       PEP 751, also `pylock.NAME.toml`; `packaging.pylock` reads and checks it.
    uv.lock           version 1; the dependencies of the project's own packages are followed.
    requirements.txt  as `pip-compile` and `uv pip compile` write it: `NAME[EXTRA]==VERSION ; MARKER --hash=...`,
                      comments, lines continued with a backslash, `-r` and `-c` relative to the file that names them.
                      Options that configure pip (--index-url and so on) have no effect.
                      Refused: editable installs, paths, bare URLs and environment variables.
                      A line without `==` pins no version: the result for that package is "unknown".

Hashes other than sha256 are kept and not compared.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from packaging.markers import Environment, InvalidMarker, Marker, UndefinedEnvironmentName
from packaging.pylock import Pylock, PylockValidationError
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from hpcenv.errors import EnvironmentUnreadable, FileUnusable, LockfileInvalid
from hpcenv.locking.wheels.proof import InstalledDist, KnownFile, WheelProof
from hpcenv.project import toml_files
from hpcenv.records.files import read_file

if sys.version_info >= (3, 11):
    import tomllib

__all__ = [
    "Pin",
    "PinDifference",
    "cross_check",
    "known_files",
    "marker_environment",
    "parse_report",
    "read_pins",
    "read_report",
    "require_readable",
]

_NESTED = 20  # how deep requirements files may include each other


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """One package as a file pins it.

    Attributes:
        name: in normal form (PEP 503).
        version: None if the file does not fix it (a directory, a VCS, a range).
        hashes: `ALGORITHM:HEX` of every file that may be installed.
        files: file name and sha256 of every file that has both.
        source: file and line (or entry) of the pin.
        required: False for a constraint, and for a package that only an extra or group needs that was not selected.
    """

    name: str
    version: str | None
    hashes: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    source: str
    required: bool = True

    @property
    def filenames(self) -> tuple[str, ...]:
        """The names of the files that may be installed."""
        return tuple(name for name, _ in self.files)


@dataclass(frozen=True, kw_only=True, slots=True)
class PinDifference:
    """One package that does not agree with its pin.

    Attributes:
        kind: how; `unknown` means that it could not be compared.
        pinned: version or hashes in the file.
        installed: version or wheel in the environment.
        note: the source of the pin, or the reason.
    """

    kind: Literal["not-installed", "not-pinned", "other-version", "other-file", "unknown"]
    name: str
    pinned: str = ""
    installed: str = ""
    note: str = ""


def read_pins(
    path: Path, *, environment: Mapping[str, str], extras: Sequence[str] = (), groups: Sequence[str] = ()
) -> tuple[Pin, ...]:
    """Return the pins of a file whose markers are true in an environment, sorted by name.

    Args:
        path: the file.
        environment: values for markers, see `marker_environment`.
        extras: extras of the project that were installed.
        groups: dependency groups that were installed.

    Raises:
        FileUnusable: it cannot be read.
        LockfileInvalid: it has none of the three formats, or contains something that is not supported.
    """
    selection = _Selection(
        environment=environment,
        extras=tuple(map(canonicalize_name, extras)),
        groups=tuple(map(canonicalize_name, groups)),
    )
    text = _read(path)
    if not _is_toml(path):
        pins: Iterable[Pin] = _requirements(path, text, selection, seen=())
    else:
        data = _toml(path, text)
        pins = _pylock(path, data, selection) if "lock-version" in data else _uv(path, data, selection)
    return tuple(sorted(dict.fromkeys(pins), key=lambda pin: (pin.name, pin.version or "", not pin.required)))


def require_readable(path: Path) -> None:
    """Refuse a file that `read_pins` could not read, before the environment is read, which takes long.

    Raises:
        FileUnusable: the file does not exist or cannot be read.
        LockfileInvalid: it is not text, or does not have the format of its name.
    """
    text = _read(path)
    if _is_toml(path):
        _toml(path, text)


def _is_toml(path: Path) -> bool:
    return path.suffix == ".toml" or path.name == "uv.lock"


def marker_environment(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the values for markers (PEP 508), from the probe's values for the examined environment.

    Raises:
        EnvironmentUnreadable: its Python version is unknown.
    """
    version = str(facts.get("python.version", ""))
    if not re.match(r"\d+\.\d+", version):
        raise EnvironmentUnreadable("cannot evaluate markers: the environment's Python version is unknown")
    implementation = str(facts.get("python.implementation", "cpython")).lower()
    return {
        "implementation_name": implementation,
        "implementation_version": version,
        "os_name": "posix",
        "platform_machine": str(facts.get("system.machine", "")),
        "platform_python_implementation": {"cpython": "CPython", "pypy": "PyPy"}.get(implementation, implementation),
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": version,
        "python_version": ".".join(version.split(".")[:2]),
        "sys_platform": "linux",
    }


def known_files(pins: Iterable[Pin]) -> tuple[KnownFile, ...]:
    """Return the wheels that a lockfile inside the image names, for `find_wheels`."""
    return tuple(
        KnownFile(name=pin.name, version=pin.version, filename=filename, sha256=sha256, proof="embedded-lock")
        for pin in pins
        if pin.version is not None
        for filename, sha256 in pin.files
        if filename.endswith(".whl")
    )


def read_report(path: Path) -> tuple[KnownFile, ...]:
    """Return the wheels that a report of `pip install --report` names, for `find_wheels`.

    Raises:
        FileUnusable: it cannot be read.
        LockfileInvalid: it is not such a report.
    """
    return parse_report(_read(path), origin=str(path))


def parse_report(text: str | bytes, *, origin: str) -> tuple[KnownFile, ...]:
    """Return the wheels that the text of a report of `pip install --report` names.

    Args:
        text: the report.
        origin: its file, for messages.

    Raises:
        LockfileInvalid: it is not such a report.
    """
    try:
        report = json.loads(text)
        if report["version"] != "1":
            raise LockfileInvalid(
                f"`{origin}` is a pip report of version {report['version']!r}", why="only version '1' is known"
            )
        files = [_reported(entry) for entry in report["install"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LockfileInvalid(
            f"`{origin}` is not a report of `pip install --report`", why=_describe_error(error)
        ) from error
    return tuple(file for file in files if file is not None)


def _reported(entry: Mapping[str, Any]) -> KnownFile | None:
    origin = entry["download_info"]
    sha256 = (origin.get("archive_info", {}).get("hashes") or {}).get("sha256")
    filename = _basename(origin["url"])
    if not isinstance(sha256, str) or not filename.endswith(".whl"):
        return None
    about = entry["metadata"]
    return KnownFile(
        name=str(about["name"]), version=str(about["version"]), filename=filename, sha256=sha256, proof="install-report"
    )


# ---- comparing -----------------------------------------------------------------------------------------------


def cross_check(
    pins: Sequence[Pin], dists: Sequence[InstalledDist], proofs: Sequence[WheelProof], *, ignore: Iterable[str] = ()
) -> tuple[PinDifference, ...]:
    """Return the differences between installed and pinned packages, sorted by package.

    Args:
        pins: the pins.
        dists: the installed packages.
        proofs: their results of `find_wheels`, in the same order.
        ignore: packages that may be installed without a pin, for example the installer itself.
    """
    pinned: dict[str, list[Pin]] = {}
    for pin in pins:
        pinned.setdefault(pin.name, []).append(pin)
    skipped = {canonicalize_name(name) for name in ignore}
    installed = {canonicalize_name(dist.name) for dist in dists}
    differences = [
        PinDifference(kind="not-installed", name=name, pinned=_versions(some), note=some[0].source)
        for name, some in pinned.items()
        if name not in installed and any(pin.required for pin in some)
    ]
    for dist, proof in zip(dists, proofs, strict=True):
        name = canonicalize_name(dist.name)
        if name in pinned:
            differences += _compare(pinned[name], dist, proof)
        elif name not in skipped:
            differences.append(PinDifference(kind="not-pinned", name=name, installed=dist.version))
    return tuple(sorted(differences, key=lambda difference: (difference.name, difference.kind)))


def _compare(pins: Sequence[Pin], dist: InstalledDist, proof: WheelProof) -> Iterator[PinDifference]:
    name = canonicalize_name(dist.name)
    same = [pin for pin in pins if pin.version is not None and _equal(pin.version, dist.version)]
    if not same:
        open_ = [pin for pin in pins if pin.version is None]
        note = f"{open_[0].source} pins no version" if open_ else pins[0].source
        yield PinDifference(
            kind="unknown" if open_ else "other-version",
            name=name,
            pinned=_versions(pins),
            installed=dist.version,
            note=note,
        )
        return
    allowed = {value.partition(":")[2] for pin in same for value in pin.hashes if value.startswith("sha256:")}
    if proof.sha256 is not None and proof.sha256 in allowed:
        return
    shown = {"name": name, "pinned": _hash_list(allowed), "installed": proof.filename or dist.version}
    if not allowed:
        yield PinDifference(kind="unknown", **shown, note=f"{same[0].source} states no sha256")
    elif proof.sha256 is None:
        yield PinDifference(kind="unknown", **shown, note=proof.reason)
    else:
        note = f"sha256 {proof.sha256} (proof: {proof.proof}) is not among those of {same[0].source}"
        yield PinDifference(kind="other-file", **shown, note=note)


def _versions(pins: Sequence[Pin]) -> str:
    return ", ".join(sorted({pin.version or "any version" for pin in pins}))


def _hash_list(allowed: Iterable[str]) -> str:
    some = sorted(allowed)
    return ", ".join(some) if len(some) < 3 else f"one of {len(some)} sha256"


def _equal(pinned: str, installed: str) -> bool:
    """Return whether two versions are equal (PEP 440). A pin without a local label (`+cu130`) accepts any label."""
    try:
        wanted, present = Version(pinned), Version(installed)
    except InvalidVersion:
        return pinned == installed
    return wanted == present if wanted.local else Version(wanted.public) == Version(present.public)


# ---- pylock.toml ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Selection:
    environment: Mapping[str, str]
    extras: tuple[str, ...]
    groups: tuple[str, ...]

    def holds(self, marker: Marker | None, **more: Any) -> bool:
        """Return whether a marker is true; `more` are `extra`, or `extras` and `dependency_groups`."""
        if marker is None:
            return True
        values: Any = Environment(**{**self.environment, **more})  # type: ignore[typeddict-item]
        context: Literal["lock_file", "metadata"] = "lock_file" if "extras" in more else "metadata"
        return marker.evaluate(values, context=context)


def _pylock(path: Path, data: Mapping[str, Any], selection: _Selection) -> Iterator[Pin]:
    try:
        lock = Pylock.from_dict(data)
    except PylockValidationError as error:
        raise LockfileInvalid(f"`{path}` is not a valid pylock.toml", why=str(error)) from error
    if lock.environments and not any(_in_lock(selection, marker, lock) for marker in lock.environments):
        raise LockfileInvalid(
            f"`{path}` is not for this environment",
            why="none of its `environments` is true here: " + "; ".join(map(str, lock.environments)),
        )
    for number, package in enumerate(lock.packages):
        required = _in_lock(selection, package.marker, lock)
        if not required and not _in_lock(selection, package.marker, lock, everything=True):
            continue
        artifacts = [*(package.wheels or ()), *([package.sdist] if package.sdist else ())]
        hashes = [item.hashes for item in artifacts] + ([package.archive.hashes] if package.archive else [])
        yield Pin(
            name=package.name,
            version=None if package.version is None else str(package.version),
            hashes=_sorted_hashes(f"{kind}:{value}" for some in hashes for kind, value in some.items()),
            files=tuple(
                sorted((item.filename, item.hashes["sha256"]) for item in artifacts if "sha256" in item.hashes)
            ),
            source=f"{path.name} packages[{number}]",
            required=required,
        )


def _in_lock(selection: _Selection, marker: Marker | None, lock: Any, *, everything: bool = False) -> bool:
    extras = set(lock.extras or ()) if everything else set(selection.extras)
    groups = set(lock.dependency_groups or ()) if everything else {*selection.groups, *(lock.default_groups or ())}
    return selection.holds(marker, extras=extras, dependency_groups=groups)


# ---- uv.lock ---------------------------------------------------------------------------------------------------


def _uv(path: Path, data: Mapping[str, Any], selection: _Selection) -> Iterator[Pin]:
    """Yield the packages of a uv.lock.

    The dependencies are followed twice: once for the packages that every installation has, and once with those of
    optional groups, which an installation may have.
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
        raise LockfileInvalid(f"`{path}` is not a uv.lock that hpcenv can read", why=_describe_error(error)) from error


class _UvWalk:
    """The packages of a uv.lock as a graph; a node is an index into `packages`."""

    def __init__(self, packages: Sequence[Mapping[str, Any]], selection: _Selection) -> None:
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
    files = [
        (_basename(a.get("filename") or a.get("url") or a.get("path") or ""), a.get("hash", "")) for a in artifacts
    ]
    version = entry.get("version")
    if version is not None and not isinstance(version, str):
        raise TypeError(f"version is {version!r}")
    return Pin(
        name=canonicalize_name(entry["name"]),
        version=version,
        hashes=_sorted_hashes(value for _, value in files if value),
        files=tuple(sorted((name, value[7:]) for name, value in files if name and value.startswith("sha256:"))),
        source=source,
    )


# ---- requirements.txt --------------------------------------------------------------------------------------------

_NESTING = re.compile(r"(-r|--requirement|-c|--constraint)(?:\s+|=|(?<=-[rc]))(.+)")
_HASH = re.compile(r"--hash(?:=|\s+)(\S+)")
_EDITABLE = re.compile(r"(-e|--editable)\b")


def _requirements(path: Path, text: str, selection: _Selection, *, seen: tuple[Path, ...]) -> Iterator[Pin]:
    if path.resolve() in seen or len(seen) > _NESTED:
        return
    for number, line in _logical_lines(text):
        source = f"{path.name} line {number}"
        nested = _NESTING.fullmatch(line)
        if nested:
            below = path.parent / nested[2].strip().strip("\"'")
            for pin in _requirements(below, _read(below), selection, seen=(*seen, path.resolve())):
                yield replace(pin, required=pin.required and nested[1] in ("-r", "--requirement"))
        elif _EDITABLE.match(line):
            raise LockfileInvalid(f"{source}: `{line}` is not supported", why="an editable install has no hash")
        elif not line.startswith("-"):
            pin_here = _requirement(line, source, selection)
            if pin_here is not None:
                yield pin_here


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line, as pip reads it: joined at a backslash first, then without comments."""
    parts: list[str] = []
    start = 1
    for number, raw in enumerate([*text.splitlines(), ""], 1):
        if not parts:
            start = number
        comment = raw.lstrip().startswith("#")
        if raw.endswith("\\") and not comment:
            parts.append(raw[:-1])
            continue
        line = re.sub(r"(^|\s)#.*$", "", " ".join([*parts, raw])).strip()
        parts = []
        if line:
            yield start, line


def _requirement(line: str, source: str, selection: _Selection) -> Pin | None:
    hashes = _HASH.findall(line)
    text = re.split(r"\s--\w", line, maxsplit=1)[0].strip()
    try:
        requirement = Requirement(text)
        if not selection.holds(requirement.marker, extra=""):
            return None
    except (InvalidRequirement, InvalidMarker, UndefinedEnvironmentName) as error:
        why = "paths, bare URLs and variables are not supported" if re.search(r"[/$]", text) else _describe_error(error)
        raise LockfileInvalid(f"{source}: `{text}` is not a pinned package", why=why) from error
    filename = _basename(requirement.url) if requirement.url else ""
    sha256 = [value[7:] for value in hashes if value.startswith("sha256:")]
    return Pin(
        name=canonicalize_name(requirement.name),
        version=_pinned_version(requirement) or _version_in(filename),
        hashes=_sorted_hashes(hashes),
        files=((filename, sha256[0]),) if filename and len(sha256) == 1 else (),
        source=source,
    )


def _pinned_version(requirement: Requirement) -> str | None:
    exact = [item.version for item in requirement.specifier if item.operator in ("==", "===")]
    return exact[0] if len(exact) == 1 and not exact[0].endswith(".*") else None


def _version_in(filename: str) -> str | None:
    parts = filename.split("-")
    return parts[1] if filename.endswith(".whl") and len(parts) in (5, 6) else None


# ---- files ---------------------------------------------------------------------------------------------------------


# The largest uv.lock that was seen has 5 MiB.
_LONGEST_FILE = 16 << 20


def _read(path: Path) -> str:
    try:
        return read_file(path, most=_LONGEST_FILE).decode("utf-8-sig")
    except OSError as error:
        hint = "name a file: a pylock.toml, a requirements.txt or a uv.lock"
        raise FileUnusable(f"cannot read `{path}`", why=error.strerror, hint=hint) from error
    except UnicodeDecodeError as error:
        raise LockfileInvalid(f"`{path}` is not UTF-8 text", why=str(error)) from error
    except ValueError as error:
        raise LockfileInvalid(f"cannot read {str(path)!r}", why=str(error)) from error


def _toml(path: Path, text: str) -> dict[str, Any]:
    """Return the data of a TOML file. tomlkit is only for Python 3.10: it needs seconds for a large uv.lock."""
    toml_files.require_short_keys(text.encode("utf-8", "replace"), path, error=LockfileInvalid)
    if sys.version_info >= (3, 11):
        try:
            return tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise LockfileInvalid(f"`{path}` is not TOML", why=_describe_error(error)) from error
    else:
        return toml_files.read(path, error=LockfileInvalid, most=_LONGEST_FILE)


def _basename(url: str) -> str:
    try:
        path = urlsplit(url).path
    except ValueError:
        return ""
    return unquote(path.rsplit("/", 1)[-1])


def _sorted_hashes(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(values)))


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
