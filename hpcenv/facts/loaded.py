"""Compare the libraries that the loader has really mapped with the lockfile, before the first rank starts.

Runs on: COMPUTE NODE. Pure, except for the table of libraries.

The check step finds the file of each library by the rules of the loader. Other causes can make a process load a
different file, for example code in sitecustomize, LD_AUDIT, or a file of the host that --nv mounts. This file is
visible only in a process that has imported torch. The agent that starts torchrun is such a process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcenv.incontainer.probe.library_versions import LIBRARIES, version_in_words
from hpcenv.incontainer.probe.values import Unknown
from hpcenv.records.facts import Difference
from hpcenv.records.manifest import Manifest, Severity
from hpcenv.records.severities import Severities

# The libraries that are compared. A different version of such a library can change results or make a job hang.
COMPARED = ("nccl", "cudnn", "cublas", "cublaslt", "libtorch", "libtorch_cpu", "libtorch_cuda")
_ABSENT = "absent"
_NO_BUILD_ID = ("", "none")


@dataclass(frozen=True, kw_only=True)
class LoadedDifference:
    """A difference between loaded and locked libraries, with its severity in this run."""

    difference: Difference
    severity: Severity


def wanted(manifest: Manifest) -> dict[str, dict[str, str]]:
    """Return what the agent must read: library -> stem of its file name, how to read its version, and the locked path.

    The result is empty if the locked environment has no torch, because nothing loads these libraries then.
    """
    if any(e.field == "torch.version" and e.value == _ABSENT for e in manifest.expectations):
        return {}
    locked = _locked(manifest)
    return {
        name: {
            "stem": LIBRARIES[name][0],
            "how": LIBRARIES[name][1],
            "function": LIBRARIES[name][2],
            "origin": locked.get(f"libs.{name}.origin", ""),
        }
        for name in COMPARED
        if f"libs.{name}.origin" in locked
    }


def compare(manifest: Manifest, loaded: Mapping[str, Any]) -> tuple[LoadedDifference, ...]:
    """Return how the mapped libraries differ from the locked libraries.

    Args:
        manifest: the run.
        loaded: the agent's report.
    """
    severities = Severities(manifest.severities)
    names = wanted(manifest)
    if not names:
        return ()
    libraries = loaded.get("libraries")
    if not isinstance(libraries, dict):
        reason = str(loaded.get("problem") or "the agent did not report it")[:300]
        unread = Difference(field="loaded.differs", locked="read", found=reason, unknown=True)
        return (LoadedDifference(difference=unread, severity=severities.of(unread.field)),)
    locked = _locked(manifest)
    found = []
    for name in names:
        report: Mapping[str, Any] = libraries.get(name) or {}
        for copy in report.get("mapped", ()):
            difference = _difference(name, locked, str(report.get("expected", "")), copy)
            if difference is not None:
                found.append(LoadedDifference(difference=difference, severity=severities.of(difference.field)))
    return tuple(found)


def blocking(differences: Sequence[LoadedDifference]) -> tuple[Difference, ...]:
    """Return the differences that forbid the start of the ranks."""
    return tuple(one.difference for one in differences if one.severity == "must")


def in_words(differences: Sequence[LoadedDifference], node: str) -> tuple[str, ...]:
    """Return the differences as lines for the log."""
    return tuple(
        f"hpcenv: node {node}: {d.difference.field} ({d.severity}): locked {d.difference.locked}, "
        f"loaded {d.difference.found}" + (f"; {d.difference.note}" if d.difference.note else "")
        for d in differences
    )


def _locked(manifest: Manifest) -> dict[str, str]:
    return {e.field: str(e.value) for e in manifest.expectations if e.field.startswith("libs.")}


def _difference(name: str, locked: Mapping[str, str], expected: str, copy: Mapping[str, Any]) -> Difference | None:
    """Return how a mapped file differs from the locked library; None if they do not differ."""
    origin = locked[f"libs.{name}.origin"]
    version = _version(name, copy.get("numbers"))
    real, build_id = str(copy.get("real", "")), str(copy.get("build-id", ""))
    locked_version = locked.get(f"libs.{name}.version", "")
    locked_id = locked.get(f"libs.{name}.build-id", "")
    notes = []
    if origin == _ABSENT:
        notes.append("the locked environment does not load this library")
    elif expected and real != expected:
        notes.append("a file from another place replaces the locked one")
    if version and locked_version and version != locked_version:
        notes.append("another version")
    if build_id not in _NO_BUILD_ID and locked_id not in (*_NO_BUILD_ID, _ABSENT) and build_id != locked_id:
        notes.append(f"another build: build-id {build_id[:12]}, locked {locked_id[:12]}")
    if not notes:
        return None
    return Difference(
        field=f"loaded.{name}",
        locked=" ".join(word for word in (locked_version, origin) if word),
        found=" ".join(word for word in (version, str(copy.get("path", ""))) if word),
        note="; ".join(notes),
    )


def _version(name: str, numbers: object) -> str:
    if not isinstance(numbers, list) or not all(isinstance(number, int) for number in numbers) or not numbers:
        return ""
    version = version_in_words(name, numbers)
    return "" if isinstance(version, Unknown) else str(version)
