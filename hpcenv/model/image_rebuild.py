"""What of a locked image can be made again, and what came of it. Pure.

Runs on: LOGIN NODE.

A lockfile holds digests, not bytes. From it can be made: the same Python packages (from the same wheels, where these
were proved), the same release of Python and of the distribution. Not: the same image. `plan` says which is which
before anything is made, `compare` afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hpcenv.model import export, image_recipe
from hpcenv.model import lockfile as lock_model
from hpcenv.model.diff import show
from hpcenv.model.image_recipe import CPU, SYSTEMS, Choice, Pin, System
from hpcenv.model.lockfile import DistTable, Lockfile
from hpcenv.wire import Severity, Value

Prospect = Literal["same", "likely", "other", "lost"]
Outcome = Literal["same", "differs", "unknown"]

# os-release's `ID VERSION_ID` -> distribution.
_SYSTEMS = {"debian 12": "bookworm", "debian 13": "trixie", "ubuntu 24.04": "ubuntu24.04"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of the locked image and what becomes of it.

    Attributes:
        prospect: `same` by construction, `likely` the same (compared after the build), certainly
            `other`, or `lost`: the lockfile does not hold it.
    """

    what: str
    prospect: Prospect
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How an image is made again.

    Attributes:
        pins: packages whose wheel is known by sha256.
        unproved: packages known by name and version; what the index has is compared afterwards.
        missing: packages that cannot be installed from an index, with reasons.
        environment: variables that the lockfile holds.
    """

    choice: Choice
    pins: tuple[Pin, ...]
    unproved: tuple[Pin, ...]
    missing: tuple[export.LeftOut, ...]
    environment: tuple[tuple[str, str], ...]
    parts: tuple[Part, ...]


def system_of(lockfile: Lockfile) -> str | None:
    """Return the name of the locked distribution, None for one that no recipe is known for."""
    return _SYSTEMS.get(str(lockfile.facts.get("system.os-release", "")))


def choice_of(lockfile: Lockfile, system: System) -> Choice:
    """Return the locked combination, whether or not the compatibility table knows it."""
    torch, _, local = str(lockfile.facts.get("torch.version", "")).partition("+")
    python = re.match(r"3\.\d+", str(lockfile.facts.get("python.version", "")))
    cuda = lock_model.cuda_of(lockfile) or CPU
    plain = re.fullmatch(r"[0-9][A-Za-z0-9.]{0,40}", torch)
    return Choice(
        torch=torch if plain else "unknown",
        cuda=cuda if re.fullmatch(r"\d+\.\d+", cuda) else CPU,
        python=python[0] if python else system.python,
        system=system,
        requirement=f"torch=={torch}" + (f"+{local}" if local else ""),
    )


def plan(lockfile: Lockfile, system: System, *, proved_only: bool = False) -> Plan:
    """Say how the image of a lockfile is made again, and what to expect.

    Args:
        lockfile: untrusted; what has not the form of a name, version or hash is left out.
        system: the distribution to start from.
        proved_only: leave packages out whose wheel is not known by hash.
    """
    locked = {dist.name: dist for dist in lockfile.packages.dist}
    no_hash = {one.name: one for one in export.requirements(lockfile).left_out}
    no_pin = {one.name: one for one in export.environment(lockfile, name="rebuild").left_out}
    pins, unproved, missing = [], [], list(no_pin.values())
    for name, dist in locked.items():
        if name in no_pin:
            continue
        if not image_recipe.can_be_pinned(name, dist.version):
            if not any(one.name == _line(name) for one in missing):
                missing.append(
                    export.LeftOut(name=_line(name), version=_line(dist.version), reason="odd name or version")
                )
            continue
        if name not in no_hash and dist.wheel is not None and dist.wheel.sha256:
            pins.append(_pin(dist, f"sha256:{dist.wheel.sha256.removeprefix('sha256:')}"))
        elif proved_only:
            missing.append(no_hash.get(name) or export.LeftOut(name=name, version=dist.version, reason="no hash"))
        else:
            unproved.append(_pin(dist, ""))
    found = Plan(
        choice=choice_of(lockfile, system),
        pins=tuple(pins),
        unproved=tuple(unproved),
        missing=tuple(missing),
        environment=_environment(lockfile),
        parts=(),
    )
    return replace(found, parts=tuple(_parts(lockfile, found)))


def _pin(dist: DistTable, digest: str) -> Pin:
    files = (dist.wheel.filename,) if dist.wheel is not None and dist.wheel.filename else ()
    return Pin(name=dist.name, version=dist.version, hashes=(digest,) if digest else (), files=files)


def _environment(lockfile: Lockfile) -> tuple[tuple[str, str], ...]:
    """Return the NVIDIA variables; a lockfile is untrusted, so only those of plain form."""
    table = lockfile.container.nvidia if lockfile.container is not None else {}
    return tuple(
        (name, value)
        for name, value in sorted(table.items())
        if re.fullmatch(r"NVIDIA_[A-Z_]+|CUDA_VERSION", name) and re.fullmatch(r"[ -~]{0,4000}", value)
    )


def _parts(lockfile: Lockfile, found: Plan) -> list[Part]:
    facts, packages = lockfile.facts, lockfile.packages
    modified = [dist.name for dist in packages.dist if dist.content_sha256 is not None and dist.record_sha256]
    parts = [
        Part(
            what=f"{len(found.pins)} of {packages.count} packages",
            prospect="same",
            why="installed from the very wheels that are locked, by sha256, as long as an index has them",
        )
    ]
    if found.unproved:
        parts.append(
            Part(
                what=f"{len(found.unproved)} packages: {_names(found.unproved)}",
                prospect="likely",
                why="their wheel was never proved: name and version are the same, RECORD is compared after the build",
            )
        )
    parts += [Part(what=f"{one.name} {one.version}", prospect="lost", why=one.reason) for one in found.missing]
    if modified:
        what, why = ", ".join(modified[:5]), "modified after they were installed: only their digests are locked"
        parts.append(Part(what=what, prospect="lost", why=why))
    release = str(facts.get("python.version", "unknown"))
    parts += [
        Part(
            what=f"Python {release}",
            prospect="likely",
            why=f"Python {found.choice.python} of the base: its last number is what the base has",
        ),
        Part(
            what=f"{facts.get('system.packages-count', 'unknown')} system packages",
            prospect="other",
            why="the lockfile has a digest of them, not their names, and mirrors keep the newest versions only",
        ),
        Part(
            what="where packages lie",
            prospect="other",
            why=f"in {image_recipe.VENV}: sys.path and the libraries' places follow from that, their content does not",
        ),
        Part(
            what="environment variables, entry point and working directory",
            prospect="lost",
            why="the lockfile has only NVIDIA variables and a digest of the others",
        ),
    ]
    if packages.unlisted_count:
        what, why = f"{packages.unlisted_count} files of no package", "the lockfile has a digest of them, not the files"
        parts.append(Part(what=what, prospect="lost", why=why))
    if lockfile.container is not None:
        why = "layers hold times and system packages: this is a new image with digests of its own"
        parts.append(Part(what="digests of image, layers and SIF", prospect="other", why=why))
    return parts


def _names(pins: Sequence[Pin]) -> str:
    return ", ".join(pin.name for pin in pins[:5]) + (", ..." if len(pins) > 5 else "")


# -- afterwards -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One field of the lockfile and what the new image has.

    Attributes:
        announced: `plan` said before that it would differ.
    """

    field: str
    locked: str
    found: str
    outcome: Outcome
    severity: Severity
    announced: bool = False


