"""The smoke test of a run: its plan, what each node saw, and the joined result.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpcenv.records.checks import NodeChecks
from hpcenv.records.verdict import Result

# How the smoke test ended on a node: SmokeReport explains each word.
SmokeEnd = Literal["done", "failed", "timeout", "unreachable", "not-started", "stopped", "other-ended"]

# The checks of the smoke test, in the order in which they run.
SMOKE_PHASES = ("init", "correct", "second-group", "bandwidth")


@dataclass(frozen=True, kw_only=True)
class SmokeNode:
    """One node that takes part in the smoke test.

    Attributes:
        address, interface: the address and interface that hpcenv chose for sockets on this node.
        interfaces: interface -> its addresses, for all interfaces of the node that have an address.
        speed_mbit: speed of `interface`; None if the kernel does not report the speed.
        pair_port: TCP port on which this node can listen for one other node.
    """

    name: str
    address: str
    interface: str
    interfaces: dict[str, tuple[str, ...]]
    speed_mbit: int | None
    pair_port: int


@dataclass(frozen=True, kw_only=True)
class SmokePlan:
    """What the nodes test (`smoke/plan.json`).

    Attributes:
        nodes: in the order of their node ranks.
        port: TCP port of the test's rendezvous on the first node. The training uses another port.
        seconds: time limit of each phase.
        start_seconds: time limit for the start of the container and for `import torch`.
        profile: profile of the network decision.
        network: `NCCL_NET` of the ranks; empty if not set.
        gpudirect: whether the network adapter can reach GPU memory on every node.
        rates_gbit: sum of the rates of all active RDMA and Slingshot adapters of a node; 0 if the value is unknown.
        skipped: ids of checks that must not run.
        settings: node -> variables of its ranks whose effect is visible in NCCL's log or in the loaded libraries.
    """

    schema: int
    run: str
    attempt: int
    job_id: str
    nodes: tuple[SmokeNode, ...]
    nproc_per_node: int
    backend: Literal["nccl", "gloo"]
    port: int
    seconds: float
    start_seconds: float
    profile: str
    network: str = ""
    gpudirect: bool = False
    rates_gbit: float = 0.0
    skipped: tuple[str, ...] = ()
    settings: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NcclTransport:
    """What NCCL wrote about its transport in one rank.

    Attributes:
        network: NAME in NCCL's line `Using network NAME`; empty if NCCL used no network.
        adapters: the adapters in the line `NET/IB : Using`, or the selected provider.
        via: transport (`NET/IB`, `P2P/CUMEM`, `SHM`) -> number of channels.
        gpudirect: whether a channel has GDRDMA.
        channels: number of collective channels; 0 if this number is not in the log.
        nvls: whether NVLS multicast is available: `yes` or `no`; empty if this is not in the log.
        errors: lines at the level WARN, at most a few.
    """

    version: str = ""
    network: str = ""
    adapters: tuple[str, ...] = ()
    via: dict[str, int] = field(default_factory=dict)
    gpudirect: bool = False
    channels: int = 0
    nvls: str = ""
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PhaseResult:
    """One phase of the test in one rank, or the test of one pair.

    Attributes:
        state: `end`, `failed`, or `running`, which means that the phase has begun and nothing more is known.
        seconds: how long the phase took. If the phase did not end, how long the test waited for the end.
        bus_gb_s: bus bandwidth of all_reduce, in 1e9 bytes per second; 0 if not measured.
    """

    phase: str
    state: Literal["end", "failed", "running"]
    seconds: float
    error: str = ""
    bus_gb_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SmokeRank:
    """What one rank reported.

    Attributes:
        connections: both addresses of each TCP connection to other ranks, after the first process group was made.
        not_run: collective -> why it was not tested.
        transport: what NCCL's log says about the transport; None with another backend, or without a log.
        libraries: libraries of NCCL and its plugins that the rank had loaded, from /proc/self/maps.
    """

    rank: int
    phases: tuple[PhaseResult, ...] = ()
    done: bool = False
    torch: str = ""
    connections: tuple[tuple[str, ...], ...] = ()
    not_run: dict[str, str] = field(default_factory=dict)
    transport: NcclTransport | None = None
    libraries: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SmokeReport:
    """What one node reported (`smoke/NODE.json`, and `smoke/pairs/NODE.json` for the pairs).

    Attributes:
        ended: how the test ended on this node. `done`: every rank gave its result and has ended. `failed`: a rank ended
            without a result. `timeout`: a phase took longer than its limit, and the ranks were killed. `unreachable`:
            no packet came back from the first node. `not-started`: the container or torch did not start. `stopped`: a
            signal asked this step to end. `other-ended`: another node could not continue, so the ranks of this node
            waited for its ranks.
        problem: the reason for the value of `ended`; empty for `done`.
        moved_bytes: how many bytes the interface sent and received in the last seconds before the ranks were killed;
            None if the value is unknown.
        ras: what NCCL's RAS service reported about a hang, or why the service was not asked.
        diagnostics: lines of NCCL's diagnostics; empty if NCCL has no diagnostics (before 2.31).
        seconds: time from the start of the container to the end of the test.
    """

    schema: int
    run: str
    node: str
    attempt: int
    ended: SmokeEnd
    problem: str = ""
    ranks: tuple[SmokeRank, ...] = ()
    moved_bytes: int | None = None
    ras: str = ""
    diagnostics: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SmokeResult:
    """The result over all nodes (`smoke.json`).

    Attributes:
        tested: when the test ran, in seconds since the epoch, by the clock of the batch node.
        checks: node -> the results of the checks `smoke.*`.
        result: the result for the run, by the severities of the run.
        seconds: part of the test -> how long this part took on the slowest rank or node.
    """

    schema: int
    run: str
    attempt: int
    result: Result
    tested: float
    checks: dict[str, NodeChecks] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
