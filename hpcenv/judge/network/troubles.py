"""Warn of problems with the network of the nodes: differences, missing parts, versions that are known to fail. Pure.

Runs on: COMPUTE NODE (the batch node), and LOGIN NODE for explanations. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from hpcenv.judge.network.known_bad import KNOWN_BAD, matches
from hpcenv.judge.network.profiles import NetworkProfile
from hpcenv.judge.network.verbs_packages import install_line
from hpcenv.records.facts import Facts
from hpcenv.records.manifest import Manifest
from hpcenv.records.network import Fabric, ImageNetwork, NetworkWarning


def warn(manifest: Manifest, facts: Mapping[str, Facts], profile: NetworkProfile) -> tuple[NetworkWarning, ...]:
    """Return all warnings. A warning names its nodes if it does not apply to all nodes."""
    groups: dict[Fabric, list[str]] = {}
    for node, one in facts.items():
        if one.fabric is not None:
            groups.setdefault(one.fabric, []).append(node)
    found = [*_mixed(profile), *_active_ports(groups, len(facts)), *_packet_sizes(facts)]
    per_fabric: dict[NetworkWarning, list[str]] = {}
    for fabric, nodes in groups.items():
        for check in _CHECKS:
            for warning in check(fabric, manifest, profile):
                per_fabric.setdefault(warning, []).extend(nodes)
    images: dict[ImageNetwork, list[str]] = {}
    for node, one in facts.items():
        if one.image_network is not None and manifest.nodes > 1:
            images.setdefault(one.image_network, []).append(node)
    for image, nodes in images.items():
        for warning in _image(image, profile):
            per_fabric.setdefault(warning, []).extend(nodes)
    found += [_on(warning, nodes, len(facts)) for warning, nodes in per_fabric.items()]
    return tuple(found)


def _on(warning: NetworkWarning, nodes: Sequence[str], count: int) -> NetworkWarning:
    return NetworkWarning(
        rule=warning.rule,
        what=warning.what,
        todo=warning.todo,
        source=warning.source,
        nodes=() if len(nodes) == count else tuple(nodes),
    )


def _mixed(profile: NetworkProfile) -> Iterator[NetworkWarning]:
    usual = max(profile.kinds.values(), key=len, default=())
    for kind, nodes in sorted(profile.kinds.items()):
        if nodes != usual:
            yield NetworkWarning(
                rule="profile.differs",
                what=f"these nodes offer `{kind}`, and the other nodes offer a different network, so the job uses TCP",
                todo="leave them out with --exclude, or request one kind of node with --constraint",
                nodes=nodes,
            )


def _active_ports(groups: Mapping[Fabric, Sequence[str]], count: int) -> Iterator[NetworkWarning]:
    """Report nodes whose number of active RDMA ports is unusual: NCCL ends with `mixed local Net device counts`."""
    if count < 2:
        return
    numbers: dict[int, list[str]] = {}
    for fabric, nodes in groups.items():
        numbers.setdefault(sum(port.state == "ACTIVE" for port in fabric.ports), []).extend(nodes)
    usual = max(numbers, key=lambda number: len(numbers[number]), default=0)
    for number, nodes in sorted(numbers.items()):
        if number != usual:
            yield NetworkWarning(
                rule="ports.differ",
                what=f"{number} active RDMA ports, where most nodes have {usual}",
                todo="tell the site's support; leave the node out with --exclude",
                source="NVIDIA/nccl 5067397, init.cc: `Detected mixed local Net device counts`",
                nodes=tuple(nodes),
            )


def _packet_sizes(facts: Mapping[str, Facts]) -> Iterator[NetworkWarning]:
    """Report nodes whose interface has a different packet size (MTU) than most interfaces in the subnet."""
    sizes: dict[str, dict[int, list[str]]] = {}
    for node, one in facts.items():
        links = {} if one.fabric is None else {link.name: link for link in one.fabric.links}
        for interface in one.network.interfaces:
            link = links.get(interface.name)
            if link is None or link.mtu is None or link.kind == "loopback" or link.state == "down":
                continue
            for subnet in dict.fromkeys(filter(None, interface.networks)):
                sizes.setdefault(subnet, {}).setdefault(link.mtu, []).append(node)
    for subnet, numbers in sizes.items():
        usual = max(numbers, key=lambda number: (len(numbers[number]), number))
        for number, nodes in sorted(numbers.items()):
            if number != usual:
                yield NetworkWarning(
                    rule="mtu.differs",
                    what=f"MTU {number} in {subnet}, and {usual} on other nodes: large packets may be lost or split",
                    todo="tell the site's support; leave the node out with --exclude",
                    source="ip(7) and icmp(7), path MTU discovery; the check is hpcenv's own judgement, 2026-11",
                    nodes=tuple(nodes),
                )


def _unknown_gpus(fabric: Fabric, manifest: Manifest, _: NetworkProfile) -> Iterator[NetworkWarning]:
    if fabric.gpu_vendor == "unknown" and manifest.gpus_per_node:
        reason = next((text for text in fabric.unknown if text.startswith("gpus")), "the GPUs could not be read")
        yield NetworkWarning(rule="gpus.unknown", what=reason, todo="see the driver's state on the node: nvidia-smi")


def _no_active_port(fabric: Fabric, manifest: Manifest, _: NetworkProfile) -> Iterator[NetworkWarning]:
    """Report InfiniBand without any active port. A single unused port on a card with two ports is not a problem."""
    states = {port.state for port in fabric.ports if port.layer == "InfiniBand"}
    if states and "ACTIVE" not in states and manifest.backend == "nccl":
        yield NetworkWarning(
            rule="ports.not-active",
            what=f"the node has InfiniBand, but none of its ports is active: {', '.join(sorted(states))}",
            todo="tell the site's support; leave the node out with --exclude",
        )


def _no_gpudirect(fabric: Fabric, _: Manifest, profile: NetworkProfile) -> Iterator[NetworkWarning]:
    if profile.rdma and fabric.gpu_vendor == "nvidia" and not fabric.gpudirect:
        yield NetworkWarning(
            rule="gpudirect.missing",
            what="no GPUDirect RDMA: neither nvidia_peermem nor the open kernel module of the driver is loaded",
            todo="ask the site to load nvidia_peermem, or to install the open kernel module",
            source="NVIDIA/nccl 5067397, troubleshooting, 2026-06-11",
        )


def _scripts(fabric: Fabric, _: Manifest, __: NetworkProfile) -> Iterator[NetworkWarning]:
    for file in fabric.tuning:
        if file.unread:
            yield NetworkWarning(
                rule="host.unread",
                what=f"{file.path}: {file.unread} settings are computed by a script, and hpcenv runs no script",
                todo="put their values into [env] or a site profile",
            )


def _known_bad(fabric: Fabric, _: Manifest, profile: NetworkProfile) -> Iterator[NetworkWarning]:
    for version in fabric.versions:
        for entry in KNOWN_BAD:
            if entry.where == "host" and entry.component == version.name and matches(entry, version.version):
                if entry.profiles and profile.name not in entry.profiles:
                    continue
                yield NetworkWarning(
                    rule=f"known-bad.{entry.id}",
                    what=f"{version.name} {version.version} ({version.path}): {entry.what}",
                    todo=entry.hint,
                    source=f"{entry.source}, {entry.date}",
                )


_LOADER = "NVIDIA/nccl 5067397, src/plugin/net.cc: dlopen of libnccl-net.so; ld.so(8)"


def _image(image: ImageNetwork, profile: NetworkProfile) -> Iterator[NetworkWarning]:
    """Report libraries that the environment lacks for the network of the nodes, and plugins for a different network."""
    if profile.rdma and not (image.verbs and image.providers):
        lacks = "no libibverbs.so.1" if not image.verbs else "no provider beside libibverbs"
        yield NetworkWarning(
            rule="image.verbs",
            what=f"the environment has {lacks}: NCCL cannot use {profile.rdma}",
            todo=f"add to the Dockerfile (Debian, Ubuntu): {install_line('debian')}",
            source="NVIDIA/nccl 5067397: NET/IB opens libibverbs.so.1",
        )
    if image.other_plugins:
        kind = f"aws-ofi-nccl {image.plugin_version}" if image.plugin_version else "not aws-ofi-nccl"
        first = f"NCCL takes {image.plugin} ({kind})" if image.plugin else "the loader finds none of them"
        yield NetworkWarning(
            rule="image.plugin-order",
            what=f"the environment has several plugins for NCCL: {first}, not {', '.join(image.other_plugins)}",
            todo="name the right one in NCCL_NET_PLUGIN, or put its folder first in LD_LIBRARY_PATH",
            source=_LOADER,
        )
    if profile.name not in ("efa", "slingshot"):
        return
    if image.plugin and not image.plugin_version:
        yield NetworkWarning(
            rule="image.plugin-other",
            what=f"NCCL takes {image.plugin}, which is not aws-ofi-nccl: it does not know {profile.name}",
            todo="put aws-ofi-nccl before it in LD_LIBRARY_PATH, or name it in NCCL_NET_PLUGIN",
            source=_LOADER,
        )
    if not image.plugin or not image.libfabric:
        lacks = "plugin for NCCL (libnccl-net.so)" if not image.plugin else "libfabric.so.1"
        yield NetworkWarning(
            rule="image.plugin",
            what=f"the environment has no {lacks}: NCCL cannot use {profile.name}",
            todo="use the site's base image, or add libfabric and aws-ofi-nccl to the Dockerfile",
            source="aws-ofi-nccl 2daf7d3, README.md, 2026-08-21",
        )


_CHECKS: tuple[Callable[[Fabric, Manifest, NetworkProfile], Iterator[NetworkWarning]], ...] = (
    _unknown_gpus,
    _no_active_port,
    _no_gpudirect,
    _scripts,
    _known_bad,
)
