"""Detect how a node can communicate with other nodes: interfaces, RDMA, Slingshot, GPUs, versions, host tuning.

Runs on: COMPUTE NODE. Standard library only. No program is started and no privilege is needed, because everything is
read from small files. If a part cannot be read, it is named in `Fabric.unknown`, and all other parts are still read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpcenv.machine.network.host_tuning import read_tuning
from hpcenv.machine.network.versions import read_versions
from hpcenv.machine.tree import HostTree
from hpcenv.records.network import CxiDevice, Fabric, GpuPlace, GpuVendor, NetworkLink, RdmaPort, YesNo


def detect(tree: HostTree, environ: Mapping[str, str], *, gpus: Sequence[GpuPlace] = ()) -> Fabric:
    """Return the fabric of a host.

    Args:
        tree: folder of the host's files.
        environ: environment of the step, which names NCCL's configuration file and the user's home.
        gpus: what NVML reported about each GPU (machine/gpus.py); empty if NVML was not asked or did not answer.
    """
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "interfaces": lambda: {"links": _links(tree)},
        "rdma": lambda: {"ports": _ports(tree)},
        "slingshot": lambda: {"cxi": _cxi(tree)},
        "gpus": lambda: _gpus(tree, gpus),
        "gpudirect": lambda: {"gpudirect": _gpudirect(tree)},
        "imex": lambda: {"imex": any("channel" in name for name in tree.names("/dev/nvidia-caps-imex-channels"))},
        "machine": lambda: _machine(tree),
        "versions": lambda: {"versions": read_versions(tree)},
        "tuning": lambda: {"tuning": read_tuning(tree, environ)},
    }
    found: dict[str, Any] = {}
    unknown: list[str] = []
    for name, read in parts.items():
        try:
            found.update(read())
        except (OSError, ValueError, KeyError, IndexError) as error:
            unknown.append(f"{name}: {type(error).__name__}: {error}")
    unknown += found.pop("why", ())
    if not tree.exists("/sys/class/net"):
        unknown.append("interfaces: /sys/class/net cannot be read")
    return _with_port_speeds(Fabric(**found, unknown=tuple(unknown)))


# -- interfaces ---------------------------------------------------------------------------

# ARPHRD_* of linux/if_arp.h.
_KINDS = {1: "ethernet", 32: "infiniband", 772: "loopback"}


def _links(tree: HostTree) -> tuple[NetworkLink, ...]:
    folder = "/sys/class/net"
    names = (name for name in tree.names(folder) if tree.exists(f"{folder}/{name}/type"))
    return tuple(_link(tree, f"{folder}/{name}", name) for name in names)


def _link(tree: HostTree, folder: str, name: str) -> NetworkLink:
    speed = tree.number(f"{folder}/speed")
    return NetworkLink(
        name=name,
        kind=_KINDS.get(tree.number(f"{folder}/type") or 0, "other"),
        state=tree.text(f"{folder}/operstate") or "unknown",
        # If the driver does not know the speed, the file contains -1, or 4294967295 in old kernels.
        speed_mbit=speed if speed is not None and 0 < speed < 10_000_000 else None,
        mtu=tree.number(f"{folder}/mtu"),
        driver=tree.link(f"{folder}/device/driver"),
        bus=_bus(tree, f"{folder}/device"),
        numa=_numa(tree, f"{folder}/device"),
    )


def _bus(tree: HostTree, device: str) -> str:
    name = tree.link(device).lower()
    return name if re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", name) else ""


def _numa(tree: HostTree, device: str) -> int | None:
    number = tree.number(f"{device}/numa_node")
    return number if number is not None and number >= 0 else None


def _with_port_speeds(fabric: Fabric) -> Fabric:
    """Give an IPoIB interface the speed of its port, because the kernel often does not know the interface's speed."""
    rates = {
        name: port.rate_gbit
        for port in fabric.ports
        if port.state == "ACTIVE" and port.rate_gbit
        for name in port.interfaces
    }
    links = tuple(
        replace(link, speed_mbit=int(rates[link.name] * 1000))
        if link.speed_mbit is None and link.name in rates
        else link
        for link in fabric.links
    )
    return replace(fabric, links=links)


