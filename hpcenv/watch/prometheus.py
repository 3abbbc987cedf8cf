"""The newest sample of a node as a text file for the textfile collector of Prometheus' node_exporter.

Runs on: COMPUTE NODE. Standard library only.

Names and units are those of NVIDIA's dcgm-exporter if dcgm-exporter has the value. So its dashboards also work with
this file. An unknown value has no line. The collector may read at any time, so the file is written under another name
and then renamed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from hpcenv.records.samples import GpuUse, NodeUse, RankUse, Sample

_MIB = 1 << 20

# Name, help text and value. All are gauges. Counters are gauges too, because the file is removed after the job.
_OF_GPUS: tuple[tuple[str, str, Callable[[GpuUse], float | None]], ...] = (
    ("DCGM_FI_DEV_GPU_UTIL", "Share of time in which a kernel ran, in percent", lambda gpu: gpu.use),
    ("DCGM_FI_DEV_FB_USED", "Memory used, in MiB", lambda gpu: _divided(gpu.memory, _MIB)),
    ("DCGM_FI_DEV_FB_FREE", "Memory free, in MiB", lambda gpu: _divided(_rest(gpu.memory_total, gpu.memory), _MIB)),
    ("DCGM_FI_DEV_POWER_USAGE", "Power, in watts", lambda gpu: gpu.power),
    ("DCGM_FI_DEV_GPU_TEMP", "Temperature, in degrees Celsius", lambda gpu: gpu.temperature),
    ("DCGM_FI_DEV_SM_CLOCK", "Clock of the SMs, in MHz", lambda gpu: gpu.clock),
    (
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "Energy since the driver was loaded, in mJ",
        lambda gpu: _divided(gpu.energy, 0.001),
    ),
    ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "PCIe packets repeated since the driver was loaded", lambda gpu: gpu.replays),
    ("DCGM_FI_PROF_SM_ACTIVE", "Share of time in which SMs were busy, from 0 to 1", lambda gpu: _divided(gpu.sm, 100)),
    ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "The same of the tensor cores", lambda gpu: _divided(gpu.tensor, 100)),
    ("DCGM_FI_PROF_DRAM_ACTIVE", "The same of the memory", lambda gpu: _divided(gpu.dram, 100)),
    ("hpcenv_gpu_ranks", "Ranks of the job with a process on the GPU", lambda gpu: len(gpu.ranks)),
    ("hpcenv_gpu_slowed", "Whether the GPU reports a reason for a lower clock", lambda gpu: len(gpu.slow) > 0),
)
_OF_NODES: tuple[tuple[str, str, Callable[[NodeUse], float | None]], ...] = (
    ("hpcenv_node_cpus_busy", "CPUs of the job that are busy", lambda node: node.cpu),
    ("hpcenv_node_cpus", "CPUs of the job", lambda node: node.cpus),
    ("hpcenv_node_memory_bytes", "Memory of the job", lambda node: node.memory),
    ("hpcenv_node_memory_limit_bytes", "Its limit", lambda node: node.memory_limit),
)
_OF_RANKS: tuple[tuple[str, str, Callable[[RankUse], float | None]], ...] = (
    ("hpcenv_rank_steps", "Optimizer steps of the rank's process", lambda rank: rank.step),
    ("hpcenv_rank_step_seconds", "Time of a step", lambda rank: rank.step_seconds),
    ("hpcenv_rank_wait_seconds", "Time of a step in which the rank waited for data", lambda rank: rank.wait_seconds),
    ("hpcenv_rank_last_step_timestamp_seconds", "When the last step ended", lambda rank: rank.last_step),
    ("hpcenv_rank_saving", "Whether the rank saves a checkpoint", lambda rank: rank.saving),
)


def publish(sample: Sample, folder: Path, labels: Mapping[str, str]) -> None:
    """Write the file of this job and node.

    Args:
        sample: the newest sample of this node.
        folder: folder that the collector reads (`WatchOptions.prometheus`).
        labels: labels of every line. `job_id` and `node` are also in the name of the file.

    Raises:
        OSError: the file cannot be written.
    """
    final = _path(folder, labels)
    aside = final.with_name(f".{final.name}.part")
    # Another user may have put a link here, because the folder may be open to all users.
    with suppress(FileNotFoundError):
        aside.unlink()
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with open(descriptor, "w", encoding="utf-8") as file:
        # The collector runs as another user, and the umask of the job may be 077.
        os.fchmod(file.fileno(), 0o644)
        file.writelines(f"{line}\n" for line in lines(sample, labels))
    os.replace(aside, final)


def withdraw(folder: Path, labels: Mapping[str, str]) -> None:
    """Remove the file of this job and node, because its values are now out of date."""
    with suppress(OSError):
        _path(folder, labels).unlink()


def _path(folder: Path, labels: Mapping[str, str]) -> Path:
    """Return the path of the file; the collector reads names that end with `.prom`."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", f"hpcenv-{labels.get('job_id', '')}-{labels.get('node', '')}")
    return folder / f"{name}.prom"


def lines(sample: Sample, labels: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines in the text format of Prometheus; all values of a name are together. Pure."""
    gpus = [({**labels, "gpu": str(gpu.index), "UUID": gpu.uuid}, gpu) for gpu in sample.gpus]
    ranks = [({**labels, "rank": str(rank.rank)}, rank) for rank in sample.ranks]
    for name, text, gpu_value in _OF_GPUS:
        yield from _family(name, text, [(own, gpu_value(gpu)) for own, gpu in gpus])
    for name, text, node_value in _OF_NODES:
        yield from _family(name, text, [(labels, node_value(sample.node))])
    for name, text, rank_value in _OF_RANKS:
        yield from _family(name, text, [(own, rank_value(rank)) for own, rank in ranks])
    yield from _family("hpcenv_sample_timestamp_seconds", "When the sample was taken", [(labels, sample.at)])


def _family(name: str, text: str, values: list[tuple[Mapping[str, str], float | None]]) -> Iterator[str]:
    known = [(labels, value) for labels, value in values if value is not None]
    if known:
        yield f"# HELP {name} {text}"
        yield f"# TYPE {name} gauge"
    for labels, value in known:
        told = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
        yield f"{name}{{{told}}} {float(value)!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _divided(value: float | None, by: float) -> float | None:
    return None if value is None else value / by


def _rest(total: float | None, used: float | None) -> float | None:
    return None if total is None or used is None else total - used
