"""`hpcenv logs`: the job's log, now or as it grows. Runs on: LOGIN NODE."""

from __future__ import annotations

import codecs
import os
import re
import shlex
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcenv import wire
from hpcenv.errors import FileUnusable, HpcenvError, RecordInvalid, RunNotFound, UsageError
from hpcenv.steps.runs import Run
from hpcenv.wire import NodeExit, NodeSettings, RunFolder, Verdict

_PIECE = 1 << 20

# The prefix that hpcenv has torchrun put before each line of a rank (node/network.py).
RANK_PREFIX = re.compile(r"\[([0-9]{1,6})\] ")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which part of a run's log: all of it where nothing is chosen.

    Attributes:
        ranks: lines of these ranks.
        node: lines of the ranks on this node.
        err: what ranks wrote to standard error only, from their own files of this attempt:
            complete also where a node died before its lines reached the log.
    """

    ranks: tuple[int, ...] = ()
    node: str | None = None
    err: bool = False

    @property
    def everything(self) -> bool:
        """Whether nothing is left out."""
        return not self.ranks and self.node is None and not self.err


def read_selected(run: Run, selection: Selection, *, word: str | None = None) -> Iterator[str]:
    """Yield what a run's log holds of a selection so far.

    Args:
        word: how a command names the run, for hints; its folder if not given.

    Lines of attempts before this one are told apart by rank, not by node: a job that was
    requeued may have got other nodes.

    Raises:
        RunNotFound: there is no log yet.
        FileUnusable: there is none any more, or it cannot be read.
        UsageError: the run has no such rank or node.
    """
    where = RankNodes(run)
    where.require(selection)
    word = word or str(run.folder.path)
    if selection.everything:
        yield from read_log(run.folder, word)
        return
    if selection.err:
        files = _RankFiles(where, selection)
        while text := files.read():
            yield text
        yield files.rest()
        return
    lines = _Lines(where, selection)
    for piece in read_log(run.folder, word):
        yield lines.feed(piece)
    yield lines.rest()


def follow_selected(
    run: Run, selection: Selection, *, ended: Callable[[], bool], pause: Callable[[float], None]
) -> Iterator[str]:
    """Yield a selection of a run's log as it grows, also through a requeue, until the run has ended.

    Args:
        ended: whether the run has ended; asked every two seconds.
        pause: called with seconds to sleep.

    Raises:
        UsageError: the run has no such rank or node.
    """
    where = RankNodes(run)
    where.require(selection)
    tail = _RankFiles(where, selection) if selection.err else LogTail(run.folder.log)
    pieces = _follow(tail, ended=ended, pause=pause)
    if selection.everything or selection.err:
        yield from pieces
        return
    lines = _Lines(where, selection)
    for piece in pieces:
        yield lines.feed(piece)
    yield lines.rest()


class RankNodes:
    """Which rank ran on which node, as far as the run's records tell."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._nodes: dict[int, tuple[str, int]] = {}
        self._looked = float("-inf")

    @property
    def folder(self) -> RunFolder:
        """The run's folder."""
        return self._run.folder

    def require(self, selection: Selection) -> None:
        """Refuse ranks and nodes that the run cannot have.

        Raises:
            UsageError: there is no such rank or node.
        """
        ranks = self._run.manifest.nodes * self._run.manifest.nproc_per_node
        for rank in selection.ranks:
            if rank >= ranks:
                raise UsageError(f"there is no rank {rank}", why=f"the run has {_ranks(ranks)}, the first one is 0")
        if selection.node is None:
            return
        nodes = self.nodes()
        if selection.node not in nodes:
            told = ", ".join(nodes) if nodes else "which ones is not known before the nodes are checked"
            raise UsageError(f"`{selection.node}` is no node of {self._run.manifest.run}", why=f"its nodes: {told}")

    def nodes(self) -> tuple[str, ...]:
        """Return the names of the nodes that have reported anything."""
        found = {path.stem for folder in (self.folder.env, self.folder.exits) for path in folder.glob("*.json")}
        return tuple(sorted(found | {path.name for path in self.folder.ranks.glob("*")}))

    def of(self, rank: int) -> tuple[str, int] | None:
        """Return node and local rank of a rank; None while that is not known."""
        if rank not in self._nodes and time.monotonic() - self._looked > 2.0:
            self._looked = time.monotonic()
            self._nodes = _rank_nodes(self._run)
        return self._nodes.get(rank)

    def rank(self, node: str, local_rank: int) -> int | None:
        """Return the rank of a local rank; None while that is not known."""
        self.of(0)
        return next((rank for rank, place in self._nodes.items() if place == (node, local_rank)), None)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _rank_nodes(run: Run) -> dict[int, tuple[str, int]]:
    """Number the ranks as torchrun does: by the nodes' addresses.

    Its c10d rendezvous sorts the nodes by the text of `--local-addr` (torch 2.13,
    dynamic_rendezvous.py, `_NodeDesc`). Where two nodes have one address (emulated nodes
    on one machine) only what failed ranks said of themselves is known.
    """
    settings, found = [], {}
    try:
        launched = wire.read(Verdict, run.folder.verdict).launched
    except RecordInvalid:
        launched = ()
    for path in sorted(run.folder.env.glob("*.json")):
        try:
            one = wire.read(NodeSettings, path)
        except RecordInvalid:
            continue
        if not launched or one.node in launched:
            settings.append(one)
    addresses = {one.local_address for one in settings}
    if len(addresses) == len(settings) == run.manifest.nodes:
        ordered = sorted(settings, key=lambda one: one.local_address)
        each = run.manifest.nproc_per_node
        found = {n * each + local: (one.node, local) for n, one in enumerate(ordered) for local in range(each)}
    for path in run.folder.exits.glob("*.json"):
        try:
            ended = wire.read(NodeExit, path)
        except RecordInvalid:
            continue
        found |= {one.rank: (ended.node, one.local_rank) for one in ended.ranks if one.rank >= 0 <= one.local_rank}
    return found


