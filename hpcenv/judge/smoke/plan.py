"""The plan of a run's smoke test: nodes, ports, limits, and rounds of pairs. Pure.

Runs on: COMPUTE NODE (the batch node), once for each attempt. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpcenv.judge.smoke.effect import READ
from hpcenv.records.codec import SCHEMA
from hpcenv.records.facts import Facts
from hpcenv.records.manifest import Manifest, SmokeOptions
from hpcenv.records.network import Fabric
from hpcenv.records.smoke import SmokeNode, SmokePlan
from hpcenv.records.verdict import NodeSettings, Verdict

# Up to this number of nodes, every pair is tested. With more nodes, each node is tested with its two neighbours. A
# faulty node fails with both neighbours, and the time does not grow with the number of nodes.
MOST_FOR_ALL_PAIRS = 8

# Time limit of one pair, in seconds. It is short because a pair has only two processes and little data.
PAIR_SECONDS = 15.0

_SOCKET_INTERFACE = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


def make_plan(
    manifest: Manifest,
    wanted: SmokeOptions,
    verdict: Verdict,
    settings: Mapping[str, NodeSettings],
    facts: Mapping[str, Facts],
    *,
    job_id: str,
) -> SmokePlan | None:
    """Return the plan of the test; None if the first node has no free port for the test.

    Args:
        manifest: the run.
        wanted: the requested smoke test.
        verdict: the verdict of this attempt, which allows the start.
        settings: node -> the variables of its ranks.
        facts: node -> its facts.
        job_id: the id of this job.
    """
    launched = verdict.launched
    ports = facts[launched[0]].network.test_ports
    if not ports:
        return None
    nodes = tuple(_node(manifest, settings[name], facts[name]) for name in launched)
    fabrics = [facts[name].fabric for name in launched]
    network = {s.value for name in launched for s in settings[name].settings if s.name == "NCCL_NET"}
    return SmokePlan(
        schema=SCHEMA,
        run=manifest.run,
        attempt=verdict.attempt,
        job_id=job_id,
        nodes=nodes,
        nproc_per_node=manifest.nproc_per_node,
        backend=manifest.backend,
        port=ports[0],
        seconds=wanted.seconds,
        start_seconds=max(wanted.seconds, float(manifest.check_seconds)),
        profile="" if verdict.network is None else verdict.network.profile,
        network=network.pop() if len(network) == 1 else "",
        gpudirect=all(fabric is not None and fabric.gpudirect for fabric in fabrics),
        rates_gbit=min((_rate_gbit(fabric) for fabric in fabrics), default=0.0),
        skipped=manifest.preflight.skipped,
        settings={name: {s.name: s.value for s in settings[name].settings if s.name in READ} for name in launched},
    )


def _node(manifest: Manifest, settings: NodeSettings, facts: Facts) -> SmokeNode:
    interfaces = {one.name: one.addresses for one in facts.network.interfaces if one.addresses}
    name = _SOCKET_INTERFACE[manifest.backend]
    word = next((s.value for s in settings.settings if s.name == name), "")
    # The value may also contain prefixes, exclusions or lists, but only one name can be compared.
    given = word.lstrip("=")
    own = next((name for name, addresses in interfaces.items() if settings.local_address in addresses), "")
    interface = given if given in interfaces else own
    addresses = interfaces.get(interface, ())
    links = () if facts.fabric is None else facts.fabric.links
    return SmokeNode(
        name=settings.node,
        address=settings.local_address if settings.local_address in addresses or not addresses else addresses[0],
        interface=interface,
        interfaces=interfaces,
        speed_mbit=next((link.speed_mbit for link in links if link.name == interface), None),
        pair_port=facts.network.test_ports[-1] if facts.network.test_ports else 0,
    )


def _rate_gbit(fabric: Fabric | None) -> float:
    if fabric is None:
        return 0.0
    ports = [port.rate_gbit or 0.0 for port in fabric.ports if port.state == "ACTIVE"]
    return sum(ports) + sum((device.speed_mbit or 0) / 1000 for device in fabric.cxi if device.link != "no")


def rounds(count: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return rounds of pairs of the numbers 0 to count - 1. Within a round, each number occurs at most once.

    The pairs follow the circle method for a round-robin tournament. With more than MOST_FOR_ALL_PAIRS nodes, only
    neighbours in a ring are paired. This takes two rounds, or three rounds if the number of nodes is odd.
    """
    if count > MOST_FOR_ALL_PAIRS:
        return tuple(tuple(_neighbours(count, first)) for first in ((0, 1) if count % 2 == 0 else (0, 1, count - 1)))
    places = [*range(count), *([-1] if count % 2 else [])]
    made = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        made.append(tuple((min(pair), max(pair)) for pair in pairs if -1 not in pair))
        places = [places[0], places[-1], *places[1:-1]]
    return tuple(made)


def _neighbours(count: int, first: int) -> Iterator[tuple[int, int]]:
    if first == count - 1:
        yield (0, count - 1)  # in an odd ring, the last node meets the first node in an extra round
        return
    for number in range(first, count if count % 2 == 0 else count - 1, 2):
        pair = sorted((number, (number + 1) % count))
        yield (pair[0], pair[1])
