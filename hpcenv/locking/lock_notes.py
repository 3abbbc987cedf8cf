"""Notes for the user about a new lockfile. Each note is one sentence.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from hpcenv.facts.probe import read_image_network
from hpcenv.judge.network.known_bad import KNOWN_BAD, BadVersion, matches
from hpcenv.judge.network.verbs_packages import install_line
from hpcenv.locking import compatibility_notes, overlay
from hpcenv.locking.conflicts import find_conflicts
from hpcenv.locking.overlay import Origin
from hpcenv.locking.pins.pin import marker_environment
from hpcenv.machine import host_glibc
from hpcenv.project import compatibility
from hpcenv.project import lockfile as lock_model
from hpcenv.project.lockfile import Lockfile
from hpcenv.records.network import ImageNetwork
from hpcenv.text import listed

_NAMED = 5
_CONFLICTS_SHOWN = 5

# Distribution (ID in os-release) -> base images, the oldest first, with their glibc (packages.debian.org,
# packages.ubuntu.com, rockylinux.org, 2026-11-23). AlmaLinux and RHEL have the same glibc as Rocky.
_BASES = {
    "debian": (("debian:12", (2, 36)), ("debian:13", (2, 41))),
    "ubuntu": (("ubuntu:22.04", (2, 35)), ("ubuntu:24.04", (2, 39))),
    "rocky": (("rockylinux:9", (2, 34)), ("rockylinux/rockylinux:10", (2, 39))),
    "almalinux": (("almalinux:9", (2, 34)), ("almalinux:10", (2, 39))),
    "rhel": (("redhat/ubi9", (2, 34)), ("redhat/ubi10", (2, 39))),
}


def notes(
    locked: Lockfile, answer: Mapping[str, Any], origins: Mapping[str, Origin], *, today: dt.date
) -> tuple[str, ...]:
    """Return all notes.

    Args:
        answer: the probe's answer.
        origins: the packages that come from the overlay.
        today: for the age of the compatibility table.
    """
    has_overlay = locked.container is not None and locked.container.overlay is not None
    return (
        *_of_packages(locked, answer),
        *(overlay.notes(origins) if has_overlay else ()),
        *_conflict_notes(answer),
        *compatibility_notes.notes(locked, compatibility.table(), today=today),
        *of_fabric(locked, read_image_network(answer)),
        *of_driver(locked),
    )


def _of_packages(locked: Lockfile, answer: Mapping[str, Any]) -> tuple[str, ...]:
    """Return notes on fields that could not be read, and on packages that were modified after their installation."""
    notes = [f"{field} is unknown: {reason}" for field, reason in locked.unknown.items()]
    notes.extend(
        f"{dist.name} {dist.version} was modified after it was installed"
        for dist in locked.packages.dist
        if dist.content_sha256 is not None and dist.record_sha256 is not None
    )
    notes.extend(_editable_notes(locked))
    notes.extend(_conda_notes(locked))
    outside = {package["name"] for package in answer["packages"] if package.get("scanned") is False}
    unproved = [d.name for d in locked.packages.dist if d.record_sha256 is None and d.source != "editable"]
    for names, what in (
        ([name for name in unproved if name not in outside], "their files count as unlisted"),
        (
            [name for name in unproved if name in outside],
            "they are outside of the environment: their files are not compared",
        ),
    ):
        if names:
            notes.append(f"packages without a digest ({what}): {listed(names, _NAMED)}")
    return tuple(notes)


def _conflict_notes(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the requirements between packages that are not met. `pip check` finds the same requirements."""
    if "python.version" not in answer["values"]:
        return
    packages = answer["packages"]
    required = {package["name"]: package.get("requires", ()) for package in packages}
    versions = {package["name"]: package["version"] for package in packages}
    found = list(find_conflicts(versions, required, marker_environment(answer["values"])))
    yield from (f"packages do not fit together: {conflict}" for conflict in found[:_CONFLICTS_SHOWN])
    if len(found) > _CONFLICTS_SHOWN:
        yield f"and {len(found) - _CONFLICTS_SHOWN} more; `python -m pip check` in the environment lists them"


def _editable_notes(locked: Lockfile) -> Iterator[str]:
    """Yield notes on editable installs, because the changes in their folders exist only on this machine."""
    editable = {
        d.name: d.direct_url for d in locked.packages.dist if d.direct_url is not None and d.direct_url.editable
    }
    for name, source in editable.items():
        if source.dirty:
            kept = "the difference is locked as a digest, " if source.diff_sha256 else ""
            yield (
                f"{name} is an editable install and its tree is not commit {(source.commit_id or '')[:12]}: "
                f"{kept}only you have these changes; commit them, then lock again"
            )
    by_commit = [name for name, source in editable.items() if source.diff_sha256 and not source.dirty]
    by_files = [name for name, source in editable.items() if source.files_sha256]
    for names, what in ((by_commit, "their commit and what differs from it"), (by_files, "the files of their trees")):
        if names:
            yield f"editable installs, compared by {what}: {listed(names, _NAMED)}"


