"""Which parts of a locked image can be made again, and the comparison afterwards. Pure.

Runs on: LOGIN NODE.

A lockfile contains digests, not bytes. The same Python packages can be installed from it (from the same wheels, where
the lockfile has their hashes), with the same release of Python and of the distribution. The image itself cannot be
made again. `plan` says before the build which part becomes the same; `compare` compares the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hpcenv.locking.difference import show
from hpcenv.locking.export_packages import is_built
from hpcenv.locking.exporter import LeftOut
from hpcenv.locking.formats.environment import environment
from hpcenv.locking.formats.requirements import requirements
from hpcenv.project import lockfile as lock_model
from hpcenv.project.lockfile import DistTable, Lockfile
from hpcenv.recipes import image_recipe
from hpcenv.recipes.combination import CPU, Combination, Distribution
from hpcenv.recipes.pinned_packages import PinnedPackage, can_be_pinned
from hpcenv.records.manifest import Severity, Value
from hpcenv.records.package_fields import package_field

Prospect = Literal["same", "likely", "other", "lost"]
Outcome = Literal["same", "differs", "unknown"]

# os-release's `ID VERSION_ID` -> distribution.
_DISTRIBUTIONS = {
    "debian 12": "bookworm",
    "debian 13": "trixie",
    "ubuntu 22.04": "ubuntu22.04",
    "ubuntu 24.04": "ubuntu24.04",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of the locked image, and whether the new image will have it.

    Attributes:
        what: the part.
        prospect: certainly the `same`, `likely` the same (compared after the build), certainly `other`, or `lost`: the
            lockfile does not contain it.
        why: the reason.
    """

    what: str
    prospect: Prospect
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RebuildPlan:
    """How an image is made again.

    Attributes:
        pins: packages whose wheel is known by sha256.
        unproved: packages that are known by name and version only; they are compared after the build.
        missing: packages that cannot be installed from an index, with reasons.
        environment: the variables in the lockfile.
    """

    combination: Combination
    pins: tuple[PinnedPackage, ...]
    unproved: tuple[PinnedPackage, ...]
    missing: tuple[LeftOut, ...]
    environment: tuple[tuple[str, str], ...]
    parts: tuple[Part, ...]


def distribution_of(lockfile: Lockfile) -> str | None:
    """Return the name of the locked distribution, None if hpcenv has no recipe for it."""
    return _DISTRIBUTIONS.get(str(lockfile.facts.get("system.os-release", "")))


def combination_of(lockfile: Lockfile, distribution: Distribution) -> Combination:
    """Return the locked combination; the compatibility table need not contain it."""
    torch, _, local = str(lockfile.facts.get("torch.version", "")).partition("+")
    python = re.match(r"3\.\d+", str(lockfile.facts.get("python.version", "")))
    cuda = lock_model.cuda_of(lockfile) or CPU
    plain = re.fullmatch(r"[0-9][A-Za-z0-9.]{0,40}", torch)
    return Combination(
        torch=torch if plain else "unknown",
        cuda=cuda if re.fullmatch(r"\d+\.\d+", cuda) else CPU,
        python=python[0] if python else distribution.python,
        distribution=distribution,
        requirement=f"torch=={torch}" + (f"+{local}" if local else ""),
    )


def plan(lockfile: Lockfile, distribution: Distribution, *, proved_only: bool = False) -> RebuildPlan:
    """Return how the image of a lockfile is made again, and what to expect.

    Args:
        lockfile: it is not trusted; invalid names, versions and hashes are left out.
        distribution: the distribution to start from.
        proved_only: leave out packages whose wheel is not known by hash.
    """
    pins, unproved, missing = _sorted_packages(lockfile, proved_only=proved_only)
    result = RebuildPlan(
        combination=combination_of(lockfile, distribution),
        pins=tuple(pins),
        unproved=tuple(unproved),
        missing=tuple(missing),
        environment=_environment(lockfile),
        parts=(),
    )
    packages, system, files = _package_parts(lockfile, result), _system_parts(lockfile, result), _file_parts(lockfile)
    return replace(result, parts=(*packages, *system, *files))


