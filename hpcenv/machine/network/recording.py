"""The recording of a machine: everything that `detect` reads on a host, without serial numbers and addresses.

Runs on: COMPUTE NODE and LOGIN NODE. Standard library only. `hpcenv doctor --record` writes a recording into a file.
`hpcenv net explain --from` reads the file, and makes the network decision for a job on several such nodes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from hpcenv.machine.network.detect import detect
from hpcenv.machine.tree import RecordedTree, TracedTree
from hpcenv.records.codec import SCHEMA
from hpcenv.records.facts import Interface, Network, Route
from hpcenv.records.network import Fabric, GpuPlace

# No file that `detect` reads is longer than this.
_LONGEST = 16 * 1024
_REMOVED = "removed"


@dataclass(frozen=True, kw_only=True)
class MachineRecording:
    """One kind of machine.

    Attributes:
        label: `recorded` if the data were recorded on a machine, `synthesised` if they were made from sources.
        sources: the sources of a synthesised machine, with dates.
        files, links: see `hpcenv.machine.tree.RecordedTree`.
        gpus: what NVML reported about each GPU.
        addressed: interfaces with an address that other machines may reach. The interface with the address of the
            node's name is the first.
    """

    schema: int
    name: str
    label: Literal["recorded", "synthesised"]
    what: str
    date: str
    sources: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    gpus: tuple[GpuPlace, ...] = ()
    addressed: tuple[str, ...] = ()


def record(
    tree: TracedTree, *, name: str, date: str, gpus: Sequence[GpuPlace], interfaces: Sequence[Interface], first: str
) -> MachineRecording:
    """Return a recording: the files of a host from which hpcenv detects the network.

    The recording does not contain the user's own configuration of NCCL.

    Args:
        tree: the files of the host, which `detect` reads here.
        name: name for the machine.
        date: the date of today.
        gpus: what NVML reports about each GPU.
        interfaces: the interfaces with their addresses. The addresses are not recorded.
        first: the interface with the address of the node's name; empty if the value is unknown.
    """
    detect(tree, {}, gpus=gpus)
    addressed = addressed_of(interfaces, first=first)
    named = _NumberedNames()
    return MachineRecording(
        schema=SCHEMA,
        name=name,
        label="recorded",
        what="a machine of a user, recorded by hpcenv doctor --record",
        date=date,
        files={named(path): named(_cleaned(path, text)) for path, text in sorted(tree.files.items())},
        links={named(path): name for path, name in sorted(tree.links.items())},
        gpus=_numbered_cliques(gpus),
        addressed=tuple(map(named, addressed)),
    )


class _NumberedNames:
    """Replaces interface names that contain a MAC address (`enx0a1b2c3d4e5f`) by names with a number (`enx0`)."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> str:
        return re.sub(r"enx[0-9a-f]{12}", lambda m: f"enx{self._numbers.setdefault(m[0], len(self._numbers))}", text)


def addressed_of(interfaces: Sequence[Interface], *, first: str) -> tuple[str, ...]:
    """Return the interfaces with an address that other machines may reach, `first` before the others."""
    found = [one.name for one in interfaces if any(_is_global(address) for address in one.addresses)]
    return tuple(sorted(found, key=lambda name: (name != first, name)))


def _is_global(address: str) -> bool:
    return not re.match(r"127\.|169\.254\.|fe80:|::1$", address)


def _numbered_cliques(gpus: Sequence[GpuPlace]) -> tuple[GpuPlace, ...]:
    """Replace the identity of each NVLink domain by a number, because this identity is unique worldwide."""
    numbers: dict[str, int] = {}
    for gpu in gpus:
        if gpu.clique:
            numbers.setdefault(gpu.clique, len(numbers))
    return tuple(replace(gpu, clique=f"clique.{numbers[gpu.clique]}" if gpu.clique else "") for gpu in gpus)


# The tags with which cloud providers mark their machines. Any other tag may be a serial number.
_KNOWN_TAGS = ("7783-7084-3265-9085-8269-3286-77", "OracleCloud.com")

_ADDRESSES = (
    # MAC addresses and GUIDs
    re.compile(r"\b[0-9a-f]{2}(?::[0-9a-f]{2}){5,19}\b", re.IGNORECASE),
    re.compile(r"\b[0-9a-f]{4}(?::[0-9a-f]{4}){3,7}\b", re.IGNORECASE),
    # UUIDs
    re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE),
    # IPv4, not a version such as 5.8.2.0 in a path
    re.compile(r"(?<![\d.\w-])(?:\d{1,3}\.){3}\d{1,3}(?:/\d{1,2})?(?![\d.\w])"),
    # IPv6
    re.compile(r"(?<![\w:])[0-9a-f]{0,4}(?::[0-9a-f]{0,4}){2,7}(?:/\d{1,3})?(?![\w.])", re.IGNORECASE),
)


def _cleaned(path: str, text: str) -> str:
    if path.endswith("/chassis_asset_tag"):
        return text if text.strip() in _KNOWN_TAGS else ""
    if path.startswith(("/sys/module/", "/proc/driver/nvidia")) or path.endswith((".pc", ".so")):
        return text[:_LONGEST]  # these files contain versions, not addresses
    for pattern in _ADDRESSES:
        text = pattern.sub(_REMOVED, text)
    return text[:_LONGEST]


# -- several nodes of this kind --------------------------------------------------------------


def fabric_of(recording: MachineRecording) -> Fabric:
    """Return the fabric that `detect` finds on the recorded machine."""
    return detect(RecordedTree(recording.files, recording.links), {}, gpus=recording.gpus)


def networks_of(addressed: Sequence[str], nodes: Sequence[str]) -> dict[str, Network]:
    """Return the network facts of several such nodes, with invented addresses: interface K is in 10.K.0.0/16."""
    made = {}
    for rank, node in enumerate(nodes, 1):
        own = {name: f"10.{at}.{rank >> 8}.{rank & 255}" for at, name in enumerate(addressed)}
        interfaces = tuple(
            Interface(name=name, addresses=(address,), networks=(f"10.{at}.0.0/16",))
            for at, (name, address) in enumerate(own.items())
        )
        # The name of a node resolves only to the address of its first interface.
        first = addressed[:1]
        routes = tuple(Route(target="10.0.0.1", source=own[name], interface=name) for name in first)
        made[node] = Network(
            first_node=nodes[0],
            first_node_addresses=("10.0.0.1",),
            interfaces=interfaces,
            routes=routes,
            free_port=29400,
        )
    return made
