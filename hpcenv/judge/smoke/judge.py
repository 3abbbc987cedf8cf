"""Judge the smoke test from the reports of all nodes: what failed, between which nodes, in which group. Pure.

Runs on: COMPUTE NODE (the batch node). Standard library only.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from hpcenv.judge.smoke.effect import ignored
from hpcenv.judge.smoke.nccl_log import fits
from hpcenv.judge.smoke.plan import rounds
from hpcenv.records.checks import CheckOutcome, CheckState, NodeChecks
from hpcenv.records.codec import SCHEMA
from hpcenv.records.smoke import (
    SMOKE_PHASES,
    NcclTransport,
    PhaseResult,
    SmokeNode,
    SmokePlan,
    SmokeRank,
    SmokeReport,
    SmokeResult,
)
from hpcenv.text import plural

# The highest rate that Gloo is expected to use. Gloo copies with one thread, so it does not use the full rate of a
# faster adapter. This is not a fault.
_GLOO_GBIT = 10.0
# Shares of the adapter's rate. Below the first share, all_reduce is slow. Below the second share, the link counts as
# broken. For NCCL, vetnode and stas00/ml-engineering require 60 to 80 % on healthy nodes. Gloo needs the CPU, which
# other work uses too, so Gloo is far slower. hpcenv chose the second shares: a link that is 10 times (with Gloo 200
# times) slower than its adapter is broken, or is the wrong link.
_SLOW = {"nccl": 0.6, "gloo": 0.03}
_BROKEN = {"nccl": 0.1, "gloo": 0.005}
# If the rate of a pair is below this share of the median of all pairs, the message names the pair. NCCL's diagnostics
# (2.31) use this limit.
_OFF_MEDIAN = 0.7

# If a link still transferred more bytes per second than this when the time limit came, it is slow, but not cut.
_STILL_MOVING = 20_000
_COUNTED_SECONDS = 5.0


def needs_pairs(plan: SmokePlan, reports: Mapping[str, SmokeReport]) -> bool:
    """Return whether pairs of nodes must be tested to find the fault. With two nodes, the pair is already known."""
    if len(plan.nodes) < 3 or set(reports) != {node.name for node in plan.nodes}:
        return False
    endings = {report.ended for report in reports.values()}
    if endings & {"stopped", "not-started"}:
        return False
    return bool(endings - {"done"}) or _bandwidth_is(plan, reports) == "broken"


def judge(
    plan: SmokePlan,
    reports: Mapping[str, SmokeReport],
    pairs: Mapping[str, SmokeReport],
    *,
    now: float,
) -> SmokeResult:
    """Return the result over all nodes.

    Args:
        plan: the plan of the test.
        reports: node -> its report; nodes may be missing.
        pairs: node -> its report on the test of pairs; empty if pairs were not tested.
        now: the present time, in seconds since the epoch.
    """
    rows = [row for row in _rows(plan, reports, pairs) if row[1].id not in plan.skipped]
    failed = {name: [outcome for node, outcome in rows if node == name] for name in _names(plan)}
    fine = [] if any(outcome.id in _BLOCKING for _, outcome in rows) else list(_fine(plan, reports))
    checks = {}
    for name, own in failed.items():
        bad = {outcome.id for outcome in own}
        good = [outcome for outcome in fine if outcome.id not in bad]
        checks[name] = NodeChecks.of([*own, *good], seconds=reports[name].seconds if name in reports else 0.0)
    return SmokeResult(
        schema=SCHEMA,
        run=plan.run,
        attempt=plan.attempt,
        result="unknown",
        tested=now,
        checks=checks,
        seconds=_seconds(reports),
    )


# After a failure in one of these phases, the results of the other phases are unknown.
_BLOCKING = ("smoke.init", "smoke.correct", "smoke.second-group")

_OutcomeRow = tuple[str, CheckOutcome]


def _names(plan: SmokePlan) -> tuple[str, ...]:
    return tuple(node.name for node in plan.nodes)


def _rows(
    plan: SmokePlan, reports: Mapping[str, SmokeReport], pairs: Mapping[str, SmokeReport]
) -> Iterator[_OutcomeRow]:
    failed = [report for report in reports.values() if report.ended != "done"]
    named = set()
    # A report that ended with `unreachable` names a pair of nodes. The other nodes may only have waited for this pair.
    if any(report.ended == "unreachable" for report in failed):
        for row in _failure(plan, reports, failed, pairs):
            named.add(row[0])
            yield row
    silent = [node.name for node in plan.nodes if node.name not in reports]
    for name in silent:
        if name not in named:
            yield _row(name, "smoke.init", "a report", "this node reported nothing", state="unknown")
    unusable = [report for report in reports.values() if report.ended in ("not-started", "stopped")]
    for report in unusable:
        if report.node not in named:
            yield _row(report.node, "smoke.init", "a start like the training's", report.problem, state="unknown")
    if named or silent or unusable:
        return
    yield from _diagnostics(reports)
    if failed:
        yield from _failure(plan, reports, failed, pairs)
        return
    yield from _interfaces(plan, reports)
    yield from _transports(plan, reports)
    yield from _bandwidth(plan, reports, pairs)


def _diagnostics(reports: Mapping[str, SmokeReport]) -> Iterator[_OutcomeRow]:
    """Yield the problems that NCCL's diagnostics found. Each line from NCCL already names GPUs and ranks."""
    for name, report in reports.items():
        found = [line for line in report.diagnostics if not line.startswith("[OK]")]
        if found:
            yield _row(name, "smoke.diagnostics", "[OK] only", "; ".join(found))