def _sorted_packages(
    lockfile: Lockfile, *, proved_only: bool
) -> tuple[list[PinnedPackage], list[PinnedPackage], list[LeftOut]]:
    """Return the packages with a known hash, those without, and those that cannot be installed."""
    without_hash = {one.name: one for one in requirements(lockfile).left_out}
    without_pin = {one.name: one for one in environment(lockfile, name="rebuild").left_out}
    pins: list[PinnedPackage] = []
    unproved: list[PinnedPackage] = []
    missing = [*without_pin.values()]
    for name, dist in {dist.name: dist for dist in lockfile.packages.dist if dist.name not in without_pin}.items():
        if not can_be_pinned(name, dist.version):
            invalid = LeftOut(name=_line(name), version=_line(dist.version), reason="invalid name or version")
            if invalid.name not in {one.name for one in missing}:
                missing.append(invalid)
        elif is_built(dist):
            missing.append(LeftOut(name=name, version=dist.version, reason=without_hash[name].reason))
        elif name not in without_hash and dist.wheel is not None and dist.wheel.sha256:
            pins.append(_pin(dist, f"sha256:{dist.wheel.sha256.removeprefix('sha256:')}"))
        elif proved_only:
            missing.append(without_hash.get(name) or LeftOut(name=name, version=dist.version, reason="no hash"))
        else:
            unproved.append(_pin(dist, ""))
    return pins, unproved, missing


def _pin(dist: DistTable, digest: str) -> PinnedPackage:
    files = (dist.wheel.filename,) if dist.wheel is not None and dist.wheel.filename else ()
    return PinnedPackage(name=dist.name, version=dist.version, hashes=(digest,) if digest else (), files=files)


def _environment(lockfile: Lockfile) -> tuple[tuple[str, str], ...]:
    """Return the NVIDIA variables with a plain value; a lockfile is not trusted."""
    table = lockfile.container.nvidia if lockfile.container is not None else {}
    return tuple(
        (name, value)
        for name, value in sorted(table.items())
        if re.fullmatch(r"NVIDIA_[A-Z_]+|CUDA_VERSION", name) and re.fullmatch(r"[ -~]{0,4000}", value)
    )


def _package_parts(lockfile: Lockfile, plan_: RebuildPlan) -> Iterator[Part]:
    yield Part(
        what=f"{len(plan_.pins)} of {lockfile.packages.count} packages",
        prospect="same",
        why="installed from the locked wheels, by sha256, as long as an index has them",
    )
    if plan_.unproved:
        yield Part(
            what=f"{len(plan_.unproved)} packages: {_names(plan_.unproved)}",
            prospect="likely",
            why="same name and version; the lockfile has no hash of their wheels, RECORD is compared after the build",
        )
    for one in plan_.missing:
        yield Part(what=f"{one.name} {one.version}", prospect="lost", why=one.reason)
    dists = lockfile.packages.dist
    modified = [dist.name for dist in dists if dist.content_sha256 is not None and dist.record_sha256]
    if modified:
        why = "modified after the installation: the lockfile has only their digests"
        yield Part(what=", ".join(modified[:5]), prospect="lost", why=why)


def _system_parts(lockfile: Lockfile, plan_: RebuildPlan) -> Iterator[Part]:
    yield Part(
        what=f"Python {lockfile.facts.get('python.version', 'unknown')}",
        prospect="likely",
        why=f"the base has Python {plan_.combination.python}, maybe with another last number",
    )
    yield Part(
        what=f"{lockfile.facts.get('system.packages-count', 'unknown')} system packages",
        prospect="other",
        why="the lockfile has a digest of them, not their names, and mirrors keep only the newest versions",
    )


def _file_parts(lockfile: Lockfile) -> Iterator[Part]:
    yield Part(
        what="the folder of the packages",
        prospect="other",
        why=f"it is {image_recipe.VENV}: sys.path and the paths of libraries differ, their content does not",
    )
    yield Part(
        what="environment variables, entry point and working directory",
        prospect="lost",
        why="the lockfile has only the NVIDIA variables and a digest of the others",
    )
    unlisted = lockfile.packages.unlisted_count
    if unlisted:
        why = "the lockfile has a digest of them, not the files"
        yield Part(what=f"{unlisted} files of no package", prospect="lost", why=why)
    if lockfile.container is not None:
        why = "layers contain times and system packages: the new image has other digests"
        yield Part(what="digests of image, layers and SIF", prospect="other", why=why)


