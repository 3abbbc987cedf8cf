"""The GPU architectures in a torch build, and which architectures a GPU can run. Pure; standard library only.

Runs on: LOGIN NODE, COMPUTE NODE.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from hpcenv.judge.compat.versions import Numbers

# Architectures of Jetson and other Tegra chips. They are not binary compatible with other chips, and not with each
# other (CUDA Programming Guide, Binary Compatibility).
TEGRA = {(5, 3), (6, 2), (7, 2), (8, 7)}

ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


_OF_BUILD = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?")


def of_build(text: str) -> tuple[str, ...]:
    """Return the architectures in a TORCH_CUDA_ARCH_LIST, with the names that `torch.cuda.get_arch_list()` uses.

    `9.0+PTX` means kernels for 9.0, and PTX for 9.0 (torch 2.13, utils/cpp_extension.py). Other words, such as
    `Ampere`, are not changed, because this module does not know whether they fit a GPU.
    """
    found = []
    for word in re.split("[; ]+", text.strip("; ")):
        match = _OF_BUILD.fullmatch(word)
        if match is None:
            found.append(word)
            continue
        major, minor, suffix, ptx = match.groups()
        found.append(f"sm_{major}{minor}{suffix}")
        found += [f"compute_{major}{minor}{suffix}"] if ptx else []
    return tuple(word for word in found if word)


def cubin_for(arch_list: Iterable[str], wanted: Numbers) -> str | None:
    """Return the kernel that runs on a GPU. It has the same major number as the GPU, and no higher minor number.

    A kernel for `sm_90a` runs only on exactly that architecture. A kernel for `sm_100f` runs on a family: the same
    major number with the same or a higher minor number.
    """
    for kind, arch, suffix, name in _architectures(arch_list):
        exact = suffix == "a" or arch in TEGRA or wanted in TEGRA
        newer = arch[:1] == wanted[:1] and arch <= wanted
        if kind == "sm" and (arch == wanted or (newer and not exact)):
            return name
    return None


def ptx_for(arch_list: Iterable[str], wanted: Numbers) -> str | None:
    """Return the PTX that can be compiled for a GPU: PTX of the GPU's architecture, or of any older architecture."""
    for kind, arch, suffix, name in _architectures(arch_list):
        fits = {"": arch <= wanted, "a": arch == wanted, "f": arch[0] == wanted[0] and arch <= wanted}[suffix]
        if kind == "compute" and fits:
            return name
    return None


def _architectures(arch_list: Iterable[str]) -> Iterable[tuple[str, Numbers, str, str]]:
    """Split names such as `sm_90a` into parts, newest first. If several kernels fit, the GPU runs the newest."""
    found = [match for arch in arch_list if (match := ARCHITECTURE.fullmatch(arch))]
    parts = [(m[1], (int(m[2]), int(m[3])), m[4], m[0]) for m in found]
    return sorted(parts, key=lambda part: part[1], reverse=True)
