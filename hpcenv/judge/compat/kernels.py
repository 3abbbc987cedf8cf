"""Judge whether torch, or a package that was compiled for torch, has kernels for a GPU. Pure; standard library only.

Runs on: LOGIN NODE, COMPUTE NODE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpcenv.judge.compat.architectures import ARCHITECTURE, TEGRA, cubin_for, ptx_for
from hpcenv.judge.compat.compat_table import Compat
from hpcenv.judge.compat.floors import driver_floor
from hpcenv.judge.compat.judgement import Judgement
from hpcenv.judge.compat.torch_builds import X86_64, suggest_torch, would_run
from hpcenv.judge.compat.versions import numbers, older


def covers(
    compat: Compat,
    arch_list: Sequence[str],
    compute_capability: str,
    *,
    gpu: str = "",
    cuda: str = "",
    driver: str = "",
    machine: str = X86_64,
    subject: str = "this image's torch",
) -> Judgement:
    """Say whether torch has kernels for a GPU.

    Args:
        compat: the table, used to name a build that would run.
        arch_list: result of `torch.cuda.get_arch_list()`, for example `sm_80` and `compute_90`.
        compute_capability: compute capability of the GPU, for example `9.0`.
        gpu: name of the GPU, for the message.
        cuda, driver: CUDA runtime version of the image, and driver version of the node. If only PTX fits, these
            versions are needed to say whether the driver compiles PTX of this toolkit.
        machine: architecture of the processors, used to name a build that would run.
        subject: the thing that contains the kernels, for the message.
    """
    wanted = numbers(compute_capability)
    if wanted is None or len(wanted) != 2:
        return Judgement(result="unknown", what=f"`{compute_capability}` is not a compute capability")
    this = f"{gpu}, compute capability {compute_capability}" if gpu else f"compute capability {compute_capability}"
    kernel = cubin_for(arch_list, wanted)
    if kernel is not None:
        return Judgement(result="match", what=f"{subject} has kernels for this GPU ({this}: {kernel})")
    ptx = ptx_for(arch_list, wanted)
    if ptx is not None:
        return _judge_ptx(compat, ptx, this=this, cuda=cuda, driver=driver, machine=machine, subject=subject)
    strange = [arch for arch in arch_list if not ARCHITECTURE.fullmatch(arch)]
    if strange:
        what = f"whether {subject} has kernels for this GPU ({this}) is not known"
        return Judgement(result="unknown", what=what, why=f"`{strange[0]}` is no CUDA architecture that hpcenv knows")
    return Judgement(
        result="mismatch",
        what=f"{subject} has no kernels for this GPU ({this}; it has {_range(arch_list)})",
        why="a Tegra runs only kernels that were compiled for it (CUDA Programming Guide, Binary Compatibility)"
        if wanted in TEGRA
        else "a kernel runs on GPUs with the same major compute capability and the same or a higher minor number",
        hint=would_run(
            suggest_torch(compat, driver, compute_capability=compute_capability, machine=machine),
            verb="would run" if driver else "has kernels for it",
        ),
    )


def covers_built(
    compat: Compat,
    package: str,
    arch_list: Sequence[str],
    compute_capability: str,
    *,
    gpu: str = "",
    cuda: str = "",
    driver: str = "",
) -> Judgement:
    """Say whether a package that was compiled in the image (`hpcenv image init --build`) has kernels for a GPU."""
    judged = covers(compat, arch_list, compute_capability, gpu=gpu, cuda=cuda, driver=driver, subject=package)
    name, _, version = package.rpartition(" ")
    again = f"compile it for this GPU: hpcenv image init --build {name}=={version} --gpu NAME"
    return judged if judged.result == "match" else replace(judged, hint=again)


def _judge_ptx(compat: Compat, ptx: str, *, this: str, cuda: str, driver: str, machine: str, subject: str) -> Judgement:
    compiled = f"{subject} has no kernels for this GPU ({this}) but {ptx}, which the driver compiles"
    why = "this takes minutes at first use"
    if not cuda or not driver:
        return Judgement(result="match", what=compiled, why=f"{why} and needs a driver as new as the CUDA toolkit")
    floor, have = driver_floor(compat, cuda), numbers(driver)
    if floor is None or have is None or not floor.packaged:
        what = f"whether driver {driver} can compile {ptx} of CUDA {cuda} for this GPU ({this}) is not known"
        return Judgement(result="unknown", what=what)
    if not older(have, floor.packaged):
        return Judgement(result="match", what=compiled, why=why)
    capability = this.rpartition(" ")[2]
    return Judgement(
        result="mismatch",
        what=f"driver {driver} cannot compile {ptx} of CUDA {cuda} for this GPU ({this}): needs >= {floor.packaged}",
        why=f"minor-version compatibility excludes PTX ({compat.packaged_source})",
        hint=would_run(suggest_torch(compat, driver, compute_capability=capability, machine=machine)),
    )


def _range(arch_list: Sequence[str]) -> str:
    if not arch_list:
        return "none: it was built without CUDA"
    return ", ".join(arch_list) if len(arch_list) <= 3 else f"{arch_list[0]} ... {arch_list[-1]}"
