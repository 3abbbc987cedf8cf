"""Read how the ranks of this node ended: the agent's record, error files, standard error, and kills by the kernel.

Runs on: COMPUTE NODE. Standard library only. The training can write anything into the records and error files. So this
module reads only a limited number of bytes, and a file with unexpected content counts as missing.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcenv.machine import job_cgroup
from hpcenv.records.files import read_end, read_json
from hpcenv.records.outcome import RankExit
from hpcenv.records.run_folder import RunFolder
from hpcenv.text import cut, visible_ascii

# A traceback is near the end of standard error; only messages of threads and exit handlers follow.
_STDERR_BYTES = 256 * 1024
_MESSAGE = 500
_TRACEBACK = 16 * 1024
# If more lines than this follow a traceback, the program continued after this exception.
_LINES_AFTER = 20
_LINES_OF_MESSAGE = 10


# Folder for the output of the program that `--launcher none` starts on a node (incontainer/tasks.py).
PROGRAM = "program"


def agent_record(local_rank: int | None = None) -> str:
    """Return the file name of an agent's record (incontainer/agent.py). Each task of srun has one agent."""
    return "agent.json" if local_rank is None else f"agent.{local_rank}.json"


def record_of(run: RunFolder, node: str, local_rank: int | None = None) -> Path:
    """Return the path of the agent's record of the ranks on a node."""
    return run.ranks / node / agent_record(local_rank)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The failed ranks of one node.

    Attributes:
        failed: the ranks that failed, in the order of their ends.
        detail: error of torchrun itself; empty without one.
        alone: True if no rank has joined a process group; False if a rank has joined, or if this is unknown.
    """

    failed: tuple[RankExit, ...] = ()
    detail: str = ""
    alone: bool = False


def read_ranks(run: RunFolder, node: str, *, status: int, local_rank: int | None = None) -> Ranks:
    """Return the failed ranks of a node.

    Args:
        run: the run folder.
        node: name of the node.
        local_rank: local rank of the task whose record is read; None for the record of all ranks of the node.
        status: exit status of torchrun; if it is 0, no rank has failed.
    """
    record = _json(record_of(run, node, local_rank))
    if status == 0:
        return Ranks(alone=record is not None and record.get("joined") == 0)
    if record is None:
        # The agent is torchrun's process.
        return Ranks(detail=f"{'torchrun' if local_rank is None else 'the agent'} left no record of its ranks")
    error = record.get("error")
    rows = record.get("ranks")
    ranks = [_rank(run, node, row) for row in (rows if isinstance(rows, list) else [])]
    return Ranks(
        failed=tuple(rank for rank in ranks if rank is not None),
        detail=_line(error) if isinstance(error, str) else "",
    )


def _rank(run: RunFolder, node: str, row: object) -> RankExit | None:
    """Return one rank of the record, with the message from its error file or from the end of its standard error."""
    if not isinstance(row, dict):
        return None
    status, local = _number(row.get("status")), _number(row.get("local_rank"))
    is_program = local == -1 and row.get("rank") == -1
    folders = [run.ranks / node / PROGRAM] if is_program else _folders_of(run, node, local)
    message, traceback, source = _error_in(folders, status=status)
    # If the program keeps no file for each rank, the output of the ranks is in the program's own file.
    logs = [*folders, run.ranks / node / PROGRAM]
    log = next((folder / "stderr.log" for folder in logs if (folder / "stderr.log").is_file()), None)
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
        log="" if log is None else os.path.relpath(log, run.path),
        program=is_program,
    )


def _error_in(folders: Sequence[Path], *, status: int | None) -> tuple[str, str, str]:
    """Return message, traceback and source of an error from the log folders of a rank."""
    for folder in folders:
        message, traceback = _from_error_file(folder / "error.json")
        if message or traceback:
            return message, traceback, "error-file"
    for folder in folders:
        message, traceback = from_stderr(_tail(folder / "stderr.log"), status=status)
        if message or traceback:
            return message, traceback, "stderr"
    return "", "", ""


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 40 else None


def signal_name(status: int | None) -> str:
    """Return the signal name of an exit status: `SIGKILL` for 137; empty for a status that is not a signal."""
    try:
        return signal.Signals(status - 128).name if status is not None and status > 128 else ""
    except ValueError:
        return ""


# -- the files that torchrun writes for a rank --------------------------------------------


def _folders_of(run: RunFolder, node: str, local_rank: int | None) -> list[Path]:
    """Return the log folders of a rank, the newest first: LOGS/RDZV-ID_xxxx/attempt_N/LOCAL-RANK (torch 1.10 to 2.13).

    Only the folders of the rank's last start are returned. The folder `errors` of the start hook is searched too.
    """
    if local_rank is None or local_rank < 0:
        return []
    found = [folder for folder in (run.ranks / node).glob(f"*/attempt_*/{local_rank}") if folder.is_dir()]
    last = max((_restart(folder) for folder in found), default=0)
    return sorted((f for f in found if _restart(f) == last), key=lambda f: f.stat().st_mtime, reverse=True)


def _restart(folder: Path) -> int:
    number = folder.parent.name.rpartition("_")[2]
    return int(number) if re.fullmatch("[0-9]{1,9}", number) else -1


# -- messages and tracebacks --------------------------------------------------------------


def _from_error_file(path: Path) -> tuple[str, str]:
    """Return message and traceback of torchelastic's error file: a record or a text (torch 1.10 to 2.13)."""
    data = _json(path)
    content = None if data is None else data.get("message")
    if isinstance(content, str):
        return _line(content), ""
    if not isinstance(content, dict):
        return "", ""
    message, extra = content.get("message"), content.get("extraInfo")
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    return (
        _line(message) if isinstance(message, str) else "",
        stack[-_TRACEBACK:].strip("\n") if isinstance(stack, str) else "",
    )