# -- RDMA ---------------------------------------------------------------------------------

# The number of GIDs that are read. A card has at most 256 GIDs of two or three kinds, and the used GIDs are first.
_GIDS = 16


def _ports(tree: HostTree) -> tuple[RdmaPort, ...]:
    folder = "/sys/class/infiniband"
    return tuple(
        _port(tree, f"{folder}/{device}", device, port)
        for device in tree.names(folder)
        for port in tree.names(f"{folder}/{device}/ports")
    )


def _port(tree: HostTree, folder: str, device: str, port: str) -> RdmaPort:
    own = f"{folder}/ports/{port}"
    rate = re.match(r"([0-9.]+) Gb/sec", tree.text(f"{own}/rate"))
    kinds = [tree.text(f"{own}/gid_attrs/types/{index}") for index in tree.names(f"{own}/gid_attrs/types")[:_GIDS]]
    return RdmaPort(
        device=device,
        port=int(port),
        # The file contains a text such as `4: ACTIVE`.
        state=tree.text(f"{own}/state").rpartition(":")[2].strip() or "unknown",
        layer=tree.text(f"{own}/link_layer") or "unknown",
        rate_gbit=float(rate.group(1)) if rate else None,
        driver=tree.link(f"{folder}/device/driver"),
        bus=_bus(tree, f"{folder}/device"),
        numa=_numa(tree, f"{folder}/device"),
        interfaces=tree.names(f"{folder}/device/net"),
        gid_types=tuple(sorted(set(filter(None, kinds)))),
        virtual_function=tree.exists(f"{folder}/device/physfn"),
    )


# -- Slingshot ----------------------------------------------------------------------------


def _cxi(tree: HostTree) -> tuple[CxiDevice, ...]:
    """Read the properties that cass_sysfs.c of HPE's driver shows (shs-cxi-driver 9ce667e, 2026-07-20)."""
    devices = []
    for name in tree.names("/sys/class/cxi"):
        device = f"/sys/class/cxi/{name}/device"
        speed = tree.number(f"{device}/properties/speed")
        devices.append(
            CxiDevice(
                device=name,
                link=_answer(tree.text(f"{device}/properties/link")),
                speed_mbit=speed or None,
                rendezvous_get=_answer(tree.text(f"{device}/properties/rdzv_get_en")),
                numa=_numa(tree, device),
            )
        )
    return tuple(devices)


def _answer(text: str) -> YesNo:
    return {"1": "yes", "0": "no"}.get(text, "unknown")  # type: ignore[return-value]


# -- GPUs ---------------------------------------------------------------------------------

_NVIDIA, _AMD = "0x10de", "0x1002"
# PCI class: display controllers, VGA (0x0300) and 3D (0x0302); processing accelerators (0x1200).
_GPU_CLASSES = ("0x0300", "0x0302", "0x1200")


def _gpus(tree: HostTree, told: Sequence[GpuPlace]) -> dict[str, Any]:
    """Return vendor and places of the GPUs, or why they are unknown.

    The vendor is `none` only if the PCI bus was read and has no GPU. A GPU without a driver counts as a GPU.
    """
    if tree.exists("/proc/driver/nvidia/version") or tree.exists("/dev/nvidiactl"):
        return _nvidia(tree, told)
    if tree.exists("/sys/class/kfd/kfd/topology/nodes") or tree.exists("/dev/kfd"):
        places = _amd(tree)
        why = () if places else ("gpus: /sys/class/kfd lists no GPU that can be read",)
        return {"gpu_vendor": "amd" if places else "unknown", "gpus": places, "why": why}
    on_bus = _gpus_on_bus(tree)
    if on_bus is None:
        reason = "GPUs through WSL (/dev/dxg)" if tree.exists("/dev/dxg") else "the PCI bus cannot be read"
        return {"gpu_vendor": "unknown", "why": (f"gpus: {reason}",)}
    if on_bus:
        return {"gpu_vendor": "unknown", "why": (f"gpus: {', '.join(on_bus)} on the PCI bus without a loaded driver",)}
    return {"gpu_vendor": "none"}


