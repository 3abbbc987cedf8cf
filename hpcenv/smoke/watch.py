"""The reports of the ranks while a smoke test runs, and the limits that ranks cannot enforce themselves.

Runs on: COMPUTE NODE. Standard library only. incontainer/smoke.py writes the files that this module reads.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcenv.errors import RecordInvalid
from hpcenv.judge.smoke.nccl_log import read_transport
from hpcenv.records.files import load_record, read_file
from hpcenv.records.smoke import NcclTransport, PhaseResult, SmokeRank, SmokeReport

# After the limit, a rank ends its collective itself. Its message often names the peer, so the rank gets time to write
# the message.
_SECONDS_FOR_MESSAGE = 5.0
_SECONDS_BETWEEN_LOOKS = 1.0


@dataclass(frozen=True, kw_only=True)
class Late:
    """A phase that took longer than its limit."""

    rank: int
    phase: str
    seconds: float


class Watch:
    """Watches the ranks of one node through the files that they write."""

    def __init__(self, folder: Path, ranks: Sequence[int], *, seconds: float, start_seconds: float) -> None:
        """Watch `ranks`, which write into `folder`; each phase and the start have a limit."""
        self._folder = folder
        self._ranks = tuple(ranks)
        self._seconds = seconds
        self._start_seconds = start_seconds
        self._since = {rank: (("start", "begin"), time.monotonic()) for rank in ranks}

    def late(self) -> Late | None:
        """Return a rank whose phase takes too long. The clock of this process measures the time."""
        now = time.monotonic()
        for rank in self._ranks:
            place = self._place(rank)
            if place != self._since[rank][0]:
                self._since[rank] = (place, now)
            phase, took = place[0], now - self._since[rank][1]
            limit = self._start_seconds if phase == "start" else self._seconds
            if took > limit + _SECONDS_FOR_MESSAGE:
                return Late(rank=rank, phase=_next_of(place), seconds=took)
        return None

    def started(self) -> bool:
        """Whether all ranks have imported torch."""
        return all(self._place(rank) not in (("start", "begin"), ("start", "failed")) for rank in self._ranks)

    def begun(self) -> bool:
        """Whether a rank runs. With torchrun, this means that the agents of all nodes have met."""
        return any(read_lines(self._file(rank)) for rank in self._ranks)

    def _place(self, rank: int) -> tuple[str, str]:
        lines = read_lines(self._file(rank))
        last = lines[-1] if lines else {}
        return str(last.get("phase", "start")), str(last.get("state", "begin"))

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.jsonl"

    def ranks(self, *, nccl: bool) -> tuple[SmokeRank, ...]:
        """Return the report of each rank."""
        return tuple(
            read_rank(rank, read_lines(self._file(rank)), _transport(self._folder, rank) if nccl else None)
            for rank in self._ranks
        )


def _next_of(place: tuple[str, str]) -> str:
    """Return the phase in which a rank is. A rank that has ended one phase is in the next phase."""
    order = ("start", "init", "correct", "second-group", "bandwidth", "all")
    phase, state = place
    if state != "end" or phase not in order[:-1]:
        return phase
    return order[order.index(phase) + 1]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a rank that are complete JSON objects; none if the file cannot be read."""
    try:
        text = read_file(path, follow=False)
    except OSError:
        return []
    found = []
    for line in text.split(b"\n"):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def read_rank(rank: int, lines: Sequence[Mapping[str, Any]], transport: NcclTransport | None) -> SmokeRank:
    """Return the record of one rank from its lines. A line in a different form counts as missing. Pure."""
    phases: dict[str, PhaseResult] = {}
    found: dict[str, Any] = {}
    done, begun = False, {str(line.get("phase")): _number(line.get("time")) for line in lines}
    last = max(begun.values(), default=0.0)
    for line in lines:
        phase, state = str(line.get("phase", "")), line.get("state")
        if phase == "all":
            done = state == "end"
            continue
        own = line.get("found")
        found |= own if isinstance(own, dict) else {}
        phases[phase] = PhaseResult(
            phase=phase,
            state="end" if state == "end" else "failed" if state == "failed" else "running",
            seconds=_number(line.get("seconds")) or (last - begun.get(phase, last)),
            error=str(line.get("error", "")),
            bus_gb_s=_number(own.get("bus_gb_s")) if isinstance(own, dict) else 0.0,
        )
    return SmokeRank(
        rank=rank,
        phases=tuple(phases.values()),
        done=done,
        torch=str(found.get("torch", "")),
        connections=_pairs(found.get("connections")),
        not_run=_texts(found.get("not_run")),
        libraries=_names(found.get("libraries")),
        transport=transport,
    )


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e15 else 0.0


