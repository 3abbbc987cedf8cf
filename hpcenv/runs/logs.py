"""`hpcenv logs`: read the log of a job, or follow it while it grows. Runs on: LOGIN NODE."""

from __future__ import annotations

import codecs
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcenv.errors import Command, FileUnusable, HpcenvError, RecordInvalid, RunNotFound, UsageError
from hpcenv.launch.rank_errors import PROGRAM
from hpcenv.records.files import load_record, open_regular
from hpcenv.records.outcome import NodeExit
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import NodeSettings, Verdict
from hpcenv.runs.entries import Run
from hpcenv.text import plural

_PIECE = 1 << 20

# Standard error of each rank, in the folder of the ranks.
RANK_FILES = "*/*/attempt_*/*/stderr.log"

# Prefix that torchrun writes before each line of a rank (launch/launch.py makes the command line of torchrun).
RANK_PREFIX = re.compile(r"\[([0-9]{1,6})\] ")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which part of a run's log to read. The default is the whole log.

    Attributes:
        ranks: read only lines of these ranks.
        node: read only lines of the ranks on this node.
        err: read only standard error of the ranks, from the files of the present attempt. These files are
            complete even if a node failed before its lines reached the log.
    """

    ranks: tuple[int, ...] = ()
    node: str | None = None
    err: bool = False

    @property
    def everything(self) -> bool:
        """Whether the whole log is selected."""
        return not self.ranks and self.node is None and not self.err


def read_selected(run: Run, selection: Selection, *, word: str | None = None) -> Iterator[str]:
    """Yield the selected part of a run's log as it is now.

    Lines of earlier attempts are selected by rank, not by node, because a requeued job may have got
    other nodes.

    Args:
        run: the run.
        selection: which part of the log.
        word: name of the run, for hints. None means the path of the run's folder.

    Raises:
        RunNotFound: there is no log yet.
        FileUnusable: the log was removed, or cannot be read.
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
    lines = _LineFilter(where, selection)
    for piece in read_log(run.folder, word):
        yield lines.feed(piece)
    yield lines.rest()


def follow_selected(
    run: Run, selection: Selection, *, ended: Callable[[], bool], pause: Callable[[float], None]
) -> Iterator[str]:
    """Yield the selected part of a run's log while the log grows, until the run has ended. A requeue is followed, too.

    Args:
        run: the run.
        selection: which part of the log.
        ended: returns whether the run has ended; called every two seconds.
        pause: called with the seconds to sleep.

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
    lines = _LineFilter(where, selection)
    for piece in pieces:
        yield lines.feed(piece)
    yield lines.rest()


class RankNodes:
    """Finds out, from the run's records, which rank ran on which node."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._nodes: dict[int, tuple[str, int]] = {}
        self._looked = float("-inf")

    @property
    def folder(self) -> RunFolder:
        """The run's folder."""
        return self._run.folder

    def require(self, selection: Selection) -> None:
        """Refuse ranks and nodes that the run does not have.

        Raises:
            UsageError: the run has no such rank or node.
        """
        ranks = self._run.manifest.nodes * self._run.manifest.nproc_per_node
        for rank in selection.ranks:
            if rank >= ranks:
                why = f"the run has {plural(ranks, 'rank')}; the first one is 0"
                raise UsageError(f"there is no rank {rank}", why=why)
        self._require_ranks_apart(selection)
        if selection.node is None:
            return
        nodes = self.nodes()
        if selection.node not in nodes:
            names = ", ".join(nodes) if nodes else "unknown until the nodes are checked"
            raise UsageError(f"`{selection.node}` is not a node of {self._run.manifest.run}", why=f"its nodes: {names}")

    def _require_ranks_apart(self, selection: Selection) -> None:
        """Refuse to select single ranks if one program mixes the output of several ranks (`--launcher none`)."""
        programs = sorted(self.folder.ranks.glob(f"{selection.node or '*'}/{PROGRAM}/stderr.log"))
        if selection.everything or not programs or any(self.folder.ranks.glob(RANK_FILES)):
            return
        raise UsageError(
            "the output of single ranks cannot be told apart",
            why="--launcher none: the program of each node started the ranks, and did not mark their lines",
            hint="let the program write a file for each rank (accelerate launch: --tee 3 --log_dir {log_dir} with "
            f"--expand); the output of a node is in {programs[0].parent}",
        )

    def nodes(self) -> tuple[str, ...]:
        """Return the names of the nodes that have written a record."""
        names = {path.stem for folder in (self.folder.env, self.folder.exits) for path in folder.glob("*.json")}
        return tuple(sorted(names | {path.name for path in self.folder.ranks.glob("*")}))

    def of(self, rank: int) -> tuple[str, int] | None:
        """Return node and local rank of a rank; None while they are unknown."""
        if rank not in self._nodes and time.monotonic() - self._looked > 2.0:
            self._looked = time.monotonic()
            self._nodes = _rank_nodes(self._run)
        return self._nodes.get(rank)

    def rank(self, node: str, local_rank: int) -> int | None:
        """Return the rank that has this local rank on a node; None while the rank is unknown."""
        self.of(0)
        return next((rank for rank, place in self._nodes.items() if place == (node, local_rank)), None)


