"""What the build of packages needs that an image compiles for its torch and GPU. Pure; needs `packaging` only.

Runs on: LOGIN NODE.

flash-attn, Apex and DeepSpeed do not have a wheel for every torch, CUDA and Python. `hpcenv image init --build
NAME==VERSION` compiles such packages in a build stage that the image does not contain. The packages are compiled with
the CUDA release of torch, for the architectures in TORCH_CUDA_ARCH_LIST. The build needs no GPU.

For CUDA 13 and newer, the compiler nvcc comes from wheels of pip's index (nvidia-cuda-nvcc 13.0.88 has `bin/nvcc`).
NVIDIA's wheels for CUDA 12 contain only ptxas (nvidia-cuda-nvcc-cu12 12.6.85, read 2026-11-23). So for CUDA 12, the
build needs an image with the toolkit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from packaging.utils import canonicalize_name

from hpcenv.errors import Command, SpecError, UsageError
from hpcenv.judge.compat.compat_table import Compat
from hpcenv.judge.compat.gpu_names import gpu_by_name
from hpcenv.judge.compat.toolkits import check_toolkit
from hpcenv.recipes.combination import CPU, Combination
from hpcenv.recipes.pinned_packages import PinnedPackage, can_be_pinned

# The first CUDA release with a compiler on pip's index.
_FIRST_WITH_WHEELS = 13

# With --no-build-isolation, pip does not install the packages that a build needs. Most builds of CUDA extensions need
# the packages below (setup.py of flash-attn 2.8, Apex and DeepSpeed 0.17, read 2026-11-23). --build-with adds more.
_TOOLS = ("setuptools", "wheel", "packaging", "ninja", "psutil")

# Parts of the toolkit that are needed to compile and link an extension of torch. torch itself requires CUDA's libraries
# with their headers.
_TOOLKIT = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl", "nvidia-cuda-runtime")

# With these settings, a package compiles its extensions in this build. Without them:
#   flash-attn: its setup.py downloads a wheel from the project's releases (setup.py, v2.8.3), or compiles for its own
#               list of architectures (issue 1038 of Dao-AILab/flash-attention)
#   apex:       only pure Python is installed (README of NVIDIA/apex)
#   deepspeed:  each node compiles the extensions at the first use (deepspeed.ai/tutorials/advanced-install)
# Read 2026-11-23.
_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "flash-attn": {"FLASH_ATTENTION_FORCE_BUILD": "TRUE"},
    "apex": {"APEX_CPP_EXT": "1", "APEX_CUDA_EXT": "1"},
    "deepspeed": {"DS_BUILD_CPU_ADAM": "1", "DS_BUILD_FUSED_ADAM": "1"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageBuild:
    """The build stage of a recipe.

    Attributes:
        sources: the packages to compile, with the hashes of their source archives.
        tools: packages that only the build needs, with hashes.
        arch_list: TORCH_CUDA_ARCH_LIST, for example `8.0`; empty for a CPU build.
        base: the image to compile in, with its digest. This image has the CUDA toolkit and a compiler. If `base` is
            empty, the packages are compiled in the base of the recipe.
        has_wheels: whether `tools` contains nvcc.
    """

    sources: tuple[PinnedPackage, ...]
    tools: tuple[PinnedPackage, ...]
    arch_list: str = ""
    base: str = ""
    has_wheels: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of the build."""
        found: dict[str, str] = {}
        if self.arch_list:
            # Without these variables, a build that sees no GPU would compile for the CPU only or for all architectures.
            found = {"TORCH_CUDA_ARCH_LIST": self.arch_list, "FORCE_CUDA": "1"}
        for source in self.sources:
            found |= _VARIABLES.get(canonicalize_name(source.name), {})
            if canonicalize_name(source.name) == "flash-attn" and self.arch_list:
                found["FLASH_ATTN_CUDA_ARCHS"] = self.arch_list.replace(".", "")
        return found


