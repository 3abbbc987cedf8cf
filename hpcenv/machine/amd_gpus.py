"""AMD GPUs of this node: their properties and health, from the files of the drivers amdkfd and amdgpu.

Runs on: COMPUTE NODE. Standard library only. No privilege is needed. A value that no file contains is left out.

Sources (2026-11): linux, drivers/gpu/drm/amd/amdkfd/kfd_topology.c (`properties` and `gpu_id` answer EPERM for GPUs
that the job must not use) and kfd_process.c (`proc/PID/vram_GPUID`); Documentation/gpu/amdgpu: RAS Error Count and VRAM
Bad Pages sysfs interfaces, driver-misc (product_name, mem_info_vram_total, unique_id, current_compute_partition).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcenv import process
from hpcenv.errors import HpcenvError
from hpcenv.machine.tree import HostTree

_NODES = "/sys/class/kfd/kfd/topology/nodes"
_PROCESSES = "/sys/class/kfd/kfd/proc"
_DEVICES = "/sys/bus/pci/devices"
# Programs of ROCm that report the product's name, the newer program first.
_TOOLS = (
    ("amd-smi", ("static", "--asic", "--bus", "--json")),
    ("rocm-smi", ("--showproductname", "--showbus", "--json")),
)
_TOOL_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class AmdGpu:
    """One GPU that this job may use.

    Attributes:
        bus: address on the PCI bus.
        attributes: name -> text, with the same names as for NVIDIA's GPUs (machine/gpus.py).
        numbers: query -> numbers that answer the query, as in `gpu_health.QUERIES`.
    """

    bus: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AmdGpus:
    """The GPUs of a node.

    Attributes:
        gpus: the GPUs; None if they could not be listed.
        reason: why GPUs or values are missing.
        problem: text about a GPU that does not answer; empty without such a GPU.
    """

    gpus: tuple[AmdGpu, ...] | None
    reason: str = ""
    problem: str = ""


def read(tree: HostTree, environ: Mapping[str, str]) -> AmdGpus:
    """Return the AMD GPUs of a node that this job may use.

    Args:
        tree: folder of the host's files.
        environ: environment for the programs of ROCm. These programs are started only if the driver does not report the
            product's name.
    """
    nodes = tree.names(_NODES)
    if not nodes:
        return AmdGpus(gpus=None, reason=f"this node has AMD GPUs, and {_NODES} cannot be read")
    found = []
    for node in nodes:
        properties = _pairs(tree.text(f"{_NODES}/{node}/properties"))
        if _number(properties, "simd_count") > 0:
            found.append((_address(properties), node, properties))
    found.sort()
    lost = [bus for bus, _, _ in found if tree.read(f"{_DEVICES}/{bus}/config", most=2) == b"\xff\xff"]
    if lost:
        return AmdGpus(gpus=None, problem=f"GPU {lost[0]} does not answer on the PCI bus")
    names = _names(tree, [bus for bus, _, _ in found], environ)
    return AmdGpus(
        gpus=tuple(_gpu(tree, bus, node, properties, names.get(bus, "")) for bus, node, properties in found),
        reason="the driver of AMD does not report it",
    )


def report(root: str) -> None:
    """Write the GPUs to standard output as JSON. This function runs in a child process."""
    sys.stdout.write(json.dumps(asdict(read(HostTree(Path(root)), os.environ))) + "\n")


def parse(told: Mapping[str, Any]) -> AmdGpus:
    """Return what the child process reported.

    Raises:
        KeyError, TypeError: `told` is not the report of the child process.
    """
    rows = told["gpus"]
    gpus = (
        None
        if rows is None
        else tuple(
            AmdGpu(
                bus=str(row["bus"]),
                attributes={str(name): str(text) for name, text in row["attributes"].items()},
                numbers={str(name): tuple(map(int, numbers)) for name, numbers in row["numbers"].items()},
            )
            for row in rows
        )
    )
    return AmdGpus(gpus=gpus, reason=str(told["reason"]), problem=str(told["problem"]))


def _pairs(text: str) -> dict[str, str]:
    return {name: value.strip() for name, _, value in (line.partition(" ") for line in text.splitlines())}


def _number(properties: Mapping[str, str], name: str) -> int:
    text = properties.get(name, "0")
    return int(text) if text.isdecimal() else 0


def _address(properties: Mapping[str, str]) -> str:
    where = _number(properties, "location_id")
    return f"{_number(properties, 'domain'):04x}:{where >> 8 & 255:02x}:{where >> 3 & 31:02x}.{where & 7}"


def _gpu(tree: HostTree, bus: str, node: str, properties: Mapping[str, str], name: str) -> AmdGpu:
    folder = f"{_DEVICES}/{bus}"
    memory, partition = tree.number(f"{folder}/mem_info_vram_total"), tree.text(f"{folder}/current_compute_partition")
    per_unit = _number(properties, "simd_per_cu")
    identity = tree.text(f"{folder}/unique_id")
    errors = _errors(tree, folder)
    attributes = {
        "model": name,
        "uuid": identity.lower() if re.fullmatch(r"[0-9a-fA-F]{8,32}", identity) else "",
        "compute-capability": _target(_number(properties, "gfx_target_version")),
        "memory-mib": str(memory >> 20) if memory else "",
        "sm-count": str(_number(properties, "simd_count") // per_unit) if per_unit else "",
        # SPX means that the GPU is whole. CPX, DPX and other values mean that it is split, as with MIG. If there is no
        # such file, the GPU cannot be split.
        "mig": "unsupported" if not partition else "disabled" if partition == "SPX" else "enabled",
        "ecc": "unsupported" if errors is None else "enabled",
    }
    return AmdGpu(
        bus=bus,
        attributes={key: text for key, text in attributes.items() if text},
        numbers=dict(_health(tree, folder, node, errors)),
    )


def _target(version: int) -> str:
    """Return the name of a target: gfx90a for 90010. Minor number and stepping are in base 16 (kfd_topology.h)."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""