def _rank_nodes(run: Run) -> dict[int, tuple[str, int]]:
    """Return rank -> node and local rank, as far as the settings and the exit records of the nodes contain them."""
    settings, nodes = [], {}
    try:
        launched = load_record(Verdict, run.folder.verdict).launched
    except RecordInvalid:
        launched = ()
    for path in sorted(run.folder.env.glob("*.json")):
        try:
            node = load_record(NodeSettings, path)
        except RecordInvalid:
            continue
        if not launched or node.node in launched:
            settings.append(node)
    ordered = _in_order_of_ranks(run, settings)
    if len(ordered) == run.manifest.nodes:
        nproc = run.manifest.nproc_per_node
        nodes = {n * nproc + local: (node.node, local) for n, node in enumerate(ordered) for local in range(nproc)}
    for path in run.folder.exits.glob("*.json"):
        try:
            ended = load_record(NodeExit, path)
        except RecordInvalid:
            continue
        nodes |= {rank.rank: (ended.node, rank.local_rank) for rank in ended.ranks if rank.rank >= 0 <= rank.local_rank}
    return nodes


def _in_order_of_ranks(run: Run, settings: Sequence[NodeSettings]) -> list[NodeSettings]:
    """Return the nodes in the order of their ranks; empty if this order is not known.

    torchrun's c10d rendezvous sorts the nodes by the text of `--local-addr` (torch 2.13, dynamic_rendezvous.py,
    `_NodeDesc`). If two nodes have the same address (emulated nodes on one machine), their order is not known. With
    other launchers, hpcenv sets the order: it numbers the tasks of srun, and sets NODE_RANK for programs that start
    their ranks.
    """
    if run.manifest.launch.launcher != "torchrun":
        return sorted(settings, key=lambda node: node.node_rank)
    if len({node.local_address for node in settings}) < len(settings):
        return []
    return sorted(settings, key=lambda node: node.local_address)


class _LineFilter:
    """Selects the lines of some ranks by the prefix of each line."""

    def __init__(self, where: RankNodes, selection: Selection) -> None:
        self._where = where
        self._selection = selection
        self._held = ""
        self._passes: bool | None = None  # whether the start of a long line was printed; None at the start of a line

    def feed(self, text: str) -> str:
        """Return the selected lines of `text`. An incomplete last line is kept for the next call."""
        whole, newline, self._held = (self._held + text).rpartition("\n")
        shown = []
        for line in whole.split("\n") if newline else ():
            passes = self._is_selected(line) if self._passes is None else self._passes
            self._passes = None
            if passes:
                shown.append(f"{line}\n")
        if len(self._held) > _PIECE:
            self._passes = self._is_selected(self._held) if self._passes is None else self._passes
            shown.append(self._held if self._passes else "")
            self._held = ""
        return "".join(shown)

    def rest(self) -> str:
        """Return the last line, which has no newline, if it is selected."""
        passes = self._is_selected(self._held) if self._passes is None else self._passes
        return self._held if passes else ""

    def _is_selected(self, line: str) -> bool:
        match = RANK_PREFIX.match(line)
        if match is None:
            return False
        rank = int(match[1])
        if self._selection.ranks and rank not in self._selection.ranks:
            return False
        node_and_local = self._where.of(rank) if self._selection.node is not None else None
        return self._selection.node is None or (
            node_and_local is not None and node_and_local[0] == self._selection.node
        )


