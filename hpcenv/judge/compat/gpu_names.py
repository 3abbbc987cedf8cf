"""Find the properties of a GPU from the name of the GPU. Pure; standard library only.

Runs on: LOGIN NODE, COMPUTE NODE.
"""

from __future__ import annotations

import re
from dataclasses import replace

from hpcenv.judge.compat.compat_table import Compat, GpuModel


def gpu_by_name(compat: Compat, name: str) -> GpuModel | None:
    """Return the properties that the name of a GPU tells; None if the name is unknown or ambiguous.

    Args:
        compat: the table.
        name: name from NVML (`NVIDIA H100 80GB HBM3`), a GRES of Slurm (`gpu:h100:8`,
            `gres/gpu:nvidia_a100-sxm4-80gb=4`), or the type in a GRES (`a100`, `rtx3090`).
    """
    words = re.findall(r"[a-z0-9]+", _gres_type(name).lower())
    runs = ["".join(words[start:end]) for start in range(len(words)) for end in range(start + 1, len(words) + 1)]
    known = sorted((run for run in runs if run in compat.gpus), key=len)
    if not known:
        return None
    longest = {compat.gpus[run].compute_capability for run in known if len(run) == len(known[-1])}
    if len(longest) != 1:
        return None
    model = compat.gpus[known[-1]]
    # `a100_1g.5gb` and `A100-SXM4-40GB MIG 1g.5gb` are slices of a GPU, with fewer multiprocessors.
    is_slice = any(re.fullmatch(r"mig|[1-9]g", word) for word in words)
    return replace(model, sm_count=None) if is_slice else model


def _gres_type(name: str) -> str:
    """Return the type in a GRES, which is between `gpu:` and the count. Any other name is not changed."""
    match = re.fullmatch(r"(?:gres[/:])?(?:gpu|shard|mps)[:/]([^:=(,]+?)(?:[:=]\d+.*)?(?:\(.*)?", name.strip())
    return match.group(1) if match else name


def names(name: str) -> tuple[str, ...]:
    """Return the short forms of a GPU's name that people and Slurm use: `rtx3090` and `3090` for GeForce RTX 3090."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    shorter = [words] if words else []
    if words[:1] == ["geforce"]:
        shorter += [words[1:], words[2:]]
    elif len(words) == 2 and (words[0] == "quadro" or name.startswith("RTX A")):
        shorter += [words[1:]]
    return tuple("".join(one) for one in shorter)
