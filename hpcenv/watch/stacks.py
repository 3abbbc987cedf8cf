"""Ask a rank of this node for its stacks without disturbing the rank, and read the kernel's data about the rank.

Runs on: COMPUTE NODE. Standard library only. The code inside the rank is incontainer/start_hook/stacks.py. A process
gets the signal only if it has marked itself, and only if its thread catches the signal. The signal would end any other
process.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcenv import process
from hpcenv.incontainer import proc
from hpcenv.records.files import read_file, read_json
from hpcenv.records.hangs import LOCK_HELD, Frame, GroupState, Operation, ProcessState, RankStacks

_SECONDS_TO_ANSWER = 5.0
# Time to wait for torch's record after the stacks have come. This record needs Python's lock.
_SECONDS_FOR_OPERATIONS = 1.0
# A thread that wants Python's lock requests it every 5 ms (sys.getswitchinterval), and sleeps between two requests.
# Python code gives the lock away on request. If this number of requests has no effect, a C call holds the lock.
_ASKED_IN_VAIN = 200
_SECONDS_BETWEEN_LOOKS = 0.05
_MOST_BYTES = 1 << 20
_MOST_WORKERS = 16

# Numbers of the system calls whose first argument is a file descriptor, and of tgkill (Linux, by machine).
_CALLS: dict[str, dict[int, str]] = {
    "x86_64": {0: "read", 1: "write", 5: "fstat", 17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev",
               73: "flock", 74: "fsync", 75: "fdatasync", 78: "getdents", 217: "getdents64"},
    "aarch64": {63: "read", 64: "write", 80: "fstat", 67: "pread64", 68: "pwrite64", 65: "readv", 66: "writev",
                32: "flock", 82: "fsync", 83: "fdatasync", 61: "getdents64"},
}  # fmt: skip
_TGKILL = {"x86_64": 234, "aarch64": 131}
_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")
_NUMBERS = ("pid", "tid", "start", "signal", "signal-without-lock", "rank")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)\Z')


def look(folders: list[Path], only: Collection[int] | None = None) -> Iterator[RankStacks]:
    """Yield the answer of each marked rank of this node.

    All ranks are asked before the first answer is read, so that all stacks show the same moment.

    Args:
        folders: folders in which the ranks of this node have their marks.
        only: process ids of the ranks to ask; None for all ranks.
    """
    marks = [
        (folder, {**mark, "slept": _sleeps(mark)})
        for folder in folders
        for mark in _marks(folder)
        if only is None or mark["pid"] in only
    ]
    asked = [(folder, mark, _ask(folder, mark)) for folder, mark in marks]
    until = time.monotonic() + _SECONDS_TO_ANSWER
    for folder, mark, was_asked in asked:
        runs = proc.runs(mark["pid"], mark["start"])
        state = state_of(mark["pid"]) if runs else ProcessState(pid=mark["pid"], state="")
        found = RankStacks(rank=mark["rank"], process=state, unknown=was_asked)
        yield found if was_asked else _answer(folder, mark, found, until)


def _marks(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("rank-*.mark")):
        try:
            mark = read_json(path)
            numbers = {name: int(mark[name]) for name in _NUMBERS}
        except (OSError, ValueError, KeyError, TypeError):
            continue
        yield {**numbers, "main": str(mark.get("main"))}


def _ask(folder: Path, mark: dict[str, Any]) -> str:
    """Send the signal to the thread that waits for it. Return why this is not possible, or an empty text."""
    if not proc.runs(mark["pid"], mark["start"]):
        return "it has ended"
    if not _is_in(mark, "Cgt", mark["signal"]):
        return "it does not take the signal"
    _file(folder, mark, "operations").unlink(missing_ok=True)
    os.truncate(_file(folder, mark, "stacks"), 0)
    return _send(mark, mark["signal"])


def _ask_without_lock(mark: dict[str, Any]) -> None:
    """Send the second signal. Its handler writes the stacks without the lock."""
    number = mark["signal-without-lock"]
    if _is_in(mark, "Cgt", number) and not _is_in(mark, "Blk", number):
        _send(mark, number)


def _send(mark: dict[str, Any], number: int) -> str:
    call = _TGKILL.get(platform.machine())
    if call is None:
        return f"the number of tgkill is not known on {platform.machine()}"
    import ctypes  # slow to load, and most runs never hang

    failed = ctypes.CDLL(None, use_errno=True).syscall(call, mark["pid"], mark["tid"], number)
    return os.strerror(ctypes.get_errno()) if failed else ""


def _file(folder: Path, mark: dict[str, Any], kind: str) -> Path:
    return folder / f"rank-{mark['rank']}.{kind}"


def _is_in(mark: dict[str, Any], mask: str, number: int) -> bool:
    """Return whether a signal is in a mask: `Cgt` has the signals with a handler, `Blk` the blocked signals."""
    found = re.search(rf"^Sig{mask}:\s*([0-9a-f]+)$", _status(mark), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


def _sleeps(mark: dict[str, Any]) -> int:
    """Return how often the thread that answers has gone to sleep since it began."""
    found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)$", _status(mark), re.MULTILINE)
    return int(found[1]) if found else 0


def _status(mark: dict[str, Any]) -> str:
    return _read(f"/proc/{mark['pid']}/task/{mark['tid']}/status")


def _stacks(folder: Path, mark: dict[str, Any], until: float) -> str:
    """Wait for the stacks. If a C call holds Python's lock, ask for the stacks without the lock."""
    text, size, wanted = "", -1, True
    while time.monotonic() < until and (size < 1 or len(text) != size):
        # The file is written within milliseconds. So it is complete when it no longer grows.
        size = len(text)
        time.sleep(_SECONDS_BETWEEN_LOOKS)
        text = _read(str(_file(folder, mark, "stacks")))
        if wanted and not text and _sleeps(mark) - mark["slept"] > _ASKED_IN_VAIN:
            wanted = False
            _ask_without_lock(mark)
    return text


