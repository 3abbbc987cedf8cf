"""What was asked of all ranks when one made no step, what each node answered, and what was found: `hangs/attempt-K/`.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only. A request is `ID.json`, the answers are
`ID/NODE.LOOK.json`, and what was found is `ID.found.json`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcenv.errors import HpcenvError
from hpcenv.records.files import load_record
from hpcenv.records.manifest import WatchOptions
from hpcenv.records.run_folder import RunFolder

HangKind = Literal["hang", "working", "unknown", "idle"]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One line of a Python stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A collective operation, by its number in its process group."""

    number: int
    name: str


@dataclass(frozen=True, kw_only=True)
class GroupState:
    """What torch's flight recorder of a rank says of one process group.

    Attributes:
        name: torch's name of the group; `about` is what the script calls it.
        ranks: its members; empty if unknown.
        last: the operation that this rank entered last.
        waits: the first one that is not finished; None without one.
        timeout: of its operations, in seconds; None if unknown.
    """

    name: str
    about: str = ""
    ranks: tuple[int, ...] = ()
    last: Operation | None = None
    waits: Operation | None = None
    timeout: float | None = None


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """What the kernel says of a process.

    Attributes:
        state: a letter of proc(5); empty if it has ended.
        wchan: where it sleeps in the kernel; empty if unknown.
        call: the system call it is in; empty if it is in none, or if this user cannot read it.
        file, mount: of that call, and type and place of the file's mount.
        written: bytes that it read or wrote; None if unknown.
        busy, cpu: seconds of CPU of the processes below it, and of the main thread.
    """

    pid: int
    state: str
    wchan: str = ""
    call: str = ""
    file: str = ""
    mount: str = ""
    written: int | None = None
    busy: float = 0.0
    cpu: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RankStacks:
    """One look at one rank.

    Attributes:
        stack: of its main thread, the innermost line first; empty if it gave none.
        threads: stacks of its other threads.
        groups: None if the flight recorder did not answer; `unknown` says why.
        workers: processes below the rank, as those of a DataLoader.
        saving: whether it is inside `hpcenv.training.saving`.
        moves: whether its lines changed within a second after this look.
    """

    rank: int
    process: ProcessState
    stack: tuple[Frame, ...] = ()
    threads: tuple[tuple[Frame, ...], ...] = ()
    groups: tuple[GroupState, ...] | None = None
    unknown: str = ""
    workers: tuple[ProcessState, ...] = ()
    saving: bool = False
    moves: bool = False


@dataclass(frozen=True, kw_only=True)
class StackRequest:
    """A request to all nodes for the stacks of their ranks.

    Attributes:
        asked: when, in seconds since the epoch.
        stalled: for how many seconds a rank made no step; None where a person asks.
        looks: how often to look, with `gap` seconds between.
    """

    id: str
    asked: float
    stalled: float | None = None
    looks: int = 1
    gap: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StackAnswer:
    """What one node answered at one look."""

    node: str
    look: int
    at: float
    ranks: tuple[RankStacks, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HangFound:
    """What two looks at all ranks say, in words: the answer first, then one line for each different stack.

    Of kind `idle`: nothing of the run was in use (`WatchOptions.idle_end`).
    """

    id: str
    kind: HangKind
    at: float
    lines: tuple[str, ...]


def requests_of(run: RunFolder, attempt: int) -> Path:
    """Return the folder of an attempt's requests."""
    return run.hangs / f"attempt-{attempt}"


def request_path(folder: Path, name: str) -> Path:
    """Return the path of a request."""
    return folder / f"{name}.json"


def answer_path(folder: Path, name: str, node: str, look: int) -> Path:
    """Return the path of a node's answer; its folder is made with the request."""
    return folder / name / f"{node}.{look}.json"


def found_path(folder: Path, name: str) -> Path:
    """Return the path of what was found."""
    return folder / f"{name}.found.json"


def read_found(folder: Path) -> list[HangFound]:
    """Return what was found in the attempt with this folder of requests, the newest last."""
    found = []
    for path in folder.glob("*.found.json"):
        with suppress(HpcenvError):
            found.append(load_record(HangFound, path))
    return sorted(found, key=lambda one: one.at)


def is_hang(folder: Path, *, since: float = 0.0) -> bool:
    """Whether a hang was found, after a time, in the attempt with this folder of requests."""
    return any(found.kind == "hang" and found.at >= since for found in read_found(folder))


def why_to_end(folder: Path, options: WatchOptions) -> Literal["", "hang", "idle"]:
    """Return why the watch ends the attempt with this folder of requests; empty where it does not."""
    if options.on_stall == "report" and not options.idle_end:
        return ""
    kinds = {found.kind for found in read_found(folder)}
    if "hang" in kinds and options.on_stall != "report":
        return "hang"
    return "idle" if "idle" in kinds else ""