def _row(node: str, check: str, wanted: str, found: str, *, state: CheckState = "failed") -> _OutcomeRow:
    return node, CheckOutcome(id=check, state=state, found=found, limit=wanted)


# -- a failure: where and between whom ---------------------------------------------------------


def _failure(
    plan: SmokePlan,
    reports: Mapping[str, SmokeReport],
    failed: Sequence[SmokeReport],
    pairs: Mapping[str, SmokeReport],
) -> Iterator[_OutcomeRow]:
    wrong = [(report.node, phase) for report in reports.values() for phase in _wrong_values(report)]
    for name, bad in wrong:
        check = _check_of(bad.phase)
        yield _row(name, check, "the known result", bad.error)
    if wrong:
        return
    phase = _earliest(reports.values())
    if not phase:
        for report in failed:
            where = f"the network is fine; look at smoke/ranks/{report.node}/output.log"
            found = f"every collective gave the known result; then {report.problem}: {where}"
            yield _row(report.node, "smoke.init", "ranks that end", found, state="unknown")
        return
    wanted = f"an end within {plan.seconds:g} s"
    check = _check_of(phase)
    how = _how(plan, phase, failed)
    named = _pairs_named(plan, failed, pairs)
    for pair, why in named:
        found = f"{_pair_in_words(pair)}: {how}{why}"
        for node in pair:
            yield _row(node.name, check, wanted, found)
    if not named:
        found = f"{how}; each pair of nodes alone works" if pairs else how
        for node in plan.nodes:
            yield _row(node.name, check, wanted, found)


def _check_of(phase: str) -> str:
    # A slow link is only a warning, but an all_reduce that does not end is a failure.
    return "smoke.link" if phase == "bandwidth" else f"smoke.{phase}"


def _wrong_values(report: SmokeReport) -> Iterator[PhaseResult]:
    for rank in report.ranks:
        yield from (phase for phase in rank.phases if phase.error.startswith("WrongValue:"))


def _earliest(reports: Iterable[SmokeReport]) -> str:
    """Return the first phase that any rank did not finish; empty if every rank finished all phases."""
    places = [_place(rank) for report in reports for rank in report.ranks]
    return min((place for place in places if place), key=SMOKE_PHASES.index, default="" if places else "init")