def _answer(folder: Path, mark: dict[str, Any], found: RankStacks, until: float) -> RankStacks:
    """Wait for the stacks, and then wait a short time for torch's record."""
    text = _stacks(folder, mark, until)
    if not text:
        return replace(found, unknown=f"no answer in {_SECONDS_TO_ANSWER:.0f} s")
    stacks = parse_stacks(text)
    main = stacks.pop(mark["main"], ())
    others = tuple(frames for frames in stacks.values() if not any(f.function == "_answer" for f in frames))
    found = replace(found, stack=main, threads=others)
    until = time.monotonic() + _SECONDS_FOR_OPERATIONS
    while not _file(folder, mark, "operations").exists():
        if time.monotonic() > until:
            return replace(found, unknown=LOCK_HELD)
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return _with_groups(found, _file(folder, mark, "operations"))


def parse_stacks(text: str) -> dict[str, tuple[Frame, ...]]:
    """Return the stacks that faulthandler wrote: thread number -> lines, the innermost line first."""
    stacks: dict[str, tuple[Frame, ...]] = {}
    thread = ""
    for line in text.splitlines():
        if begins := _THREAD.match(line):
            thread = begins[1]
            stacks[thread] = ()
        elif (frame := _FRAME.match(line)) and thread:
            stacks[thread] += (Frame(file=frame[1], line=int(frame[2]), function=frame[3]),)
    return stacks


def _with_groups(found: RankStacks, path: Path) -> RankStacks:
    try:
        data = read_json(path)
        if "unknown" in data:
            return replace(found, unknown=str(data["unknown"]))
        groups = tuple(_group(name, one) for name, one in data["groups"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return replace(found, unknown=f"{path.name}: {error}")
    return replace(found, groups=groups)


def _group(name: str, data: dict[str, Any]) -> GroupState:
    last, waits = (
        Operation(number=int(one["number"]), name=str(one["name"])) if (one := data.get(key)) else None
        for key in ("last", "waits")
    )
    ranks = tuple(int(rank) for rank in data["ranks"])
    return GroupState(
        name=name,
        about=str(data["about"]),
        ranks=ranks,
        last=last,
        own=int(data.get("own", 0)),
        waits=waits,
        timeout=data.get("timeout"),
    )


# -- data from the kernel ------------------------------------------------------------------


def state_of(pid: int) -> ProcessState:
    """Return the state of a process. Values that this user cannot read stay empty."""
    state = proc.state(pid)[0]
    if not state:
        return ProcessState(pid=pid, state="")
    # A process that reads a mapped file makes no system call for it: only `read_bytes` counts these bytes.
    counts = re.findall(r"^(?:[rw]char|read_bytes): (\d+)$", _read(f"/proc/{pid}/io"), re.MULTILINE)
    ran = _read(f"/proc/{pid}/task/{pid}/schedstat").split()
    found = ProcessState(
        pid=pid,
        state=state,
        wchan=_read(f"/proc/{pid}/wchan").strip("0\n"),
        cpu=int(ran[0]) / 1e9 if ran else 0.0,
        written=sum(map(int, counts)) if counts else None,
        total=proc.cpu_seconds(pid),
        busy=sum(proc.cpu_seconds(child) for child in process.below(pid)),
    )
    words = _read(f"/proc/{pid}/syscall").split()
    if len(words) < 2 or not words[0].isdecimal():
        return found
    name = _CALLS.get(platform.machine(), {}).get(int(words[0]))
    if name is None:
        return replace(found, call=f"system call {words[0]}")
    file, mount = _place(pid, int(words[1], 16))
    return replace(found, call=name, file=file, mount=mount)


def workers_of(pid: int) -> tuple[ProcessState, ...]:
    """Return the states of the processes that a rank or one of its child processes started. They get no signal."""
    return tuple(state_of(child) for child in process.below(pid)[:_MOST_WORKERS])


def _place(pid: int, descriptor: int) -> tuple[str, str]:
    """Return the file of a descriptor, and its mount. `stat` is not called, because it could hang too."""
    try:
        file = os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return "", ""
    number = re.search(r"^mnt_id:\s*(\d+)$", _read(f"/proc/{pid}/fdinfo/{descriptor}"), re.MULTILINE)
    for line in _read(f"/proc/{pid}/mountinfo").splitlines():
        words = line.split()
        if number is not None and words[0] == number[1] and "-" in words:
            return file, f"{words[words.index('-') + 1]} at {words[4]}"
    return file, ""


def _read(path: str) -> str:
    """Return the start of a file; empty if it cannot be read."""
    try:
        return read_file(Path(path), most=_MOST_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""
