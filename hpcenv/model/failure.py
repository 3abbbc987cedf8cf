"""The first failure of a run, in words: from what nodes recorded of their ranks, and what Slurm says. Pure.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

After the first rank has failed nearly all others fail too: their peer is gone, or torchrun and srun end them. So the
first one counts, by the time at which each process ended, over all nodes. Clocks of nodes differ by some milliseconds,
which is longer than a lost connection takes to be noticed: of failures close to each other one that only tells of a
lost peer is never the first. Who was asked to end from outside, and did, has not failed.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hpcenv.wire import NodeExit, RankExit

Cause = Literal[
    "rank", "torchrun", "lack-of-memory", "node-failure", "no-record", "time-limit", "preemption", "cancelled",
    "asked-to-end",
]  # fmt: skip

# What clocks of nodes may differ by, and a peer's end may take to be noticed, in seconds.
_CLOSE = 5.0
# A process that Slurm signals itself (proctrack/linuxproc) may end before the launch step notes that it was asked.
_SIGNALLED_TOGETHER = 0.25
# When Slurm ended the job, ranks that failed less than this before did so because of it.
_BECAUSE_OF_SLURM = 1.0

# What a rank says whose peer is gone: gloo and NCCL in torch 1.10 to 2.13, TCPStore, sockets.
_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|connection was (likely )?closed|"
    r"remote process exited|ncclRemoteError|ncclSystemError|Socket Timeout|recvValue failed|sendBytes failed|"
    r"SignalException|failed to (recv|send)|RendezvousConnectionError",
    re.IGNORECASE,
)

# Slurm's words for a job that it ended itself (adapters/slurm.py).
_BY_SLURM: dict[str, tuple[Cause, str]] = {
    "timeout": ("time-limit", "the job reached its time limit"),
    "preempted": ("preemption", "the job was preempted"),
    "cancelled": ("cancelled", "the job was cancelled"),
    "node-fail": ("node-failure", "a node failed, says Slurm"),
    "out-of-memory": ("lack-of-memory", "the job ran out of memory, says Slurm"),
}
_STOPPED: dict[str, tuple[Cause, str]] = {
    "time-limit": ("time-limit", "the job reached its time limit"),
    "preemption": ("preemption", "the job was preempted"),
}

# Exit statuses of hpcenv's own: NodeRejected, NodesUnknown.
_GATE = (90, 91)

_MESSAGE = 300
_TRACEBACK_LINES = 40
_LINE = 400


@dataclass(frozen=True, kw_only=True)
class FirstFailure:
    """What went wrong first.

    Attributes:
        headline: in one line; without control characters, as all texts here.
        cause: `rank`: a rank failed by itself; `torchrun`: the launch did, before or beside its ranks; the others:
            somebody else ended it, or nobody knows.
        node, rank, status, signal: of whom, where that is known.
        message: the exception in one line, or the last line of the rank's standard error.
        traceback: empty where there is none.
        log: the rank's standard error, relative to the run folder.
        others: how many other ranks ended because of it; None where that is not known.
        notes: what else is to be known, one line each: nodes that left no record, kills for lack of memory.
    """

    headline: str
    cause: Cause
    node: str = ""
    rank: int | None = None
    status: int | None = None
    signal: str = ""
    message: str = ""
    traceback: str = ""
    log: str = ""
    others: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A failure by itself, of a rank or of the launch on a node."""

    record: NodeExit
    rank: RankExit | None
    time: float

    @property
    def status(self) -> int | None:
        return self.record.status if self.rank is None else self.rank.status

    @property
    def is_of_lost_peer(self) -> bool:
        said = self.record.detail if self.rank is None else f"{self.rank.message}\n{self.rank.traceback[-2000:]}"
        return bool(_LOST_PEER.search(said))