def _place(rank: SmokeRank) -> str:
    """Return the phase in which a rank stopped; empty if the rank finished all phases."""
    ended = {phase.phase for phase in rank.phases if phase.state == "end"}
    return next((phase for phase in SMOKE_PHASES if phase not in ended), "")


def _how(plan: SmokePlan, phase: str, failed: Sequence[SmokeReport]) -> str:
    """Describe the failure: which collective did not end, in which group, and whether data were still transferred."""
    if any(report.ended == "unreachable" for report in failed):
        first = next(report for report in failed if report.ended == "unreachable")
        return f"the ranks could not meet: {first.problem}"
    what = {
        "init": "the first process group was not formed, or one all_reduce of one element did not end",
        "correct": "the first all_reduce ended, and larger collectives in the first process group did not",
        "second-group": "the first process group works; a second one beside it does not",
        "bandwidth": "collectives are right, and all_reduce of more data did not end",
    }[phase]
    late = [report for report in failed if report.ended == "timeout" or _reached_limit(plan, phase, report)]
    limit = f" within {plan.seconds:g} s" if late else ""
    return f"{what}{limit}{_traffic(late)}{_said(phase, failed)}"


def _reached_limit(plan: SmokePlan, phase: str, report: SmokeReport) -> bool:
    """Return whether a rank itself ended its collective at the time limit. Later, the node would end the rank."""
    return any(
        one.phase == phase and one.state == "failed" and one.seconds >= plan.seconds
        for rank in report.ranks
        for one in rank.phases
    )


def _traffic(late: Sequence[SmokeReport]) -> str:
    moved = [report.moved_bytes for report in late if report.moved_bytes is not None]
    if not moved:
        return ""
    rate = max(moved) / _COUNTED_SECONDS
    if rate >= _STILL_MOVING:
        return f"; data still moved at {_rate(rate)} when the limit came: the link is slow"
    return "; no data moved when the limit came: the link is cut, or packets are dropped"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e6:.3g} MB/s"


def _said(phase: str, failed: Sequence[SmokeReport]) -> str:
    """Return the error of a rank that ended its collective itself.

    `closed by peer` means that a different rank ended.
    """
    errors = [
        p.error for report in failed for rank in report.ranks for p in rank.phases if p.phase == phase and p.error
    ]
    first = [error for error in errors if "closed by peer" not in error.lower()] or errors
    asked = next((report.ras for report in failed if report.ras), "")
    said = f" ({_one_line(first[0])})" if first else ""
    return said + (f"; NCCL's RAS service: {_one_line(asked)}" if asked else "")


def _one_line(text: str, longest: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[:longest]}..."


# -- pairs --------------------------------------------------------------------------------------

_NodePair = tuple[SmokeNode, ...]


def _pairs_named(
    plan: SmokePlan, failed: Sequence[SmokeReport], pairs: Mapping[str, SmokeReport]
) -> list[tuple[_NodePair, str]]:
    """Return the pairs of nodes between which the fault is, each with the result of the test of this pair."""
    if len(plan.nodes) <= 2:
        return [(plan.nodes, "")]
    named: list[tuple[_NodePair, str]] = []
    for pair, found in _tested_pairs(plan, pairs):
        bad = [phase for phase in found if phase.state != "end"]
        if bad or not found:
            error = next((_one_line(phase.error, 120) for phase in bad if phase.error), "no answer")
            named.append((pair, f"; alone: {error}"))
    if named:
        return named
    unreached = [report.node for report in failed if report.ended == "unreachable"]
    by_name = {node.name: node for node in plan.nodes}
    return [] if pairs else [((plan.nodes[0], by_name[name]), "") for name in unreached]


def _tested_pairs(
    plan: SmokePlan, pairs: Mapping[str, SmokeReport]
) -> Iterator[tuple[_NodePair, tuple[PhaseResult, ...]]]:
    """Yield each pair of nodes that was tested, with the results of both nodes."""
    if not pairs:
        return
    of_node = {
        report.node: {phase.phase: phase for rank in report.ranks for phase in rank.phases} for report in pairs.values()
    }
    for one in rounds(len(plan.nodes)):
        for first, second in one:
            pair = (plan.nodes[first], plan.nodes[second])
            name = f"pair-{first}-{second}"
            yield pair, tuple(of_node[n.name][name] for n in pair if name in of_node.get(n.name, {}))


