"""Find the CPUs that are near the GPU of each rank of this node.

Runs on: COMPUTE NODE. Standard library only. The kernel lists these CPUs in `local_cpulist` of the GPU's PCI device
(sysfs, Documentation/ABI/testing/sysfs-bus-pci, Linux 6.12). A rank that runs far from its GPU copies data over the
link between CPU sockets. LUMI's guide and torchrun's `--numa-binding` bind ranks to CPUs for this reason (PyTorch,
Performance Tuning Guide, 2.13).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hpcenv.machine.gpus import GpuFacts
from hpcenv.machine.tree import HostTree
from hpcenv.records.facts import RankCpus
from hpcenv.records.manifest import Manifest
from hpcenv.records.network import Fabric

# The equal share of a rank is the number of the job's CPUs, divided by the number of ranks. If a binding would leave a
# rank fewer CPUs than this part of the equal share, the rank is not bound.
_LEAST_PART = 0.5


@dataclass(frozen=True, kw_only=True)
class HostView:
    """The known facts of this node.

    Attributes:
        gpus: the GPUs that NVML lists; None if they could not be read.
        fabric: the network hardware, which contains the GPUs of AMD's driver; None if it could not be read.
        allowed: CPUs that this step may use.
    """

    gpus: GpuFacts | None
    fabric: Fabric | None
    allowed: Collection[int]


def choose(manifest: Manifest, environ: Mapping[str, str], view: HostView, tree: HostTree) -> RankCpus | None:
    """Return the CPUs of each rank of this node, and why some ranks are not bound; None if no binding is requested."""
    if manifest.launch.cpu_binding != "near-gpu" or not manifest.gpus_per_node or not manifest.launches:
        return None
    try:
        buses = _gpus_in_order(environ, view)
    except LookupError as error:
        return RankCpus(why=str(error))
    ranks, has = manifest.nproc_per_node, manifest.gpus_per_node
    if manifest.cluster == "slurm" and len(buses) != has:
        return RankCpus(why=f"the job has {has} GPUs here, and the driver lists {len(buses)}")
    if ranks > len(buses):
        return RankCpus(why=f"{ranks} ranks use {len(buses)} GPUs, and which rank uses which GPU is not known")
    chosen, reasons = _near(buses[:ranks], set(view.allowed), tree)
    return RankCpus(cpus=chosen, gpus=tuple(buses[:ranks]), why="; ".join(dict.fromkeys(reasons)))


def _gpus_in_order(environ: Mapping[str, str], view: HostView) -> list[str]:
    """Return the bus addresses of the job's GPUs, in the order in which CUDA or HIP numbers them.

    NVML uses the order of the PCI bus. CUDA uses the same order for GPUs of one model (CUDA_DEVICE_ORDER, CUDA 13).

    Raises:
        LookupError: the order is not known. The message says why.
    """
    if view.fabric is not None and view.fabric.gpu_vendor == "amd":
        buses = [place.bus for place in view.fabric.gpus]
        return visible(buses, {}, environ, ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))
    if view.gpus is None or not view.gpus.places:
        raise LookupError("where the GPUs are on the PCI bus is not known")
    models = view.gpus.values.get("host.gpu-models")
    if isinstance(models, tuple) and len(set(models)) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise LookupError("the GPUs differ, and in which order CUDA numbers them is not known")
    uuids = view.gpus.values.get("host.gpu-uuids")
    buses = [place.bus for place in view.gpus.places]
    named = dict(zip(map(str, uuids), buses, strict=False)) if isinstance(uuids, tuple) else {}
    return visible(buses, named, environ, ("CUDA_VISIBLE_DEVICES",))


def visible(
    buses: Sequence[str], named: Mapping[str, str], environ: Mapping[str, str], variables: Sequence[str]
) -> list[str]:
    """Return the GPUs that the variables of the job name.

    Raises:
        LookupError: a variable names a GPU that the machine does not have.
    """
    left = list(buses)
    for variable in variables:
        words = [word.strip() for word in environ.get(variable, "").split(",") if word.strip()]
        if not words:
            continue
        numbers = [int(word) if re.fullmatch("[0-9]{1,4}", word) else -1 for word in words]
        if all(word in named for word in words):
            left = [named[word] for word in words]
        elif all(0 <= number < len(left) for number in numbers):
            left = [left[number] for number in numbers]
        else:
            raise LookupError(f"{variable}={environ[variable][:60]} names other GPUs than the driver lists")
    return left


def _near(buses: Sequence[str], allowed: set[int], tree: HostTree) -> tuple[tuple[str, ...], list[str]]:
    """Return the CPUs of each rank, and reasons. If a rank is not bound, its CPUs are empty and a reason says why."""
    lists = [parse_list(tree.text(f"/sys/bus/pci/devices/{bus}/local_cpulist")) for bus in buses]
    near = [frozenset(allowed & cpus) for cpus in lists]
    even = len(allowed) / len(buses)
    chosen, reasons = [], []
    for bus, cpus, usable in zip(buses, lists, near, strict=True):
        sharing = near.count(usable)
        why = ""
        if not cpus:
            why = f"the machine does not say which CPUs are near GPU {bus}"
        elif not usable:
            why = f"Slurm gave no CPU near GPU {bus}"
        elif usable == allowed:
            why = "all CPUs of the job are near the GPUs"
        elif len(usable) < sharing or len(usable) / sharing < _LEAST_PART * even:
            why = f"only {len(usable)} of the {len(allowed)} CPUs of the job are near GPU {bus}, for {sharing} ranks"
        chosen.append("" if why else format_list(usable))
        reasons += [why] if why else []
    return tuple(chosen), reasons


def parse_list(text: str) -> set[int]:
    """Return the numbers of a list such as `0-3,8` (Linux, bitmap list format); empty if the text is no such list."""
    if not re.fullmatch(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*", text):
        return set()
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def format_list(numbers: Collection[int]) -> str:
    """Return numbers as a list such as `0-3,8`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
