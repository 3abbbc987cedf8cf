"""Name the earliest cause that the logs of a failed run, or some log files, show. Runs on: LOGIN NODE."""

from __future__ import annotations

import calendar
import io
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hpcenv.judge.checks.check_table import BY_ID
from hpcenv.judge.first_failure import FailureKind, FirstFailure, first_failure
from hpcenv.machine.network import port_errors
from hpcenv.records.files import open_regular
from hpcenv.records.outcome import NodeExit
from hpcenv.records.run_folder import RunFolder
from hpcenv.runs.clocks import node_clocks
from hpcenv.runs.diagnose import flight
from hpcenv.runs.diagnose.choose import Seen, choose
from hpcenv.runs.diagnose.patterns import CauseOwner, Pattern, patterns_for
from hpcenv.runs.diagnose.scan import FIRST_FAILURE, PatternFound, Scanned, scan
from hpcenv.runs.entries import Run, Submitted
from hpcenv.runs.find import find_all
from hpcenv.runs.hangs import hang_lines
from hpcenv.runs.logs import RankNodes
from hpcenv.runs.status import RunStatus, read_statuses
from hpcenv.text import Shown, visible

DiagnosisOutcome = Literal["cause", "consequences", "no-known-pattern", "no-failure"]

# Limits: the number of other findings that are listed, and the number of characters of a quoted line.
_MOST_OTHERS = 12
_LONGEST_TEXT = 300
# The largest number of ranks that are listed for one finding.
_MOST_RANKS = 64
_MOST_PEERS = 3
# The largest number of error counters that are listed for one node.
_MOST_COUNTERS = 8
# Used instead of the name of a log if the records of a run are the source of a finding.
_RECORDS = "the records of the run"

# Bytes at the end of each log that `wait` and `report` read, because they answer at once. `diagnose` reads whole logs.
AT_END = 8 * 1024 * 1024

# A cause that the records of a run show for certain -> ids of the patterns that contain its fix.
_BY_RECORDS: dict[FailureKind, tuple[str, ...]] = {
    "time-limit": ("slurm-time-limit",),
    "preemption": ("slurm-preempted",),
    "lack-of-memory": ("slurm-oom-kill", "slurm-task-oom", "kernel-oom"),
    "node-failure": ("slurm-node-failure",),
    "cancelled": ("slurm-cancelled",),
    "disk-full": ("disk-full", "disk-quota"),
    "no-record": ("node-no-record",),
    "no-facts": ("node-no-facts",),
    "hang": ("ranks-hang",),
    "idle": ("run-idle",),
}


_BY_SIGNAL: dict[str, tuple[str, ...]] = {
    "SIGKILL": ("rank-killed", "dataloader-worker-killed"),
    "SIGSEGV": ("rank-segfault",),
    "SIGBUS": ("rank-bus-error", "dataloader-bus-error"),
    "SIGABRT": ("rank-aborted",),
    "SIGILL": ("rank-illegal-instruction",),
}


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A known pattern in the logs. Texts have no control characters.

    Attributes:
        pattern, owner, cause, fix, source, retrieved: the values of the pattern's row in patterns.toml.
        kind: `root`, `maybe` or `cascade`.
        file, line: where the pattern was first found. Line 0 means that the source is not a log, but the records of
            the run.
        rank, node, time: which rank wrote that line, where, and when, as far as known. The time is from the node's
            clock.
        text: the line.
        code: the last line of the user's code in the traceback, such as `train.py:12`; empty if none is known.
        count: number of lines that match the pattern.
        ranks: at most 64 of the ranks that wrote these lines.
        peers: peer that these lines name -> number of lines that name it, the most frequent peer first.
    """

    pattern: str
    kind: str
    owner: CauseOwner
    cause: str
    fix: str
    source: str
    retrieved: str
    file: str
    line: int
    rank: int | None = None
    node: str = ""
    time: str = ""
    text: str = ""
    code: str = ""
    count: int = 1
    ranks: tuple[int, ...] = ()
    peers: Mapping[str, int] | None = None


@dataclass(frozen=True, kw_only=True)
class LogRead:
    """A log that was read.

    Attributes:
        size, lines: bytes and lines that were read.
        left_out: bytes at the start of the log that were not read. Line numbers count from the end of this part.
        problem: why the log could not be read; empty if it was read.
    """

    path: str
    size: int = 0
    lines: int = 0
    left_out: int = 0
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class FailureDiagnosis:
    """What the logs of one run, or of some files, show.

    Attributes:
        subject: name of the run, or the files.
        outcome: `cause` if the cause was found, `consequences` if only consequences of another failure were found,
            `no-known-pattern` if no pattern was found, `no-failure` if the run has not failed.
        cause: the most likely cause; None if no cause was found.
        others: the other findings: first other possible causes, then consequences.
        failure: the first failure as `hpcenv report` describes it; empty if it is not known.
        torch: version of torch for which the patterns were chosen; empty if it is not known.
        patterns: number of patterns that were searched.
        notes: limits of the result, and what flight-recorder dumps show.
    """

    subject: str
    outcome: DiagnosisOutcome
    cause: Evidence | None
    others: tuple[Evidence, ...]
    failure: str
    torch: str
    logs: tuple[LogRead, ...]
    patterns: int
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether a cause was found."""
        return self.outcome == "cause"


