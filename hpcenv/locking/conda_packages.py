"""Packages that conda installed: compare them with pins, and find out which archive each package comes from. Pure.

Runs on: LOGIN NODE.

conda, mamba, micromamba and pixi leave a record of each package in `conda-meta`: name, version, build, the sha256 of
its archive, and the sha256 of each file (conda/models/records.py, PrefixRecord; rattler_conda_types writes the same
record). The probe reads the records and hashes the files. If the files agree with the record, the package comes from
the archive that its record names. The record is conda's own statement, like pip's report. A file of pins does not
depend on conda's statement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcenv.locking.pins.cross_check import PinDifference
from hpcenv.locking.pins.pin import Pin
from hpcenv.project.lockfile import CondaProof, CondaTable, Lockfile
from hpcenv.text import listed

_NAMED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class InstalledConda:
    """One package that conda installed.

    Attributes:
        build: conda's build string.
        channel: the last part of the channel's URL.
        sha256, md5: hashes of the archive, from the package's record; empty if the record has none.
        dists: the Python distributions that the package contains.
        unproved: why the files may differ from the recorded files; empty if they certainly agree.
    """

    name: str
    version: str
    build: str
    channel: str
    sha256: str
    md5: str
    dists: tuple[str, ...]
    unproved: str


def installed_conda(answer: Mapping[str, Any]) -> tuple[InstalledConda, ...]:
    """Return the packages in the probe's answer, sorted by name as in the answer."""
    dists: dict[str, list[Mapping[str, Any]]] = {}
    for package in answer["packages"]:
        if package.get("conda"):
            dists.setdefault(package["conda"], []).append(package)
    unread = answer["unknown"].get("packages.conda-content-digest", "")
    return tuple(
        _installed(entry, dists.get(entry["name"], ()), unread) for entry in answer.get("conda-packages") or ()
    )


def _installed(entry: Mapping[str, Any], dists: Sequence[Mapping[str, Any]], unread: str) -> InstalledConda:
    algorithm, _, digest = str(entry["hash"]).partition("=")
    return InstalledConda(
        name=entry["name"],
        version=entry["version"],
        build=entry["build"],
        channel=entry["channel"],
        sha256=digest if algorithm == "sha256" else "",
        md5=digest if algorithm == "md5" else entry.get("md5", ""),
        dists=tuple(sorted(dist["name"] for dist in dists)),
        unproved=_unproved(entry, dists, unread),
    )


def _unproved(entry: Mapping[str, Any], dists: Sequence[Mapping[str, Any]], unread: str) -> str:
    changed = list(entry.get("modified") or ())
    changed += [file["path"] for dist in dists for file in dist.get("modified") or ()]
    if changed:
        return f"not as conda installed it: {listed(changed, _NAMED)}"
    if any(_differs(dist) for dist in dists):
        return "files of its Python distribution were changed after it was installed"
    if entry.get("outside"):
        return "it is in the environment below this one, whose files were not compared"
    # If a distribution has no RECORD, conda's own record covers its files.
    unhashed = [dist for dist in dists if dist.get("record-sha256") and dist.get("content-sha256") is None]
    if unhashed:
        return (
            f"the files of {unhashed[0]['name']} were not compared: {unhashed[0].get('reason') or 'they were not read'}"
        )
    return f"its files were not compared: {unread}" if unread else ""


def _differs(dist: Mapping[str, Any]) -> bool:
    record, content = dist.get("record-sha256"), dist.get("content-sha256")
    return None not in (record, content) and record != content


# ---- comparing -----------------------------------------------------------------------------------------------


def compare_conda(pins: Iterable[Pin], installed: Sequence[InstalledConda]) -> tuple[PinDifference, ...]:
    """Return the differences between the packages that conda installed and the conda packages of a file, by name."""
    pinned: dict[str, list[Pin]] = {}
    for pin in pins:
        if pin.manager == "conda":
            pinned.setdefault(pin.name, []).append(pin)
    present = {package.name for package in installed}
    differences = [
        PinDifference(kind="not-installed", name=name, pinned=_shown(some), note=some[0].source)
        for name, some in pinned.items()
        if name not in present and any(pin.required for pin in some)
    ]
    for package in installed:
        if package.name in pinned:
            differences += _compare(pinned[package.name], package)
        else:
            differences.append(PinDifference(kind="not-pinned", name=package.name, installed=_build(package)))
    return tuple(sorted(differences, key=lambda difference: (difference.name, difference.kind)))


