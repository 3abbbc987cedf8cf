"""What the preflight checks of a node found.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

The table `judge/checks/check_table.py` lists all checks, what each check measures, and who has to act on a failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from hpcenv.records.manifest import PreflightLevel

# fine: the check measured a value within the limit.
# failed: the check measured a value outside of the limit.
# unknown: the check applies to this node, but could not measure.
# not-run: the check does not apply to this node, for example because the node has no GPU.
CheckState = Literal["fine", "failed", "unknown", "not-run"]


@dataclass(frozen=True, kw_only=True)
class CheckOutcome:
    """What one check found on one node.

    Attributes:
        id: id of the check in the table of checks.
        found: what was measured; for `unknown` and `not-run`, why nothing was measured.
        limit: the required value, if the table of checks gives no exact value.
        note: details of a failure, for example which GPU failed.
        seconds: how long the check took.
    """

    id: str
    state: CheckState
    found: str
    limit: str = ""
    note: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class NodeChecks:
    """The results of one node. Results that are fine are stored in short form, because a job may have 1,000 nodes.

    Attributes:
        fine: id -> what was measured.
        others: the results that are `failed`, `unknown` or `not-run`.
        seconds: how long the checks took; they run at the same time.
        clock: the node's clock minus the clock that sets the times of files in the run folder, in seconds; None if the
            value is unknown.
    """

    fine: dict[str, str] = field(default_factory=dict)
    others: tuple[CheckOutcome, ...] = ()
    seconds: float = 0.0
    clock: float | None = None

    @classmethod
    def of(cls, results: Iterable[CheckOutcome], *, seconds: float, clock: float | None = None) -> NodeChecks:
        """Return results in the form of this class."""
        every = tuple(results)
        return cls(
            fine={one.id: one.found for one in every if one.state == "fine"},
            others=tuple(one for one in every if one.state != "fine"),
            seconds=round(seconds, 3),
            clock=clock,
        )

    def results(self) -> Iterator[CheckOutcome]:
        """Yield all results."""
        yield from (CheckOutcome(id=name, state="fine", found=found) for name, found in self.fine.items())
        yield from self.others


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What one family of checks found on one node after the verdict (`preflight/FAMILY/NODE.json`)."""

    schema: int
    run: str
    node: str
    attempt: int
    checks: NodeChecks


@dataclass(frozen=True, kw_only=True)
class PreflightSummary:
    """The results of the checks over all nodes (part of `verdict.json`). Failures are also findings of the verdict.

    Attributes:
        fine: checks that ran on at least one node, and were fine on every node on which they ran.
        failed, unknown: checks that failed, or that could not measure, on at least one node.
        not_run: id -> why the check ran on no node.
        skipped: the checks that `--skip-check` names.
    """

    level: PreflightLevel
    skipped: tuple[str, ...] = ()
    fine: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    not_run: dict[str, str] = field(default_factory=dict)