def first_failure(
    exits: Sequence[NodeExit],
    *,
    nodes: Sequence[str],
    nproc: int,
    state: str = "",
    over: bool = True,
    down: Mapping[str, str] | None = None,
    stopped: str = "",
    unfinished: str = "",
    waited: bool = False,
) -> FirstFailure | None:
    """Return what went wrong first in one attempt; None where nothing is known to have gone wrong.

    Args:
        exits: the nodes' records of this attempt.
        nodes: the nodes on which training was started (`Verdict.launched`, else all of a verdict that is a match);
            empty when it was not.
        nproc: ranks per node.
        state: Slurm's word as `RunStatus.state` has it, `timeout`, `node-fail` and so on; empty where Slurm says
            nothing of this attempt.
        over: whether the attempt has ended; as long as it runs a missing record says nothing.
        down: node -> reason, of those that Slurm held for down when the attempt ended.
        stopped: why it was stopped before the training began, as `NodeExit.stopped` has it; else empty.
        unfinished: in words, that the training was stopped and is not gone on with; else empty.
        waited: it ended while it waited to go on with what an attempt before began.
    """
    if stopped:
        return _of_slurm((), (), nproc, "", (), stopped=stopped)
    lost = {node: reason for node, reason in (down or {}).items() if node in nodes}
    missing = [node for node in nodes if over and node not in {record.node for record in exits}]
    first = _first(exits, margin=_BECAUSE_OF_SLURM if state in _BY_SLURM else 0.0)
    notes = (*_missing_notes(missing, state), *_memory_notes(exits), *_stopping_notes(exits))
    if missing and exits == () and state == "completed":
        return None
    if first is not None and not _is_explained_by_node(first, missing, state, lost):
        return _of_candidate(first, exits, nproc, state, notes)
    if lost:
        return _of_lost(lost, exits, nproc, notes)
    if missing and (state not in _BY_SLURM or state == "node-fail"):
        return _of_missing(missing, first, exits, nproc, state, notes)
    if unfinished:
        return _of_unfinished(exits, nproc, unfinished, notes)
    return _of_slurm(exits, nodes, nproc, state, notes, waited=waited)


def first_status(exits: Sequence[NodeExit]) -> int | None:
    """Return the exit status of who failed first by itself, 128 + number for a signal; None where nobody did."""
    first = _first(exits, margin=0.0)
    if first is None:
        return None
    # Torch may know that a rank failed, and not of what.
    return first.status or first.record.status


def _first(exits: Sequence[NodeExit], *, margin: float) -> _Candidate | None:
    found = sorted(_candidates(exits, margin), key=lambda candidate: candidate.time)
    if not found:
        return None
    close = [candidate for candidate in found if candidate.time <= found[0].time + _CLOSE]
    return next((candidate for candidate in close if not candidate.is_of_lost_peer), found[0])


def _candidates(exits: Sequence[NodeExit], margin: float) -> Iterator[_Candidate]:
    """Give the first failure of each node, but none that came of being asked to end."""
    asked = [record.asked_at for record in exits if record.asked_at is not None]
    until = min(asked) - margin if asked and margin else float("inf")
    for record in exits:
        # Asked to save itself and end: what its ranks then end with is told beside it.
        if record.status == 0 or record.stopped:
            continue
        rank = next(iter(record.ranks), None)
        time = record.ended if rank is None or rank.ended is None else rank.ended
        if record.asked_to_end:
            if rank is None or rank.ended is None or record.asked_at is None:
                continue
            early = _SIGNALLED_TOGETHER if rank.status == 143 else 0.0
            if rank.ended >= record.asked_at - early:
                continue
        if time < until:
            yield _Candidate(record=record, rank=rank, time=time)


def _is_explained_by_node(first: _Candidate, missing: Sequence[str], state: str, lost: Mapping[str, str]) -> bool:
    """Whether a rank or torchrun failed only because a node was gone, or could record nothing any more."""
    if lost and (first.is_of_lost_peer or first.rank is None):
        return True
    return bool(missing) and (state == "node-fail" or first.is_of_lost_peer)


# -- words --------------------------------------------------------------------------------