def _compare(pins: Sequence[Pin], package: InstalledConda) -> Iterator[PinDifference]:
    shown = {"name": package.name, "pinned": _shown(pins), "installed": _build(package)}
    if any(pin.version is None for pin in pins):
        yield PinDifference(kind="unknown", **shown, note=f"{pins[0].source} pins no file")
        return
    same = [pin for pin in pins if pin.version == package.version]
    if not same:
        yield PinDifference(kind="other-version", **shown, note=pins[0].source)
        return
    same = [pin for pin in same if pin.build == package.build]
    if not same:
        yield PinDifference(kind="other-build", **shown, note=pins[0].source)
        return
    verdict = _same_archive(same, package)
    if verdict is None:
        note = f"neither its record in conda-meta nor {same[0].source} has a hash that the other has"
        yield PinDifference(kind="unknown", **shown, note=note)
    elif not verdict:
        name, digest = (
            ("sha256", package.sha256) if _values(same, "sha256") and package.sha256 else ("md5", package.md5)
        )
        note = f"{name} {digest} is not that of {same[0].source}, which is another file of the same name"
        yield PinDifference(kind="other-file", **shown, note=note)
    elif package.unproved:
        yield PinDifference(kind="unknown", **shown, note=package.unproved)
    elif not package.sha256 or not _values(same, "sha256"):
        yield PinDifference(
            kind="unknown", **shown, note="only the md5 can be compared; it is equal, and can be forged"
        )


def _same_archive(pins: Sequence[Pin], package: InstalledConda) -> bool | None:
    """Return whether a package came from a pinned archive; None if no hash can be compared."""
    for algorithm, digest in (("sha256", package.sha256), ("md5", package.md5)):
        allowed = _values(pins, algorithm)
        if digest and allowed:
            return digest in allowed
    return None


def _values(pins: Iterable[Pin], algorithm: str) -> set[str]:
    return {one.partition(":")[2] for pin in pins for one in pin.hashes if one.startswith(f"{algorithm}:")}


def _build(package: InstalledConda) -> str:
    return f"{package.version} {package.build}".strip()


def _shown(pins: Sequence[Pin]) -> str:
    return ", ".join(sorted({f"{pin.version or 'any version'} {pin.build}".strip() for pin in pins}))


# ---- entries for the lockfile --------------------------------------------------------------------------------


def conda_tables(
    installed: Sequence[InstalledConda], pins: Iterable[Pin], before: Lockfile | None
) -> tuple[CondaTable, ...]:
    """Return the entries of the packages for the lockfile, each with its proof.

    Args:
        installed: the packages that conda installed.
        pins: the pins that agree with `installed`; empty without a file of pins.
        before: the lockfile that will be replaced. A package that is pinned in that lockfile stays pinned.
    """
    pinned = {(pin.name, one) for pin in pins if pin.manager == "conda" for one in pin.hashes}
    known = {} if before is None else {table.name: table for table in before.packages.conda_package}
    return tuple(_table(package, pinned, known.get(package.name)) for package in installed)


def _table(package: InstalledConda, pinned: set[tuple[str, str]], before: CondaTable | None) -> CondaTable:
    reason = package.unproved or ("" if package.sha256 else "its record in conda-meta has no sha256")
    proof: CondaProof = "none" if reason else "conda-meta"
    if proof != "none" and ((package.name, f"sha256:{package.sha256}") in pinned or _pinned_before(package, before)):
        proof = "pinned"
    return CondaTable(
        name=package.name,
        version=package.version,
        build=package.build or None,
        channel=package.channel or None,
        sha256=package.sha256 or None,
        md5=package.md5 or None,
        dists=package.dists,
        proof=proof,
        reason=reason or None,
    )


def _pinned_before(package: InstalledConda, before: CondaTable | None) -> bool:
    return (
        before is not None
        and before.proof == "pinned"
        and (before.version, before.build or "", before.sha256) == (package.version, package.build, package.sha256)
    )


def locked_conda(locked: Lockfile) -> tuple[InstalledConda, ...]:
    """Return the conda packages in a lockfile. If the lockfile is fresh, these are the installed packages."""
    return tuple(
        InstalledConda(
            name=table.name,
            version=table.version,
            build=table.build or "",
            channel=table.channel or "",
            sha256=table.sha256 or "",
            md5=table.md5 or "",
            dists=table.dists,
            unproved=(table.reason or "") if table.proof == "none" and table.sha256 else "",
        )
        for table in locked.packages.conda_package
    )


def conda_changes(before: Lockfile, after: Lockfile) -> Iterator[str]:
    """Yield a line for each conda package that changed; no line if a lockfile does not list conda packages."""
    old = {table.name: _what(table) for table in before.packages.conda_package}
    new = {table.name: _what(table) for table in after.packages.conda_package}
    for name in sorted(old.keys() | new.keys()) if old else ():
        if old.get(name) != new.get(name):
            yield f"package of conda {name} {old.get(name, 'absent')} -> {new.get(name, 'absent')}"


def _what(table: CondaTable) -> str:
    digest = f" sha256 {table.sha256[:12]}" if table.sha256 else ""
    return f"{table.version} {table.build or ''}".strip() + digest


def proved_dists(locked: Lockfile) -> frozenset[str]:
    """Return the Python distributions in a lockfile that come from a confirmed conda archive."""
    return frozenset(name for table in locked.packages.conda_package if table.proof != "none" for name in table.dists)
