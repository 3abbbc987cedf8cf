"""Choose the rendezvous endpoint and the interfaces of the ranks, from the facts of all nodes. Pure.

Runs on: COMPUTE NODE (the batch node), once for each attempt. Standard library only.

Each node uses the interface of its route to the first node. If hpcenv chose no interface, NCCL would take the first
interface by name, and Gloo would take the address of the host name. These guesses are the most frequent
cause of "Connection refused" at start (pytorch#38702, nccl#1105; Debian maps the host name to
127.0.1.1). If several interfaces reach the first node, the fastest interface is used.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hpcenv.judge.network.decision import SocketInterface, decide
from hpcenv.judge.network.profiles import NetworkProfile, find_profile
from hpcenv.records.facts import Facts, Route
from hpcenv.records.manifest import Bind, Manifest, Setting
from hpcenv.records.network import FABRIC_SCHEMA, NetworkDecision
from hpcenv.records.verdict import Rendezvous

# This address is used for a single node, and if several nodes are emulated on one machine.
_LOOPBACK = "127.0.0.1"

# If no route was recorded for a network, the network is preferred only if it is faster by this factor.
_MUCH_FASTER = 2


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The network decision.

    Attributes:
        rendezvous: the rendezvous; None if no rendezvous was possible, for the reasons in `problems`.
        settings: node -> its variables, each with origin and reason.
        local_addresses: node -> its address, which torchrun announces to the other nodes.
        problems: node -> why no rendezvous is possible.
        binds: node -> files of the host that the node's container needs for the network.
        network: explanation of the settings; None if there is no rendezvous.
    """

    rendezvous: Rendezvous | None
    settings: dict[str, tuple[Setting, ...]]
    local_addresses: dict[str, str]
    problems: dict[str, str]
    binds: dict[str, tuple[Bind, ...]]
    network: NetworkDecision | None = None


def choose(
    manifest: Manifest, nodes: Sequence[str], facts: Mapping[str, Facts], *, job_id: str, attempt: int
) -> Choice:
    """Choose rendezvous and variables for every node. Pure.

    Args:
        manifest: the run, whose settings have priority over all detected values.
        nodes: all nodes in Slurm's order. The first node hosts the rendezvous.
        facts: facts of each node; nodes may be missing.
        job_id, attempt: make the rendezvous id unique to this start.

    If several nodes used localhost, each node would train alone (pith-train#91). So hpcenv does not guess. If a fact is
    missing, it is reported as a problem.
    """
    first = nodes[0]
    reported = {node: _readable(facts[node]) for node in nodes if node in facts}
    # Emulated nodes are on one machine, so only the first node is needed.
    seen = list(reported.items())[: 1 if manifest.cluster == "local" else None]
    profile = find_profile({node: found.fabric for node, found in seen}, backend=manifest.backend)
    problems: dict[str, str] = {}
    if manifest.cluster == "local" or len(nodes) == 1:
        why = "nodes are emulated on this machine" if manifest.cluster == "local" else "the job has one node"
        loopback = Route(target=_LOOPBACK, source=_LOOPBACK, interface="lo")
        path: _Path | None = _Path(routes=dict.fromkeys(nodes, loopback), why=why)
    else:
        path, problems = _path_to_first(nodes, facts, profile)
    port = facts[first].network.free_port if first in facts else None
    if port is None and first in facts:
        problems[first] = "no free TCP port for the rendezvous"
    if problems or port is None or path is None:
        return Choice(rendezvous=None, settings={}, local_addresses={}, problems=problems, binds={})
    interfaces = {node: SocketInterface(name=route.interface, why=path.why) for node, route in path.routes.items()}
    made, network = decide(manifest, reported, interfaces, profile, attempt=attempt)
    return Choice(
        rendezvous=Rendezvous(host=path.routes[first].target, port=port, id=f"{job_id}.{attempt}"),
        settings={node: decided.settings for node, decided in made.items()},
        local_addresses={node: route.source for node, route in path.routes.items()},
        problems={},
        binds={node: decided.binds for node, decided in made.items()},
        network=network,
    )


def _readable(facts: Facts) -> Facts:
    """Return the facts. A record of network hardware with a different schema version is left out as unknown."""
    known = facts.fabric is None or facts.fabric.schema == FABRIC_SCHEMA
    return facts if known else replace(facts, fabric=None)