class _RankFiles:
    """Standard error of the ranks, from the files that torchrun writes for each rank.

    The files are `ranks/NODE/ID_RANDOM/attempt_N/LOCAL_RANK/stderr.log` (torch 2.13,
    multiprocessing/api.py, `DefaultLogsSpecs`).
    """

    def __init__(self, where: RankNodes, selection: Selection) -> None:
        self._where = where
        self._selection = selection
        self._tails: dict[Path, tuple[LogTail, str]] = {}
        self._open: set[Path] = set()

    def read(self) -> str:
        """Return the new lines of all files. The prefix of each line is its rank."""
        self._discover()
        return "".join(self._prefixed(path, tail.read()) for path, (tail, _) in list(self._tails.items()))

    def rest(self) -> str:
        """Return what remains to be read in all files at the end of the run."""
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
        for path in sorted(self._where.folder.ranks.glob(RANK_FILES)):
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
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def read_log(run: RunFolder, word: str) -> Iterator[str]:
    """Yield a run's log in pieces, because it may not fit into memory.

    Args:
        run: the run folder.
        word: name of the run, for hints.

    Raises:
        RunNotFound: the job has not written a log yet.
        FileUnusable: the log was removed, or cannot be read.
    """
    try:
        descriptor = open_regular(run.log)
    except FileNotFoundError as error:
        raise _no_log(run, word) from error
    except OSError as error:
        raise FileUnusable(f"cannot read the log `{run.log}`", why=error.strerror) from error
    with open(descriptor, encoding="utf-8", errors="replace", newline="") as file:
        while piece := file.read(_PIECE):
            yield piece


def _no_log(run: RunFolder, word: str) -> HpcenvError:
    """Return the error for a missing log, which says whether it is not written yet, or was removed."""
    status = Command("hpcenv", "status", word)
    if next(run.ranks.glob(RANK_FILES), None) is not None:
        kept = f"standard error of each rank is still in {run.ranks}"
        return FileUnusable(
            f"the log `{run.log}` is gone", why=kept, hint=Command("hpcenv", "logs", "--err", f"{word}")
        )
    if any(os.path.lexists(record) for record in (run.started, run.finished, run.attempts)):
        return FileUnusable(f"the log `{run.log}` is gone", why="the job has started, so it had a log", hint=status)
    return RunNotFound(f"there is no log `{run.log}` yet", why="the job has not started", hint=status)


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
            # The last lines may arrive after Slurm reports the end, so the file is read once more.
            over = looks % 4 == 3 and ended()
            pause(0.5)
            looks += 1


class LogTail:
    """Reads the new text of a growing file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._partial = ""
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def read(self) -> str:
        """Return new complete lines. If the file has not grown since the last call, return the incomplete last line."""
        try:
            with open(open_regular(self._path), "rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    # The file was emptied, or replaced by a shorter file. So read from its start.
                    self._offset = 0
                file.seek(self._offset)
                data = file.read(_PIECE)
        except FileNotFoundError:
            return ""
        self._offset += len(data)
        if data:
            whole, newline, self._partial = (self._partial + self._decode(data)).rpartition("\n")
            if len(self._partial) > _PIECE:  # a line without end
                whole, self._partial = whole + newline + self._partial, ""
                return whole
            return whole + newline
        part, self._partial = self._partial, ""
        return part

    def rest(self) -> str:
        """Return what remains at the end of the file: an incomplete line, or an incomplete character."""
        rest = self._partial + self._decode(b"", True)
        self._partial = ""
        return rest