def _health(
    tree: HostTree, folder: str, node: str, errors: tuple[int, int] | None
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the queries that the driver's files answer. The other queries of `gpu_health.QUERIES` have no answer."""
    if errors is not None:
        yield "ecc-uncorrected", (errors[0],)
        yield "ecc-corrected", (errors[1],)
    if tree.exists(f"{folder}/ras/gpu_vram_bad_pages"):
        # A line is `0x00000001 : 0x00001000 : P`. The flag is R (reserved), P (pending) or F (could not be reserved).
        flags = [line.rpartition(":")[2].strip() for line in tree.text(f"{folder}/ras/gpu_vram_bad_pages").splitlines()]
        yield "remapped", (0, flags.count("R"), 0, int("F" in flags))
        yield "retired-pending", (int("P" in flags),)
    width, most = (tree.number(f"{folder}/{which}_link_width") for which in ("current", "max"))
    if width and most:
        yield "pcie-width", (width, most)
    identity = tree.number(f"{_NODES}/{node}/gpu_id")
    if identity and tree.exists(_PROCESSES):
        yield "processes", tuple(_processes(tree, identity))
    used = tree.number(f"{folder}/mem_info_vram_used")
    if used is not None:
        yield "memory-used", (used >> 20,)


def _errors(tree: HostTree, folder: str) -> tuple[int, int] | None:
    """Return the numbers of uncorrected and corrected errors of a whole GPU; None if the GPU does not count errors."""
    sums = {"ue": 0, "ce": 0}
    counted = False
    for name in tree.names(f"{folder}/ras"):
        if not name.endswith("_err_count"):
            continue
        for kind, count in re.findall(r"^(ue|ce):\s*(\d{1,18})$", tree.text(f"{folder}/ras/{name}"), re.MULTILINE):
            sums[kind] += int(count)
            counted = True
    return (sums["ue"], sums["ce"]) if counted else None


def _processes(tree: HostTree, identity: int) -> Iterator[int]:
    """Yield pid and memory in MiB of each process that computes on a GPU."""
    for pid in tree.names(_PROCESSES):
        memory = tree.number(f"{_PROCESSES}/{pid}/vram_{identity}") if pid.isdecimal() else None
        if memory:
            yield from (int(pid), memory >> 20)


# -- the product's name ---------------------------------------------------------------------


def _names(tree: HostTree, buses: list[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the product's name of each GPU. If no file of the driver has the name, ask a program of ROCm."""
    names = {bus: tree.text(f"{_DEVICES}/{bus}/product_name")[:128] for bus in buses}
    if all(names.values()):
        return names
    for tool, words in _TOOLS:
        program = shutil.which(tool, path=environ.get("PATH"))
        if program is None:
            continue
        try:
            done = process.run([program, *words], timeout=_TOOL_SECONDS, env=environ)
            told = dict(_told(json.loads(done.stdout)))
        except (HpcenvError, OSError, ValueError):
            continue
        names = {bus: name or told.get(bus, "") for bus, name in names.items()}
        if all(names.values()):
            break
    return names


def _told(answer: Any) -> Iterator[tuple[str, str]]:
    """Yield bus address and name of each GPU in the JSON of amd-smi (a list) or rocm-smi (an object of cards)."""
    rows = answer.get("gpu_data", answer) if isinstance(answer, dict) else answer
    for row in rows.values() if isinstance(rows, dict) else rows:
        if not isinstance(row, dict):
            continue
        asic, bus = row.get("asic"), row.get("bus")
        if isinstance(asic, dict) and isinstance(bus, dict):
            yield str(bus.get("bdf", "")).lower(), str(asic.get("market_name", ""))[:128]
        elif "PCI Bus" in row:
            yield str(row["PCI Bus"]).lower(), str(row.get("Card Series") or row.get("Card series") or "")[:128]