def _names(pins: Sequence[PinnedPackage]) -> str:
    return ", ".join(pin.name for pin in pins[:5]) + (", ..." if len(pins) > 5 else "")


# -- afterwards -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedField:
    """A field of the lockfile, compared with the new image.

    Attributes:
        announced: whether `plan` said before the build that it will differ.
    """

    field: str
    locked: str
    found: str
    outcome: Outcome
    severity: Severity
    announced: bool = False


# `plan` announces these differences for every new image: the packages are in a virtual environment, files that belong
# to no package are missing, and the system packages differ.
_ANNOUNCED = re.compile(
    r"libs\..+\.origin|python\.(sys-path|startup-files)|packages\.unlisted-(digest|count)|system\.packages-(digest|count)"
)

# Always different in a new image; not reported.
_ALWAYS_OTHER = ("container.sif.sha256",)
# Derived from fields that are already in the list.
_DIGESTS = ("packages.env-digest", "packages.content-digest", "packages.count")


def announced(plan_: RebuildPlan, field: str) -> bool:
    """Say whether `plan` announced that a field will differ."""
    gone = {package_field(one.name) for one in plan_.missing}
    return field in gone or _ANNOUNCED.fullmatch(field) is not None


def compare(
    lockfile: Lockfile,
    plan_: RebuildPlan,
    values: Mapping[str, Value],
    unknown: Mapping[str, str],
    differences: Sequence[tuple[str, str, str]],
) -> tuple[ComparedField, ...]:
    """Compare the facts of the new image with the lockfile, field by field.

    Args:
        lockfile: the lockfile.
        plan_: how the image was made.
        values: the facts of the image.
        unknown: facts that could not be read, with the reason.
        differences: (field, locked, found) of packages that differ.

    Returns:
        A row for each field, differing ones first.
    """
    rows = [
        ComparedField(field=field, locked=locked, found=found, outcome="differs", severity="must")
        for field, locked, found in differences
    ]
    explained = _DIGESTS if rows else ()
    for expected in lock_model.expectations(lockfile, level="full", origin=""):
        name = expected.field
        if name in _ALWAYS_OTHER or name in explained:
            continue
        if expected.value == lock_model.UNKNOWN_WHEN_LOCKED:
            continue
        outcome: Outcome
        if name not in values:
            outcome, found = "unknown", unknown.get(name, "not reported")
        else:
            outcome, found = ("same" if values[name] == expected.value else "differs"), show(values[name])
        rows.append(
            ComparedField(
                field=name, locked=show(expected.value), found=found, outcome=outcome, severity=expected.severity
            )
        )
    rows = [replace(row, announced=row.outcome != "same" and announced(plan_, row.field)) for row in rows]
    order = {"differs": 0, "unknown": 1, "same": 2}
    ranks = {"must": 0, "warn": 1, "info": 2}
    return tuple(sorted(rows, key=lambda row: (order[row.outcome], ranks[row.severity], row.field)))


def report(plan_: RebuildPlan, lockfile: Lockfile) -> str:
    """Return the text of REBUILD.md: what to expect of each part."""
    fingerprint = "".join(char for char in lockfile.fingerprint if char.isalnum() or char == "-")[:40]
    prospects = {"same": "the same", "likely": "likely the same", "other": "other", "lost": "not in the lockfile"}
    rows = "\n".join(f"- {prospects[part.prospect]}: {_line(part.what)} ({_line(part.why)})" for part in plan_.parts)
    return f"""{image_recipe.FIRST_LINE} rebuild`.

# The image of the lockfile {fingerprint}, made again

{rows}

`hpcenv image rebuild --lock NAME --build` builds the image and compares it with the lockfile, field by field.
"""


def _line(text: str) -> str:
    """Return untrusted text as one line of plain text."""
    return "".join(char if char.isprintable() and char not in "`<>|" else " " for char in text)[:300]
