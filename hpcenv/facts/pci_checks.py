"""Checks of the PCI bus between GPUs and RDMA adapters: does the IOMMU, or access control, send transfers to the CPU?

Runs on: COMPUTE NODE. Standard library only. The checks need no privilege; values that only root may read are unknown.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Sequence

from hpcenv.machine.tree import HostTree
from hpcenv.records.checks import CheckOutcome, CheckState
from hpcenv.records.network import Fabric

_DEVICES = "/sys/bus/pci/devices"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# Types of IOMMU domains that translate addresses (Linux, sysfs-kernel-iommu_groups).
_TRANSLATES = ("DMA", "DMA-FQ")
# From the PCI Express Base Specification 5.0: the id 0x10 of a capability, the id 0x000d of an extended capability, the
# bits of the ACS control register that send requests and completions to the CPU, and the type of a switch's port.
_EXPRESS, _ACS = 0x10, 0x0D
_REDIRECTS = 0x4 | 0x8
_SWITCH_PORT = 6


def check_pci(fabric: Fabric | None, tree: HostTree, *, machine: str = "") -> Iterator[CheckOutcome]:
    """Yield the outcomes about the PCI bus.

    Args:
        fabric: GPUs and adapters of the node; None if they could not be read.
        tree: the files of the host.
        machine: the output of `uname -m`; empty for this machine.
    """
    names = ("pci.iommu", "pci.acs")
    if fabric is None:
        yield from (CheckOutcome(id=name, state="unknown", found="the GPUs could not be read") for name in names)
        return
    buses = _buses(fabric)
    reason = _not_needed(fabric, buses, tree, machine or os.uname().machine)
    if reason:
        yield from (CheckOutcome(id=name, state="not-run", found=reason) for name in names)
        return
    lost = [bus for bus in buses if not tree.resolved(f"{_DEVICES}/{bus}")]
    if lost:
        why = f"{_DEVICES} does not show {lost[0]}"
        yield from (CheckOutcome(id=name, state="unknown", found=why) for name in names)
        return
    yield _iommu(buses, tree)
    yield _acs(buses, tree)


def _buses(fabric: Fabric) -> tuple[str, ...]:
    every = [gpu.bus for gpu in fabric.gpus] + [port.bus for port in fabric.ports if port.state == "ACTIVE"]
    return tuple(dict.fromkeys(bus for bus in every if _ADDRESS.fullmatch(bus)))


def _not_needed(fabric: Fabric, buses: Sequence[str], tree: HostTree, machine: str) -> str:
    if not fabric.gpus or len(buses) < 2:
        return "the node has no two GPUs, and no GPU with an RDMA adapter"
    if machine != "x86_64":
        return f"on {machine} an IOMMU that translates is usual, and the devices know the addresses (ATS)"
    if re.search(r"^flags\s*:.*\bhypervisor\b", tree.text("/proc/cpuinfo"), re.MULTILINE):
        return "in a virtual machine, the host decides this"
    return ""


def _iommu(buses: Sequence[str], tree: HostTree) -> CheckOutcome:
    name = "pci.iommu"
    groups = {bus: tree.link(f"{_DEVICES}/{bus}/iommu_group") for bus in buses}
    kinds = {bus: tree.text(f"/sys/kernel/iommu_groups/{group}/type") for bus, group in groups.items() if group}
    translated = [bus for bus, kind in kinds.items() if kind in _TRANSLATES]
    if translated:
        found = f"the IOMMU translates the addresses of {len(translated)} of {len(buses)} GPUs and adapters"
        return CheckOutcome(id=name, state="failed", found=found, limit="identity", note=", ".join(translated[:8]))
    unread = [bus for bus, kind in kinds.items() if not kind]
    if unread:  # kernels before 5.11 do not report the type
        return CheckOutcome(id=name, state="unknown", found=f"the kernel does not tell the kind of {unread[0]}'s group")
    return CheckOutcome(id=name, state="fine", found="identity" if kinds else "no IOMMU")


def _acs(buses: Sequence[str], tree: HostTree) -> CheckOutcome:
    """Check the ports of PCI switches above the devices. Data between root ports always go through the CPU."""
    name = "pci.acs"
    bridges = dict.fromkeys(bridge for bus in buses for bridge in _bridges(bus, tree))
    if not bridges:
        return CheckOutcome(id=name, state="fine", found="no PCI switch above them")
    read = {bridge: tree.read(f"{_DEVICES}/{bridge}/config", most=4096) for bridge in bridges}
    redirects = [bridge for bridge, config in read.items() if _redirects(config)]
    hidden = [bridge for bridge, config in read.items() if len(config) <= 256]
    if redirects:
        found = f"{len(redirects)} of {len(bridges)} bridges redirect to the CPU"
        return CheckOutcome(id=name, state="failed", found=found, note=", ".join(redirects[:8]))
    state: CheckState = "unknown" if hidden else "fine"
    found = f"only root may read it, of {len(hidden)} bridges" if hidden else f"{len(bridges)} bridges"
    return CheckOutcome(id=name, state=state, found=found)


def _bridges(bus: str, tree: HostTree) -> list[str]:
    """Return the bridges above a device. The first bridge is the root port, and is left out."""
    above = [part for part in tree.resolved(f"{_DEVICES}/{bus}").split("/") if _ADDRESS.fullmatch(part)]
    return above[1:-1]


def _redirects(config: bytes) -> bool:
    """Return whether a port of a switch sends transfers between devices to the CPU (ACSCtl)."""
    if len(config) <= 256 or _port_type(config) != _SWITCH_PORT:
        return False
    at, seen = 0x100, set()
    while 0x100 <= at <= len(config) - 8 and at not in seen:
        seen.add(at)
        head = struct.unpack_from("<I", config, at)[0]
        if head & 0xFFFF == _ACS:
            return bool(struct.unpack_from("<H", config, at + 6)[0] & _REDIRECTS)
        at = head >> 20
    return False


def _port_type(config: bytes) -> int | None:
    at, seen = config[0x34] & 0xFC, set()
    while 0x40 <= at <= 0xFC and at not in seen:
        seen.add(at)
        if config[at] == _EXPRESS:
            return int(struct.unpack_from("<H", config, at + 2)[0]) >> 4 & 0xF
        at = config[at + 1] & 0xFC
    return None