def _pairs(value: object) -> tuple[tuple[str, ...], ...]:
    rows = value if isinstance(value, list) else []
    return tuple((str(row[0]), str(row[1])) for row in rows if isinstance(row, list) and len(row) == 2)


def _names(value: object) -> tuple[str, ...]:
    rows = value if isinstance(value, list) else []
    return tuple(row for row in rows if isinstance(row, str))


def _texts(value: object) -> dict[str, str]:
    items = value.items() if isinstance(value, dict) else ()
    return {str(name): str(text) for name, text in items}


def _transport(folder: Path, rank: int) -> NcclTransport | None:
    try:
        text = read_file(folder / f"nccl-rank-{rank}.log", follow=False).decode("utf-8", errors="replace")
    except OSError:
        return None
    return read_transport(text.splitlines())


# -- other nodes --------------------------------------------------------------------------------


class Others:
    """Finds out whether another node could not continue. The ranks of such a node will never start or answer.

    The first failing node writes one file for all nodes, so that each node reads only one file, even in a large job.
    """

    def __init__(self, path: Path, *, run: str, attempt: int, node: str) -> None:
        """Read `path`; a file of another run or attempt, or of this node itself, is ignored."""
        self._path = path
        self._run = (run, attempt)
        self._node = node
        self._ended: SmokeReport | None = None
        self._seen = 0.0
        self._next = 0.0

    def ended(self, *, ranks_run: bool) -> SmokeReport | None:
        """Return the report of a node that could not continue.

        Args:
            ranks_run: whether ranks of this node run. Such ranks get some seconds to end by themselves, because their
                last messages often name the other node.
        """
        now = time.monotonic()
        if self._ended is None and now >= self._next:
            self._next = now + _SECONDS_BETWEEN_LOOKS
            self._ended, self._seen = self._read(), now
        return self._ended if not ranks_run or now - self._seen > _SECONDS_FOR_MESSAGE else None

    def _read(self) -> SmokeReport | None:
        try:
            report = load_record(SmokeReport, self._path)
        except RecordInvalid:
            return None
        return report if (report.run, report.attempt) == self._run and report.node != self._node else None


# -- the interface ---------------------------------------------------------------------------


def moved_bytes(interface: str, folder: Path = Path("/sys/class/net")) -> int | None:
    """Return how many bytes an interface has sent and received since it came up; None if the number is unknown."""
    total = 0
    for name in ("rx_bytes", "tx_bytes"):
        try:
            total += int((folder / os.path.basename(interface) / "statistics" / name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None
    return total


class Counter:
    """Records the byte counter of an interface, to find out how many bytes the interface moved in the last seconds."""

    def __init__(self, interface: str, *, seconds: float) -> None:
        """Keep the values of the last `seconds`."""
        self._interface = interface
        self._seconds = seconds
        self._seen: list[tuple[float, int]] = []

    def look(self) -> None:
        """Record the counter, at most twice per second."""
        now = time.monotonic()
        if self._seen and now - self._seen[-1][0] < 0.5:
            return
        moved = moved_bytes(self._interface)
        if moved is not None:
            self._seen = [(when, value) for when, value in self._seen if now - when <= self._seconds]
            self._seen.append((now, moved))

    def moved(self) -> int | None:
        """Return the bytes sent and received from the oldest to the newest count; None with fewer than two counts."""
        return self._seen[-1][1] - self._seen[0][1] if len(self._seen) > 1 else None
