"""What a node tells the batch node while its step still ends: one line on the standard output of srun.

Runs on: COMPUTE NODE. Standard library only.

srun sends what the tasks print to its own standard output. So the batch node needs not ask a file system whether a node
is ready, and no cache of one comes between. Only the short line goes this way: srun does not mix lines of several
tasks, up to 1,024 bytes (slurmstepd/io.c, MAX_MSG_LEN, read in commit 00da91a). What the node found is in its report.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from hpcenv.records.smoke import SmokeReport

_FIRST_WORD = "hpcenv-smoke"
_DONE = ("done", 0)
_PIECE = 1 << 12
# Nothing that a node tells is longer; it is then not a line of ours.
_LONGEST_LINE = 1 << 10


def line_of(report: SmokeReport, status: int) -> str:
    """Return the line that tells how the test ended on a node, and with which status the step there will end."""
    return f"{_FIRST_WORD} {report.node} {report.ended} {status}"


@dataclass(frozen=True, kw_only=True)
class Told:
    """How the test ended, by what the nodes told.

    Attributes:
        all_done: every node told that its ranks are done and have ended.
        status: of the first node whose step did not end with 0, because a signal asked it to end; 0 without one.
        missing: nodes that told nothing until the limit; empty where the limit was not reached.
    """

    all_done: bool
    status: int
    missing: tuple[str, ...] = ()


def listen(source: int, nodes: Collection[str], say: Callable[[str], None], *, seconds: float) -> Told:
    """Read until every node has told that it is done, or until the end; other lines are given to `say`.

    Args:
        source: number of the open file, the standard output of srun.
        nodes: that take part.
        say: called with each line that is for the log.
        seconds: limit. srun waits without one for the start of its step, which has no time limit before that.
    """
    ended: dict[str, tuple[str, int]] = {}
    rest = b""
    missing: tuple[str, ...] = ()
    until = time.monotonic() + seconds
    while any(ended.get(node) != _DONE for node in nodes):
        if not select.select([source], [], [], max(0.0, until - time.monotonic()))[0]:
            missing = tuple(node for node in nodes if node not in ended)
            break
        piece = os.read(source, _PIECE)
        if not piece:
            break
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        for line in lines:
            _note(line, nodes, ended, say)
    if rest:
        _note(rest, nodes, ended, say)
    statuses = [status for _, status in ended.values() if status]
    all_done = all(ended.get(node) == _DONE for node in nodes)
    return Told(all_done=all_done, status=next(iter(statuses), 0), missing=missing)


def _note(line: bytes, nodes: Collection[str], ended: dict[str, tuple[str, int]], say: Callable[[str], None]) -> None:
    text = line.decode(errors="backslashreplace")
    # The user may give srun --label: the number of the task stands before each line.
    words = text.split()[-4:]
    if len(words) == 4 and words[0] == _FIRST_WORD and words[1] in nodes and re.fullmatch("[0-9]{1,3}", words[3]):
        ended[words[1]] = (words[2], int(words[3]))
    else:
        say(text)
