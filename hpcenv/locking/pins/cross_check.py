"""The differences between pinned and installed Python packages. Pure.

Runs on: LOGIN NODE.

    differences = cross_check(pins, dists, find_wheels(dists, ...))

Only sha256 hashes are compared. Other hashes stay in the pin, but are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from hpcenv.locking.pins.pin import Pin
from hpcenv.locking.wheels.proof import InstalledDist, WheelProof


@dataclass(frozen=True, kw_only=True, slots=True)
class PinDifference:
    """One package that does not agree with its pin.

    Attributes:
        kind: the kind of difference; `unknown` means that the package could not be compared.
        pinned: version or hashes in the file.
        installed: version or wheel in the environment.
        note: the source of the pin, or the reason.
    """

    kind: Literal["not-installed", "not-pinned", "other-version", "other-build", "other-file", "unknown"]
    name: str
    pinned: str = ""
    installed: str = ""
    note: str = ""


def cross_check(
    pins: Sequence[Pin], dists: Sequence[InstalledDist], proofs: Sequence[WheelProof], *, ignore: Iterable[str] = ()
) -> tuple[PinDifference, ...]:
    """Return the differences between installed and pinned packages, sorted by package.

    Args:
        pins: the pins.
        dists: the installed packages.
        proofs: the results of `find_wheels` for `dists`, in the same order.
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