def _of_candidate(
    first: _Candidate, exits: Sequence[NodeExit], nproc: int, state: str, notes: tuple[str, ...]
) -> FirstFailure:
    record, rank = first.record, first.rank
    if rank is None:
        detail = visible(record.detail)[:_MESSAGE]
        words = [f"node {visible(record.node)}", f"torchrun ended with {_ended(record.status, record.signal)}"]
        if record.status in _GATE and detail:
            words = words[:1] if record.node not in detail else []  # it was never started
        return FirstFailure(
            headline=", ".join([*words, *filter(None, [detail])]),
            cause="torchrun",
            node=visible(record.node),
            status=record.status,
            signal=visible(record.signal),
            message=detail,
            notes=notes,
        )
    message = visible(rank.message)[:_MESSAGE]
    for_memory = rank.signal == "SIGKILL" and bool(record.oom_kills or state == "out-of-memory")
    words = [f"node {visible(record.node)}", f"rank {rank.rank if rank.rank >= 0 else 'unknown'}"]
    words.append(_ended(rank.status, visible(rank.signal)) + (" for lack of memory" if for_memory else ""))
    # A last line of its log may be anything: it is shown below, as what it is.
    if message and (rank.traceback or rank.source == "error-file"):
        words.append(message)
    others = max(0, _count(exits, nproc) - 1)
    return FirstFailure(
        headline=", ".join(words) + _cleaned_up(others),
        cause="lack-of-memory" if for_memory else "rank",
        node=visible(record.node),
        rank=rank.rank,
        status=rank.status,
        signal=visible(rank.signal),
        message=message,
        traceback=_shown_traceback(rank.traceback),
        log=visible(rank.log),
        others=others,
        notes=notes,
    )


def _of_lost(lost: Mapping[str, str], exits: Sequence[NodeExit], nproc: int, notes: tuple[str, ...]) -> FirstFailure:
    names = _names(list(lost))
    reasons = ", ".join(dict.fromkeys(visible(reason)[:_MESSAGE] for reason in lost.values() if reason))
    others = _count([record for record in exits if record.node not in lost], nproc)
    return FirstFailure(
        headline=f"node failure: {names}, says Slurm: {reasons or 'down'}" + _cleaned_up(others),
        cause="node-failure",
        node=visible(next(iter(lost))),
        message=reasons,
        others=others,
        notes=tuple(note for note in notes if not note.endswith(_NO_RECORD)),
    )


def _of_missing(
    missing: Sequence[str],
    first: _Candidate | None,
    exits: Sequence[NodeExit],
    nproc: int,
    state: str,
    notes: tuple[str, ...],
) -> FirstFailure:
    names = _names(missing)
    failed = state == "node-fail"
    words = f"node failure: {names} left no record" if failed else f"{names} left no record of how the training ended"
    then = ""
    if first is not None and first.rank is not None:
        then = f"; then rank {first.rank.rank} on node {visible(first.record.node)} lost its peer"
    return FirstFailure(
        headline=words + then + _cleaned_up(max(0, _count(exits, nproc) - (first is not None))),
        cause="node-failure" if failed else "no-record",
        node=visible(missing[0]),
        others=_count(exits, nproc),
        notes=tuple(note for note in notes if not note.endswith(_NO_RECORD)),
    )


def _of_slurm(
    exits: Sequence[NodeExit],
    nodes: Sequence[str],
    nproc: int,
    state: str,
    notes: tuple[str, ...],
    *,
    stopped: str = "",
    waited: bool = False,
) -> FirstFailure | None:
    """Return what Slurm says, or who was asked to end by whom."""
    stopped = next((record.stopped for record in exits if record.stopped), stopped)
    cause, words = _BY_SLURM.get(state) or _STOPPED.get(stopped) or (None, "")
    others = _count(exits, nproc)
    if cause is not None:
        where = ", while it waited to go on" if waited else "" if nodes else ", before the training started"
        ranks = f"; {others} rank{'s were' if others != 1 else ' was'} cleaned up" if others else ""
        saved = "; the script saved itself" if exits and all(record.saved for record in exits) else ""
        return FirstFailure(headline=f"{words}{where}{ranks}{saved}", cause=cause, others=others, notes=notes)
    if stopped and not exits:
        return FirstFailure(headline="the job was asked to stop, before the training started", cause="asked-to-end")
    asked = sorted((r for r in exits if r.asked_to_end and r.status != 0), key=lambda r: r.asked_at or r.ended)
    if not asked and any(record.stopped and record.status != 0 for record in exits):
        return FirstFailure(headline="the job was asked to stop", cause="asked-to-end", others=others, notes=notes)
    if not asked:
        return None
    return FirstFailure(
        headline=f"node {visible(asked[0].node)} was asked to end by {visible(asked[0].asked_to_end)}",
        cause="asked-to-end",
        node=visible(asked[0].node),
        status=asked[0].status,
        signal=visible(asked[0].asked_to_end),
        others=others,
        notes=notes,
    )


