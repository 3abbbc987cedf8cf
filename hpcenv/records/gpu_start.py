"""Which GPUs torch could use in the environment of a node, before the first rank (`ranks/NODE/gpus.json`).

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only. With `--launcher srun` each task has its own
`ranks/NODE/gpus.LOCAL-RANK.json`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StartedGpu:
    """One GPU.

    Attributes:
        index: its number in CUDA or HIP, in this node or task.
        model, uuid, bus: empty where it is not known. `bus` is the PCI address as /sys/bus/pci has it.
        problem: why it cannot be used; empty if it can.
    """

    index: int
    model: str = ""
    uuid: str = ""
    bus: str = ""
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class GpuStart:
    """What a child of the agent saw (incontainer/gpu_start.py).

    Attributes:
        local_rank: of the only rank of this task; None for all ranks of the node.
        expected: how many GPUs Slurm and the variables give.
        seen: how many torch counts; None if it did not say it.
        gpus: those on which a context was made, or should have been.
        seconds: how long it took: it is a part of the start.
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
