"""Whether the driver's libraries of this machine run with the locked image's C library.

Runs on: LOGIN NODE. Many login nodes have the libraries of the driver. Where they do not, the check `glibc.driver`
looks on each node, before the ranks start.
"""

from __future__ import annotations

from hpcenv.machine import host_glibc
from hpcenv.project import lockfile as lock_model
from hpcenv.project.lockfile import Lockfile

# Distribution (ID in os-release) -> base images, the oldest first, with their glibc (packages.debian.org,
# packages.ubuntu.com, rockylinux.org; AlmaLinux and RHEL have Rocky's; 2026-11-23).
_BASES = {
    "debian": (("debian:12", (2, 36)), ("debian:13", (2, 41))),
    "ubuntu": (("ubuntu:22.04", (2, 35)), ("ubuntu:24.04", (2, 39))),
    "rocky": (("rockylinux:9", (2, 34)), ("rockylinux/rockylinux:10", (2, 39))),
    "almalinux": (("almalinux:9", (2, 34)), ("almalinux:10", (2, 39))),
    "rhel": (("redhat/ubi9", (2, 34)), ("redhat/ubi10", (2, 39))),
}


def notes(locked: Lockfile) -> tuple[str, ...]:
    """Return what the user should know before a job with GPUs; reads libraries of this machine."""
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
    """Return the line for the Dockerfile: a base of the same distribution with this glibc, or a newer one. Pure.

    For another distribution it names the glibc only.
    """
    family = os_release.partition(" ")[0].lower()
    base = next((image for image, glibc in _BASES.get(family, ()) if glibc >= need), "")
    change = f"FROM {base}" if base else f"a base with glibc {need[0]}.{need[1]} or newer"
    return f"change the base in the Dockerfile: {change}"