class _Lines:
    """Lets the chosen ranks' lines through. A line is told by its prefix."""

    def __init__(self, where: RankNodes, selection: Selection) -> None:
        self._where = where
        self._selection = selection
        self._held = ""
        self._passes: bool | None = None  # of a line so long that its start is gone already

    def feed(self, text: str) -> str:
        """Return the chosen ones of the lines so far."""
        whole, newline, self._held = (self._held + text).rpartition("\n")
        shown = []
        for line in whole.split("\n") if newline else ():
            passes = self._chosen(line) if self._passes is None else self._passes
            self._passes = None
            if passes:
                shown.append(f"{line}\n")
        if len(self._held) > _PIECE:
            self._passes = self._chosen(self._held) if self._passes is None else self._passes
            shown.append(self._held if self._passes else "")
            self._held = ""
        return "".join(shown)

    def rest(self) -> str:
        """Return the last line, which nobody ended."""
        passes = self._chosen(self._held) if self._passes is None else self._passes
        return self._held if passes else ""

    def _chosen(self, line: str) -> bool:
        match = RANK_PREFIX.match(line)
        if match is None:
            return False
        rank = int(match[1])
        if self._selection.ranks and rank not in self._selection.ranks:
            return False
        place = self._where.of(rank) if self._selection.node is not None else None
        return self._selection.node is None or (place is not None and place[0] == self._selection.node)


