"""Show which GPU each rank of a run used, and which ranks trained on the CPU although the job has GPUs.

Runs on: LOGIN NODE. The ranks record the device of their first backward pass (incontainer/start_hook/device.py). The
GPUs of each node, and how long CUDA took to start, are recorded before the first rank starts (records/gpu_start.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcenv.errors import RecordInvalid
from hpcenv.machine.rank_cpus import format_list
from hpcenv.records.determinism import RankDeterminism, read_run_determinism
from hpcenv.records.files import load_record
from hpcenv.records.gpu_start import GpuStart, StartedGpu
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.text import visible

# The text contains at most this number of ranks. `--json` has all ranks.
_MOST_RANKS = 16


@dataclass(frozen=True, kw_only=True)
class RankGpu:
    """The GPU of one rank.

    Attributes:
        device: device of the rank's first backward pass, as torch names it; empty if no backward pass was seen.
        model, uuid, bus: model, UUID and PCI address of the rank's GPU; empty if the value is unknown. If no backward
            pass was seen, the GPU whose number is the local rank is taken.
    """

    rank: int
    node: str
    device: str
    model: str = ""
    uuid: str = ""
    bus: str = ""


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """The GPUs of the newest attempt.

    Attributes:
        seconds: node -> how long torch took to start CUDA or HIP on all GPUs, before the first rank started.
        on_cpu: ranks whose first backward pass ran on the CPU.
    """

    seconds: dict[str, float]
    ranks: tuple[RankGpu, ...]
    on_cpu: tuple[int, ...]


def report_gpus(run: RunFolder, manifest: Manifest) -> GpuReport | None:
    """Return what the records say about the GPUs of a run; None for a run without GPUs, or without such records."""
    if not manifest.gpus_per_node:
        return None
    starts = {(start.node, start.local_rank): start for start in _starts(run)}
    found, _ = read_run_determinism(run)
    newest = max((rank.attempt for rank in found), default=0)
    ranks = tuple(_of_rank(rank, starts) for rank in found if rank.attempt == newest and rank.node)
    seconds: dict[str, float] = {}
    for start in starts.values():
        seconds[start.node] = max(start.seconds, seconds.get(start.node, 0.0))
    if not ranks and not seconds:
        return None
    return GpuReport(seconds=seconds, ranks=ranks, on_cpu=tuple(one.rank for one in ranks if one.device == "cpu"))


def _starts(run: RunFolder) -> Iterator[GpuStart]:
    for path in sorted(run.ranks.glob("*/gpus*.json")):
        try:
            yield load_record(GpuStart, path)
        except RecordInvalid:
            continue  # a damaged record says nothing about the GPUs


def _of_rank(rank: RankDeterminism, starts: dict[tuple[str, int | None], GpuStart]) -> RankGpu:
    start = starts.get((rank.node, None)) or starts.get((rank.node, rank.local_rank))
    gpus = () if start is None else start.gpus
    own = StartedGpu(index=-1, model=rank.gpu_model, uuid=rank.gpu_uuid, bus=rank.gpu_bus)
    if not rank.device:
        # In a task with one GPU, this GPU has number 0.
        number = rank.local_rank if len(gpus) != 1 else gpus[0].index
        own = next((gpu for gpu in gpus if gpu.index == number), own)
    bus = own.bus or next((gpu.bus for gpu in gpus if own.uuid and gpu.uuid == own.uuid), "")
    return RankGpu(rank=rank.rank, node=rank.node, device=rank.device, model=own.model, uuid=own.uuid, bus=bus)


def lines(report: GpuReport) -> Iterator[str]:
    """Yield the report as text for `hpcenv report`. Pure."""
    slowest = max(report.seconds, key=lambda node: report.seconds[node], default="")
    if slowest:
        yield f"  GPUs      tried before the ranks started: {report.seconds[slowest]:.1f} s on {visible(slowest)}"
    for line in cpu_lines(report):
        yield f"  GPUs      {line}"
    for one in report.ranks[:_MOST_RANKS]:
        yield f"            rank {one.rank}, {visible(one.node)}: {_gpu_in_words(one)}"
    if len(report.ranks) > _MOST_RANKS:
        yield f"            and {len(report.ranks) - _MOST_RANKS} more ranks"


def _gpu_in_words(one: RankGpu) -> str:
    if one.device and not one.device.startswith("cuda"):
        return visible(one.device)
    parts = [one.model or "model unknown", one.uuid or "UUID unknown", one.bus or "PCI address unknown"]
    return visible(", ".join(parts)) + ("" if one.device else " (by its local rank: no backward pass was seen)")


def cpu_lines(report: GpuReport | None) -> Sequence[str]:
    """Return a line if ranks trained on the CPU in a job with GPUs."""
    if report is None or not report.on_cpu:
        return ()
    ranks = "rank" if len(report.on_cpu) == 1 else "ranks"
    what = f"the first backward pass of {ranks} {format_list(report.on_cpu)} ran on the CPU"
    return (f"{what}, although the job has GPUs: the script must move model and data to the GPU",)