def _pair_in_words(pair: _NodePair) -> str:
    words = [f"{node.name} ({node.address}, {node.interface or 'unknown interface'})" for node in pair]
    return words[0] if len(words) == 1 else f"between {words[0]} and {words[1]}"


# -- everything ended: over which network, and how fast -----------------------------------------


def _interfaces(plan: SmokePlan, reports: Mapping[str, SmokeReport]) -> Iterator[_OutcomeRow]:
    """Compare the real addresses of Gloo's connections with the chosen interface."""
    if plan.backend != "gloo" or plan.profile.startswith("single"):
        return
    chosen = {address for node in plan.nodes for address in node.interfaces.get(node.interface, ())}
    for node in plan.nodes:
        own = node.interfaces.get(node.interface, ())
        rows = [pair for rank in reports[node.name].ranks for pair in rank.connections]
        other = sorted({there for _, there in rows} - chosen)
        mine = sorted({here for here, _ in rows} - set(own))
        for kind, addresses in (("to", other), ("from", mine)):
            if addresses and own:
                wanted = f"connections over {node.interface} ({', '.join(own)})"
                yield _row(node.name, "smoke.transport", wanted, f"connections {kind} {_addresses(node, addresses)}")


def _addresses(node: SmokeNode, addresses: Sequence[str]) -> str:
    names = {address: name for name, own in node.interfaces.items() for address in own}
    return ", ".join(f"{address} ({names[address]})" if address in names else address for address in addresses[:4])


def _transports(plan: SmokePlan, reports: Mapping[str, SmokeReport]) -> Iterator[_OutcomeRow]:
    if plan.backend != "nccl":
        return
    of_node = {name: [rank.transport for rank in report.ranks] for name, report in reports.items()}
    for name, found in of_node.items():
        known = [transport for transport in found if transport is not None and transport.version]
        if len(known) < len(found):
            yield _row(name, "smoke.transport", "NCCL's log", "a rank wrote no log", state="unknown")
            continue
        if len(plan.nodes) > 1:
            yield from _wrong_network(plan, name, known)
        yield from _without_effect(plan, name, reports[name])
    if len(plan.nodes) > 1:
        yield from _different(of_node)


def _without_effect(plan: SmokePlan, node: str, report: SmokeReport) -> Iterator[_OutcomeRow]:
    """Report the settings that NCCL ignored, each setting once for each node."""
    found = {one: None for rank in report.ranks for one in ignored(plan.settings.get(node, {}), rank)}
    for setting, wanted, did in found:
        yield _row(node, "smoke.transport", f"{wanted} ({setting})", did)


def _wrong_network(plan: SmokePlan, node: str, found: Sequence[NcclTransport]) -> Iterator[_OutcomeRow]:
    for transport in found:
        fit, wanted = fits(transport, profile=plan.profile, wanted=plan.network)
        if not fit:
            used = transport.network or "no network"
            why = f" ({_one_line(transport.errors[0], 160)})" if transport.errors else ""
            yield _row(node, "smoke.transport", f"network {wanted}", f"network {used}{why}")
            return
    over_network = any(kind.startswith("NET/") for transport in found for kind in transport.via)
    rdma = plan.profile in ("ib", "roce2", "efa", "slingshot")
    if plan.gpudirect and rdma and over_network and not any(transport.gpudirect for transport in found):
        wanted = "channels with GDRDMA, which driver and adapter offer"
        found_words = "none: data pass through the memory of the host"
        yield _row(node, "smoke.gpudirect", wanted, found_words)