# What `plan` says of every image that is made again: packages lie in a virtual environment now, files of no
# package are gone, the system's packages are others.
_ANNOUNCED = re.compile(
    r"libs\..+\.origin|python\.(sys-path|startup-files)|packages\.unlisted-(digest|count)|system\.packages-(digest|count)"
)

# Another image has others by construction: no news.
_ALWAYS_OTHER = ("container.sif.sha256",)
# Consequences of a row that stands there already.
_DIGESTS = ("packages.env-digest", "packages.content-digest", "packages.count")


def announced(plan_: Plan, field: str) -> bool:
    """Say whether a field was known beforehand not to become the same."""
    gone = {f"packages.{one.name}" for one in plan_.missing}
    return field in gone or _ANNOUNCED.fullmatch(field) is not None


def compare(
    lockfile: Lockfile,
    plan_: Plan,
    values: Mapping[str, Value],
    unknown: Mapping[str, str],
    differences: Sequence[tuple[str, str, str]],
) -> tuple[Row, ...]:
    """Compare what was found in the new image with the lockfile, field by field.

    Args:
        plan_: how it was made.
        values, unknown: of the probe.
        differences: (field, locked, found) of single packages.
    """
    rows = [
        Row(field=field, locked=locked, found=found, outcome="differs", severity="must")
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
            Row(field=name, locked=show(expected.value), found=found, outcome=outcome, severity=expected.severity)
        )
    rows = [replace(row, announced=row.outcome != "same" and announced(plan_, row.field)) for row in rows]
    order = {"differs": 0, "unknown": 1, "same": 2}
    ranks = {"must": 0, "warn": 1, "info": 2}
    return tuple(sorted(rows, key=lambda row: (order[row.outcome], ranks[row.severity], row.field)))


def report(plan_: Plan, lockfile: Lockfile) -> str:
    """Return REBUILD.md: what to expect."""
    fingerprint = "".join(char for char in lockfile.fingerprint if char.isalnum() or char == "-")[:40]
    words = {"same": "the same", "likely": "likely the same", "other": "other", "lost": "not in the lockfile"}
    rows = "\n".join(f"- {words[part.prospect]}: {_line(part.what)} ({_line(part.why)})" for part in plan_.parts)
    return f"""{image_recipe.FIRST_LINE} rebuild`.

# What is made again from the lockfile {fingerprint}

{rows}

`hpcenv image rebuild LOCK --build` makes the image and compares it with the lockfile, field by field.
"""


def _line(text: str) -> str:
    """Return untrusted words as one line of plain text."""
    return "".join(char if char.isprintable() and char not in "`<>|" else " " for char in text)[:300]


def system(name: str) -> System | None:
    """Return a distribution by name."""
    return SYSTEMS.get(name)
