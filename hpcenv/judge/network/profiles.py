"""Choose which kind of network the ranks use, from the hardware of all nodes. Pure.

Runs on: COMPUTE NODE (the batch node), and LOGIN NODE for explanations. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcenv.records.network import Fabric, RdmaPort

# A RoCE adapter below this speed counts as an Ethernet adapter. Small clusters have such adapters, but their network is
# not configured for RoCE. An image without libibverbs cannot use RoCE, but can train with such an
# adapter over TCP.
_ROCE_GBIT = 100.0

# Name of a profile -> the condition under which it is chosen. docs/explanation/network.md shows this table.
PROFILES = {
    "gloo": "the ranks talk with Gloo, over TCP",
    "single-nvlink": "one node, and its GPUs have NVLink or xGMI links that are up",
    "single-pcie": "one node, and its GPUs have no such links",
    "single": "one node, and it is unknown whether its GPUs have such links",
    "slingshot": "every node has a Slingshot adapter (`/sys/class/cxi`) whose link is not down",
    "gcp": "every node is a GCP machine with gIB or TCPXO (a script with settings is there)",
    "efa": "every node has an active EFA device",
    "mnnvl": "all GPUs of all nodes are in one NVLink domain, and IMEX channels are there",
    "ib": "every node has an active InfiniBand port",
    "roce2": f"every node has an active RoCE v2 port of at least {_ROCE_GBIT:g} Gb/s",
    "tcp": "no network of the rows above is on every node",
    "unknown": "a node did not report its network hardware",
}


@dataclass(frozen=True, kw_only=True)
class NetworkProfile:
    """The kind of network of one attempt.

    Attributes:
        name: a key of PROFILES.
        why: the facts that led to the choice, in one line.
        rdma: link layer of the ports that transfer the data: `InfiniBand` or `Ethernet`; empty for other networks.
        kinds: kind of network -> nodes, if the nodes have different kinds; otherwise empty.
    """

    name: str
    why: str
    rdma: str = ""
    kinds: Mapping[str, tuple[str, ...]]

    @property
    def over_sockets(self) -> bool:
        """Whether the training's data are sent over TCP, so that the speed of the interface matters."""
        return self.name in ("tcp", "gloo", "unknown")


def find_profile(fabrics: Mapping[str, Fabric | None], *, backend: str) -> NetworkProfile:
    """Return the profile that all nodes can use."""
    known = {node: fabric for node, fabric in fabrics.items() if fabric is not None}
    if backend != "nccl":
        return NetworkProfile(name="gloo", why="the run uses the Gloo backend", kinds={})
    if len(known) < len(fabrics):
        missing = [node for node in fabrics if node not in known]
        return NetworkProfile(name="unknown", why=f"{', '.join(missing[:3])} did not report it", kinds={})
    if len(known) == 1:
        return _single(next(iter(known.values())))
    kinds: dict[str, list[str]] = {}
    found: dict[Fabric, str] = {}
    for node, fabric in known.items():
        kind = found.get(fabric)
        if kind is None:
            kind = found.setdefault(fabric, kind_of(fabric))
        kinds.setdefault(kind, []).append(node)
    if len(kinds) > 1:
        why = "; ".join(f"{kind}: {len(nodes)} of {len(known)} nodes" for kind, nodes in sorted(kinds.items()))
        return NetworkProfile(
            name="tcp", why=f"the nodes differ: {why}", kinds={kind: tuple(nodes) for kind, nodes in kinds.items()}
        )
    name = next(iter(kinds))
    cliques = {gpu.clique for fabric in found for gpu in fabric.gpus}
    if name == "mnnvl" and len(cliques) > 1:
        name = next((_rdma_kind(fabric) for fabric in found), "tcp")
    some = next(iter(found))
    kind_below = _rdma_kind(some) if name == "mnnvl" else name
    rdma = {"ib": "InfiniBand", "roce2": "Ethernet"}.get(kind_below, "")
    return NetworkProfile(name=name, why=_in_words(some, name), rdma=rdma, kinds={})


