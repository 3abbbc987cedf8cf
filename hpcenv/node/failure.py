"""How the ranks of this node ended: what torchrun's start recorded, their errors, and the kernel's kills.

Runs on: COMPUTE NODE. Standard library only. Everything read here was written by the training or beside it: it is
bounded, and a file that is not what it should be is as good as none.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
from pathlib import Path
from typing import Any

from hpcenv.dataclass import dataclass
from hpcenv.wire import RankExit, RunFolder

_MOST_RANKS = 256
_RECORD_BYTES = 1 << 20
_ERROR_FILE_BYTES = 1 << 20
# A traceback stands at the end, before what threads and exit handlers say.
_STDERR_BYTES = 256 * 1024
_MESSAGE = 500
_TRACEBACK = 16 * 1024
# A traceback that is followed by more than this was survived.
_LINES_AFTER = 20
_LINES_OF_MESSAGE = 10


def record_of(run: RunFolder, node: str) -> Path:
    """Return where the start of torchrun (incontainer/agent.py) records its ranks on a node."""
    return run.ranks / node / "agent.json"


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What is known of the ranks of one node.

    Attributes:
        failed: the ranks that failed, the first one first.
        detail: what torchrun itself failed of.
    """

    failed: tuple[RankExit, ...] = ()
    detail: str = ""


def read_ranks(run: RunFolder, node: str, *, status: int) -> Ranks:
    """Return how the ranks of a node ended.

    Args:
        status: exit status of torchrun; of 0 there is nothing to tell.
    """
    if status == 0:
        return Ranks()
    record = _json(record_of(run, node), _RECORD_BYTES)
    if record is None:
        return Ranks(detail="torchrun left no record of its ranks")
    error = record.get("error")
    rows = record.get("ranks")
    found = [_rank(run, node, row) for row in (rows if isinstance(rows, list) else [])[:_MOST_RANKS]]
    return Ranks(
        failed=tuple(rank for rank in found if rank is not None),
        detail=_line(error) if isinstance(error, str) else "",
    )


def _rank(run: RunFolder, node: str, row: object) -> RankExit | None:
    """Return one row of the record, with what its error file or the end of its log says."""
    if not isinstance(row, dict):
        return None
    status, local = _number(row.get("status")), _number(row.get("local_rank"))
    folder = _folder_of(run, node, local)
    message, traceback, source = "", "", ""
    if folder is not None:
        message, traceback = _from_error_file(folder / "error.json")
        source = "error-file" if message or traceback else ""
        if not source:
            message, traceback = from_stderr(_tail(folder / "stderr.log"), status=status)
            source = "stderr" if message or traceback else ""
    rank, pid, ended = _number(row.get("rank")), _number(row.get("pid")), row.get("ended")
    return RankExit(
        rank=-1 if rank is None else rank,
        local_rank=-1 if local is None else local,
        pid=-1 if pid is None else pid,
        status=status,
        signal=signal_name(status),
        ended=float(ended) if isinstance(ended, (int, float)) and not isinstance(ended, bool) else None,
        message=message,
        traceback=traceback,
        source=source,  # type: ignore[arg-type]
        log="" if folder is None else os.path.relpath(folder / "stderr.log", run.path),
    )


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 40 else None


def signal_name(status: int | None) -> str:
    """Return the name of the signal that a status stands for: `SIGKILL` for 137, empty for a plain one."""
    try:
        return signal.Signals(status - 128).name if status is not None and status > 128 else ""
    except ValueError:
        return ""


# -- where torchrun put the files of a rank -----------------------------------------------


def _folder_of(run: RunFolder, node: str, local_rank: int | None) -> Path | None:
    """Return the folder of a rank's logs: LOGS/RDZV-ID_xxxx/attempt_N/LOCAL-RANK (torch 1.10 to 2.13), the last N."""
    if local_rank is None or local_rank < 0:
        return None
    folders = (run.ranks / node).glob(f"*/attempt_*/{local_rank}")
    return max((f for f in folders if f.is_dir()), key=lambda f: (_restart(f), f.stat().st_mtime), default=None)


def _restart(folder: Path) -> int:
    number = folder.parent.name.rpartition("_")[2]
    return int(number) if re.fullmatch("[0-9]{1,9}", number) else -1


# -- what it says -------------------------------------------------------------------------


def _from_error_file(path: Path) -> tuple[str, str]:
    """Return message and traceback of torchelastic's error file: a record, or a text by itself (torch 1.10 to 2.13)."""
    data = _json(path, _ERROR_FILE_BYTES)
    said = None if data is None else data.get("message")
    if isinstance(said, str):
        return _line(said), ""
    if not isinstance(said, dict):
        return "", ""
    message, extra = said.get("message"), said.get("extraInfo")
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    return (
        _line(message) if isinstance(message, str) else "",
        stack[-_TRACEBACK:].strip("\n") if isinstance(stack, str) else "",
    )


_PREFIX = re.compile(r"\[rank\d+\]: ?")
_BEGINS = "Traceback (most recent call last):"
# What torch's own logging says without being asked: `[W1120 16:26:23.22 socket.cpp:207] ...`.
_NOTICE = re.compile(r"\[?[IW]\d{4} \d\d:\d\d:\d\d")
_DIED = re.compile(r"(Fatal Python error: .+|terminate called .+|\s+what\(\):\s+.+)")


