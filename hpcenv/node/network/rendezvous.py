"""Where the ranks meet and over which interfaces they talk: a pure choice from all nodes' facts.

Runs on: COMPUTE NODE (the batch node), once for each attempt. Standard library only.

Each node uses the interface of its route to the first node. NCCL guesses the first interface
by name, Gloo the address of the host name; these guesses are the most frequent cause of
"Connection refused" at start (pytorch#38702, nccl#1105; Debian maps the host name to
127.0.1.1).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcenv.records.facts import Facts, Route
from hpcenv.records.manifest import Manifest, Setting
from hpcenv.records.verdict import Rendezvous

# Used where several nodes are emulated on one machine, and for a single node.
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The network decision.

    Attributes:
        rendezvous: None when it could not be decided; `problems` says why.
        settings: node -> its variables, each with origin and reason.
        local_addresses: node -> the own address that torchrun gives to other nodes.
        problems: node -> why there is no rendezvous.
    """

    rendezvous: Rendezvous | None
    settings: dict[str, tuple[Setting, ...]]
    local_addresses: dict[str, str]
    problems: dict[str, str]


def choose(
    manifest: Manifest, nodes: Sequence[str], facts: Mapping[str, Facts], *, job_id: str, attempt: int
) -> Choice:
    """Choose rendezvous and variables for every node. Pure.

    Args:
        manifest: the run; its settings win over everything found here.
        nodes: all nodes in Slurm's order, the first one hosts the rendezvous.
        facts: what each node reported; nodes may be missing.
        job_id, attempt: make the rendezvous id unique to this start.

    Precedence of a variable: user (flag) > project (hpcenv.toml) > environment of the job >
    detected. With localhost on more than one node, each node would train alone (pith-train#91):
    what is not known is a problem, and hpcenv does not guess.
    """
    first = nodes[0]
    if manifest.cluster == "local" or len(nodes) == 1:
        why = "nodes are emulated on this machine" if manifest.cluster == "local" else "the job has one node"
        routes = {node: Route(target=_LOOPBACK, source=_LOOPBACK, interface="lo") for node in nodes}
        problems: dict[str, str] = {}
    else:
        why = f"interface of the route to {first}"
        routes, problems = _routes_to_first(nodes, facts)
    port = facts[first].network.free_port if first in facts else None
    if port is None and first in facts:
        problems[first] = "no free TCP port for the rendezvous"
    target = next((route.target for route in routes.values()), None)
    if problems or port is None or target is None:
        return Choice(rendezvous=None, settings={}, local_addresses={}, problems=problems)
    return Choice(
        rendezvous=Rendezvous(host=target, port=port, id=f"{job_id}.{attempt}"),
        settings={node: _settings(manifest, facts[node], routes[node], why) for node in nodes if node in facts},
        local_addresses={node: route.source for node, route in routes.items()},
        problems={},
    )


def _routes_to_first(nodes: Sequence[str], facts: Mapping[str, Facts]) -> tuple[dict[str, Route], dict[str, str]]:
    """Return one route per node to one address of the first node, or what is missing.

    The address must be one that every other node reaches and that the first node owns:
    what its resolver answers for its name (often 127.0.1.1) does not count.
    """
    first, others = nodes[0], nodes[1:]
    reported = [node for node in nodes if node in facts]
    if len(reported) < len(nodes):
        return {}, {node: "this node reported no facts" for node in nodes if node not in facts}
    owned = {a: i.name for i in facts[first].network.interfaces for a in i.addresses if not _is_loopback(a)}
    for address in sorted(owned, key=lambda a: (":" in a, a)):
        routes = {node: _route_from(facts[node], address) for node in others}
        if all(routes.values()):
            found = {node: route for node, route in routes.items() if route is not None}
            found[first] = Route(target=address, source=address, interface=owned[address])
            return found, {}
    return {}, {node: _why_no_route(facts[node], first, tuple(owned)) for node in others}


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


def _settings(manifest: Manifest, facts: Facts, route: Route, why: str) -> tuple[Setting, ...]:
    """Return one node's variables; later layers win, and the table keeps the origin of each."""
    threads, shared_by = _threads(manifest, facts)
    detected = [
        # torchrun's own prefix names the local rank, which is not unique (torch >= 2.3).
        Setting(
            name="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
            value="[${rank}] ",
            origin="detected",
            reason="the rank in front of each line",
        ),
        Setting(name="NCCL_DEBUG", value="WARN", origin="detected", reason="names the cause of a failure in the log"),
        # "=" asks for exactly this name; NCCL reads a bare one as a prefix (env.rst, 2.29).
        Setting(name="NCCL_SOCKET_IFNAME", value=f"={route.interface}", origin="detected", reason=why),
        Setting(name="GLOO_SOCKET_IFNAME", value=route.interface, origin="detected", reason=why),
        Setting(name="OMP_NUM_THREADS", value=str(threads), origin="detected", reason=shared_by),
        Setting(
            name="PYTHONUNBUFFERED", value="1", origin="detected", reason="lines reach the log as they are printed"
        ),
    ]
    merged = {setting.name: setting for setting in (*detected, *facts.network.variables, *manifest.settings)}
    return tuple(merged[name] for name in sorted(merged))


def _threads(manifest: Manifest, facts: Facts) -> tuple[int, str]:
    """Return threads per rank and the reason; without --cpus, the CPUs that Slurm gave are shared."""
    seen = facts.values.get("host.cpus")
    cpus = manifest.cpus_per_task or (seen if isinstance(seen, int) else 1)
    if manifest.cluster == "local":
        ranks, where = manifest.nproc_per_node * manifest.nodes, "on this machine"
    else:
        ranks, where = manifest.nproc_per_node, "on a node"
    return max(1, cpus // ranks), f"{cpus} CPUs for {ranks} ranks {where}"
