"""Find out for a line of a log: the rank and the node that wrote it, its time, and the traceback before it. Pure.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# The traceback of an exception is searched in this many lines before the exception.
MOST_BEFORE = 300
_MOST_PREFIXES = 4
# Between two lines of one rank, there may be this many lines of other ranks.
MOST_BETWEEN = 32

# `[3] ` (hpcenv, and TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE), `[default3]:` (torchrun --tee), `[rank3]:` (torch's hook
# for exceptions that end a rank). Every repetition below has a limit, because a log may be hostile input.
_PREFIX = re.compile(r"\[(?:rank|default)?(\d{1,6})\](?::\s?| )")
# `0: ` and `12: ` of `srun --label`: the number of the task, right-aligned (srun.1, Slurm 24.11). `grep -n` writes no
# blank after the colon.
_TASK = re.compile(r" {0,5}(\d{1,6}): ")
# `n1:1234:5678 [0] NCCL WARN`, with or without a time before it (NCCL, debug.cc).
_NCCL = re.compile(r"(?:\[[\d :-]{10,30}\] )?(?P<node>[\w.-]{1,64}):\d{1,10}:\d{1,10} \[\d{1,4}\]")
# A line about a failed node (`DUE TO NODE`) names the node of the batch script, not the failed node.
_SLURM = re.compile(
    r" ON (?P<node>[\w.-]{1,64}) CANCELLED AT (?!\S{1,40} DUE TO NODE)|srun: error: (?P<other>[\w.-]{1,64}): tasks? "
)
# With these words, a program marks a line as information or a warning, so the text after them is not a failure.
_REMARK = re.compile(
    r"NCCL (?:INFO|TRACE)\b|\[(?:INFO|WARNING|DEBUG)\]|(?:^|[\s:|])(?:INFO|WARNING|DEBUG)\b|[A-Za-z]{0,40}Warning: "
    r"|^\[?[WI](?:\d{3,4}| )[^\]]{0,80}\]| [WI] \S{1,200}\.cc:\d{1,6}\] "
)
# Lines that a program writes at its end, and lines of launchers and libraries. They do not show that a rank continued.
_NO_PROGRESS = re.compile(
    r"^(?!\s*\d{1,3}%)\s|^(?:Traceback|During handling|The above exception|frame #|srun:|slurmstepd|sbatch:|wandb:"
    r"|hpcenv|what\(\)|\[?[EWF]\d{3,4} |\[[EWIF] |[\w.]{0,200}(?:Error|Exception|Interrupt)\b)|NCCL (?:INFO|WARN)"
    r"|(?i:fail|abort|kill|terminat|error|fatal|exit(?:ed|s|code| code)|closing signal)"
)
_PROGRESS = re.compile(r"[A-Za-z]{2}|\d%")
# This many lines show that a rank continued.
MANY = 10
_TORCH_RANK = re.compile(r"\[(?:PG [^\]]{0,80})?[Rr]ank (\d{1,6})\]")
# A time such as 2026-11-22T10:11:12, also with a space instead of T, or `E1122 10:11:12.345678` of glog (torch), which
# has no year.
_TIME = re.compile(r"\b\d{4}-\d\d-\d\d[T _]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?|(?<=[EWFI])\d{3,4} \d\d:\d\d:\d\d\.\d{1,9}")
_FRAME = re.compile(r'File "(?P<file>[^"]{1,400})", line (?P<line>\d{1,9})')
# Frames of these files are not the user's code.
_NOT_OURS = re.compile(r"site-packages/|dist-packages/|/lib/python|/hpcenv/incontainer/|^<|/torch/|importlib")
_BEGIN = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
# torchrun's table of failures: `  rank      : 1 (local_rank: 1)`.
_TABLE = re.compile(r"^\s{1,8}(host|rank|time)\s{1,12}: (\S{1,80})")


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line without its prefixes.

    Attributes:
        task: number of the task, which `srun --label` wrote before the line; None if there is no such label.
    """

    text: str
    rank: int | None
    task: int | None = None

    @property
    def writer(self) -> tuple[int | None, int | None]:
        """The writer of the line.

        The lines of one writer are in order, but lines of other writers may be between them.
        """
        return self.rank, self.task


@dataclass(frozen=True, kw_only=True)
class Around:
    """What the lines before a line show.

    Attributes:
        where: the last frame of the user's code in the traceback before the line, such as `train.py:12`.
        time: the last time in the lines before the line.
    """

    where: str = ""
    time: str = ""