@dataclass(frozen=True, kw_only=True)
class _Path:
    """The routes of all nodes to one address of the first node.

    Attributes:
        speed_mbit: speed of the slowest interface; None if the speed of an interface is not known.
    """

    routes: dict[str, Route]
    why: str
    speed_mbit: int | None = None


def _path_to_first(
    nodes: Sequence[str], facts: Mapping[str, Facts], profile: NetworkProfile
) -> tuple[_Path | None, dict[str, str]]:
    """Return each node's route to one address of the first node; without such an address, the reason for each node.

    The first node must have the address, and every other node must have a route to it. The address that the resolver
    returns for the host name (often 127.0.1.1) is not used.
    """
    first, others = nodes[0], nodes[1:]
    missing = {node: "this node reported no facts" for node in nodes if node not in facts}
    if missing:
        return None, missing
    owned = {a: i.name for i in facts[first].network.interfaces for a in i.addresses if not _is_loopback(a)}
    proved = list(_routed(nodes, facts, owned))
    if not proved:
        return None, {node: _why_no_route(facts[node], first, tuple(owned)) for node in others}
    best = max(proved, key=lambda path: path.speed_mbit or 0)
    if profile.over_sockets and best.speed_mbit is not None:
        shared = max(_shared_networks(nodes, facts), key=lambda path: path.speed_mbit or 0, default=None)
        if shared is not None and (shared.speed_mbit or 0) >= _MUCH_FASTER * best.speed_mbit:
            return shared, {}
    return best, {}


def _routed(nodes: Sequence[str], facts: Mapping[str, Facts], owned: Mapping[str, str]) -> Iterator[_Path]:
    """Yield the routes to each address of the first node, if the kernel of every other node has a route to it."""
    first, others = nodes[0], nodes[1:]
    for address in sorted(owned, key=lambda a: (":" in a, a)):
        routes = {node: route for node in others if (route := _route_from(facts[node], address)) is not None}
        if len(routes) == len(others):
            routes[first] = Route(target=address, source=address, interface=owned[address])
            yield _Path(routes=routes, why=f"interface of the route to {first}", speed_mbit=_slowest(routes, facts))


def _shared_networks(nodes: Sequence[str], facts: Mapping[str, Facts]) -> Iterator[_Path]:
    """Yield routes in each network in which every node has an address, on a device that is up.

    Bridges and other virtual interfaces do not count. For example, each node has a docker0 with the same address.
    """
    first = nodes[0]
    own = {node: dict(_addresses_on_devices(facts[node])) for node in nodes}
    for network, (address, name) in own[first].items():
        found = {node: own[node][network] for node in nodes if network in own[node]}
        if len({where[0] for where in found.values()}) < len(nodes):
            continue
        routes = {node: Route(target=address, source=where[0], interface=where[1]) for node, where in found.items()}
        speed = _slowest(routes, facts)
        if speed is not None:
            why = f"all nodes have an address in {network}, at {speed / 1000:g} Gb/s the fastest ({name} on {first})"
            yield _Path(routes=routes, why=why, speed_mbit=speed)


def _addresses_on_devices(facts: Facts) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield network, address and interface of each device that is up."""
    links = {} if facts.fabric is None else {link.name: link for link in facts.fabric.links}
    for interface in facts.network.interfaces:
        link = links.get(interface.name)
        if link is None or link.state != "up" or not link.driver:
            continue
        for address, network in zip(interface.addresses, interface.networks, strict=False):
            if not _is_loopback(address):
                yield network, (address, interface.name)


def _slowest(routes: Mapping[str, Route], facts: Mapping[str, Facts]) -> int | None:
    speeds = [_speed(facts[node], route.interface) for node, route in routes.items()]
    known = [speed for speed in speeds if speed is not None]
    return min(known) if len(known) == len(speeds) else None


def _speed(facts: Facts, interface: str) -> int | None:
    links = () if facts.fabric is None else facts.fabric.links
    return next((link.speed_mbit for link in links if link.name == interface), None)


def _why_no_route(facts: Facts, first: str, owned: tuple[str, ...]) -> str:
    resolved = _listed(facts.network.first_node_addresses)
    return facts.network.problem or (
        f"no address of {first} ({_listed(owned)}) is reached by all other nodes; here it resolves to {resolved}"
    )


def _route_from(facts: Facts, target: str) -> Route | None:
    return next((route for route in facts.network.routes if route.target == target), None)


def _listed(addresses: tuple[str, ...]) -> str:
    return ", ".join(addresses) if addresses else "nothing"


def _is_loopback(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return True
    return parsed.is_loopback or parsed.is_link_local
