"""The network hardware and the network software of a node, as `facts/NODE.json` records them.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

Every value is text, a number or a tuple, so that equal nodes have equal values. Then the decision is computed only once
for all equal nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from hpcenv.records.manifest import Bind, Setting

# This number is increased when a key changes its meaning. Facts with a different number are not used, and the network
# counts as unknown.
FABRIC_SCHEMA = 1

GpuVendor = Literal["nvidia", "amd", "none", "unknown"]
YesNo = Literal["yes", "no", "unknown"]


@dataclass(frozen=True, kw_only=True)
class NetworkLink:
    """One network interface of the host, from `/sys/class/net`.

    Attributes:
        kind: `ethernet`, `infiniband` (IPoIB), `loopback` or `other`.
        state: operstate of the kernel: `up`, `down`, `unknown`.
        speed_mbit: link speed; None if the kernel does not report the speed. For IPoIB, this is the speed of the RDMA
            port under the interface.
        driver: kernel driver of the device; empty for an interface without a device (bridge, veth, bond).
        bus, numa: PCI address and NUMA node of the device; empty and None if they are unknown.
    """

    name: str
    kind: str
    state: str
    speed_mbit: int | None = None
    mtu: int | None = None
    driver: str = ""
    bus: str = ""
    numa: int | None = None


@dataclass(frozen=True, kw_only=True)
class RdmaPort:
    """One port of an RDMA device, from `/sys/class/infiniband`.

    Attributes:
        layer: link layer: `InfiniBand`, `Ethernet` (RoCE) or `Unspecified` (EFA).
        rate_gbit: signalling rate; None if it could not be read.
        gid_types: kinds of its GIDs: `IB/RoCE v1`, `RoCE v2`.
        interfaces: names of the network interfaces that the same device has.
        virtual_function: whether the device is a virtual function (SR-IOV).
    """

    device: str
    port: int
    state: str
    layer: str
    rate_gbit: float | None = None
    driver: str = ""
    bus: str = ""
    numa: int | None = None
    interfaces: tuple[str, ...] = ()
    gid_types: tuple[str, ...] = ()
    virtual_function: bool = False


@dataclass(frozen=True, kw_only=True)
class PortErrors:
    """How much one error counter of an RDMA port grew while the ranks of a node ran.

    Attributes:
        counter: name of the file below `counters` or `hw_counters` of the port.
        grown: the number of new errors.
        many: whether `grown` is more than the limit of the check `ib.errors`.
    """

    device: str
    port: int
    counter: str
    grown: int
    many: bool


@dataclass(frozen=True, kw_only=True)
class CxiDevice:
    """One Slingshot adapter, from `/sys/class/cxi/DEVICE/device/properties`.

    Attributes:
        link: whether the link is up.
        rendezvous_get: the property `rdzv_get_en`. The option `--network=disable_rdzv_get` of srun changes this
            property to `no`.
    """

    device: str
    link: YesNo = "unknown"
    speed_mbit: int | None = None
    rendezvous_get: YesNo = "unknown"
    numa: int | None = None


@dataclass(frozen=True, kw_only=True)
class GpuPlace:
    """One GPU: its PCI address, its NUMA node, and how many NVLink or xGMI links to other GPUs are up.

    Attributes:
        links: number of links that are up; None if it could not be read.
        clique: NVLink domain across nodes (`UUID.CLIQUE`, GpuFabricInfo); empty without such a domain.
    """

    bus: str
    numa: int | None = None
    links: int | None = None
    clique: str = ""


@dataclass(frozen=True, kw_only=True)
class FabricVersion:
    """The version of one component of the host's network software, and the file from which it was read."""

    name: str
    version: str
    path: str