@dataclass(frozen=True, kw_only=True, repr=False)
class Diagnosed(Shown):
    """A diagnosis and its run. For log files, `run` is None."""

    diagnosis: FailureDiagnosis
    run: Submitted | None = None
    status: RunStatus | None = None


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A log to read, with the rank and the node that wrote it."""

    path: Path
    name: str
    rank: int | None = None
    node: str = ""
    follow: bool = False


def diagnose(
    start: Path, words: Sequence[str], *, environ: Mapping[str, str], runs: str | None = None
) -> tuple[Diagnosed, ...]:
    """Return one diagnosis for each run that failed or has not ended, and one diagnosis for all given log files.

    If all runs succeeded, return one diagnosis, which says that the first run has no failure.

    Args:
        start: current directory. The project is in this folder or in a folder above.
        words: runs (as for `hpcenv wait`) and log files. No words mean the latest run.
        environ: environment variables, for the Slurm commands.
        runs: folder of runs, if it is not the project's folder of runs.

    Raises:
        RunNotFound, RecordInvalid: see `hpcenv.runs.find.find_submitted`.
    """
    files = [word for word in words if (start / word).is_file()]
    named = [word for word in words if word not in files]
    entries = find_all(start, named, runs=runs) if named or not files else []
    diagnoses = []
    if files:
        diagnoses.append(Diagnosed(diagnosis=diagnose_files([start / word for word in files], files)))
    pairs = list(zip(entries, read_statuses(entries, environ) if entries else [], strict=True))
    # In a sweep, successful runs need no diagnosis.
    failed = [(run, status) for run, status in pairs if not _went_well(status)]
    for run, status in failed or pairs[:1]:
        diagnoses.append(Diagnosed(diagnosis=diagnose_run(run, status), run=run, status=status))
    return tuple(diagnoses)


def _went_well(status: RunStatus) -> bool:
    return status.state == "completed" and status.failure is None


def diagnose_files(paths: Sequence[Path], names: Sequence[str]) -> FailureDiagnosis:
    """Return what log files and flight-recorder dumps of one job show."""
    dumps = [path for path in paths if flight.is_dump(path)]
    sources = [
        _Source(path=path, name=name, follow=True) for path, name in zip(paths, names, strict=True) if path not in dumps
    ]
    patterns = patterns_for()
    seen, logs = _read(sources, patterns, {}, None, most=None)
    notes = [*flight.describe(dumps)]
    if len(sources) > 1:
        notes.append("the order between files is by the times in them, which come from the nodes' clocks")
    return _result(", ".join(names), seen, logs, sources, len(patterns), notes=notes)


def diagnose_run(run: Submitted, status: RunStatus, *, most: int | None = None) -> FailureDiagnosis:
    """Return what the logs and records of a run show.

    Args:
        run: the run.
        status: the state of the run, and its first failure.
        most: read only this many bytes at the end of each log; None for whole logs.
    """
    torch = _torch_of(run)
    patterns = patterns_for(torch)
    if _went_well(status):
        return FailureDiagnosis(
            subject=status.run, outcome="no-failure", cause=None, others=(), failure="", torch=torch, logs=(),
            patterns=len(patterns),
        )  # fmt: skip
    ranks = RankNodes(run) if isinstance(run, Run) else None
    offsets, clock_notes = node_clocks(run.folder) if most is None else ({}, [])
    failure = _by_true_clocks(run, status, offsets)
    headline = "" if failure is None else failure.headline
    sources = [_Source(path=run.folder.log, name=run.folder.log.name)]
    seen, logs = _read(sources, patterns, offsets, ranks, most=most)
    first_rank = None if failure is None else failure.rank
    if not any(one.rank == first_rank for one in choose(seen, first_rank=first_rank, failed=True)):
        # The output of the job does not name the cause. The file of each rank may say more.
        more = list(_rank_logs(run.folder, ranks, failure))[: _MOST_RANK_LOGS if most is None else 1]
        found, read = _read(more, patterns, offsets, ranks, most=most, number=len(sources))
        known = {(one.pattern.id, one.rank) for one in seen}
        seen = [*seen, *(one for one in found if (one.pattern.id, one.rank) not in known)]
        sources, logs = [*sources, *more], [*logs, *read]
    if failure is not None and not choose(seen, first_rank=first_rank, failed=True):
        sources.append(_Source(path=run.folder.exits, name=_RECORDS, rank=failure.rank, node=failure.node))
        text = io.BytesIO(f"{failure.traceback}\n{failure.message}".encode())
        seen = [*seen, *_seen(scan(text, patterns), sources[-1], len(sources) - 1, {}, ranks, year=0)]
    return _result(
        status.run, seen, logs, sources, len(patterns), failure=failure, failed=status.has_failed, torch=torch,
        headline=headline, notes=[*clock_notes, *_link_notes(status), *_stand_still(run.folder)],
    )  # fmt: skip


def _stand_still(folder: RunFolder) -> Iterator[str]:
    """Yield where the ranks were when a rank made no step, and how ranks differ in flight-recorder dumps."""
    yield from hang_lines(folder)
    yield from flight.describe(flight.dumps_of(folder))


def _link_notes(status: RunStatus) -> Iterator[str]:
    """Yield for each node the error counters of its RDMA ports that grew too much while its ranks ran."""
    check = BY_ID["ib.errors"]
    for record in status.exits:
        many = [port_errors.in_words(one) for one in record.port_errors if one.many]
        if many:
            found = ", ".join(many[:_MOST_COUNTERS])
            yield (
                f"node {record.node}: RDMA errors while its ranks ran: {found} [{check.owner}: {check.id}]; "
                f"{check.why}; {check.hint}"
            )
        if record.port_errors_unknown:
            yield f"node {record.node}: whether RDMA errors grew is unknown: {record.port_errors_unknown}"


def _by_true_clocks(run: Submitted, status: RunStatus, offsets: Mapping[str, float]) -> FirstFailure | None:
    """Return the first failure of a run. If clocks of nodes are wrong, the times are corrected first."""
    failure = status.failure
    if not offsets or failure is None or failure.cause != "rank" or not isinstance(run, Run):
        return failure
    exits = tuple(_shifted(record, offsets.get(record.node, 0.0)) for record in status.exits)
    nodes = [record.node for record in exits]
    return first_failure(exits, nodes=nodes, nproc=run.manifest.nproc_per_node, state=status.state) or failure


def _shifted(record: NodeExit, seconds: float) -> NodeExit:
    """Return the record of a node, with a number of seconds added to all its times."""
    ranks = tuple(rank if rank.ended is None else replace(rank, ended=rank.ended + seconds) for rank in record.ranks)
    asked_at = None if record.asked_at is None else record.asked_at + seconds
    return replace(
        record, started=record.started + seconds, ended=record.ended + seconds, asked_at=asked_at, ranks=ranks
    )


def _torch_of(run: Submitted) -> str:
    """Return the version of torch in the lockfile; empty if the lockfile has no torch."""
    if not isinstance(run, Run):
        return ""
    found = next((e.value for e in run.manifest.expectations if e.field == "torch.version"), "")
    return found if isinstance(found, str) else ""


# Beginning of the ids of patterns for lines in which torchrun reports how a rank ended.
_OF_AGENT = "rank-"

# Number of rank logs to read if the job's own log does not name the cause.
_MOST_RANK_LOGS = 512


def _rank_logs(folder: RunFolder, ranks: RankNodes | None, failure: FirstFailure | None) -> Iterator[_Source]:
    """Yield the standard error files of the ranks, beginning with the rank that failed first."""
    paths = sorted(folder.ranks.glob("*/*/attempt_*/*/stderr.log"))
    if failure is not None and failure.log:
        paths.sort(key=lambda path: str(path.relative_to(folder.path)) != failure.log)
    for path in paths:
        node, local = path.parents[3].name, path.parent.name
        rank = ranks.rank(node, int(local)) if ranks is not None and local.isdecimal() else None
        yield _Source(path=path, name=str(path.relative_to(folder.path)), rank=rank, node=node)


def _read(
    sources: Sequence[_Source],
    patterns: Sequence[Pattern],
    offsets: Mapping[str, float],
    ranks: RankNodes | None,
    *,
    most: int | None,
    number: int = 0,
) -> tuple[list[Seen], list[LogRead]]:
    """Search logs. A log that cannot be read is in the second list, with the reason."""
    seen: list[Seen] = []
    logs = []
    for position, source in enumerate(sources, number):
        try:
            with open(open_regular(source.path, follow=source.follow), "rb") as file:
                state = os.fstat(file.fileno())
                begin = 0 if most is None else max(0, state.st_size - most)
                scanned = scan(file, patterns, start=begin)
        except OSError as error:
            logs.append(LogRead(path=source.name, problem=error.strerror or str(error)))
            continue
        logs.append(LogRead(path=source.name, size=scanned.size, lines=scanned.lines, left_out=begin))
        year = time.localtime(state.st_mtime).tm_year
        seen += _seen(scanned, source, position, offsets, ranks, year=year)
    return seen, logs


def _seen(
    scanned: Scanned,
    source: _Source,
    position: int,
    offsets: Mapping[str, float],
    ranks: RankNodes | None,
    *,
    year: int,
) -> list[Seen]:
    """Return what was found in one log, with rank, node and corrected time."""
    seen = []
    table = next((found for found in scanned.found if found.pattern.id == FIRST_FAILURE), None)
    # If each rank is a task of srun, srun's label is the rank. If torchrun starts the ranks, the label is not the rank.
    labelled = not any(one.rank is not None or one.pattern.id.startswith("torchrun-") for one in scanned.found)
    codes: dict[int | None, list[PatternFound]] = {}
    for found in sorted(scanned.found, key=lambda one: one.where_line):
        if found.where:
            codes.setdefault(found.rank, []).append(found)
    for found in scanned.found:
        rank = next(
            (one for one in (found.rank, source.rank, found.task if labelled else None) if one is not None), None
        )
        if rank is None and table is not None and found.pattern.id.startswith(_OF_AGENT):
            rank = table.rank  # torchrun's own line has the local rank only
        if rank is None and found.pattern.id.startswith(_OF_AGENT):
            same = [one for one in scanned.found if one.pattern is found.pattern and one.rank is not None]
            if len(same) == 1:  # hpcenv's line names the rank and its node
                rank, found.node = same[0].rank, found.node or same[0].node
        node = found.node or source.node or (_node_of(rank, ranks) if rank is not None else "")
        moment = moment_of(found.time, year=year)
        if moment is not None:
            moment += offsets.get(node, 0.0)
        whole = _with_code(found, codes.get(found.rank, ()))
        seen.append(Seen(file=position, found=whole, rank=rank, node=node, moment=moment))
    return seen


def _with_code(found: PatternFound, exceptions: Sequence[PatternFound]) -> PatternFound:
    """Add a line of code to a message of a rank: the line of the next exception in this rank, which ended the rank."""
    if found.where or found.rank is None or found.pattern.kind == "cascade":
        return found
    then = next((one for one in exceptions if one.where_line > found.line), None)
    return found if then is None else replace(found, where=then.where)


def _node_of(rank: int, ranks: RankNodes | None) -> str:
    place = None if ranks is None else ranks.of(rank)
    return "" if place is None else place[0]


_FULL_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d+))?\Z")
_SHORT_TIME = re.compile(r"(\d\d?)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d+)\Z")


def moment_of(text: str, *, year: int) -> float | None:
    """Return a time in a log as a number, to compare it with times of its time zone; None if the text is no time."""
    match = _FULL_TIME.match(text)
    if match is not None:
        parts, fraction = match.groups()[:6], match[7] or "0"
    elif (match := _SHORT_TIME.match(text)) is not None:
        parts, fraction = (str(year), *match.groups()[:5]), match[6]
    else:
        return None
    try:
        return calendar.timegm((*map(int, parts), 0, 0, 0)) + float(f"0.{fraction}")
    except ValueError:
        return None


def _result(
    subject: str,
    seen: Sequence[Seen],
    logs: Sequence[LogRead],
    sources: Sequence[_Source],
    patterns: int,
    *,
    failure: FirstFailure | None = None,
    failed: bool = False,
    torch: str = "",
    headline: str = "",
    notes: Sequence[str] = (),
) -> FailureDiagnosis:
    first_rank = None if failure is None else failure.rank
    causes = list(choose(seen, first_rank=first_rank, failed=failed))
    consequences = [one for one in seen if one.pattern.kind == "cascade" and one.pattern.id != FIRST_FAILURE]
    groups = _proved_first([*_grouped(causes, sources), *_grouped(consequences, sources)], failure, causes)
    is_cause = bool(groups) and groups[0].kind != "cascade"
    cause = groups[0] if is_cause else None
    outcome: DiagnosisOutcome = "cause" if is_cause else "consequences" if groups else "no-known-pattern"
    others = tuple(groups[1:] if is_cause else groups)[:_MOST_OTHERS]
    return FailureDiagnosis(
        subject=subject, outcome=outcome, cause=cause, others=others, failure=headline, torch=torch, logs=tuple(logs),
        patterns=patterns, notes=tuple(map(visible, notes)),
    )  # fmt: skip


def _proved_first(groups: Sequence[Evidence], failure: FirstFailure | None, causes: Sequence[Seen]) -> list[Evidence]:
    """Put first the cause that the records of a run show for certain. If no log line names this cause, add it."""
    rows = _rows_of(failure, causes)
    if failure is None or not rows:
        return list(groups)
    first = next((group for group in groups if group.pattern in rows), None)
    if first is not None:
        return [first, *(group for group in groups if group is not first)]
    pattern = next(pattern for pattern in patterns_for() if pattern.id == rows[0])
    proved = Evidence(
        pattern=pattern.id, kind="root", owner=pattern.owner, cause=pattern.cause, fix=pattern.hint,
        source=pattern.source, retrieved=pattern.retrieved, file=_RECORDS, line=0, rank=failure.rank,
        node=failure.node, text=failure.headline,
    )  # fmt: skip
    return [proved, *groups]


def _rows_of(failure: FirstFailure | None, causes: Sequence[Seen]) -> tuple[str, ...]:
    """Return the ids of the patterns for the cause that the records of a run show for certain; else empty."""
    if failure is None:
        return ()
    if failure.cause == "cancelled" and _failed_before_cancel(causes):
        return ()
    if failure.cause != "rank" or failure.rank is None:
        return _BY_RECORDS.get(failure.cause, ())
    # A rank that a signal ended could not write anything about the signal. If the rank wrote a cause before, use it.
    if any(one.rank == failure.rank and one.kind == "root" for one in causes):
        return ()
    return _BY_SIGNAL.get(failure.signal, ())


def _failed_before_cancel(causes: Sequence[Seen]) -> bool:
    """Whether the first cause ended its rank before the job was cancelled, perhaps because other ranks hung."""
    rows = _BY_RECORDS["cancelled"]
    cancelled = next((one for one in causes if one.pattern.id in rows), None)
    first = next(iter(causes), None)
    if first is None or cancelled is None or first.kind != "root":
        return False
    return first.file == cancelled.file and first.found.line < cancelled.found.line


def _grouped(seen: Sequence[Seen], sources: Sequence[_Source]) -> Iterator[Evidence]:
    """Yield one finding for each pattern, with the place where the pattern was first found."""
    groups: dict[str, list[Seen]] = {}
    for one in seen:
        groups.setdefault(one.pattern.id, []).append(one)
    for members in groups.values():
        first = members[0]
        peers: dict[str, int] = {}
        for one in members:
            for peer, count in one.found.peers.items():
                peers[peer] = peers.get(peer, 0) + count
        pattern, found = first.pattern, first.found
        ranks = sorted({one.rank for one in members if one.rank is not None})
        yield Evidence(
            pattern=pattern.id, kind=first.kind, owner=pattern.owner, cause=pattern.cause, fix=pattern.hint,
            source=pattern.source, retrieved=pattern.retrieved, file=visible(sources[first.file].name),
            line=0 if sources[first.file].name == _RECORDS else found.line, rank=first.rank, node=visible(first.node),
            time=found.time,
            text=visible(found.text.strip())[:_LONGEST_TEXT], code=visible(found.where),
            count=sum(one.found.count for one in members), ranks=tuple(ranks[:_MOST_RANKS]),
            peers=_most_frequent(peers),
        )  # fmt: skip


def _most_frequent(peers: Mapping[str, int]) -> dict[str, int] | None:
    ordered = sorted(peers.items(), key=lambda pair: -pair[1])
    return {visible(peer): count for peer, count in ordered[:_MOST_PEERS]} or None
