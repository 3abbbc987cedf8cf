"""Which GPUs torch could use in the environment of a node, before the first rank (`ranks/NODE/gpus.json`).

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only. With `--launcher srun` there is one file for each task:
`ranks/NODE/gpus.LOCAL-RANK.json`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StartedGpu:
    """One GPU.

    Attributes:
        index: number of the GPU in CUDA or HIP, on this node or in this task.
        model, uuid, bus: each is empty if the value is unknown. `bus` is the PCI address in the form of /sys/bus/pci.
        problem: why the GPU cannot be used; empty if the GPU can be used.
    """

    index: int
    model: str = ""
    uuid: str = ""
    bus: str = ""
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class GpuStart:
    """What a child process of the agent found (incontainer/gpu_start.py).

    Attributes:
        local_rank: local rank of the only rank of this task; None for all ranks of the node.
        expected: how many GPUs torch should see, from Slurm and the environment variables.
        seen: how many GPUs torch counts; None if torch reported no number.
        gpus: the GPUs on which the child process made a context, or tried to make a context.
        seconds: how much longer the start took because of this check.
    """

    schema: int
    run: str
    node: str
    attempt: int
    expected: int
    seen: int | None
    seconds: float
    local_rank: int | None = None
    gpus: tuple[StartedGpu, ...] = ()
