"""Separate the cause of a failure from its consequences. Pure. Runs on: LOGIN NODE.

After the first failure, nearly every rank writes something. A line that matches a pattern of kind `cascade` is never
the cause. Among the other lines, the lines of the rank that failed first have priority, then the order in the log
decides. A line of kind `maybe` is the cause only if no line of kind `root` is found. If the rank wrote some ordinary
lines after a line, this line is at most `maybe`. If the rank wrote many ordinary lines, it certainly continued. Then
the line is the cause only if nothing else is found, and the run has failed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpcenv.runs.diagnose.patterns import Pattern, PatternKind
from hpcenv.runs.diagnose.scan import FIRST_FAILURE, PatternFound

# The row of the table that matches any exception.
ANY_EXCEPTION = "python-exception"
# Patterns that occur only in a run that failed.
_FAILED = frozenset(
    {FIRST_FAILURE, "torchrun-child-failed", "torchrun-exit-code", "slurm-task-exit", "slurm-task-killed-by-peer"}
)
# The last step of a job writes the text of this pattern if the time limit ended the job while a node hung.
_HUNG = "node-no-facts"
# HUP, INT, USR1, USR2 and TERM, in the forms of a shell and of torchrun.
_ASKED_TO_END = re.compile(r"exit code (129|130|138|140|143)\b|exitcode: -(1|2|10|12|15)\b")
# This many ordinary lines between two failures mean that the program handled the first failure.
_SOME = 3
# The parts of one message are within this many lines.
_ONE_MESSAGE = 100


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A pattern that was found in one log.

    Attributes:
        file: number of the log, in the order in which the logs were given.
        rank, node: the rank and the node that wrote the line, as far as the line, the log or the records name them.
        moment: time of the line as a sort key, corrected for the clock of the node; None if the time is unknown.
    """

    file: int
    found: PatternFound
    rank: int | None
    node: str
    moment: float | None

    @property
    def pattern(self) -> Pattern:
        """The pattern that was found."""
        return self.found.pattern

    @property
    def kind(self) -> PatternKind:
        """The kind of this finding. `root` becomes `maybe` if ordinary lines of the rank or the job follow the line."""
        return "maybe" if self.found.after >= _SOME and self.pattern.kind == "root" else self.pattern.kind


def choose(seen: Sequence[Seen], *, first_rank: int | None = None, failed: bool = False) -> tuple[Seen, ...]:
    """Return the possible causes, the most likely cause first; empty if nothing, or only consequences, were found.

    Args:
        seen: everything that was found.
        first_rank: the rank that failed first, if records of the run say so.
        failed: whether the run is known to have failed.
    """
    failed = failed or any(one.pattern.id in _FAILED and not one.found.went_on for one in seen)
    if first_rank is None:
        first_rank = next((one.rank for one in _sorted(seen) if one.pattern.id == FIRST_FAILURE), None)
    causes = [one for one in seen if one.pattern.kind != "cascade" and (failed or not one.found.went_on)]
    causes = [one for one in causes if not (one.pattern.before_ranks and _ranks_ran(seen, one))]
    causes = [one for one in causes if not (one.pattern.after_failure and _failed_before(seen, one))]
    causes = [one for one in causes if not _is_explained(one, causes)]
    likely = [_likelihood(seen, one) for one in causes]
    best = [one for one, rank in zip(causes, likely, strict=True) if rank == min(likely)]
    best = [one for one in best if not any(_outlived(one, other) for other in best)] or best
    own = [one for one in best if one.rank is not None and one.rank == first_rank]
    return (
        *_sorted(own),
        *_sorted([one for one in best if one not in own]),
        *_sorted([one for one in causes if one not in best]),
    )


def _likelihood(seen: Sequence[Seen], one: Seen) -> int:
    """Return 0 for a cause, 1 for a possible cause, 2 for a failure that the rank or the job survived."""
    ends = [other.found.line for other in seen if other.pattern.ends_attempt and other.file == one.file]
    later = (other.found.line for other in seen if other.pattern.kind != "cascade" and other.file == one.file)
    last = max(later, default=0)
    if one.found.went_on or any(one.found.line <= end < last for end in ends):
        return 2
    return 0 if one.kind == "root" else 1


def _outlived(one: Seen, other: Seen) -> bool:
    """Whether the same writer wrote both lines, and survived the first: it wrote ordinary lines between the two."""
    same = (one.file, one.rank, one.found.task) == (other.file, other.rank, other.found.task)
    return same and one.found.line < other.found.line and one.found.after - other.found.after >= _SOME


def _ranks_ran(seen: Sequence[Seen], one: Seen) -> bool:
    """Whether a rank of the job wrote an earlier line. If so, torchrun lost its peer after its ranks had started."""
    return any(
        other.rank is not None and other.file == one.file and other.found.line < one.found.line for other in seen
    )


def _failed_before(seen: Sequence[Seen], one: Seen) -> bool:
    """Whether the log reports a failure before this line, and a request to end does not explain that failure."""
    before = [other for other in seen if other.file == one.file and other.found.line < one.found.line]
    return any(other.pattern.id == _HUNG and other.file == one.file for other in seen) or any(
        not other.found.went_on
        and not other.pattern.after_failure
        and not other.pattern.ends_attempt
        and (other.pattern.id in _FAILED or (one.pattern.kind == "root" and other.pattern.kind != "cascade"))
        and not _ASKED_TO_END.search(other.found.text)
        for other in before
    )


def _is_explained(one: Seen, causes: Sequence[Seen]) -> bool:
    """Whether another pattern says more about the same exception."""
    return one.pattern.id == ANY_EXCEPTION and any(
        other.pattern.id != ANY_EXCEPTION
        and (other.file, other.rank) == (one.file, one.rank)
        and abs(other.found.line - one.found.line) <= _ONE_MESSAGE
        and not _outlived(other, one)
        for other in causes
    )


def _sorted(seen: Sequence[Seen]) -> list[Seen]:
    """Sort findings, the earliest first: by line within one log, and by time between logs if all have a time."""
    if len({one.file for one in seen}) > 1 and all(one.moment is not None for one in seen):
        return sorted(seen, key=lambda one: (one.moment or 0.0, one.file, one.found.line))
    return sorted(seen, key=lambda one: (one.file, one.found.line))