@dataclass(frozen=True, kw_only=True)
class HostTuning:
    """A file of the host that tunes the network. A container does not see this file.

    Attributes:
        kind: `settings` (a file with variables that hpcenv uses) or `topology` (an XML file for NCCL).
        variables: the literal assignments in the file; their origin is its path.
        unread: the number of lines that are not literal assignments, so that their effect is unknown.
    """

    path: str
    kind: Literal["settings", "topology"]
    variables: tuple[Setting, ...] = ()
    unread: int = 0


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The hardware and software with which one node communicates with other nodes.

    Attributes:
        schema: see FABRIC_SCHEMA.
        gpu_vendor: `none` only if the PCI bus could be read and no GPU was on it.
        gpudirect: how a network adapter can reach GPU memory: `nvidia_peermem`, `dma-buf`, or empty.
        imex: whether a channel for NVLink across nodes exists.
        cloud, product: provider and machine type, from DMI.
        unknown: parts that could not be read, each `PART: REASON`.
    """

    # The record is large, and equal on most nodes of a job. So the codec decodes equal records only once.
    DECODED_ONCE: ClassVar = True

    schema: int = FABRIC_SCHEMA
    links: tuple[NetworkLink, ...] = ()
    ports: tuple[RdmaPort, ...] = ()
    cxi: tuple[CxiDevice, ...] = ()
    gpu_vendor: GpuVendor = "unknown"
    gpus: tuple[GpuPlace, ...] = ()
    gpudirect: str = ""
    imex: bool = False
    cloud: str = ""
    product: str = ""
    versions: tuple[FabricVersion, ...] = ()
    tuning: tuple[HostTuning, ...] = ()
    unknown: tuple[str, ...] = ()

    def __hash__(self) -> int:
        """Return a hash over a few parts, to group nodes with equal hardware. A hash over all parts would be slow."""
        return hash((self.gpu_vendor, self.product, len(self.gpus), len(self.ports), len(self.links), len(self.cxi)))


@dataclass(frozen=True, kw_only=True)
class ImageNetwork:
    """The libraries in the environment that the loader would find for NCCL; recorded only if torch has NCCL.

    Attributes:
        verbs, libfabric, plugin: the file that the loader finds first; empty if there is no such file.
        providers: the number of libibverbs' provider libraries, each for one kind of adapter.
        plugin_version: version of aws-ofi-nccl; empty for a different plugin.
        other_plugins: libraries with the plugin's name that the loader finds later or not at all, as
            `PATH (aws-ofi-nccl VERSION)`.
        unread: NCCL variables of the ranks that no library of the environment reads.
    """

    verbs: str
    providers: int
    libfabric: str
    plugin: str
    plugin_version: str
    other_plugins: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NetworkRow:
    """One variable of the decision, and the reason why hpcenv sets it, keeps it or leaves it out.

    Attributes:
        action: `set` (hpcenv chose the value), `host` (from a file of the host), `given` (from user, project, site
            profile or job), `skip` (left at the library's default on purpose).
        rule: id of the rule; empty if the value was only given.
        source: the document from which the rule comes, with its date.
        evidence: the facts that the rule was applied to.
        nodes: the nodes to which this row applies; empty for all nodes.
    """

    action: Literal["set", "host", "given", "skip"]
    name: str
    value: str
    origin: str
    reason: str
    rule: str = ""
    source: str = ""
    evidence: str = ""
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NetworkWarning:
    """A warning about something that is slow, wrong or without effect, and what to do about it."""

    rule: str
    what: str
    todo: str = ""
    source: str = ""
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SettingEffect:
    """A setting, compared with the value that was read back.

    Attributes:
        took_effect: `yes`: the value that was read fits the setting. `no`: the setting is ignored. `unknown`: the value
            could not be read.
        where, found: the place that was read, and its content.
        why, todo: the consequence if the setting is ignored, and what to do in that case.
        nodes: the nodes to which this comparison applies; empty for all nodes.
    """

    name: str
    value: str
    origin: str
    took_effect: YesNo
    where: str
    found: str
    why: str = ""
    todo: str = ""
    source: str = ""
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepOption:
    """An option of srun that the launch step needs, so that a setting takes effect."""

    option: str
    reason: str
    rule: str
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class ExplainedBind:
    """A file of the host that the container needs for the network."""

    bind: Bind
    reason: str
    rule: str


@dataclass(frozen=True, kw_only=True)
class NetworkDecision:
    """The network decision of one attempt (part of `verdict.json`).

    Attributes:
        effects: the settings that can be read back before the training.
        profile: the kind of network that the ranks use.
        why: the facts from which hpcenv chose the profile.
    """

    schema: int = FABRIC_SCHEMA
    profile: str
    why: str
    rows: tuple[NetworkRow, ...] = ()
    effects: tuple[SettingEffect, ...] = ()
    warnings: tuple[NetworkWarning, ...] = ()
    step_options: tuple[StepOption, ...] = ()
    binds: tuple[ExplainedBind, ...] = ()