def parse_request(text: str) -> tuple[str, str]:
    """Return name and version of `NAME==VERSION`.

    Raises:
        UsageError: the text has another form.
    """
    name, _, version = text.partition("==")
    if not can_be_pinned(name, version):
        raise UsageError(
            f"`{text[:80]}` is not NAME==VERSION",
            why="--build compiles one version, from its source archive on pip's index",
            hint="for example --build flash-attn==2.8.3",
        )
    return canonicalize_name(name), version


def arch_list(table: Compat, combination: Combination, gpu: str | None) -> str:
    """Return TORCH_CUDA_ARCH_LIST for a GPU: the architecture that its kernels are compiled for.

    Args:
        table: the compatibility table.
        combination: the combination of the image.
        gpu: the name of the GPU, as for `gpu` under [host], for example `h100`.

    Raises:
        SpecError: no GPU is named, or the GPU is not known, or this CUDA release cannot compile for it.
    """
    if combination.cuda == CPU:
        return ""
    if gpu is None:
        raise SpecError(
            "--build does not know which GPU to compile for",
            why="without a GPU here, a build cannot detect the GPU, and would compile for all GPUs",
            hint='--gpu h100, or under [host] in hpcenv.toml: gpu = "h100"',
        )
    model = gpu_by_name(table, gpu)
    if model is None:
        raise SpecError(
            f"the GPU `{gpu[:60]}` is not in the compatibility table, or several GPUs have this name",
            why=f"source: {table.origin}",
            hint="use the vendor's name: --gpu a100, --gpu h100, --gpu l40s",
        )
    judged = check_toolkit(table, combination.cuda, model.compute_capability)
    if judged.result == "mismatch":
        raise SpecError(
            f"--build for {model.name}: {judged.what}",
            why=judged.why,
            hint=("to see what runs on it: ", Command("hpcenv", "compat", "--gpu", gpu)),
        )
    return model.compute_capability


def needs_image(combination: Combination) -> bool:
    """Return whether the build needs an image with the toolkit, because pip's index has no nvcc for this CUDA."""
    return combination.cuda != CPU and int(combination.cuda.partition(".")[0]) < _FIRST_WITH_WHEELS


def require_image(combination: Combination, base: str | None) -> None:
    """Refuse a build if there is no source for its compiler.

    Raises:
        SpecError: CUDA is older than 13, and the user named no image to compile in.
    """
    if base is None and needs_image(combination):
        raise SpecError(
            f"--build has no compiler for CUDA {combination.cuda}",
            why=f"pip's index has nvcc from CUDA {_FIRST_WITH_WHEELS} on",
            hint=f"name an image with the toolkit of CUDA {combination.cuda} on {combination.distribution.name}: "
            "--build-base IMAGE; or --cuda 13.0",
        )


def tool_requirements(combination: Combination, more: Iterable[str], *, with_toolkit: bool) -> tuple[str, ...]:
    """Return the build's requirements, which pip installs.

    Args:
        combination: the combination of the image.
        more: names from `--build-with`.
        with_toolkit: whether nvcc comes from wheels.
    """
    toolkit = (f"{name}=={combination.cuda}.*" for name in _TOOLKIT) if with_toolkit else ()
    return (*_TOOLS, *more, *toolkit)


def wheel_folder(cuda: str) -> str:
    """Return the folder in site-packages that NVIDIA's wheels for this CUDA install into: `nvidia/cu13`."""
    return f"nvidia/cu{cuda.partition('.')[0]}"


def check_tool(name: str) -> None:
    """Refuse a value of `--build-with` that is not a package.

    Raises:
        UsageError: the value is not NAME or NAME==VERSION.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*(==[A-Za-z0-9.!+_-]+)?", name):
        raise UsageError(f"`{name[:80]}` is not NAME or NAME==VERSION", hint="for example --build-with pybind11")
