"""The attempts of a run: when each attempt began and ended, how its nodes ended, and how long its parts took.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcenv.records.outcome import NodeExit
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.submission import Submission
from hpcenv.runs.attempts import attempt_number, nodes_started, read_exits, read_finished, read_record, read_verdict

_MOST_ATTEMPTS = 1000


@dataclass(frozen=True, kw_only=True)
class ExitRecord:
    """How one node ended.

    Attributes:
        launched, ended: when the launch began and ended, in seconds since the epoch.
        stopped: why the training was asked to end; empty without such a request.
        saved: whether the training reported that it saved its state.
        failed_ranks: how many ranks failed on this node.
    """

    node: str
    status: int
    launched: float
    ended: float
    stopped: str = ""
    saved: bool = False
    failed_ranks: int = 0


@dataclass(frozen=True, kw_only=True)
class AttemptRecord:
    """One start of the job.

    Attributes:
        began, ended: when the batch script began and ended, in seconds since the epoch; `ended` is None if the end is
            not recorded.
        verdict: the gate's verdict; empty without a verdict.
        status: exit status of the batch script; None if this status is not recorded.
        outcome: `completed`, or how the attempt ended.
    """

    attempt: int
    job_id: str
    began: float
    ended: float | None
    nodes: tuple[str, ...]
    verdict: str
    status: int | None
    outcome: str
    exits: tuple[ExitRecord, ...]


@dataclass(frozen=True, kw_only=True)
class Timings:
    """How long the parts of a run took, in seconds, over all attempts; None if a time is not recorded.

    Attributes:
        queue: from the submission, or from the end of the previous attempt, to the start of the batch script.
        check: from the start of the batch script to the launch on the first node.
        training: from the launch to the end of the last node.
        requeues: how often the job began again.
    """

    queue: float | None
    check: float | None
    training: float | None
    requeues: int


def read_attempts(run: RunFolder) -> tuple[AttemptRecord, ...]:
    """Return the attempts of a run, in order. The last item is the newest attempt, which may still be running."""
    folders = [*sorted(_earlier(run), key=_numbers), run.path][-_MOST_ATTEMPTS:]
    return tuple(found for path in folders if (found := _read_attempt(RunFolder(path))) is not None)


def _earlier(run: RunFolder) -> list[Path]:
    try:
        return [path for path in run.attempts.iterdir() if path.name.replace(".", "").isdecimal()]
    except OSError:
        return []


def _numbers(path: Path) -> list[int]:
    return [int(part) for part in path.name.split(".") if part]


def _read_attempt(folder: RunFolder) -> AttemptRecord | None:
    started = read_record(folder.started)
    if started is None:
        return None
    finished = read_finished(folder)
    verdict, _ = read_verdict(folder)
    status = finished.get("status")
    result = "" if verdict is None else verdict.result
    return AttemptRecord(
        attempt=attempt_number(started),
        job_id=str(started.get("job_id") or ""),
        began=_time(started) or 0.0,
        ended=_time(finished),
        nodes=nodes_started(started),
        verdict=result,
        status=status if type(status) is int else None,
        outcome=_outcome(result, finished),
        exits=tuple(_exit(record) for record in read_exits(folder)),
    )


def _time(record: Mapping[str, Any]) -> float | None:
    value = record.get("time")
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _exit(record: NodeExit) -> ExitRecord:
    return ExitRecord(
        node=record.node, status=record.status, launched=record.started, ended=record.ended, stopped=record.stopped,
        saved=record.saved, failed_ranks=len(record.ranks),
    )  # fmt: skip


def _outcome(verdict: str, finished: Mapping[str, Any]) -> str:
    """Return how an attempt ended, in words."""
    status = finished.get("status")
    if not isinstance(status, int):
        return "has not ended"
    if finished.get("cancelled") is True:
        return "cancelled"
    if verdict and verdict != "match":
        return f"never trained: the verdict is {verdict}"
    if finished.get("again") is True:
        return "stopped and queued again"
    if finished.get("unfinished") is True:
        return "stopped before its end"
    return "completed" if status == 0 else f"ended with status {status}"


def timings_of(submission: Submission, attempts: Sequence[AttemptRecord]) -> Timings:
    """Return how long the parts of a run took. Pure."""
    before: float | None = submission.submitted
    queue: list[float | None] = []
    check: list[float | None] = []
    training: list[float | None] = []
    for one in attempts:
        queue.append(None if before is None else one.began - before)
        before = one.ended
        launched = min((node.launched for node in one.exits), default=None)
        check.append(_span(one.began, launched, one.ended))
        never = one.verdict not in ("", "match")
        trained = max((node.ended for node in one.exits), default=0.0) - (launched or 0.0)
        training.append(trained if launched is not None or never else None)
    return Timings(queue=total(queue), check=total(check), training=total(training), requeues=max(0, len(attempts) - 1))


def _span(began: float, launched: float | None, ended: float | None) -> float | None:
    until = launched if launched is not None else ended
    return None if until is None else until - began


def total(parts: Sequence[float | None]) -> float | None:
    """Return the sum of the parts; None if a part is unknown, or if there is no part."""
    known = [part for part in parts if part is not None]
    return math.fsum(known) if known and len(known) == len(parts) else None
