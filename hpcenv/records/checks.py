"""What the preflight checks of a node found.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

Which checks there are, what each one measures and who has to act is in `judge/checks/check_table.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from hpcenv.records.manifest import PreflightLevel

# fine: measured, and within the limit.
# failed: measured, and not within the limit.
# unknown: it applies here, and could not be measured.
# not-run: it does not apply here, for example because there is no GPU.
CheckState = Literal["fine", "failed", "unknown", "not-run"]


@dataclass(frozen=True, kw_only=True)
class CheckOutcome:
    """What one check found on one node.

    Attributes:
        id: of the check, as in the table of checks.
        found: what was measured; for `unknown` and `not-run` the reason why nothing was.
        limit: what it had to be, where the table's text is too general.
        note: more about a failure, for example which GPU.
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
    """The results of one node. Those that are fine are kept short: a job may have a thousand nodes.

    Attributes:
        fine: id -> what was measured.
        others: failed, unknown and not run.
        seconds: how long all of them took together; they run at the same time.
        clock: the node's clock minus the one that stamps files of the run folder, in seconds; None if not known.
    """

    fine: dict[str, str] = field(default_factory=dict)
    others: tuple[CheckOutcome, ...] = ()
    seconds: float = 0.0
    clock: float | None = None

    @classmethod
    def of(cls, results: Iterable[CheckOutcome], *, seconds: float, clock: float | None = None) -> NodeChecks:
        """Return results in this form."""
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
    """What the checks of all nodes gave (part of `verdict.json`); failures are findings of the verdict.

    Attributes:
        fine: checks that are fine on every node on which they ran, and ran on one at least.
        failed, unknown: checks that failed, or could not be measured, on a node.
        not_run: id -> why the check ran on no node.
        skipped: what `--skip-check` names.
    """

    level: PreflightLevel
    skipped: tuple[str, ...] = ()
    fine: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    not_run: dict[str, str] = field(default_factory=dict)