def _conda_notes(locked: Lockfile) -> Iterator[str]:
    """Yield notes on the conda packages that may not come from the recorded archive, one note per reason."""
    reasons = [(table.name, table.reason) for table in locked.packages.conda_package if table.proof == "none"]
    for reason, _ in Counter(reason for _, reason in reasons).most_common(_CONFLICTS_SHOWN):
        names = listed([name for name, why in reasons if why == reason], _NAMED)
        yield f"packages of conda without a proof: {names}: {reason}"


# -- fast networks --------------------------------------------------------------------------


def of_fabric(locked: Lockfile, image: ImageNetwork | None) -> tuple[str, ...]:
    """Return notes on libraries for fast networks between nodes that are missing or wrong in the image.

    For an image without a lockfile, `hpcenv image lint` reports the same faults (rule `no-fabric`). The verdict of a
    run also reports such faults, for the network of the run's nodes (judge/network/troubles.py).

    Args:
        locked: the new lockfile. For an environment of the host there are no notes, because the nodes have their own
            libraries.
        image: the libraries in the image that NCCL would use; None if torch has no NCCL.
    """
    if image is None or locked.kind != "sif":
        return ()
    return (*_verbs(locked, image), *_plugins(image), *_known_bad(locked, image))


def _verbs(locked: Lockfile, image: ImageNetwork) -> Iterator[str]:
    if image.verbs and image.providers:
        return
    lacks = "libibverbs.so.1" if not image.verbs else "a provider beside libibverbs.so.1, such as mlx5"
    line = install_line(str(locked.facts.get("system.os-release", "")))
    add = f"add to the Dockerfile: {line}" if line else "install libibverbs and its providers (rdma-core) in the image"
    yield (
        f"the image does not contain {lacks}: with InfiniBand or RoCE, NCCL silently uses TCP between nodes, "
        f"5 to 70 times slower; {add}"
    )


def _plugins(image: ImageNetwork) -> Iterator[str]:
    if image.other_plugins:
        first = f"NCCL takes {image.plugin}" if image.plugin else "the loader finds none of them"
        others = ", ".join(image.other_plugins)
        yield (
            f"the image contains several plugins for NCCL: {first}, not {others}; "
            "add to the Dockerfile: ENV NCCL_NET_PLUGIN=PATH with the right one"
        )
    if image.plugin_version and not image.libfabric:
        yield (
            f"the image contains {image.plugin} (aws-ofi-nccl {image.plugin_version}) and no libfabric.so.1, which it "
            "needs; bind the site's libfabric, or add it to the Dockerfile"
        )


def _known_bad(locked: Lockfile, image: ImageNetwork) -> Iterator[str]:
    versions = {"nccl": str(locked.facts.get("libs.nccl.version", "")), "aws-ofi-nccl": image.plugin_version}
    machine = locked.facts.get("system.machine")
    for entry in KNOWN_BAD:
        version = versions.get(entry.component, "")
        if entry.where == "image" and entry.machine in ("", machine) and matches(entry, version):
            yield _sentence(entry, version)


def _sentence(entry: BadVersion, version: str) -> str:
    name = "NCCL" if entry.component == "nccl" else entry.component
    where = f" on {', '.join(entry.profiles)}" if entry.profiles else ""
    return f"{name} {version} is known to fail{where}: {entry.what}; {entry.hint} ({entry.source}, {entry.date})"


# -- the driver -----------------------------------------------------------------------------


def of_driver(locked: Lockfile) -> tuple[str, ...]:
    """Return notes on whether the libraries of this machine's driver run with the image's C library.

    Many login nodes have the driver's libraries. On a login node without these libraries, there is no note. The
    check `glibc.driver` then compares the libraries on each node before the ranks start.
    """
    support, image = lock_model.gpu_support(locked), host_glibc.parse_glibc(locked.facts.get(host_glibc.IMAGE_GLIBC))
    if locked.kind != "sif" or support not in ("cuda", "hip") or image is None:
        return ()
    found = host_glibc.read_driver(nvidia=support == "cuda", amd=support == "hip")
    bad, option = found.too_new(image), "--nv" if support == "cuda" else "--rocm"
    if bad:
        need = max(found.needs.values())
        line = base_line(str(locked.facts.get("system.os-release", "")), need)
        what = f"on this machine {bad[0]}, and the image has {image[0]}.{image[1]}"
        return (f"{what}: {option} brings it into the container, whose loader refuses it; {line}",)
    if not found.needs:
        why = found.problem or "this machine has no library of the driver"
        return (f"whether the driver's libraries run with the image's glibc is unknown: {why}; each node checks it",)
    return ()


def base_line(os_release: str, need: tuple[int, int]) -> str:
    """Return the line for the Dockerfile: a base image of the same distribution with this glibc or a newer glibc. Pure.

    For an unknown distribution, the line names the glibc only.
    """
    family = os_release.partition(" ")[0].lower()
    base = next((image for image, glibc in _BASES.get(family, ()) if glibc >= need), "")
    change = f"FROM {base}" if base else f"a base with glibc {need[0]}.{need[1]} or newer"
    return f"change the base in the Dockerfile: {change}"
