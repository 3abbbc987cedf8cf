"""Reports of nodes in, findings out: which check, which nodes, which words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcenv.judge.checks.check_table import BY_ID
from hpcenv.judge.smoke.judge import judge, needs_pairs
from hpcenv.judge.smoke.plan import rounds
from hpcenv.records.checks import CheckOutcome
from hpcenv.records.smoke import (
    SMOKE_PHASES,
    NcclTransport,
    PhaseResult,
    SmokeNode,
    SmokePlan,
    SmokeRank,
    SmokeReport,
)


def _node(number: int) -> SmokeNode:
    address = f"10.0.0.{number}"
    return SmokeNode(
        name=f"n{number}",
        address=address,
        interface="eth0",
        interfaces={"eth0": (address,), "eth1": (f"10.9.0.{number}",)},
        speed_mbit=10_000,
        pair_port=20_000 + number,
    )


def _plan(nodes: int = 2, **changes: object) -> SmokePlan:
    plan = SmokePlan(
        schema=1,
        run="r",
        attempt=0,
        job_id="1",
        nodes=tuple(_node(number) for number in range(1, nodes + 1)),
        nproc_per_node=1,
        backend="gloo",
        port=20_000,
        seconds=10,
        start_seconds=60,
        profile="gloo",
    )
    return replace(plan, **changes)


def _phases(until: str = "", error: str = "", rate: float = 1.0) -> tuple[PhaseResult, ...]:
    found = []
    for phase in SMOKE_PHASES:
        if phase == until:
            state = "failed" if error else "running"
            return (*found, PhaseResult(phase=phase, state=state, seconds=1.0, error=error))
        found.append(PhaseResult(phase=phase, state="end", seconds=0.1, bus_gb_s=rate if phase == "bandwidth" else 0.0))
    return tuple(found)


def _report(number: int, ended: str = "done", *, until: str = "", error: str = "", **rank: object) -> SmokeReport:
    rate = float(rank.pop("rate", 1.0))  # type: ignore[arg-type]
    other = rank.pop("connections", (("10.0.0.1", "10.0.0.2"), ("10.0.0.2", "10.0.0.1"))[number - 1 : number])
    one = SmokeRank(rank=number - 1, phases=_phases(until, error, rate), done=not until, connections=other, **rank)
    return SmokeReport(schema=1, run="r", node=f"n{number}", attempt=0, ended=ended, ranks=(one,))


def _bad(
    plan: SmokePlan, *reports: SmokeReport, pairs: dict[str, SmokeReport] | None = None
) -> dict[str, CheckOutcome]:
    result = judge(plan, {report.node: report for report in reports}, pairs or {}, now=1.0)
    return {
        f"{node} {outcome.id}": outcome
        for node, checks in result.checks.items()
        for outcome in checks.others
        if outcome.state in ("failed", "unknown")
    }


def test_healthy_nodes_have_no_finding() -> None:
    assert _bad(_plan(), _report(1), _report(2)) == {}


@pytest.mark.parametrize(
    ("phase", "check", "words"),
    [
        ("init", "smoke.init", "the first process group was not formed"),
        ("correct", "smoke.correct", "larger collectives in the first process group did not"),
        ("second-group", "smoke.second-group", "the first process group works; a second one beside it does not"),
        ("bandwidth", "smoke.link", "all_reduce of more data did not end"),
    ],
)
def test_a_hang_names_group_pair_addresses_and_interfaces(phase: str, check: str, words: str) -> None:
    late = [replace(_report(number, "timeout", until=phase), moved_bytes=100) for number in (1, 2)]
    found = _bad(_plan(), *late)
    assert set(found) == {f"n1 {check}", f"n2 {check}"}
    text = found[f"n1 {check}"].found
    assert "between n1 (10.0.0.1, eth0) and n2 (10.0.0.2, eth0)" in text
    assert words in text and "within 10 s" in text and "the link is cut" in text


def test_a_slow_link_is_told_from_a_cut_one_by_its_traffic() -> None:
    late = replace(_report(1, "timeout", until="correct"), moved_bytes=1_000_000)
    found = _bad(_plan(), late, _report(2, "failed", until="correct", error="RuntimeError: Connection closed by peer"))
    assert "data still moved at 0.2 MB/s" in found["n1 smoke.correct"].found


def test_a_rank_that_ends_its_collective_itself_after_the_limit_was_late_too() -> None:
    report = _report(1, "failed", until="correct", error="RuntimeError: Timed out waiting 10000ms for recv operation")
    (rank,) = report.ranks
    phases = (*rank.phases[:-1], replace(rank.phases[-1], seconds=12.0))
    late = replace(report, ranks=(replace(rank, phases=phases),), moved_bytes=500_000)
    closed = _report(2, "failed", until="correct", error="RuntimeError: Connection closed by peer")
    found = _bad(_plan(), late, closed)["n1 smoke.correct"].found
    assert "within 10 s; data still moved at 0.1 MB/s" in found
    early = _bad(_plan(), replace(report, moved_bytes=500_000), closed)["n1 smoke.correct"].found
    assert "within" not in early and "data still moved" not in early


def test_the_earliest_phase_of_all_ranks_counts() -> None:
    found = _bad(_plan(), _report(1, "timeout", until="second-group"), _report(2, "failed", until="correct", error="x"))
    assert set(found) == {"n1 smoke.correct", "n2 smoke.correct"}


def test_a_wrong_value_is_that_of_its_node() -> None:
    wrong = _report(2, "failed", until="correct", error="WrongValue: all_reduce of 4 elements: 1 are wrong")
    closed = _report(1, "failed", until="correct", error="RuntimeError: Connection closed by peer")
    assert set(_bad(_plan(), closed, wrong)) == {"n2 smoke.correct"}


def test_a_silent_node_is_unknown_and_not_fine() -> None:
    found = _bad(_plan(), _report(1))
    assert {name: outcome.state for name, outcome in found.items()} == {"n2 smoke.init": "unknown"}


def _unreachable(number: int) -> SmokeReport:
    problem = "nothing came back from 10.0.0.1, port 20000: Connection timed out"
    return replace(_report(number, "unreachable", until="start"), problem=problem, ranks=())


@pytest.mark.parametrize("ended", ["other-ended", "not-started", None])
def test_a_node_that_waited_in_vain_does_not_hide_the_pair(ended: str | None) -> None:
    waited = [] if ended is None else [replace(_report(1, ended, until="start"), ranks=())]
    found = _bad(_plan(), *waited, _unreachable(2))
    assert {name: outcome.state for name, outcome in found.items()} == {
        "n1 smoke.init": "failed",
        "n2 smoke.init": "failed",
    }
    text = found["n1 smoke.init"].found
    assert "between n1 (10.0.0.1, eth0) and n2 (10.0.0.2, eth0): the ranks could not meet: nothing came back" in text


def test_nodes_beside_an_unreachable_pair_stay_unknown() -> None:
    found = _bad(
        _plan(4), _report(1, "other-ended", until="init"), _unreachable(2), _report(3, "not-started", until="init")
    )
    states = {name: outcome.state for name, outcome in found.items()}
    assert states == {
        "n1 smoke.init": "failed",
        "n2 smoke.init": "failed",
        "n3 smoke.init": "unknown",
        "n4 smoke.init": "unknown",
    }


def test_the_end_of_another_node_is_no_failure_of_its_own() -> None:
    late = replace(_report(1, "timeout", until="correct"), moved_bytes=100)
    found = _bad(_plan(), late, _report(2, "other-ended", until="correct"))
    assert set(found) == {"n1 smoke.correct", "n2 smoke.correct"}
    not_started = _report(1, "not-started", until="init")
    assert set(_bad(_plan(), not_started, _report(2, "other-ended", until="init"))) == {"n1 smoke.init"}


def test_a_connection_over_another_interface_is_named() -> None:
    wrong = _report(1, connections=(("10.9.0.1", "10.9.0.2"),))
    found = _bad(_plan(), wrong, _report(2))["n1 smoke.transport"]
    assert "10.9.0.1 (eth1)" in found.found and "eth0" in found.limit


@pytest.mark.parametrize(("rate", "checks"), [(0.5, set()), (0.02, {"smoke.bandwidth"}), (0.002, {"smoke.link"})])
def test_bandwidth_is_compared_with_the_adapter(rate: float, checks: set[str]) -> None:
    found = _bad(_plan(), _report(1, rate=rate), _report(2, rate=rate))
    assert {name.split()[1] for name in found} == checks


def test_tcp_in_place_of_infiniband_is_a_failure() -> None:
    plan = _plan(backend="nccl", profile="ib", rates_gbit=0.0)
    good = NcclTransport(version="2.27.3", network="IB", adapters=("mlx5_0:1/IB",), via={"NET/IB": 4}, channels=4)
    bad = replace(good, network="Socket", adapters=("eth0",), via={"NET/Socket": 4})
    found = _bad(plan, _report(1, transport=good), _report(2, transport=bad))
    assert found["n2 smoke.transport"].state == "failed"
    assert _bad(plan, _report(1, transport=good), _report(2, transport=good)) == {}


def test_what_nccls_own_diagnostics_found_is_a_warning_of_its_node() -> None:
    plan = _plan(backend="nccl")
    good = "[OK] p2p: verified P2P access in both directions between every GPU pair (56 peer accesses)"
    bad = "[INFO] p2p: only 52/56 GPU-to-GPU peer accesses passed verification"
    first, second = (node.name for node in plan.nodes)
    reports = {first: replace(_report(0), diagnostics=(good, bad)), second: _report(1)}
    found = judge(plan, reports, {}, now=0).checks
    outcomes = {name: {one.id: one for one in checks.results()}["smoke.diagnostics"] for name, checks in found.items()}
    assert (outcomes[first].state, outcomes[first].found) == ("failed", bad)
    assert (outcomes[second].state, outcomes[second].found) == ("fine", good)
    check = BY_ID["smoke.diagnostics"]
    assert (check.severity, check.owner) == ("warn", "node")
    silent = judge(plan, {first: _report(0), second: _report(1)}, {}, now=0).checks[first]
    assert {one.id: one.state for one in silent.results()}["smoke.diagnostics"] == "not-run"


def test_pairs_are_needed_after_a_failure_of_more_than_two_nodes() -> None:
    late = {f"n{number}": _report(number, "timeout", until="init", connections=()) for number in (1, 2, 3)}
    assert needs_pairs(_plan(3), late)
    assert not needs_pairs(_plan(), {name: late[name] for name in ("n1", "n2")})


def test_the_pair_that_fails_alone_is_named() -> None:
    plan = _plan(3)
    late = [_report(number, "timeout", until="init", connections=()) for number in (1, 2, 3)]
    pairs = {node.name: _pairs_of(number) for number, node in enumerate(plan.nodes)}
    found = _bad(plan, *late, pairs=pairs)
    assert set(found) == {"n2 smoke.init", "n3 smoke.init"}
    assert "between n2 (10.0.0.2, eth0) and n3 (10.0.0.3, eth0)" in found["n2 smoke.init"].found


def _pairs_of(number: int) -> SmokeReport:
    pairs = [pair for one in rounds(3) for pair in one if number in pair]
    phases = tuple(
        PhaseResult(phase=f"pair-{a}-{b}", state="running" if (a, b) == (1, 2) else "end", seconds=1.0, bus_gb_s=1.0)
        for a, b in pairs
    )
    rank = SmokeRank(rank=number, phases=phases, done=True)
    return SmokeReport(schema=1, run="r", node=f"n{number + 1}", attempt=0, ended="done", ranks=(rank,))


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8, 9, 16, 33])
def test_rounds_have_each_node_once_and_reach_all(count: int) -> None:
    made = rounds(count)
    for one in made:
        numbers = [number for pair in one for number in pair]
        assert len(numbers) == len(set(numbers)) and all(a < b < count for a, b in one)
    pairs = {pair for one in made for pair in one}
    assert {number for pair in pairs for number in pair} == set(range(count))
    assert len(pairs) == (count * (count - 1) // 2 if count <= 8 else count)


def test_ranks_that_do_not_end_after_their_last_collective_are_no_broken_network() -> None:
    late = replace(_report(1, "timeout"), problem="rank 0 gave its result, but its process did not end")
    found = _bad(_plan(), late, _report(2))
    assert set(found) == {"n1 smoke.init"}
    assert found["n1 smoke.init"].state == "unknown"
    assert found["n1 smoke.init"].found == (
        "every collective gave the known result; then rank 0 gave its result, but its process did not end: "
        "the network is fine; look at smoke/ranks/n1/output.log"
    )