def unfinished(stopped: str, *, saved: bool, not_again: str) -> str:
    """Return in words that a training was stopped that has more to do, and why it is not gone on with."""
    where = {"time-limit": " at the time limit", "preemption": " by a preemption"}.get(stopped, "")
    after = " after it saved itself" if saved else ""
    refusal = f" ({visible(' '.join(not_again.split()))[:_MESSAGE]})" if not_again else ""
    return f"stopped{where}{after}; not queued again{refusal}"


def _of_unfinished(exits: Sequence[NodeExit], nproc: int, words: str, notes: tuple[str, ...]) -> FirstFailure:
    reason = next((record.stopped for record in exits if record.stopped), "")
    cause: Cause = _STOPPED[reason][0] if reason in _STOPPED else "asked-to-end"
    return FirstFailure(headline=words, cause=cause, others=_count(exits, nproc), notes=notes)


def _count(exits: Sequence[NodeExit], nproc: int) -> int:
    """Return how many ranks did not end well: those that were seen, else all of a node that did not."""
    return sum(len(record.ranks) or nproc for record in exits if record.status != 0)


def _cleaned_up(others: int) -> str:
    if not others:
        return ""
    return f"; {others} other{'s were' if others != 1 else ' was'} cleaned up"


def _ended(status: int | None, signal: str) -> str:
    if signal:
        return signal
    return "exit status unknown" if status is None else f"exit {status}"


def _names(nodes: Sequence[str]) -> str:
    shown = ", ".join(visible(node) for node in nodes[:8]) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
    return f"node {shown}" if len(nodes) == 1 else f"nodes {shown}"


_NO_RECORD = "no record of its end"


def _missing_notes(missing: Sequence[str], state: str) -> tuple[str, ...]:
    says = f"Slurm says {visible(state)}; " if state in _BY_SLURM else ""
    return tuple(f"node {visible(node)}: {says}{_NO_RECORD}" for node in missing[:8])


def _memory_notes(exits: Sequence[NodeExit]) -> tuple[str, ...]:
    untold = tuple(
        f"node {visible(record.node)}: whether the kernel killed it for lack of memory could not be read"
        for record in exits
        if record.oom_kills is None and not record.asked_to_end and not record.stopped
        and any(rank.signal == "SIGKILL" for rank in record.ranks[:1])
    )  # fmt: skip
    return untold + tuple(
        f"node {visible(record.node)}: the kernel killed {record.oom_kills} "
        f"process{'es' if record.oom_kills != 1 else ''} of this job for lack of memory"
        for record in exits
        if record.oom_kills
    )


def _stopping_notes(exits: Sequence[NodeExit]) -> tuple[str, ...]:
    """Say which ranks failed of themselves when they should save and end."""
    return tuple(
        f"node {visible(record.node)}: rank {rank.rank} failed while stopping: {visible(rank.message)[:_MESSAGE]}"
        for record in exits
        if record.stopped
        for rank in record.ranks[:1]
        if rank.traceback and not rank.signal
    )


def _shown_traceback(text: str) -> str:
    """Return a traceback without control characters: its first line, and as many of the last ones as are useful."""
    lines = [visible(line)[:_LINE] for line in text.splitlines()]
    if len(lines) > _TRACEBACK_LINES:
        lines = [lines[0], "  ...", *lines[2 - _TRACEBACK_LINES :]]
    return "\n".join(lines)


def visible(text: str) -> str:
    """Show what cannot be printed (control characters, direction marks) as escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def render(failure: FirstFailure, *, width: int = 80, word: str = "first failure", folder: str = "") -> str:
    """Return a failure as lines for people.

    Args:
        folder: of the run: the log's path is shown in it, to be pasted; relative to the run if it is not given.
        width: columns; lines of the traceback stay as they are.
        word: what the first line begins with.
    """
    lines = [_wrap(f"{word}: {failure.headline}", width, "  ")]
    if failure.traceback:
        lines += [f"  {line}".rstrip() for line in failure.traceback.splitlines()]
    elif failure.message and failure.message not in failure.headline:
        lines.append(_wrap(f"  its standard error ends with: {failure.message}", width, "    "))
    lines += [_wrap(f"  {note}", width, "    ") for note in failure.notes]
    if failure.log:
        lines.append(f"  log: {visible(folder)}/{failure.log}" if folder else f"  log: {failure.log}")
    return "\n".join(lines)


def _wrap(text: str, width: int, indent: str) -> str:
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
