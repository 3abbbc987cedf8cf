"""Tell the cause of a failure from its consequences. Pure. Runs on: LOGIN NODE.

After the first failure, nearly every rank writes something. What a pattern of kind `cascade` finds is never the cause.
Of the rest, the rank that failed first goes before the others, and then the order in the log. A line of kind `maybe` is
the cause only where no line of kind `root` is found.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpcenv.runs.diagnose.patterns import Pattern
from hpcenv.runs.diagnose.scan import FIRST_FAILURE, PatternFound

# The row that any exception matches.
ANY_EXCEPTION = "python-exception"
# Consequences that only a run which failed has.
_FAILED = frozenset(
    {FIRST_FAILURE, "torchrun-child-failed", "torchrun-exit-code", "slurm-task-exit", "slurm-task-killed-by-peer"}
)
# Written by the last step of the job, which the time limit has ended: a node hung before it.
_HUNG = "node-no-facts"
# HUP, INT, USR1, USR2 and TERM, as a shell and as torchrun write them.
_ASKED_TO_END = re.compile(r"exit code (129|130|138|140|143)\b|exitcode: -(1|2|10|12|15)\b")
# A program may handle an exception, print it and go on. It ended the program if no more lines than these follow.
_AT_END = 50
# Lines of one rank within which a message and its parts stand.
_ONE_MESSAGE = 100


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A pattern in one log.

    Attributes:
        file: number of the log, in the order in which they were given.
        rank, node: where it happened, as far as line, log or records say.
        moment: sort key of its time, with the clock of the node corrected; None if it is unknown.
        last_line: number of lines of the log.
    """

    file: int
    found: PatternFound
    rank: int | None
    node: str
    moment: float | None
    last_line: int

    @property
    def pattern(self) -> Pattern:
        """The pattern that was found."""
        return self.found.pattern


def choose(seen: Sequence[Seen], *, first_rank: int | None = None, failed: bool = False) -> tuple[Seen, ...]:
    """Return what may be the cause, the most likely one first; empty if only consequences or nothing were found.

    Args:
        seen: everything that was found.
        first_rank: the rank that failed first, if records of the run say so.
        failed: whether the run is known to have failed.
    """
    failed = failed or any(one.pattern.id in _FAILED for one in seen)
    if first_rank is None:
        first_rank = next((one.rank for one in _sorted(seen) if one.pattern.id == FIRST_FAILURE), None)
    causes = [one for one in seen if one.pattern.kind != "cascade" and _ended_it(one, failed)]
    causes = [one for one in causes if not (one.pattern.before_ranks and _ranks_ran(seen, one))]
    causes = [one for one in causes if not (one.pattern.after_failure and _failed_before(seen, one))]
    causes = [one for one in causes if not _is_explained(one, causes)]
    for kind in ("root", "maybe"):
        of_kind = [one for one in causes if one.pattern.kind == kind]
        if of_kind:
            rest = [one for one in causes if one.pattern.kind != kind]
            own = [one for one in of_kind if one.rank is not None and one.rank == first_rank]
            others = [one for one in of_kind if one not in own]
            return (*_sorted(own), *_sorted(others), *_sorted(rest))
    return ()


def _ended_it(one: Seen, failed: bool) -> bool:
    """Whether an exception ended the program, as far as the log shows; other lines always count."""
    if not one.found.traced or one.found.uncaught or failed:
        return True
    return one.last_line - one.found.line <= _AT_END


def _ranks_ran(seen: Sequence[Seen], one: Seen) -> bool:
    """Whether a rank of the job had written something before: its torchrun had started, and then lost its peer."""
    return any(
        other.rank is not None and other.file == one.file and other.found.line < one.found.line for other in seen
    )


def _failed_before(seen: Sequence[Seen], one: Seen) -> bool:
    """Whether the log says before this line that a rank or a task had failed, and not because it was asked to end."""
    return any(
        other.file == one.file
        and (
            other.pattern.id == _HUNG
            or (
                other.pattern.id in _FAILED
                and other.found.line < one.found.line
                and not _ASKED_TO_END.search(other.found.text)
            )
        )
        for other in seen
    )


def _is_explained(one: Seen, causes: Sequence[Seen]) -> bool:
    """Whether another pattern says more about the same exception."""
    return one.pattern.id == ANY_EXCEPTION and any(
        other.pattern.id != ANY_EXCEPTION
        and (other.file, other.rank) == (one.file, one.rank)
        and abs(other.found.line - one.found.line) <= _ONE_MESSAGE
        for other in causes
    )


def _sorted(seen: Sequence[Seen]) -> list[Seen]:
    """Return the earliest first: within one log by line, between logs by time where all have one."""
    if len({one.file for one in seen}) > 1 and all(one.moment is not None for one in seen):
        return sorted(seen, key=lambda one: (one.moment or 0.0, one.file, one.found.line))
    return sorted(seen, key=lambda one: (one.file, one.found.line))