_PREFIX = re.compile(r"\[rank\d+\]: ?")
_BEGINS = "Traceback (most recent call last):"
# Lines of torch's own logging: `[W1120 16:26:23.22 socket.cpp:207] ...`.
_NOTICE = re.compile(r"\[?[IW]\d{4} \d\d:\d\d:\d\d")
_DIED = re.compile(r"(Fatal Python error: .+|terminate called .+|\s+what\(\):\s+.+)")


def from_stderr(text: str, *, status: int | None) -> tuple[str, str]:
    """Return message and traceback from the end of a rank's standard error. Pure.

    With a process group, torch writes `[rank3]: ` before each line of a traceback (torch 2.2 to 2.13).
    Without a traceback, the message is the last line, or the line that reports the fatal error.
    """
    lines = text.splitlines()
    start = next((n for n in range(len(lines) - 1, -1, -1) if _plain(lines[n]) == _BEGINS), None)
    if start is not None:
        traceback = _traceback(lines[start:])
        # Python ends with 1 after an exception. With another status, the exception may have been handled.
        if status == 1 or len(lines) - start - len(traceback) <= _LINES_AFTER:
            whole = "\n".join(traceback)[-_TRACEBACK:]
            last = next((n for n, line in enumerate(traceback) if n and line and not line.startswith(" ")), None)
            return ("" if last is None else _line(traceback[last])), whole
    died = [line for line in lines if _DIED.match(line)]
    if status is not None and status > 128:
        return (_line(died[-1]) if died else ""), ""
    messages = [line for line in lines if line.strip() and not _NOTICE.match(line)]
    return (_line(messages[-1]) if messages else ""), ""


def _plain(line: str) -> str:
    return _PREFIX.sub("", line, count=1)


def _traceback(lines: list[str]) -> list[str]:
    """Return the traceback at the start of `lines`, without prefixes.

    The exception's message may have several lines.
    """
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
    return cut(" ".join(text[: 4 * _MESSAGE].split()), _MESSAGE)


def _tail(path: Path) -> str:
    try:
        return read_end(path, most=_STDERR_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""


def _json(path: Path) -> dict[str, Any] | None:
    try:
        data = read_json(path)
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


# -- lack of memory -----------------------------------------------------------------------

_CGROUPS = Path("/sys/fs/cgroup")


def count_oom_kills(own: str, mounted: Path = _CGROUPS) -> int | None:
    """Return how often the kernel killed a process of this job step for lack of memory; None if the result is unknown.

    A cgroup of version 2 also counts the kills in cgroups below it. A cgroup of version 1 counts only its own kills
    (kernel documentation, cgroup-v2 "memory.events", cgroup-v1/memory "oom_control", Linux 4.13). Only cgroups of jobs
    are read, because other cgroups would also count other users' processes.

    Args:
        own: text of /proc/self/cgroup.
    """
    for kinds, step in job_cgroup.steps_of(own):
        if not kinds:
            return _field(mounted / step.lstrip("/") / "memory.events", "oom_kill")
        if "memory" in kinds:
            top = mounted / "memory" / step.lstrip("/")
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
    """Return the text of /proc/self/cgroup; empty if it cannot be read."""
    try:
        return Path("/proc/self/cgroup").read_text()
    except OSError:
        return ""


def oom_since(before: int | None, after: int | None) -> int | None:
    """Return how many processes were killed between two counts; None if a count is unknown."""
    return None if before is None or after is None else max(0, after - before)


# -- for the job's log --------------------------------------------------------------------


def in_words(ranks: Ranks, node: str) -> list[str]:
    """Return one line for each of the first failed ranks. torchrun's own message comes later and has less detail."""
    shown = []
    for rank in ranks.failed[:4]:
        ended = rank.signal or ("no status" if rank.status is None else f"exit {rank.status}")
        message = f": {visible_ascii(rank.message)}" if rank.message else ""
        who = "the program" if rank.program else f"rank {rank.rank}"
        shown.append(f"hpcenv: node {node}: {who} ended with {ended}{message}")
    if len(ranks.failed) > len(shown):
        shown.append(f"hpcenv: node {node}: and {len(ranks.failed) - len(shown)} more ranks")
    return shown
