"""Find the first failure of a run from the exit records of its nodes and Slurm's job state. Pure.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

After the first rank has failed, nearly all other ranks fail, too: they lose the connection to the first
rank, or torchrun and srun end them. So the failure that matters is the earliest one, by the end times of the processes
on all nodes. But the clocks of nodes differ by some milliseconds, and a rank may notice a lost connection in less time.
So if several failures are close in time, the first failure is the one with an error that is not only a lost connection.
A process that ended because of a request to end has not failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hpcenv.records.outcome import NodeExit, RankExit
from hpcenv.text import listed, visible, wrap

FailureKind = Literal[
    "rank", "torchrun", "lack-of-memory", "node-failure", "no-record", "time-limit", "preemption", "cancelled",
    "asked-to-end", "disk-full", "no-facts", "hang", "idle",
]  # fmt: skip

# Failures within this number of seconds are close in time. The clocks of nodes may differ by this time, and a rank may
# need this time to notice that a peer has ended.
_CLOSE = 5.0
# With proctrack/linuxproc, Slurm signals ranks directly. A rank may end before the launch step records the signal.
_SIGNALLED_TOGETHER = 0.25
# If Slurm ended the job, it also caused the failures of ranks less than this number of seconds earlier.
_BECAUSE_OF_SLURM = 1.0

# Messages of a rank that lost the connection to a peer: gloo and NCCL in torch 1.10 to 2.13, TCPStore, sockets.
_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|connection was (likely )?closed|"
    r"remote process exited|ncclRemoteError|ncclSystemError|Socket Timeout|recvValue failed|sendBytes failed|"
    r"SignalException|failed to (recv|send)|RendezvousConnectionError",
    re.IGNORECASE,
)

# Slurm's states of a job that Slurm itself ended (cluster/slurm.py).
_BY_SLURM: dict[str, tuple[FailureKind, str]] = {
    "timeout": ("time-limit", "the job reached its time limit"),
    "preempted": ("preemption", "the job was preempted"),
    "cancelled": ("cancelled", "the job was cancelled"),
    "node-fail": ("node-failure", "a node failed, says Slurm"),
    "out-of-memory": ("lack-of-memory", "the job ran out of memory, says Slurm"),
}
_STOPPED: dict[str, tuple[FailureKind, str]] = {
    "time-limit": ("time-limit", "the job reached its time limit"),
    "preemption": ("preemption", "the job was preempted"),
    "hang": ("hang", "hpcenv ended the job, because its ranks hang ([watch] on-stall)"),
    "idle": ("idle", "hpcenv ended the job, because no GPU and no CPU was in use (--idle-end)"),
}

# Exit statuses of the gate, for the errors NodeRejected and NodesUnknown.
_GATE = (90, 91)

# std::terminate without an exception: a C++ object of a thread is destroyed while the thread runs. This was seen with
# torch 2.13 (gloo, torch.distributed.checkpoint.async_save) when Python ends, even after a script that succeeded.
_THREAD_AT_EXIT = "terminate called without an active exception"
_WHY_AT_EXIT = (
    "torch aborts like this if one of its threads (gloo, async_save) still runs while Python ends. The script itself "
    "may have finished. Wait for async_save, and end the script with torch.distributed.destroy_process_group()."
)

_MESSAGE = 300
_TRACEBACK_LINES = 40
_LINE = 400


@dataclass(frozen=True, kw_only=True)
class FirstFailure:
    """The first failure of a run. Texts have no control characters.

    Attributes:
        headline: the failure in one line.
        cause: `rank` if a rank failed; `torchrun` if torchrun failed. Any other value means that the run was
            ended from outside, or that the cause is unknown.
        node, rank, status, signal: node, rank, exit status and signal of the process that failed, if known.
        message: the exception in one line, or the last line of the rank's standard error.
        traceback: the Python traceback; empty if the rank printed none.
        log: file with the rank's standard error, relative to the run folder.
        others: number of other ranks that ended because of this failure; None if the value is unknown.
        notes: more lines, for example on nodes without a record, or on processes killed for lack of memory.
    """

    headline: str
    cause: FailureKind
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
class _FailureCandidate:
    """A failure on one node: a failure of a rank, or of torchrun if `rank` is None."""

    record: NodeExit
    rank: RankExit | None
    time: float

    @property
    def status(self) -> int | None:
        return self.record.status if self.rank is None else self.rank.status

    @property
    def is_lost_connection(self) -> bool:
        text = self.record.detail if self.rank is None else f"{self.rank.message}\n{self.rank.traceback[-2000:]}"
        return bool(_LOST_PEER.search(text))


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
    silent: Sequence[str] = (),
) -> FirstFailure | None:
    """Return the first failure of one attempt; None if no failure is known.

    Args:
        exits: exit records of the nodes.
        nodes: nodes on which the training was started; empty if no training was started.
        nproc: number of ranks per node.
        state: Slurm's job state as in `RunStatus.state`, for example `timeout`; empty if the value is unknown.
        over: whether the attempt has ended. While the attempt runs, a missing record means nothing.
        down: node -> reason, for nodes that Slurm reported as down when the attempt ended.
        stopped: why the job was stopped before the training started, as in `NodeExit.stopped`; empty if the training
            started.
        unfinished: description of a training that was stopped and will not continue; empty for any other training.
        waited: whether the job ended while it waited in the queue to continue an earlier attempt.
        silent: nodes whose check did not end before the job ended, although the check of other nodes did.
    """
    if silent and (stopped == "time-limit" or state == "timeout"):
        return FirstFailure(headline=no_facts(silent), cause="no-facts", node=visible(silent[0]))
    if stopped:
        return _of_slurm((), (), nproc, "", (), stopped=stopped)
    lost = {node: reason for node, reason in (down or {}).items() if node in nodes}
    whole = {record.node for record in exits if not 0 < record.tasks < nproc}
    missing = [node for node in nodes if over and node not in whole]
    first = _first(exits, margin=_BECAUSE_OF_SLURM if state in _BY_SLURM else 0.0)
    notes = (*_missing_notes(missing, state), *_memory_notes(exits), *_stopping_notes(exits))
    if missing and exits == () and state == "completed":
        return None
    full = next((record.full for record in exits if record.full and record.status != 0), "")
    if full and first is not None:
        then = _of_candidate(first, exits, nproc, state, notes)
        headline = f"the disk of the run folder is full: {visible(full)}; then {then.headline}"
        return replace(then, headline=headline, cause="disk-full")
    if first is not None and not _is_explained_by_node(first, missing, state, lost):
        return _of_candidate(first, exits, nproc, state, notes)
    if lost:
        return _of_lost(lost, exits, nproc, notes)
    # If a lost node explains the failure, the lost node is the cause, not the time limit: srun waited for this node
    # until the limit.
    if missing and (first is not None or state not in _BY_SLURM or state == "node-fail"):
        return _of_missing(missing, first, exits, nproc, state, notes)
    if unfinished:
        return _of_unfinished(exits, nproc, unfinished, notes)
    return _of_slurm(exits, nodes, nproc, state, notes, waited=waited)


def first_status(exits: Sequence[NodeExit]) -> int | None:
    """Return the exit status of the first failure, which is 128 + N for signal N; None if nothing failed."""
    first = _first(exits, margin=0.0)
    if first is None:
        return None
    # torch may know that a rank failed, but not its exit status.
    return first.status or first.record.status


def _first(exits: Sequence[NodeExit], *, margin: float) -> _FailureCandidate | None:
    refused = sorted((record for record in exits if record.refused), key=lambda record: (record.status, record.ended))
    if refused:
        # The training could not begin without this node, so the other nodes do not matter. Status 90 comes before 91.
        return _FailureCandidate(record=refused[0], rank=None, time=refused[0].ended)
    candidates = sorted(_candidates(exits, margin), key=lambda candidate: candidate.time)
    if not candidates:
        return None
    close = [candidate for candidate in candidates if candidate.time <= candidates[0].time + _CLOSE]
    return next((candidate for candidate in close if not candidate.is_lost_connection), candidates[0])


def _candidates(exits: Sequence[NodeExit], margin: float) -> Iterator[_FailureCandidate]:
    """Yield the first failure of each node. Failures that followed a request to end are left out."""
    asked = [record.asked_at for record in exits if record.asked_at is not None]
    until = min(asked) - margin if asked and margin else float("inf")
    for record in exits:
        # If the node received a request to save its state and end, failures after this request become notes.
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
            yield _FailureCandidate(record=record, rank=rank, time=time)


def _is_explained_by_node(
    first: _FailureCandidate, missing: Sequence[str], state: str, lost: Mapping[str, str]
) -> bool:
    """Whether a rank or torchrun failed only because a different node was lost, or left no record."""
    if first.record.refused:
        return False
    # A rank does not send SIGTERM to itself. So torchrun, srun or Slurm ended the rank, because of the lost node.
    if lost and (first.is_lost_connection or first.rank is None or first.rank.signal == "SIGTERM"):
        return True
    return bool(missing) and (state == "node-fail" or first.is_lost_connection)


# -- texts --------------------------------------------------------------------------------


def _of_candidate(
    first: _FailureCandidate, exits: Sequence[NodeExit], nproc: int, state: str, notes: tuple[str, ...]
) -> FirstFailure:
    record, rank = first.record, first.rank
    if rank is None:
        detail = visible(record.detail)[:_MESSAGE]
        who = {"torchrun": "torchrun", "ray": "Ray"}.get(record.launcher, "the agent")
        parts = [f"node {visible(record.node)}", f"{who} ended with {_ended(record.status, record.signal)}"]
        if record.status in _GATE and detail:
            parts = parts[:1] if record.node not in detail else []  # torchrun was not started
        return FirstFailure(
            headline=", ".join([*parts, *filter(None, [detail])]),
            cause="torchrun",
            node=visible(record.node),
            status=record.status,
            signal=visible(record.signal),
            message=detail,
            notes=notes,
        )
    message = visible(rank.message)[:_MESSAGE]
    for_memory = rank.signal == "SIGKILL" and bool(record.oom_kills or state == "out-of-memory")
    number = str(rank.rank) if rank.rank >= 0 else "unknown"
    parts = [f"node {visible(record.node)}", "the program" if rank.program else f"rank {number}"]
    parts.append(_ended(rank.status, visible(rank.signal)) + (" for lack of memory" if for_memory else ""))
    # Without a traceback, the message is only the last line of the log. It is shown below the headline.
    if message and (rank.traceback or rank.source == "error-file"):
        parts.append(message)
    others = max(0, _count(exits, nproc) - 1)
    if rank.signal == "SIGABRT" and message == _THREAD_AT_EXIT:
        notes = (_WHY_AT_EXIT, *notes)
    return FirstFailure(
        headline=", ".join(parts) + _cleaned_up(others),
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
    first: _FailureCandidate | None,
    exits: Sequence[NodeExit],
    nproc: int,
    state: str,
    notes: tuple[str, ...],
) -> FirstFailure:
    names = _names(missing)
    failed = state == "node-fail"
    text = f"node failure: {names} left no record" if failed else f"{names} left no record of how the training ended"
    then = ""
    if first is not None and first.rank is not None:
        then = f"; then rank {first.rank.rank} on node {visible(first.record.node)} lost its peer"
    return FirstFailure(
        headline=text + then + _cleaned_up(max(0, _count(exits, nproc) - (first is not None))),
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
    """Return the failure of a job that Slurm ended, or that was asked to end; None if neither happened."""
    stopped = next((record.stopped for record in exits if record.stopped), stopped)
    cause, text = _BY_SLURM.get(state) or _STOPPED.get(stopped) or (None, "")
    others = _count(exits, nproc)
    if cause is not None:
        where = ", while it waited to continue" if waited else "" if nodes else ", before the training started"
        ranks = f"; {others} rank{'s were' if others != 1 else ' was'} cleaned up" if others else ""
        saved = "; the script saved its state" if exits and all(record.saved for record in exits) else ""
        return FirstFailure(headline=f"{text}{where}{ranks}{saved}", cause=cause, others=others, notes=notes)
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
    """Describe a training that was stopped before it was finished, and why it is not requeued."""
    where = {
        "time-limit": " at the time limit", "preemption": " by a preemption",
        "hang": ", because its ranks hang", "idle": ", because no GPU and no CPU was in use",
    }.get(stopped, "")  # fmt: skip
    after = " after it saved its state" if saved else ""
    refusal = f" ({visible(' '.join(not_again.split()))[:_MESSAGE]})" if not_again else ""
    return f"stopped{where}{after}; not requeued{refusal}"


def _of_unfinished(exits: Sequence[NodeExit], nproc: int, text: str, notes: tuple[str, ...]) -> FirstFailure:
    reason = next((record.stopped for record in exits if record.stopped), "")
    cause: FailureKind = _STOPPED[reason][0] if reason in _STOPPED else "asked-to-end"
    return FirstFailure(headline=text, cause=cause, others=_count(exits, nproc), notes=notes)


def _count(exits: Sequence[NodeExit], nproc: int) -> int:
    """Return how many ranks failed. If a node that failed has recorded no rank, all its ranks are counted."""
    return sum(len(record.ranks) or nproc for record in exits if record.status != 0)


def _cleaned_up(others: int) -> str:
    if not others:
        return ""
    return f"; {others} other{'s were' if others != 1 else ' was'} cleaned up"


def _ended(status: int | None, signal: str) -> str:
    if signal:
        return signal
    return "exit status unknown" if status is None else f"exit {status}"


def no_facts(nodes: Sequence[str]) -> str:
    """Return a sentence that names the nodes whose check did not end."""
    return f"{_names(nodes)} gave no facts, and others did, until the time limit, before the training started"


def _names(nodes: Sequence[str]) -> str:
    shown = listed([visible(node) for node in nodes], 8)
    return f"node {shown}" if len(nodes) == 1 else f"nodes {shown}"


_NO_RECORD = "no record of its end"


def _missing_notes(missing: Sequence[str], state: str) -> tuple[str, ...]:
    says = f"Slurm says {visible(state)}; " if state in _BY_SLURM else ""
    return tuple(f"node {visible(node)}: {says}{_NO_RECORD}" for node in missing[:8])


def _memory_notes(exits: Sequence[NodeExit]) -> tuple[str, ...]:
    unreadable = tuple(
        f"node {visible(record.node)}: could not read whether the kernel killed processes for lack of memory"
        for record in exits
        if record.oom_kills is None and not record.asked_to_end and not record.stopped
        and any(rank.signal == "SIGKILL" for rank in record.ranks[:1])
    )  # fmt: skip
    return unreadable + tuple(
        f"node {visible(record.node)}: the kernel killed {record.oom_kills} "
        f"process{'es' if record.oom_kills != 1 else ''} of this job for lack of memory"
        for record in exits
        if record.oom_kills
    )


def _stopping_notes(exits: Sequence[NodeExit]) -> tuple[str, ...]:
    """Return notes on ranks that failed after they were asked to save their state and end."""
    return tuple(
        f"node {visible(record.node)}: rank {rank.rank} failed while stopping: {visible(rank.message)[:_MESSAGE]}"
        for record in exits
        if record.stopped
        for rank in record.ranks[:1]
        if rank.traceback and not rank.signal
    )


def _shown_traceback(text: str) -> str:
    """Return a traceback without control characters. A long traceback is cut to its first line and last lines."""
    lines = [visible(line)[:_LINE] for line in text.splitlines()]
    if len(lines) > _TRACEBACK_LINES:
        lines = [lines[0], "  ...", *lines[2 - _TRACEBACK_LINES :]]
    return "\n".join(lines)


def render(failure: FirstFailure, *, width: int = 80, word: str = "first failure", folder: str = "") -> str:
    """Return a failure as text.

    Args:
        failure: the failure.
        width: width of the text in columns. Lines of the traceback are not wrapped.
        word: the words at the beginning of the first line.
        folder: the run folder, for the path of the log. If `folder` is empty, the path is relative to the run folder.
    """
    lines = [wrap(f"{word}: {failure.headline}", width=width)]
    if failure.traceback:
        lines += [f"  {line}".rstrip() for line in failure.traceback.splitlines()]
    elif failure.message and failure.message not in failure.headline:
        lines.append(wrap(f"  its standard error ends with: {failure.message}", indent=4, width=width))
    lines += [wrap(f"  {note}", indent=4, width=width) for note in failure.notes]
    if failure.log:
        lines.append(f"  log: {visible(folder)}/{failure.log}" if folder else f"  log: {failure.log}")
    return "\n".join(lines)