def parse(raw: bytes, at: int, *, around: int) -> Line:
    """Return a line. If the line is long, return only the part around position `at`."""
    begin = raw.rfind(b"\r", 0, at) + 1
    if at - begin > around:
        begin = at - around
    text, rank, task = _strip(raw[begin : at + around].decode("utf-8", errors="replace").rstrip("\r\n"))
    if begin and rank is None:
        _, rank, task = _strip(raw[:64].decode("utf-8", errors="replace"))
    if rank is None and (match := _TORCH_RANK.search(text[:400])):
        rank = int(match[1])
    return Line(text=text, rank=rank, task=task)


def time_of(text: str) -> str:
    """Return the time that a line contains; empty if it contains no time."""
    match = _TIME.search(text[:300])
    return match[0] if match else ""


def node_of(text: str) -> str:
    """Return the node that a line of NCCL or Slurm names; empty if the line names no node."""
    match = _NCCL.match(text) or _SLURM.search(text[:400])
    return next((name for name in match.groups() if name), "") if match else ""


def is_remark(text: str) -> bool:
    """Return whether the words at the beginning of a line mark the line as information or a warning."""
    return _REMARK.search(text[:400]) is not None


def ordinary(after: bytes, writer: tuple[int | None, int | None] | None) -> int:
    """Return how many ordinary lines this writer wrote (None: any writer). `MANY` means that the writer continued."""
    count = 0
    for raw in re.split(rb"[\r\n]", after):
        line = _strip(raw[:400].decode("utf-8", errors="replace"))
        if writer not in (None, line.writer) or _NO_PROGRESS.search(line.text) or not _PROGRESS.search(line.text):
            continue
        count += 1
        if count == MANY:
            break
    return count


def follows_code(before: Sequence[bytes], line: Line) -> bool:
    """Return whether the previous line of the same writer is indented, as in a traceback."""
    for raw in reversed(before):
        own = _strip(raw[:200].decode("utf-8", errors="replace"))
        if own.writer == line.writer:
            return own.text.startswith(" ")
    return False


class _Stripped(NamedTuple):
    """A text without the prefixes for task and rank, and the numbers that were in these prefixes; see `Line`."""

    text: str
    rank: int | None
    task: int | None

    @property
    def writer(self) -> tuple[int | None, int | None]:
        return self.rank, self.task


def _strip(text: str) -> _Stripped:
    rank, task = None, None
    if (match := _TASK.match(text)) is not None:
        task, text = int(match[1]), text[match.end() :]
    for _ in range(_MOST_PREFIXES):
        match = _PREFIX.match(text)
        if match is None:
            break
        rank = int(match[1])
        text = text[match.end() :]
    return _Stripped(text, rank, task)


def look_back(before: Sequence[bytes], line: Line) -> Around:
    """Return what the lines before an exception show: the place in the code of the same writer, and the last time."""
    texts = [_strip(raw[:1000].decode("utf-8", errors="replace")) for raw in before[-MOST_BEFORE:]]
    times = (match[0] for one in reversed(texts) if (match := _TIME.search(one.text[:200])))
    own = [one.text for one in texts if one.writer == line.writer]
    begin = _last_traceback(own)
    if begin is None:
        return Around(time=next(times, ""))
    where = _last_frame(own[begin:])
    # The user's code may be only in the traceback of the exception that caused this exception.
    while not where and begin and any(own[n].startswith(_CHAINED) for n in range(max(0, begin - 2), begin)):
        earlier = _last_traceback(own[:begin])
        if earlier is None:
            break
        where, begin = _last_frame(own[earlier:begin]), earlier
    return Around(where=where, time=next(times, ""))


def _last_traceback(texts: Sequence[str]) -> int | None:
    return next((n for n in range(len(texts) - 1, -1, -1) if _BEGIN in texts[n]), None)


def _last_frame(texts: Sequence[str]) -> str:
    """Return file and line of the last frame of the user's code, such as `train.py:12`; empty without such a frame."""
    for text in reversed(texts):
        frame = _FRAME.search(text)
        if frame is not None and not _NOT_OURS.search(frame["file"]):
            return f"{frame['file'].rpartition('/')[2]}:{frame['line']}"
    return ""


def first_in_table(after: Sequence[bytes], task: int | None) -> tuple[int | None, str, str]:
    """Return rank, host and time from the table that torchrun prints below `Root Cause (first observed failure):`."""
    fields: dict[str, str] = {}
    for raw in after:
        line = _strip(raw[:200].decode("utf-8", errors="replace"))
        match = _TABLE.match(line.text)
        if match and line.task == task:
            fields.setdefault(match[1], match[2])
    rank = fields.get("rank", "")
    return (int(rank) if rank.isdecimal() else None), fields.get("host", ""), fields.get("time", "")