def from_stderr(text: str, *, status: int | None) -> tuple[str, str]:
    """Return message and traceback from the end of a rank's standard error. Pure.

    With a process group torch writes `[rank3]: ` before each line of a traceback (torch 2.2 to 2.13).
    Without a traceback the message is the last line, or the one in which the program died.
    """
    lines = text.splitlines()
    start = next((n for n in range(len(lines) - 1, -1, -1) if _plain(lines[n]) == _BEGINS), None)
    if start is not None:
        traceback = _traceback(lines[start:])
        # Python ends with 1 after an exception; who ends otherwise may have survived this one.
        if status == 1 or len(lines) - start - len(traceback) <= _LINES_AFTER:
            whole = "\n".join(traceback)[-_TRACEBACK:]
            last = next((n for n, line in enumerate(traceback) if n and line and not line.startswith(" ")), None)
            return ("" if last is None else _line(traceback[last])), whole
    died = [line for line in lines if _DIED.match(line)]
    if status is not None and status > 128:
        return (_line(died[-1]) if died else ""), ""
    said = [line for line in lines if line.strip() and not _NOTICE.match(line)]
    return (_line(said[-1]) if said else ""), ""


def _plain(line: str) -> str:
    return _PREFIX.sub("", line, count=1)


def _traceback(lines: list[str]) -> list[str]:
    """Return the traceback that `lines` begin with, without prefixes; its message may have several lines."""
    prefixed = _PREFIX.match(lines[0])
    if prefixed:
        prefix = prefixed.group().rstrip()
        count = next((n for n, line in enumerate(lines) if not line.startswith(prefix)), len(lines))
        return [_plain(line).rstrip() for line in lines[:count]]
    frames = next((n for n, line in enumerate(lines) if n and line and not line.startswith(" ")), len(lines) - 1)
    rest = lines[frames + 1 : frames + _LINES_OF_MESSAGE]
    message = next((n for n, line in enumerate(rest) if not line.strip()), len(rest))
    return [line.rstrip() for line in lines[: frames + 1 + message]]


def _line(text: str) -> str:
    """Return a text in one line of bounded length."""
    line = " ".join(text[: 4 * _MESSAGE].split())
    return line if len(line) <= _MESSAGE else line[: _MESSAGE - 3] + "..."


def _read(path: Path, most: int, *, end: bool) -> bytes | None:
    """Return the beginning or the end of a plain file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        with open(descriptor, "rb", closefd=False) as file:
            if end:
                file.seek(max(0, status.st_size - most))
            return file.read(most)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _tail(path: Path) -> str:
    return (_read(path, _STDERR_BYTES, end=True) or b"").decode("utf-8", errors="replace")


def _json(path: Path, most: int) -> dict[str, Any] | None:
    try:
        data = json.loads(_read(path, most, end=False) or b"")
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


# -- lack of memory -----------------------------------------------------------------------

_CGROUPS = Path("/sys/fs/cgroup")


def count_oom_kills(own: str, mounted: Path = _CGROUPS) -> int | None:
    """Return how often the kernel killed a process of this job step for lack of memory; None if it cannot be told.

    Slurm's cgroups are named job_N/step_N/..., in both versions (cgroup.conf(5), Slurm 22.05 to 26.05). Version 2
    counts what happened below a group in the group itself, version 1 in each one alone (kernel documentation,
    cgroup-v2 "memory.events", cgroup-v1/memory "oom_control", Linux 4.13). In a cgroup that is not a job's,
    other people's processes would be counted.

    Args:
        own: text of /proc/self/cgroup.
    """
    for line in own.splitlines():
        _, kinds, path = ([*line.split(":", 2), "", ""])[:3]
        step = re.match(r"(.*/job_\d+/step_[^/]+)(/|$)", path)
        if step is None:
            continue
        if not kinds:
            return _field(mounted / step[1].lstrip("/") / "memory.events", "oom_kill")
        if "memory" in kinds.split(","):
            top = mounted / "memory" / step[1].lstrip("/")
            counts = [_field(folder / "memory.oom_control", "oom_kill") for folder in (top, *top.glob("*"))]
            known = [count for count in counts if count is not None]
            return sum(known) if known else None
    return None


def _field(path: Path, name: str) -> int | None:
    try:
        rows = dict(line.split(None, 1) for line in path.read_text().splitlines() if " " in line)
        return int(rows[name])
    except (OSError, ValueError, KeyError):
        return None


def own_cgroup() -> str:
    """Return the text of /proc/self/cgroup, empty where there is none."""
    try:
        return Path("/proc/self/cgroup").read_text()
    except OSError:
        return ""


def oom_since(before: int | None, after: int | None) -> int | None:
    """Return how many were killed between two looks."""
    return None if before is None or after is None else max(0, after - before)


# -- for the job's log --------------------------------------------------------------------


def in_words(ranks: Ranks, node: str) -> list[str]:
    """Return one line for each of the first ranks that failed: torchrun's own words say less, and later."""
    shown = []
    for rank in ranks.failed[:4]:
        ended = rank.signal or ("no status" if rank.status is None else f"exit {rank.status}")
        message = f": {ascii_line(rank.message)}" if rank.message else ""
        shown.append(f"hpcenv: node {node}: rank {rank.rank} ended with {ended}{message}")
    if len(ranks.failed) > len(shown):
        shown.append(f"hpcenv: node {node}: and {len(ranks.failed) - len(shown)} more ranks")
    return shown


def ascii_line(text: str) -> str:
    """Show what is not printable ASCII as escapes: what a rank said goes into the job's log and to terminals."""
    return "".join(c if " " <= c <= "~" else ascii(c)[1:-1] for c in text)
