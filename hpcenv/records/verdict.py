"""The verdict: what the batch node decides from the facts of all nodes.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpcenv.records.checks import PreflightSummary
from hpcenv.records.manifest import Bind, Setting, Severity
from hpcenv.records.network import NetworkDecision

Result = Literal["match", "mismatch", "unknown"]


# The first words of a finding about a node that reported nothing because srun could not start there.
SRUN_GAVE_UP = "srun could not start on this node"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One comparison that users should know about, usually because its result is not `match`.

    Attributes:
        owner: for a check, where the cause is: `node` (hardware or a service of the node) or `user` (the user's job).
        remedy: for a check, what to do about the cause.
    """

    node: str
    field: str
    locked: str
    found: str
    result: Result
    severity: Severity
    note: str = ""
    owner: Literal["", "node", "user"] = ""
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeVerdict:
    """One node's result.

    Attributes:
        compared: the number of compared fields. Only fields that the node reported can be compared.
        sif: a text for people on how the SIF was checked; empty without a SIF.
    """

    node: str
    result: Result
    compared: int
    sif: str = ""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The rendezvous of the ranks: the arguments of torchrun's c10d backend.

    `host` and `port` name the endpoint on the first node. `id` changes with every restart, so that no rank joins the
    store of an earlier attempt.
    """

    host: str
    port: int
    id: str


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """What the launch step needs on one node (`env/NODE.json`)."""

    schema: int
    run: str
    node: str
    attempt: int
    node_rank: int
    local_address: str
    rendezvous: Rendezvous
    settings: tuple[Setting, ...]
    binds: tuple[Bind, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The gate's decision on one attempt, over all nodes.

    Attributes:
        settings: node -> variables that hpcenv sets for the ranks of the node; credentials without their value.
        inherited: node -> variables of the job that the ranks of the node get and that can change results.
        launched: the nodes that train, in the order of their node ranks, without nodes that a spare node replaces.
        notes: which data were compared, and which parts of the code were not compared.
        network: the reasons of the network settings; None in an old verdict, which did not record these reasons.
        preflight: which checks ran, with their results; None if no check ran.
    """

    schema: int
    run: str
    attempt: int
    result: Result
    nodes: tuple[NodeVerdict, ...]
    findings: tuple[Finding, ...]
    rendezvous: Rendezvous | None
    settings: dict[str, tuple[Setting, ...]]
    launched: tuple[str, ...] = ()
    inherited: dict[str, tuple[Setting, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    network: NetworkDecision | None = None
    preflight: PreflightSummary | None = None

    @property
    def training_nodes(self) -> tuple[str, ...]:
        """The nodes that train. If `launched` is empty, as in a verdict without a start, these are all nodes."""
        return self.launched or tuple(node.node for node in self.nodes)

    def allows(self, attempt: int) -> bool:
        """Return whether this verdict lets the nodes of this attempt train."""
        return self.result == "match" and self.attempt == attempt

    @property
    def of_checks(self) -> bool:
        """Whether only checks stopped the run, for example of network, GPUs or files. Such findings have an owner."""
        blocking = [one for one in self.findings if one.severity == "must" and one.result == "mismatch"]
        return bool(blocking) and all(one.owner for one in blocking)