def _nvidia(tree: HostTree, told: Sequence[GpuPlace]) -> dict[str, Any]:
    vendor: GpuVendor = "nvidia"
    of_nvml = {place.bus: place for place in told}
    names = tree.names("/proc/driver/nvidia/gpus")
    buses = [name.lower() for name in names] or list(of_nvml)
    places = tuple(
        replace(
            of_nvml.get(bus, GpuPlace(bus=bus)),
            numa=_numa(tree, f"/sys/bus/pci/devices/{bus}"),
        )
        for bus in buses
    )
    if not places:
        return {"gpu_vendor": "unknown", "why": ("gpus: the driver of NVIDIA is loaded and lists no GPU",)}
    return {"gpu_vendor": vendor, "gpus": places}


def _amd(tree: HostTree) -> tuple[GpuPlace, ...]:
    """Read the GPUs that the kernel's KFD driver lists, with their xGMI links (io_links of type 11)."""
    folder = "/sys/class/kfd/kfd/topology/nodes"
    places = []
    for node in tree.names(folder):
        properties = _pairs(tree.text(f"{folder}/{node}/properties"))
        if int(properties.get("simd_count", "0")) == 0:
            continue  # a CPU
        where = int(properties.get("location_id", "0"))
        bus = f"{int(properties.get('domain', '0')):04x}:{where >> 8 & 255:02x}:{where >> 3 & 31:02x}.{where & 7}"
        links = [
            _pairs(tree.text(f"{folder}/{node}/io_links/{link}/properties")).get("type")
            for link in tree.names(f"{folder}/{node}/io_links")
        ]
        places.append(GpuPlace(bus=bus, numa=_numa(tree, f"/sys/bus/pci/devices/{bus}"), links=links.count("11")))
    return tuple(places)


def _pairs(text: str) -> dict[str, str]:
    return {name: value.strip() for name, _, value in (line.partition(" ") for line in text.splitlines())}


def _gpus_on_bus(tree: HostTree) -> list[str] | None:
    """Return the bus addresses of GPUs, each with its vendor; None if the bus cannot be read."""
    folder = "/sys/bus/pci/devices"
    if not tree.exists(folder):
        return None
    return [
        f"{name} ({'NVIDIA' if vendor == _NVIDIA else 'AMD'})"
        for name in tree.names(folder)
        if tree.text(f"{folder}/{name}/class").startswith(_GPU_CLASSES)
        and (vendor := tree.text(f"{folder}/{name}/vendor")) in (_NVIDIA, _AMD)
    ]


def _gpudirect(tree: HostTree) -> str:
    """Return how an adapter can access GPU memory: `nvidia_peermem`, or `dma-buf` of the open kernel module."""
    if tree.exists("/sys/module/nvidia_peermem") or tree.names("/sys/kernel/mm/memory_peers"):
        return "nvidia_peermem"
    if "Open Kernel Module" in tree.text("/proc/driver/nvidia/version"):
        return "dma-buf"
    return ""


# -- the machine --------------------------------------------------------------------------

# Texts in the firmware of a cloud provider's machine, from the provider's documentation for guests.
_CLOUDS = (
    ("sys_vendor", "Amazon EC2", "aws"),
    ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77", "azure"),
    ("sys_vendor", "Google", "gcp"),
    ("chassis_asset_tag", "OracleCloud.com", "oci"),
)


def _machine(tree: HostTree) -> dict[str, Any]:
    folder = "/sys/class/dmi/id"
    cloud = next((name for file, text, name in _CLOUDS if tree.text(f"{folder}/{file}") == text), "")
    return {"cloud": cloud, "product": tree.text(f"{folder}/product_name")[:80]}
