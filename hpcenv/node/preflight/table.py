"""The table of preflight checks: what each one measures, its limit, who has to act, and what to do. Data only.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

`project/fields.py` takes the severities from here into its table of fields, so that [policy] can change them. The
functions that measure are beside this file; docs/reference/checks.md is written from this table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hpcenv.records.manifest import Manifest, PreflightLevel, PreflightOptions, Severity

LEVELS: tuple[PreflightLevel, ...] = ("off", "quick", "full", "deep")

Owner = Literal["node", "user"]

# Where a check runs:
#   host       on every node, before the verdict
#   nodes      on the batch node, from what all nodes reported
#   container  on every node after the verdict, inside the environment
#   smoke      on all nodes together after the verdict, started as the training will be
CheckPlace = Literal["host", "nodes", "container", "smoke"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check.

    Attributes:
        id: in `--skip-check`, [policy], records and tables.
        measures: what is measured, and how.
        limit: what it must be.
        why: what goes wrong otherwise.
        severity: of a failure, before any [policy]: `must` stops the job.
        owner: who can remove the cause: `node` is the hardware or a service of the node, `user` is the job.
        level: from which level on it runs.
        place: where it runs.
        cost: what it costs, as text.
        seconds: time limit; after it the result is unknown, or a failure where the limit is what is measured.
        source: where the limit comes from, with its date.
        remedy: what to do.
        gpus: it applies to jobs with GPUs only.
        if_unknown: severity of a result that could not be measured, where the check itself is no `must`.
    """

    id: str
    measures: str
    limit: str
    why: str
    severity: Severity
    owner: Owner
    level: PreflightLevel
    place: CheckPlace
    cost: str
    seconds: float
    source: str
    remedy: str
    gpus: bool = False
    if_unknown: Severity | None = None


_EXCLUDE = "tell the site's support, and submit with --exclude NODE, or with --spare 1"
_CLUSTER = "tell the site's support: it concerns the node, not your job"

