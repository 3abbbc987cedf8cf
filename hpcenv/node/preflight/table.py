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