def _single(fabric: Fabric) -> NetworkProfile:
    counts = [gpu.links for gpu in fabric.gpus]
    if fabric.gpu_vendor in ("nvidia", "amd") and counts and None not in counts:
        linked = all(count for count in counts)
        kind = "xGMI" if fabric.gpu_vendor == "amd" else "NVLink"
        why = f"one node, {len(counts)} GPUs {'with' if linked else 'without'} {kind}"
        return NetworkProfile(name="single-nvlink" if linked else "single-pcie", why=why, kinds={})
    if fabric.gpu_vendor == "none":
        return NetworkProfile(name="single", why="one node without GPUs", kinds={})
    reason = next((text for text in fabric.unknown if text.startswith("gpus")), "the GPUs' links could not be read")
    return NetworkProfile(name="single", why=f"one node; {reason}", kinds={})


def kind_of(fabric: Fabric) -> str:
    """Return the kind of network that a node offers, in a run with several nodes."""
    if any(device.link != "no" for device in fabric.cxi):
        return "slingshot"
    if fabric.cloud == "gcp" and any(t.path.startswith(("/usr/local/gib", "/var/lib/tcpxo")) for t in fabric.tuning):
        return "gcp"
    if any(port.driver == "efa" and port.state == "ACTIVE" for port in fabric.ports):
        return "efa"
    if fabric.imex and fabric.gpus and all(gpu.clique for gpu in fabric.gpus):
        return "mnnvl"
    return _rdma_kind(fabric)


def _rdma_kind(fabric: Fabric) -> str:
    if data_ports(fabric, "InfiniBand"):
        return "ib"
    return "roce2" if any((p.rate_gbit or 0) >= _ROCE_GBIT for p in data_ports(fabric, "Ethernet")) else "tcp"


def data_ports(fabric: Fabric, layer: str) -> tuple[RdmaPort, ...]:
    """Return the active ports of a link layer that NCCL can use. With Ethernet, these are the ports with RoCE v2."""
    return tuple(
        port
        for port in fabric.ports
        if port.state == "ACTIVE" and port.layer == layer and (layer == "InfiniBand" or "RoCE v2" in port.gid_types)
    )


def _in_words(fabric: Fabric, name: str) -> str:
    gpus = f"{len(fabric.gpus)} GPUs" if fabric.gpus else f"GPUs {fabric.gpu_vendor}"
    if name == "slingshot":
        return f"{len(fabric.cxi)} Slingshot adapters and {gpus} on each node"
    if name in ("ib", "roce2"):
        ports = data_ports(fabric, "InfiniBand" if name == "ib" else "Ethernet")
        return f"{_counted(ports)} and {gpus} on each node"
    if name == "efa":
        return f"{sum(port.driver == 'efa' for port in fabric.ports)} EFA devices and {gpus} on each node"
    if name == "mnnvl":
        return f"one NVLink domain over all nodes, {gpus} on each"
    if name == "gcp":
        return f"{fabric.product or 'GCP'} with settings of the provider, {gpus} on each node"
    speeds = [link.speed_mbit for link in fabric.links if link.state == "up" and link.speed_mbit]
    fastest = f", interfaces up to {max(speeds) / 1000:g} Gb/s" if speeds else ""
    return f"no RDMA network on every node{fastest}"


def _counted(ports: Sequence[RdmaPort]) -> str:
    rates: dict[float | None, int] = {}
    for port in ports:
        rates[port.rate_gbit] = rates.get(port.rate_gbit, 0) + 1
    word = ports[0].layer if ports and ports[0].layer == "InfiniBand" else "RoCE"
    parts = (
        f"{count} {word} ports of {'unknown rate' if rate is None else f'{rate:g} Gb/s'}"
        for rate, count in rates.items()
    )
    return ", ".join(parts)