class _RankFiles:
    """What ranks write to standard error, from the files that torchrun keeps for each of them.

    They lie in `ranks/NODE/ID_RANDOM/attempt_N/LOCAL_RANK/stderr.log` (torch 2.13,
    multiprocessing/api.py, `DefaultLogsSpecs`).
    """

    def __init__(self, where: RankNodes, selection: Selection) -> None:
        self._where = where
        self._selection = selection
        self._tails: dict[Path, tuple[LogTail, str]] = {}
        self._open: set[Path] = set()

    def read(self) -> str:
        """Return new lines of all files, each with its rank before it."""
        self._discover()
        return "".join(self._prefixed(path, tail.read()) for path, (tail, _) in list(self._tails.items()))

    def rest(self) -> str:
        """Return what is left once nothing more will come."""
        return "".join(self._prefixed(path, tail.rest()) for path, (tail, _) in self._tails.items())

    def _prefixed(self, path: Path, text: str) -> str:
        if not text:
            return ""
        prefix, inside = self._tails[path][1], path in self._open
        (self._open.discard if text.endswith("\n") else self._open.add)(path)
        lines = text.split("\n")
        last = lines.pop()
        shown = [f"{prefix}{line}\n" for line in lines] + ([f"{prefix}{last}"] if last else [])
        if inside:
            shown[0] = shown[0].removeprefix(prefix)
        return "".join(shown)

    def _discover(self) -> None:
        for path in sorted(self._where.folder.ranks.glob("*/*/attempt_*/*/stderr.log")):
            node, local = path.parents[3].name, path.parent.name
            if path in self._tails or not local.isdecimal() or not _is_file(path):
                continue
            rank = self._where.rank(node, int(local))
            if self._selection.node not in (None, node):
                continue
            if self._selection.ranks and rank not in self._selection.ranks:
                continue
            prefix = f"[{rank}] " if rank is not None else f"[{node}, local rank {int(local)}] "
            self._tails[path] = (LogTail(path), prefix)


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def read_log(run: RunFolder, word: str) -> Iterator[str]:
    """Yield a run's log so far, in pieces: it may not fit into memory.

    Args:
        word: how a command names the run, for hints.

    Raises:
        RunNotFound: the job has not written one yet.
        FileUnusable: it has, and the log is gone, or cannot be read.
    """
    try:
        file = open(run.log, encoding="utf-8", errors="replace", newline="")  # noqa: SIM115  (closed below)
    except FileNotFoundError as error:
        raise _no_log(run, word) from error
    except OSError as error:
        raise FileUnusable(f"cannot read the log `{run.log}`", why=error.strerror) from error
    with file:
        while piece := file.read(_PIECE):
            yield piece


def _no_log(run: RunFolder, word: str) -> HpcenvError:
    """Tell a log that is not there yet from one that is gone."""
    status = f"hpcenv status {shlex.quote(word)}"
    if next(run.ranks.glob("*/*/attempt_*/*/stderr.log"), None) is not None:
        kept = f"what each rank wrote to standard error is still in {run.ranks}"
        return FileUnusable(f"the log `{run.log}` is gone", why=kept, hint=f"hpcenv logs --err {shlex.quote(word)}")
    if any(os.path.lexists(record) for record in (run.started, run.finished, run.attempts)):
        return FileUnusable(f"the log `{run.log}` is gone", why="the job has started, and begins with it", hint=status)
    return RunNotFound(f"there is no log `{run.log}` yet", why="the job has not started", hint=status)


def follow_log(path: Path, *, ended: Callable[[], bool], pause: Callable[[float], None]) -> Iterator[str]:
    """Yield a log's text as it grows, until the run has ended and all of it was seen.

    Args:
        ended: whether the run has ended; asked every two seconds.
        pause: called with seconds to sleep.
    """
    yield from _follow(LogTail(path), ended=ended, pause=pause)


def _follow(tail: LogTail | _RankFiles, *, ended: Callable[[], bool], pause: Callable[[float], None]) -> Iterator[str]:
    looks, over = 0, False
    while True:
        text = tail.read()
        if text:
            yield text
        elif over:
            yield tail.rest()
            return
        else:
            # The last lines may come after Slurm says "ended": look once more.
            over = looks % 4 == 3 and ended()
            pause(0.5)
            looks += 1


class LogTail:
    """Reads what a growing file got since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._partial = ""
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def read(self) -> str:
        """Return new whole lines; a part of a line only when nothing was added to it meanwhile."""
        try:
            with open(self._path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    # Emptied or replaced by a shorter one: it starts anew.
                    self._offset = 0
                file.seek(self._offset)
                data = file.read(_PIECE)
        except FileNotFoundError:
            return ""
        self._offset += len(data)
        if data:
            whole, newline, self._partial = (self._partial + self._decode(data)).rpartition("\n")
            return whole + newline
        part, self._partial = self._partial, ""
        return part

    def rest(self) -> str:
        """Return what is left once nothing more will come: also half a character."""
        rest = self._partial + self._decode(b"", True)
        self._partial = ""
        return rest
