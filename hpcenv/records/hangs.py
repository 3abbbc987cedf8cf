"""Requests for the stacks of all ranks after one rank made no step, the nodes' answers, and the results.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only. The files are in `hangs/attempt-K/`: a request is
`ID.json`, the answers are `ID/NODE.LOOK.json`, and the result is `ID.found.json`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcenv.errors import HpcenvError
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest, WatchOptions
from hpcenv.records.run_folder import RunFolder

HangKind = Literal["hang", "working", "unknown", "idle"]
# The text in `RankStacks.unknown` if a rank could not report its operations because it is in a call of C code.
LOCK_HELD = "a C call holds Python's lock"

# The words before a result of the kind `unknown`.
CANNOT_TELL = "cannot tell whether the ranks hang"


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One line of a Python stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation of a process group.

    Attributes:
        number: number of a collective operation in its process group; 0 for a send or receive, because only two ranks
            know it.
    """

    number: int
    name: str


@dataclass(frozen=True, kw_only=True)
class GroupState:
    """What torch's flight recorder in a rank says about one process group.

    Attributes:
        name: torch's name of the group.
        about: the script's name of the group.
        ranks: the members of the group; empty if the value is unknown.
        last: the collective operation that this rank entered last.
        own: number of the newest send or receive, as this rank counts them; 0 without one.
        waits: the first operation that is not finished; None if all operations are finished.
        timeout: timeout of the group's operations, in seconds; None if the value is unknown.
    """

    name: str
    about: str = ""
    ranks: tuple[int, ...] = ()
    last: Operation | None = None
    own: int = 0
    waits: Operation | None = None
    timeout: float | None = None


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """What the kernel says about a process.

    Attributes:
        state: the state as a letter of proc(5); empty if the process has ended.
        wchan: the kernel function in which the process sleeps; empty if the value is unknown.
        call: the current system call of the process; empty without such a call, or if this user cannot read it.
        file, mount: the file of the system call, and the type and path of the mount with this file.
        written: how many bytes the process read or wrote; None if the value is unknown.
        busy, cpu, total: CPU seconds of the process's children, of its main thread, and of all its threads.
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
    total: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RankStacks:
    """One reading of one rank's stacks.

    Attributes:
        stack: stack of the rank's main thread, the innermost line first; empty if the rank gave no stack.
        threads: stacks of the rank's other threads.
        groups: process groups of the rank; None if the flight recorder did not answer. If `groups` is None, `unknown`
            has the reason.
        workers: child processes of the rank, for example workers of a DataLoader.
        saving: whether the rank is inside `hpcenv.training.saving`.
        moves: whether the lines of the stack changed within a second after this reading.
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
        asked: time of the request, in seconds since the epoch.
        stalled: for how many seconds a rank made no step; None if a person made the request.
        looks: how often each node reads the stacks.
        gap: seconds between two readings.
    """

    id: str
    asked: float
    stalled: float | None = None
    looks: int = 1
    gap: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StackAnswer:
    """What one node answered at one reading."""

    node: str
    look: int
    at: float
    ranks: tuple[RankStacks, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HangFound:
    """The result of two readings of all ranks, in words: first the conclusion, then one line for each different stack.

    The kind `idle` means that the run used no GPU and no CPU (`WatchOptions.idle_end`).
    """

    id: str
    kind: HangKind
    at: float
    lines: tuple[str, ...]


def requests_of(run: RunFolder, attempt: int) -> Path:
    """Return the folder with the requests of an attempt."""
    return run.hangs / f"attempt-{attempt}"


def request_path(folder: Path, name: str) -> Path:
    """Return the path of a request."""
    return folder / f"{name}.json"


def answer_path(folder: Path, name: str, node: str, look: int) -> Path:
    """Return the path of a node's answer. The caller makes the folder of the answers together with the request."""
    return folder / name / f"{node}.{look}.json"


def found_path(folder: Path, name: str) -> Path:
    """Return the path of the result of a request."""
    return folder / f"{name}.found.json"


def ranks_of_node(manifest: Manifest) -> int:
    """Return how many ranks hpcenv starts on each node; 0 if the program starts its ranks itself."""
    return manifest.nproc_per_node if manifest.launch.launcher in ("torchrun", "srun") else 0


def read_found(folder: Path) -> list[HangFound]:
    """Return the results in an attempt's folder of requests, the newest last."""
    found = []
    for path in folder.glob("*.found.json"):
        with suppress(HpcenvError):
            found.append(load_record(HangFound, path))
    return sorted(found, key=lambda one: one.at)


def is_hang(folder: Path, *, since: float = 0.0) -> bool:
    """Return whether an attempt's folder of requests has a hang that was found at `since` or later."""
    return any(found.kind == "hang" and found.at >= since for found in read_found(folder))


def why_to_end(folder: Path, options: WatchOptions) -> Literal["", "hang", "idle"]:
    """Return why the watch ends the attempt with this folder of requests; empty if the watch does not end it."""
    if options.on_stall == "report" and not options.idle_end:
        return ""
    kinds = {found.kind for found in read_found(folder)}
    if "hang" in kinds and options.on_stall != "report":
        return "hang"
    return "idle" if "idle" in kinds else ""
