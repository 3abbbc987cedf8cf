"""Look at all ranks when one rank makes no optimizer step, and report for which rank the other ranks wait.

Runs on: COMPUTE NODE. Standard library only. The nodes communicate through files in the run folder: a request, two
answers from each node, and the first node's judgement of all answers.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from hpcenv.errors import HpcenvError
from hpcenv.judge.hang import judge, lines_of
from hpcenv.records.files import load_record, save_record
from hpcenv.records.hangs import (
    CANNOT_TELL,
    HangFound,
    RankStacks,
    StackAnswer,
    StackRequest,
    answer_path,
    found_path,
    is_hang,
    ranks_of_node,
    request_path,
    requests_of,
    why_to_end,
)
from hpcenv.watch import stacks
from hpcenv.watch.pulses import RankPulse, read_pulses
from hpcenv.watch.watched_node import WatchedNode

_LEAST_STALL = 300.0
_MEDIANS = 10
_BEFORE_FIRST_STEP = 1800.0
# Share of the shortest time-out of a process group. After the whole time-out, the ranks would have ended.
_SHARE_OF_TIMEOUT = 0.7
_SHARE_BETWEEN_LOOKS = 0.1
_SHARE_BETWEEN_LISTINGS = 0.05
_SECONDS_BETWEEN_LOOKS = 60.0
_SECONDS_BETWEEN_LISTINGS = 10.0
# If a node has not answered after this time, hpcenv reports that the node does not answer.
_SECONDS_FOR_NODES = 15.0
_FURTHER_LOOKS = 6
_SECONDS_BETWEEN_FURTHER_LOOKS = 0.13
_MOST_TIMES = 101


class HangWatch:
    """Watches the ranks of this node. The first node also judges the answers of all nodes.

    Args:
        node: this node.
        say: called with each line for the job's log.
    """

    def __init__(self, node: WatchedNode, say: Callable[[str], None] | None = None) -> None:
        self._node = node
        self._say = say or say_in_log
        self._folder = requests_of(node.run, node.this_node.attempt)
        given = node.options.stall_after
        self._gap = min(_SECONDS_BETWEEN_LOOKS, given / 5 if given else _SECONDS_BETWEEN_LOOKS)
        self._usual = min(_SECONDS_BETWEEN_LISTINGS, max(1.0, self._gap))
        self._listed = float("-inf")
        self._began: dict[int, float] = {}
        self._before: dict[int, RankPulse] = {}
        self._times: dict[int, list[float]] = {}
        self._timeouts: dict[int, float] = {}
        self._learned = float("-inf")
        self._asked_after: dict[tuple[int, float], float] = {}
        self._seen: set[str] = set()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def attend(self, now: float) -> None:
        """If it is time, look at the steps of this node's ranks, and look for requests."""
        if now - self._listed < self._between:
            return
        self._listed = now
        with suppress(OSError, HpcenvError):
            # The program that keeps a session open makes no steps.
            ranks = read_pulses(self._node.rank_folders()) if self._node.manifest.session is None else ()
            for rank in ranks:
                self._look_at(rank, now)
            self._look_for_requests()
            if any(self._may_know_less(rank, now) for rank in ranks):
                self._begin(self._learn_timeouts)
            self._stop_if_found()

    def finish(self, now: float) -> None:
        """Do nothing, because all results are already written."""

    # -- a rank that makes no step -----------------------------------------------------------

    def _look_at(self, rank: RankPulse, now: float) -> None:
        began = self._began.setdefault(rank.pid, now)
        before, self._before[rank.pid] = self._before.get(rank.pid, rank), rank
        if before.steps and rank.steps > before.steps:
            times = self._times.setdefault(rank.pid, [])
            times.append((rank.seconds - before.seconds) / (rank.steps - before.steps))
            del times[:-_MOST_TIMES]
        since = rank.last_step or began
        still = now - since
        if rank.saving:
            return
        limit = self._limit(rank)
        # If the same stall goes on, the second request follows after twice the time of the first request.
        if still >= max(limit, 2 * self._asked_after.get((rank.pid, since), 0.0)):
            self._asked_after[rank.pid, since] = still
            self._request(rank, still, since, now)

    def _limit(self, rank: RankPulse) -> float:
        """Return the number of seconds without a step after which this node requests the stacks."""
        given = self._node.options.stall_after
        if not rank.last_step:
            limit = max(_BEFORE_FIRST_STEP, given)
        elif given:
            limit = given
        else:
            limit = max(_LEAST_STALL, _MEDIANS * self._median(rank.pid))
        # The nodes make their requests one after the other, so that a later node sees the request of an earlier node.
        limit += min(self._node.this_node.rank * self._between * 2, limit / 4)
        return min(limit, _SHARE_OF_TIMEOUT * self._timeouts.get(rank.pid, float("inf")))

    def _median(self, pid: int) -> float:
        times = sorted(self._times.get(pid, ()))
        return times[len(times) // 2] if times else 0.0

    @property
    def _timeout(self) -> float:
        """The shortest known time-out of the process groups of this node's ranks."""
        return min(self._timeouts.values(), default=float("inf"))

    @property
    def _between(self) -> float:
        """Seconds between two listings. If time-outs are short, the second look must still be before they end."""
        return min(self._usual, max(1.0, _SHARE_BETWEEN_LISTINGS * self._timeout))

    def _may_know_less(self, rank: RankPulse, now: float) -> bool:
        """Whether to ask a rank for time-outs: after 10 s, 20 s, 40 s and so on.

        The question is repeated because a script can make process groups at any time. A rank that makes its usual steps
        is not asked.
        """
        still = now - (rank.last_step or self._began[rank.pid])
        usual = 3 * self._median(rank.pid)
        return not rank.saving and still >= max(self._usual, usual) and now - self._learned >= still / 2

    def _learn_timeouts(self) -> None:
        """Ask the ranks of this node for the time-outs of their process groups."""
        self._learned = time.time()
        for look in stacks.look(self._node.rank_folders()):
            known = [group.timeout for group in look.groups or () if group.timeout]
            if known:
                self._timeouts = {**self._timeouts, look.process.pid: min(known)}

    def _request(self, rank: RankPulse, still: float, since: float, now: float) -> None:
        if is_hang(self._folder, since=since):
            return  # this hang is already reported
        for name in self._names():
            with suppress(HpcenvError):
                known = load_record(StackRequest, request_path(self._folder, name))
                if known.stalled is not None and known.asked > max(since, now - still / 2):
                    return  # this stall is being looked at
        name = f"stall-{rank.steps}-{self._node.this_node.node}-{now:.0f}"
        (self._folder / name).mkdir(parents=True, exist_ok=True)
        gap = min(self._gap, _SHARE_BETWEEN_LOOKS * self._timeout)
        request = StackRequest(id=name, asked=now, stalled=still, looks=2, gap=gap)
        save_record(request, request_path(self._folder, name))

    def _stop_if_found(self) -> None:
        """If a result requires a stop, send the launch step of this node the signal of Slurm's warning."""
        if not self._stopped and why_to_end(self._folder, self._node.options):
            self._stopped = True
            os.kill(self._node.launch, signal.SIGUSR2)

    # -- requests ------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        if not self._folder.is_dir():
            return []
        files = [name.removesuffix(".json") for name in os.listdir(self._folder) if name.endswith(".json")]
        return sorted(name for name in files if not name.endswith(".found"))

    def _look_for_requests(self) -> None:
        if self._is_busy():
            return
        for name in self._names():
            if name not in self._seen:
                self._seen.add(name)
                request = load_record(StackRequest, request_path(self._folder, name))
                self._begin(partial(self._serve, request))
                return

    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _begin(self, work: Callable[[], None]) -> None:
        """Do work in a thread, if no other work is being done.

        The samples must not wait for a rank without an answer.
        """
        if not self._is_busy():
            self._thread = threading.Thread(target=work, name="stacks", daemon=True)
            self._thread.start()

    def _serve(self, request: StackRequest) -> None:
        """Answer a request; on the first node, judge all answers."""
        with suppress(OSError, HpcenvError):
            until = time.monotonic()
            for number in range(1, request.looks + 1):
                time.sleep(max(0.0, until - time.monotonic()))
                until = time.monotonic() + request.gap
                self._answer(request, number)
            # Two nodes may ask at the same time.
            known = is_hang(self._folder, since=request.asked)
            if request.stalled is not None and self._node.this_node.rank == 0 and not known:
                self._judge(request)

    def _answer(self, request: StackRequest, number: int) -> None:
        saving = {rank.pid for rank in read_pulses(self._node.rank_folders()) if rank.saving}
        looks = [
            replace(look, saving=look.process.pid in saving, workers=stacks.workers_of(look.process.pid))
            for look in stacks.look(self._node.rank_folders())
        ]
        if number == 2:
            # A rank may loop over two lines. Then two looks often see the same line, so further looks are needed.
            moving = self._moving(looks)
            looks = [replace(look, moves=look.process.pid in moving) for look in looks]
        node = self._node.this_node.node
        answer = StackAnswer(node=node, look=number, at=time.time(), ranks=tuple(looks))
        save_record(answer, answer_path(self._folder, request.id, node, number))

    def _moving(self, looks: Sequence[RankStacks]) -> set[int]:
        """Return the processes that are at different lines in further looks. Only processes with a stack are asked."""
        lines = {look.process.pid: lines_of(look.stack) for look in looks if look.stack and not look.unknown}
        moving: set[int] = set()
        for _ in range(_FURTHER_LOOKS):
            time.sleep(_SECONDS_BETWEEN_FURTHER_LOOKS)
            rest = set(lines) - moving
            for look in stacks.look(self._node.rank_folders(), only=rest) if rest else ():
                if look.stack and lines_of(look.stack) != lines[look.process.pid]:
                    moving.add(look.process.pid)
        return moving

    def _judge(self, request: StackRequest) -> None:
        nodes = self._node.this_node.nodes
        ranks = len(nodes) * ranks_of_node(self._node.manifest)
        until = time.monotonic() + self._between + _SECONDS_FOR_NODES
        paths = [answer_path(self._folder, request.id, node, 2) for node in nodes]
        while not all(path.exists() for path in paths) and time.monotonic() < until:
            time.sleep(0.5)
        found = judge(request, read_answers(self._folder, request.id), nodes=nodes, ranks=ranks, at=time.time())
        save_record(found, found_path(self._folder, request.id))
        for line in in_words(found):
            self._say(line)


def read_answers(folder: Path, name: str) -> list[StackAnswer]:
    """Return the existing, complete answers to a request."""
    answers = []
    for path in sorted((folder / name).glob("*.json")):
        with suppress(HpcenvError):
            answers.append(load_record(StackAnswer, path))
    return answers


def in_words(found: HangFound) -> list[str]:
    """Return the lines of the job's log."""
    word = {"hang": "the ranks hang", "working": "note", "unknown": CANNOT_TELL, "idle": "idle"}[found.kind]
    first, *more = found.lines or ("no rank answered",)
    return [f"hpcenv: {word}: {first}", *(f"hpcenv:   {line}" for line in more)]


def say_in_log(line: str) -> None:
    """Write a line to the job's log, which is standard error of the watching process."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