CHECKS: tuple[Check, ...] = (
    # -- limits of a process ---------------------------------------------------------------
    Check(
        id="sys.nofile",
        measures="how many files a process may open: the soft limit RLIMIT_NOFILE of the step",
        limit="at least 1024, and 4 for each rank of the job",
        why="the rendezvous keeps a connection to every rank; then: Too many open files",
        severity="warn",
        owner="user",
        level="quick",
        place="host",
        cost="< 1 ms",
        seconds=1,
        source="NCCL user guide, Troubleshooting, system limits (2.30, 2026-11); the factor is hpcenv's",
        remedy="`ulimit -n 65536` in the shell before hpcenv submit: Slurm passes limits on (PropagateResourceLimits)",
    ),
    Check(
        id="sys.affinity",
        measures="how many CPU cores the step may use, against the ranks of the node",
        limit="a core for each rank",
        why="ranks that share one core wait for each other in every operation, data loaders too",
        severity="warn",
        owner="user",
        level="quick",
        place="host",
        cost="< 1 ms",
        seconds=1,
        source="PyTorch, Performance Tuning Guide, CPU affinity (2.13); nccl-tests#300 (2025-03)",
        remedy="ask for cores: --cpus N; if you did: --srun cpu-bind=none, or see task/affinity of this cluster",
    ),
    # -- smoke test --------------------------------------------------------------------------
    Check(
        id="smoke.init",
        measures="a process group of all ranks, started as the training will be, and one all_reduce of one element",
        limit="an end within 90 s",
        why="the training would hang at its first collective until a watchdog ends it, and name no node",
        severity="must",
        owner="node",
        level="full",
        place="smoke",
        cost="the start of a job without work: 5 to 20 s",
        seconds=90,
        source="stas00/ml-engineering, torch-distributed-gpu-test.py (2026-11)",
        remedy="look for a firewall, a cut link or a wrong interface between the addresses that are named: `hpcenv net "
        "explain RUN` says why they were chosen; --exclude NODE submits without a node",
    ),
    Check(
        id="smoke.correct",
        measures="all_reduce, all_gather, reduce_scatter and all_to_all at four sizes to 4 MiB, every value compared",
        limit="the known results, within 90 s",
        why="a wrong protocol or a sick GPU changes numbers, and nothing else says so (nccl#596, nccl#2001)",
        severity="must",
        owner="node",
        level="full",
        place="smoke",
        cost="< 1 s",
        seconds=90,
        source="NVIDIA/nccl issues 596 and 2001; sizes: NCCL's protocols LL, LL128, Simple (2.30, 2026-11)",
        remedy="wrong values: --exclude NODE, tell the site's support, and look for NCCL_PROTO or NCCL_ALGO in your "
        "settings; no end: look for a slow or cut link",
    ),
    Check(
        id="smoke.second-group",
        measures="a second process group of all ranks, used at the same time as the first one",
        limit="an end within 90 s, and the known results",
        why="on some fabrics one group works and two hang; sharded training uses several",
        severity="must",
        owner="node",
        level="full",
        place="smoke",
        cost="< 1 s",
        seconds=90,
        source="lumi-ai-factory/laifs-container-recipes#44 (2026)",
        remedy="new connections between these nodes do not get through although the first ones did: look for a "
        "firewall that closes a range of ports, and with RDMA for a limit of queue pairs or registered memory",
    ),
    Check(
        id="smoke.transport",
        measures="NCCL's own log of each rank; with Gloo the addresses of its connections",
        limit="the network and the interface that were decided, the same on all nodes",
        why="NCCL falls back to TCP without an error, and is 5 to 70 times slower",
        severity="must",
        owner="user",
        level="full",
        place="smoke",
        cost="< 10 ms",
        seconds=10,
        source="ROCm/container-toolkit#88; NVIDIA/nccl src/init.cc (2.30, 2026-11)",
        remedy="`hpcenv net explain RUN` says what was decided and what the environment lacks; "
        "--env NCCL_NET=NAME asks for another network on purpose",
    ),
    Check(
        id="smoke.gpudirect",
        measures="channels with GDRDMA in NCCL's log, where driver and adapter of every node offer it",
        limit="at least one per node",
        why="without it all data pass through the memory of the host",
        severity="warn",
        owner="node",
        level="full",
        place="smoke",
        cost="< 10 ms",
        seconds=10,
        source="NCCL user guide, Troubleshooting, GPU Direct (2.30, 2026-11)",
        remedy="look for NCCL_NET_GDR_LEVEL in your settings, and ask the site for nvidia_peermem or DMA-BUF",
        gpus=True,
    ),
    Check(
        id="smoke.link",
        measures="bus bandwidth of all_reduce against the rate of the adapter",
        limit="NCCL 10 % of it, Gloo 0.5 % (at most 10 Gb/s counts); and an end within 90 s",
        why="such a link is broken, or it is not the one that was chosen",
        severity="must",
        owner="node",
        level="full",
        place="smoke",
        cost="< 1 s",
        seconds=90,
        source="the limits are hpcenv's (2026-11-23)",
        remedy="look for a slow or cut link between the addresses that are named, or submit with --exclude NODE",
    ),
    Check(
        id="smoke.bandwidth",
        measures="bus bandwidth of all_reduce against the rate of the adapter",
        limit="NCCL 60 % of it, Gloo 3 % (at most 10 Gb/s counts)",
        why="one slow link slows every step of all ranks down",
        severity="warn",
        owner="node",
        level="full",
        place="smoke",
        cost="< 1 s",
        seconds=90,
        source="stas00/ml-engineering, eth-cscs/vetnode 5dd9d25 (60 to 80 %); for Gloo hpcenv's (2026-11-23)",
        remedy="compare with other jobs of this partition: `hpcenv net diff RUN1 RUN2`",
    ),
)

BY_ID = {check.id: check for check in CHECKS}


def active(manifest: Manifest) -> tuple[Check, ...]:
    """Return the checks that a run makes, in the order of the table."""
    return at_level(manifest.preflight, gpus=manifest.gpus_per_node > 0)


def at_level(options: PreflightOptions, *, gpus: bool, places: Iterable[CheckPlace] | None = None) -> tuple[Check, ...]:
    """Return the checks of a level without the skipped ones.

    Args:
        gpus: the run has GPUs.
        places: only checks that run in one of these places.
    """
    depth = LEVELS.index(options.level)
    return tuple(
        check
        for check in CHECKS
        if LEVELS.index(check.level) <= depth
        and check.id not in options.skipped
        and (gpus or not check.gpus)
        and (places is None or check.place in tuple(places))
    )
