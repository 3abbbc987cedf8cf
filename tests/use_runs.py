"""Made-up runs: the samples of an attempt, from curves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hpcenv.records.samples import GpuUse, NodeSamples, NodeUse, RankUse, Sample

BEGAN = 1_700_000_000.0
GB = 1e9
Change = Callable[[str, float, int], dict[str, Any]]


def nothing(_node: str, _at: float, _number: int) -> dict[str, Any]:
    return {}


def run(
    *,
    nodes: int = 1,
    gpus: int = 4,
    minutes: float = 60,
    every: float = 10,
    gpu: Change = nothing,
    rank: Change = nothing,
    node: Change = nothing,
    ranks: int | None = None,
    began: float = BEGAN,
) -> tuple[NodeSamples, ...]:
    """Return the samples of a run that is healthy but for the changes.

    Args:
        gpu, rank, node: of a node, the seconds since the begin, and the number of the GPU or rank: other values.
    """
    per_node = (gpus or 2) if ranks is None else ranks
    names = [f"n{number}" for number in range(1, nodes + 1)]
    looks = [round(every * count, 3) for count in range(1, int(minutes * 60 / every) + 1)]

    def one_gpu(name: str, at: float, index: int, first: int) -> GpuUse:
        usual = {
            "use": 96.0, "memory": 41 * GB, "memory_total": 80 * GB, "power": 410.0, "clock": 1700.0, "ecc": 0.0,
            "ranks": (first + index,) if index < per_node else (), "others": 0,
        }  # fmt: skip
        return GpuUse(index=index, **usual | gpu(name, at, index))

    def one_rank(name: str, at: float, number: int) -> RankUse:
        usual = {
            "step": int(at * 2), "step_seconds": 0.5, "wait_seconds": 0.01, "last_step": began + at, "state": "R",
            "cpu": 1.5, "workers": 4, "torch_memory": 30 * GB,
        }  # fmt: skip
        return RankUse(rank=number, pid=100 + number, **usual | rank(name, at, number))

    def one_sample(name: str, at: float, first: int) -> Sample:
        usual = {"cpu": 6.0, "cpus": 16, "memory": 20 * GB, "memory_peak": 21 * GB, "memory_limit": 80 * GB}
        return Sample(
            at=began + at,
            seconds=every,
            gpus=tuple(one_gpu(name, at, index, first) for index in range(gpus)),
            node=NodeUse(**usual | {"pressure_cpu": 1.0, "pressure_memory": 0.0} | node(name, at, 0)),
            ranks=tuple(one_rank(name, at, number) for number in range(first, first + per_node)),
        )

    return tuple(
        NodeSamples(node=name, attempt=0, samples=tuple(one_sample(name, at, n * per_node) for at in looks))
        for n, name in enumerate(names)
    )


def thinned(nodes: tuple[NodeSamples, ...], **most: Any) -> tuple[NodeSamples, ...]:
    """Return samples that have a least and a most; `most` are the highest values of the nodes."""
    return tuple(
        replace(
            node,
            samples=tuple(
                replace(sample, least=sample, most=replace(sample, node=replace(sample.node, **most)))
                for sample in node.samples
            ),
        )
        for node in nodes
    )