def _different(of_node: Mapping[str, Sequence[NcclTransport | None]]) -> Iterator[_OutcomeRow]:
    """Compare the nodes with each other. One node without an adapter or without GPUDirect makes all nodes slow."""
    seen: dict[tuple[str, ...], list[str]] = {}
    for name, found in of_node.items():
        known = [transport for transport in found if transport is not None]
        words: tuple[str, ...] = (
            ", ".join(sorted({one.network for one in known})),
            ", ".join(map(str, sorted({len(one.adapters) for one in known}))),
            "with" if any(one.gpudirect for one in known) else "without",
            ", ".join(map(str, sorted({one.channels for one in known}))),
        )
        seen.setdefault(words, []).append(name)
    if len(seen) < 2:
        return
    usual = max(seen, key=lambda words: len(seen[words]))
    for words, names in seen.items():
        for name in names if words != usual else ():
            yield _row(name, "smoke.transport", _in_words(usual), _in_words(words))


def _in_words(words: tuple[str, ...]) -> str:
    network, adapters, direct, channels = words
    return f"network {network or 'none'}, {adapters} adapters, {direct} GPUDirect, {channels} channels"


def _bus_gb_s(reports: Mapping[str, SmokeReport]) -> float:
    """Return the lowest bus bandwidth that a rank reports, in 1e9 bytes per second; 0 if no bandwidth is known."""
    rates = [p.bus_gb_s for report in reports.values() for rank in report.ranks for p in rank.phases if p.bus_gb_s]
    return min(rates, default=0.0)


def _link_gb_s(plan: SmokePlan) -> float:
    """Return the rate that the adapters of every node can reach, in 1e9 bytes per second; 0 if the rate is unknown."""
    speeds = [node.speed_mbit for node in plan.nodes]
    sockets = min((speed for speed in speeds if speed is not None), default=0) / 1000 if None not in speeds else 0.0
    if plan.backend == "gloo":
        return min(sockets, _GLOO_GBIT) / 8
    return (sockets if plan.profile == "tcp" else plan.rates_gbit) / 8


def _bandwidth_is(plan: SmokePlan, reports: Mapping[str, SmokeReport]) -> str:
    found, link = _bus_gb_s(reports), _link_gb_s(plan)
    if len(plan.nodes) < 2 or not link or not found:
        return "unknown"
    if found < _BROKEN[plan.backend] * link:
        return "broken"
    return "slow" if found < _SLOW[plan.backend] * link else "fine"


def _bandwidth(
    plan: SmokePlan, reports: Mapping[str, SmokeReport], pairs: Mapping[str, SmokeReport]
) -> Iterator[_OutcomeRow]:
    state = _bandwidth_is(plan, reports)
    if state not in ("slow", "broken"):
        return
    found, link = _bus_gb_s(reports), _link_gb_s(plan)
    share = (_BROKEN if state == "broken" else _SLOW)[plan.backend]
    wanted = f"at least {_gigabytes(share * link)}: {share:.0%} of the adapter's {_gigabytes(link)}"
    named = _slow_pairs(plan, pairs) if len(plan.nodes) > 2 else [(plan.nodes, "")]
    check = "smoke.link" if state == "broken" else "smoke.bandwidth"
    text = f"all_reduce at {_gigabytes(found)} bus bandwidth"
    for pair, why in named or [(plan.nodes, "")]:
        where = f"{_pair_in_words(pair)}: " if len(pair) <= 2 else ""
        for node in pair:
            yield _row(node.name, check, wanted, f"{where}{text}{why}")


def _slow_pairs(plan: SmokePlan, pairs: Mapping[str, SmokeReport]) -> list[tuple[_NodePair, str]]:
    tested = [(pair, min((p.bus_gb_s for p in found), default=0.0)) for pair, found in _tested_pairs(plan, pairs)]
    if not tested:
        return []
    median = statistics.median(rate for _, rate in tested)
    return [
        (pair, f"; alone {_gigabytes(rate)}, the median of all pairs is {_gigabytes(median)}")
        for pair, rate in tested
        if rate < _OFF_MEDIAN * median
    ]


