"""The data about an installed package and its wheel.

Runs on: LOGIN NODE, also in the process beside pip: standard library only.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

ProofKind = Literal["built", "claimed", "direct-url", "embedded-lock", "install-report", "record", "index-only", "none"]
# `SeenWheel.label` of the file that direct_url.json names (PEP 610). No index has this label.
DIRECT = "direct"

HEX_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class InstalledDist:
    """One installed package, as the probe describes it.

    Attributes:
        build: `Build:` in the WHEEL file of the package; "" without such a line.
        tags: `Tag:` lines in the WHEEL file of the package; empty if they are not known.
        record_sha256: its RECORD digest (hpcenv-env-v1).
        content_sha256: the same digest over the real content of its files; None if the files were not read.
        programs: name -> sha256 of each of its programs in bin/ (see incontainer/probe/programs.py); None if the
            programs were not read.
        direct_url: the source of the installation, as the probe reports it: `url`, `hash`, `commit-id`, `editable`.
        wheel_file: the path of the local wheel from which the package was installed; "" without a local wheel.
    """

    name: str
    version: str
    build: str = ""
    tags: tuple[str, ...] = ()
    record_sha256: str | None = None
    content_sha256: str | None = None
    programs: Mapping[str, str] | None = None
    direct_url: Mapping[str, Any] | None = None
    wheel_file: str = ""

    @classmethod
    def from_probe(cls, entry: Mapping[str, Any]) -> InstalledDist:
        """Return the package that an entry in the probe's `packages` describes."""
        return cls(
            name=entry["name"],
            version=entry["version"],
            build=entry.get("build") or "",
            tags=tuple(sorted(entry.get("tags") or ())),
            record_sha256=entry.get("record-sha256"),
            content_sha256=entry.get("content-sha256"),
            programs=entry["programs"]["files"] if entry.get("programs") else None,
            direct_url=entry.get("direct-url"),
            wheel_file=entry.get("wheel-file", ""),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownFile:
    """A wheel that is named in the image: by a lockfile, direct_url.json, or a report of the installation or build."""

    name: str
    version: str
    filename: str
    sha256: str
    proof: Literal["built", "claimed", "embedded-lock", "install-report"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """How to ask the index.

    Attributes:
        env: the user's whole environment, through which pip finds its configuration.
        python: the Python whose pip contacts the index: hpcenv's own, or a Python that the user chose (3.10 or newer).
    """

    env: Mapping[str, str]
    python: str = sys.executable


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelProof:
    """A package's wheel, or the reason why the wheel is not known.

    Attributes:
        index: `pypi`, `extra-N` or `find-links`; None if no index was needed.
        reason: why the proof is not stronger; empty for `record` and `direct-url`.
    """

    name: str
    filename: str | None = None
    sha256: str | None = None
    index: str | None = None
    proof: ProofKind
    reason: str = ""


def no_proof(dist: InstalledDist, reason: str, filename: str | None = None) -> WheelProof:
    """Return the result `none` for a package, with the reason."""
    return WheelProof(name=dist.name, filename=filename, proof="none", reason=reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenWheel:
    """One wheel of the installed name and version, as the process beside pip reports it.

    Attributes:
        label: the index: `pypi`, `extra-N` or `find-links`; or `DIRECT`.
        exact: whether the file name has the installed build and tags.
        records: the RECORD digests that an installation of this wheel can have; empty if the wheel was not read.
        programs: name and sha256 of the wheel's programs, as in `InstalledDist.programs`.
        problem: how the wheel contradicts its RECORD, or the sha256 that the index states.
        unread: why the wheel was not read, or not read as a whole.
    """

    label: str
    filename: str
    sha256: str | None
    exact: bool
    records: Sequence[str] = ()
    programs: Sequence[Sequence[str]] = ()
    problem: str = ""
    unread: str = ""


ENTRY_POINT = "entry-point "


def other_program(dist: InstalledDist, programs: Sequence[Sequence[str]]) -> str:
    """Return the name of a program that differs between the installation and the wheel; empty if no program differs.

    The launcher for an entry point of the wheel may be missing in the installation, because an installer may write its
    own launcher.
    """
    if dist.programs is None:
        return ""
    brought = {pair[0]: pair[1] for pair in programs}
    names = [name for name, digest in dist.programs.items() if brought.get(name) != digest]
    names += [n for n, digest in brought.items() if n not in dist.programs and not digest.startswith(ENTRY_POINT)]
    return min(names, default="")
