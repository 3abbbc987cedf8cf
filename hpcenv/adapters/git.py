"""A git work tree: its commit, what differs from it, and which files belong to it.

Runs on: LOGIN NODE. Nothing here writes to the repository: not its index, not one object.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hpcenv.adapters import process
from hpcenv.dataclass import dataclass
from hpcenv.errors import ToolFailed

if TYPE_CHECKING:
    from typing_extensions import Self

# A tree on a cold parallel file system answers slowly; a plan must not wait for ever.
_SECONDS = 60.0

# What a git hook or an outer git leaves in the environment would name another repository.
_OTHER_REPOSITORY = (
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_NAMESPACE"),
    *("GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES"),
)


@dataclass(frozen=True, kw_only=True)
class WorkTree:
    """A work tree as it was when git looked at it. Paths are relative to `root`, undecodable bytes escaped.

    Attributes:
        root: its top folder, symbolic links resolved.
        commit: the one that is checked out; empty in a repository without any.
        changed: tracked files that differ from it, also by being staged, removed or in conflict.
        untracked: files, and folders (they end with `/`), that git neither tracks nor ignores.
    """

    root: Path
    commit: str
    changed: tuple[str, ...] = ()
    untracked: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """The tracked files of a work tree, those of its initialised submodules among them.

    Attributes:
        files: in git's order.
        unwatched: those whose changes git was told not to look for (`--assume-unchanged`).
        left_out: those that are not to be in the work tree (sparse checkout).
    """

    files: tuple[str, ...]
    unwatched: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


_STATUS = (
    *("status", "--porcelain=v2", "--branch", "-z", "--no-renames", "--untracked-files=normal"),
    "--ignore-submodules=untracked",
)
_FILES = ("ls-files", "-z", "-v", "--recurse-submodules")


class Look:
    """What git is asked about a folder, all at once: it answers while its caller does something else.

    To be used in a `with`, which ends what was not waited for.

    Args:
        folder: in the work tree.

    Raises:
        ToolMissing: there is a repository, but no git to ask.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._environ, self._real = environ, os.path.realpath(folder)
        around = (Path(self._real), *Path(self._real).parents)
        # git says itself where the tree begins; it is nearly always here.
        self._guess = next((str(place) for place in around if os.path.lexists(place / ".git")), None)
        self._asked: list[process.Begun] = []
        if self._guess is not None:
            # `--show-cdup` has no names in it, which may hold newlines: only `../` again and again.
            self._root = self._ask(self._real, "rev-parse", "--is-inside-work-tree", "--show-cdup")
            self._status = self._ask(self._guess, *_STATUS)
            self._files = self._ask(self._guess, *_FILES)

    def _ask(self, folder: str, *words: str) -> process.Begun:
        self._asked.append(_begin(folder, self._environ, *words))
        return self._asked[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for asked in self._asked:
            asked.__exit__()

    def tree(self) -> WorkTree | None:
        """Return the work tree that the folder lies in; None where there is no repository around it.

        Raises:
            ToolFailed: git refuses it (`safe.directory`), or it is damaged.
        """
        if self._guess is None:
            return None
        inside, up = (self._root.read_bytes().decode() + "\n").split("\n", 2)[:2]
        if inside != "true":
            return None
        root = os.path.realpath(os.path.join(self._real, up))
        if root != self._guess:
            self._status, self._files = self._ask(root, *_STATUS), self._ask(root, *_FILES)
        return _parse_status(Path(root), self._status.read_bytes())

    def files(self, tree: WorkTree) -> Tracked:
        """Return the files that git tracks in that tree.

        Raises:
            ToolFailed: git refuses.
        """
        return _parse_files(tree, self._files.read_bytes())


def begin_status(tree: Path, environ: Mapping[str, str]) -> process.Begun:
    """Begin to ask what differs from the commit; `read_status` gives the answer.

    Args:
        tree: the top folder of a work tree.

    Raises:
        ToolMissing: git is gone.
    """
    return _begin(str(tree), environ, *_STATUS)


def read_status(tree: Path, asked: process.Begun) -> WorkTree:
    """Return the work tree as it was now.

    Raises:
        ToolFailed: git refuses.
    """
    return _parse_status(tree, asked.read_bytes())


def _parse_status(root: Path, said: bytes) -> WorkTree:
    """Parse git-status(1), porcelain format version 2 with `-z` (git 2.47; the format is promised not to change)."""
    commit, changed, untracked = "", [], []
    for entry in said.split(b"\0"):
        kind, _, rest = entry.partition(b" ")
        if entry.startswith(b"# branch.oid "):
            word = rest.partition(b" ")[2].decode()
            commit = "" if word.startswith("(") else word
        elif kind == b"1":
            changed.append(os.fsdecode(rest.split(b" ", 7)[-1]))
        elif kind == b"2":
            changed.append(os.fsdecode(rest.split(b" ", 8)[-1]))
        elif kind == b"u":
            changed.append(os.fsdecode(rest.split(b" ", 9)[-1]))
        elif kind == b"?":
            untracked.append(os.fsdecode(rest))
    return WorkTree(root=root, commit=commit, changed=tuple(changed), untracked=tuple(untracked))


def _parse_files(tree: WorkTree, said: bytes) -> Tracked:
    files, unwatched, left_out = [], [], []
    for entry in said.split(b"\0"):
        tag, _, name = entry.partition(b" ")
        if not name:
            continue
        path = os.fsdecode(name)
        # git-ls-files(1), -t and -v: S for skip-worktree, lower case for assume-unchanged.
        if tag in (b"S", b"s") and not os.path.lexists(tree.root / path):
            left_out.append(path)
            continue
        files.append(path)
        if tag.islower() or tag == b"S":
            unwatched.append(path)
    # A path in conflict stands there once for each side.
    return Tracked(files=tuple(dict.fromkeys(files)), unwatched=tuple(unwatched), left_out=tuple(left_out))


def read_diff(tree: WorkTree, new: tuple[str, ...], environ: Mapping[str, str]) -> bytes:
    """Return how the tracked files, and the untracked ones in `new`, differ from the commit: a patch for `git apply`.

    Raises:
        ToolMissing, ToolFailed: git is gone or refuses.
    """
    literal = ("--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")
    parts = [_run(str(tree.root), environ, "diff", "--binary", "--submodule=diff", *literal, "HEAD")]
    for path in new:
        words = ("diff", "--no-index", "--binary", *literal, "--", os.devnull, path)
        # Status 1: they differ (git-diff(1)), which they do.
        parts.append(_run(str(tree.root), environ, *words, accept=(0, 1)))
    return b"".join(parts)


def said_by(error: ToolFailed) -> str:
    """Return the line with which git explains a failure."""
    lines = [line.removeprefix("fatal: ") for line in error.stderr.strip().splitlines()]
    return lines[0] if lines else error.what


def _run(folder: str, environ: Mapping[str, str], *words: str, accept: tuple[int, ...] = (0,)) -> bytes:
    with _begin(folder, environ, *words) as asked:
        return asked.read_bytes(accept=accept)


def _begin(folder: str, environ: Mapping[str, str], *words: str) -> process.Begun:
    git = process.find_tool("git", needed_for="record the commit of the code", path=environ.get("PATH"))
    # A repository's own configuration may name programs to run; none of them is needed here.
    safe = ["-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.quotePath=false"]
    env = {name: value for name, value in environ.items() if name not in _OTHER_REPOSITORY}
    env |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    return process.Begun([git, "-C", folder, *safe, "--no-optional-locks", *words], timeout=_SECONDS, env=env)