def _gigabytes(rate: float) -> str:
    return f"{rate:.3g} GB/s" if rate >= 0.1 else f"{rate * 1000:.3g} MB/s"


# -- what is fine, for people -------------------------------------------------------------------


def _fine(plan: SmokePlan, reports: Mapping[str, SmokeReport]) -> Iterator[CheckOutcome]:
    """Yield the measured values. If a value was not measured, yield the reason."""
    ranks = [rank for report in reports.values() for rank in report.ranks]
    yield _good("smoke.init", f"{plural(len(ranks), 'rank')}, {_seconds(reports).get('init', 0):.2f} s")
    missing = {name: why for rank in ranks for name, why in rank.not_run.items()}
    ran = [name for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all") if name not in missing]
    not_run = "".join(f"; not run: {why}" for why in missing.values())
    yield _good("smoke.correct", f"every value of {', '.join(ran)} is right{not_run}")
    yield _good("smoke.second-group", "a second process group works beside the first")
    alone = "one rank" if len(ranks) == 1 else ""
    transport = "" if alone else _transport_in_words(plan, ranks)
    yield _good("smoke.transport", transport) if transport else _absent("smoke.transport", alone or "one node")
    direct = plan.backend == "nccl" and plan.gpudirect and len(plan.nodes) > 1
    text = "the channels between nodes have it" if direct else "no GPUs and adapters that offer it, or one node"
    yield _good("smoke.gpudirect", text) if direct else _absent("smoke.gpudirect", text)
    told = [line for report in reports.values() for line in report.diagnostics if line.startswith("[OK]")]
    none = "this NCCL has none: 2.31 and newer have them" if plan.backend == "nccl" else "the backend is gloo"
    yield _good("smoke.diagnostics", "; ".join(told)) if told else _absent("smoke.diagnostics", none)
    found, link = _bus_gb_s(reports), _link_gb_s(plan)
    text = f"all_reduce at {_gigabytes(found)} bus bandwidth"
    if alone or _bandwidth_is(plan, reports) == "unknown":
        why = alone or f"{text}; no limit for {'one node' if len(plan.nodes) == 1 else 'adapters of unknown speed'}"
        yield _absent("smoke.link", why)
        yield _absent("smoke.bandwidth", why)
        return
    yield _good("smoke.link", text)
    yield _good("smoke.bandwidth", f"{text}, the adapter has {_gigabytes(link)}")


def _good(check: str, found: str) -> CheckOutcome:
    return CheckOutcome(id=check, state="fine", found=found)


def _absent(check: str, why: str) -> CheckOutcome:
    return CheckOutcome(id=check, state="not-run", found=why)


def _transport_in_words(plan: SmokePlan, ranks: Sequence[SmokeRank]) -> str:
    if plan.backend == "gloo":
        names = sorted({node.interface for node in plan.nodes if node.interface})
        return f"Gloo over TCP, interface {', '.join(names)}" if names and len(plan.nodes) > 1 else ""
    found = [rank.transport for rank in ranks if rank.transport is not None]
    if not found:
        return ""
    kinds = sorted({kind for transport in found for kind in transport.via})
    network = ", ".join(sorted({transport.network for transport in found if transport.network})) or "none"
    direct = sum(1 for transport in found if transport.gpudirect)
    return f"network {network}; via {', '.join(kinds) or 'nothing'}; GPUDirect on {direct} of {len(found)} ranks"


def _seconds(reports: Mapping[str, SmokeReport]) -> dict[str, float]:
    """Return phase -> seconds on the slowest rank, and `all` -> seconds of the whole test on the slowest node."""
    found: dict[str, float] = {}
    for report in reports.values():
        for phase in (phase for rank in report.ranks for phase in rank.phases if phase.state == "end"):
            found[phase.phase] = round(max(found.get(phase.phase, 0.0), phase.seconds), 3)
        found["all"] = max(found.get("all", 0.0), report.seconds)
    return found
