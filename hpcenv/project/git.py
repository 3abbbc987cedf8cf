"""A git work tree: its commit, what differs from it, and which files belong to it.

Runs on: LOGIN NODE. Nothing here writes to the repository, not even to its index, and nothing starts a program that
the repository names: see `incontainer/probe/git_folder.py`. git itself would look into a submodule with the
submodule's own configuration. So each submodule is asked here, in the same way as the repository.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcenv import process
from hpcenv.errors import ToolFailed
from hpcenv.incontainer.probe import git_folder

if TYPE_CHECKING:
    from typing_extensions import Self

# A parallel file system may answer slowly, but a plan must not wait without end.
_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Unfiltered:
    """A changed file whose filter was not started, because only the repository's own configuration names it."""

    path: str
    filter: str


@dataclass(frozen=True, kw_only=True)
class Submodule:
    """An initialised submodule.

    Attributes:
        path: of its folder, below the work tree.
        commit: the one that the commit of the work tree names; empty if it names none.
    """

    path: str
    commit: str


@dataclass(frozen=True, kw_only=True)
class WorkTree:
    """A work tree as it was when git looked at it. Paths are relative to `root`, undecodable bytes escaped.

    Attributes:
        root: its top folder, symbolic links resolved.
        commit: the one that is checked out; empty in a repository without any.
        changed: tracked files that differ from it, also by being staged, removed or in conflict; a submodule with
            another commit; changed files of submodules.
        untracked: files, and folders (they end with `/`), that git neither tracks nor ignores.
        unfiltered: those of `changed` that may be equal after a filter that was not started.
        submodules: initialised ones, outer ones first.
    """

    root: Path
    commit: str
    changed: tuple[str, ...] = ()
    untracked: tuple[str, ...] = ()
    unfiltered: tuple[Unfiltered, ...] = ()
    submodules: tuple[Submodule, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """The tracked files of a work tree, those of its initialised submodules among them.

    Attributes:
        files: in git's order.
        unwatched: files whose changes git does not look for (`--assume-unchanged`).
        left_out: files that the work tree does not have (sparse checkout).
    """

    files: tuple[str, ...]
    unwatched: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


# `dirty`: git compares the commit of a submodule, but does not start another git in it.
_STATUS = (
    *("status", "--porcelain=v2", "--branch", "-z", "--no-renames", "--untracked-files=normal"),
    "--ignore-submodules=dirty",
)
_FILES = ("ls-files", "-z", "-v", "--stage")
_GITLINK = "160000"


class _Repository:
    """Questions to git about one work tree, without the repository's own configuration; use it in a `with`.

    Args:
        tree: the top folder.
        place: its `.git`.

    Raises:
        ToolMissing: git is not on PATH.
        ToolFailed: the git folder cannot be read.
    """

    def __init__(self, tree: str, place: str, environ: Mapping[str, str]) -> None:
        self.tree, self._processes = tree, contextlib.ExitStack()
        variables = git_folder.variables(environ)
        try:
            self.git, common = git_folder.find_folders(place)
            listing = _run("/", variables, *git_folder.LISTING, stdin=git_folder.read_configuration(common))
            self.filters = git_folder.filters(listing)
            folder = os.path.join(environ.get("TMPDIR") or "/tmp", f"hpcenv-git-{os.urandom(8).hex()}")  # noqa: S108
            os.mkdir(folder, 0o700)
            self._processes.callback(shutil.rmtree, folder, ignore_errors=True)
            git_folder.make(folder, common, listing)
        except (OSError, ValueError) as error:
            self._processes.close()
            raise ToolFailed(f"cannot read the git folder of `{tree}`", stderr=str(error), why=str(error)) from error
        self._variables = git_folder.placed(variables, self.git, folder, tree)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()

    def begin(self, *words: str) -> process.BackgroundProcess:
        return self._processes.enter_context(_begin(self.tree, self._variables, *words))

    def ask(self, *words: str, stdin: bytes | None = None, accept: tuple[int, ...] = (0,)) -> bytes:
        with _begin(self.tree, self._variables, *words, stdin=stdin) as running:
            return running.read_bytes(accept=accept)


class StatusQuery:
    """What is changed and what is tracked in a work tree. git answers in the background; use it in a `with`.

    Args:
        files: ask what is tracked, and look into submodules.
    """

    def __init__(self, tree: str, place: str, environ: Mapping[str, str], *, files: bool = True) -> None:
        self._environ = environ
        self.repository = _Repository(tree, place, environ)
        self._status = self.repository.begin(*_STATUS)
        self._files = self.repository.begin(*_FILES) if files else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.repository.__exit__()

    def read(self) -> tuple[WorkTree, Tracked]:
        """Return the answer, with that of the submodules; to be called once.

        Raises:
            ToolFailed: git refuses.
        """
        root = self.repository.tree
        found = _parse_status(self._status.read_bytes())
        links, tracked = _parse_files(Path(root), b"" if self._files is None else self._files.read_bytes())
        changed = list(found.changed)
        unfiltered = list(_unfiltered(self.repository, found.changed))
        files, unwatched, left_out = list(tracked.files), list(tracked.unwatched), list(tracked.left_out)
        submodules = []
        for path, commit in links.items():
            folder = os.path.join(root, path)
            # A link could lead to a folder that holds this one.
            if os.path.realpath(folder) != folder or not os.path.lexists(os.path.join(folder, ".git")):
                continue
            with StatusQuery(folder, os.path.join(folder, ".git"), self._environ) as inner:
                nested, theirs = inner.read()
            files.remove(path)
            files += _below(path, theirs.files)
            unwatched += _below(path, theirs.unwatched)
            left_out += _below(path, theirs.left_out)
            changed += _below(path, nested.changed)
            unfiltered += [Unfiltered(path=f"{path}/{u.path}", filter=u.filter) for u in nested.unfiltered]
            submodules.append(Submodule(path=path, commit=found.links.get(path, commit)))
            submodules += [Submodule(path=f"{path}/{s.path}", commit=s.commit) for s in nested.submodules]
        tree = WorkTree(
            root=Path(root),
            commit=found.commit,
            changed=tuple(changed),
            untracked=found.untracked,
            unfiltered=tuple(unfiltered),
            submodules=tuple(submodules),
        )
        return tree, Tracked(files=tuple(files), unwatched=tuple(unwatched), left_out=tuple(left_out))


def _below(folder: str, paths: Iterable[str]) -> Iterator[str]:
    return (f"{folder}/{path}" for path in paths)


def _unfiltered(repository: _Repository, changed: tuple[str, ...]) -> Iterator[Unfiltered]:
    """Yield the changed files whose filter only the repository's own configuration defines."""
    if not changed or not repository.filters:
        return
    # The user's and the system's; the repository's own are not in the folder that is asked.
    known = git_folder.filters(repository.ask("config", "-z", "--list"))
    names = b"".join(os.fsencode(path) + b"\0" for path in changed)
    answer = repository.ask("check-attr", "-z", "--stdin", "filter", stdin=names)
    words = [os.fsdecode(word) for word in answer.split(b"\0")]
    for path, name in zip(words[::3], words[2::3], strict=False):
        if name in repository.filters - known:
            yield Unfiltered(path=path, filter=name)


class GitQuery:
    """Questions to git about a folder. git answers in the background; use it in a `with`.

    Args:
        folder: in the work tree.

    Raises:
        ToolMissing: there is a repository, but git is not on PATH.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._environ, self._real = environ, os.path.realpath(folder)
        self._open = contextlib.ExitStack()
        self._tracked: Tracked | None = None
        self._question: StatusQuery | None = None
        context = (Path(self._real), *Path(self._real).parents)
        # git reports the top folder of the tree; it is nearly always this folder.
        self._guess = next((str(place) for place in context if os.path.lexists(place / ".git")), None)
        if self._guess is not None:
            # git decides whether this is a repository, and whether its owner is trusted (`safe.directory`). This
            # question starts no program. The output of `--show-cdup` has no names, which can contain newlines.
            words = ("rev-parse", "--is-inside-work-tree", "--show-cdup", "--absolute-git-dir")
            self._place = self._open.enter_context(_begin(self._real, git_folder.variables(environ), *words))
            with contextlib.suppress(ToolFailed):  # git tells it better
                self._question = self._ask(self._guess, os.path.join(self._guess, ".git"))

    def _ask(self, tree: str, place: str) -> StatusQuery:
        return self._open.enter_context(StatusQuery(tree, place, self._environ))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def tree(self) -> WorkTree | None:
        """Return the work tree of the folder; None if the folder is not in a repository.

        Raises:
            ToolFailed: git refuses it (`safe.directory`), or it is damaged.
        """
        if self._guess is None:
            return None
        inside, up, git = [*os.fsdecode(self._place.read_bytes()).split("\n", 2), "", ""][:3]
        if inside != "true":
            return None
        root, git = os.path.realpath(os.path.join(self._real, up)), git.rstrip("\n")
        question = self._question
        if question is None or root != self._guess or not os.path.samefile(git, question.repository.git):
            question = self._ask(root, git)
        tree, self._tracked = question.read()
        return tree

    def files(self) -> Tracked:
        """Return the files that git tracks in the work tree; to be called after `tree`, which has returned one."""
        assert self._tracked is not None
        return self._tracked


def begin_status(tree: Path, environ: Mapping[str, str], *, submodules: bool) -> StatusQuery:
    """Start git-status; `read_status` returns its answer.

    Args:
        tree: the top folder of a work tree.
        submodules: look into them, too.

    Raises:
        ToolMissing, ToolFailed: git is gone, or the git folder cannot be read.
    """
    return StatusQuery(str(tree), os.path.join(tree, ".git"), environ, files=submodules)


def read_status(status: StatusQuery) -> WorkTree:
    """Return the work tree as it was now.

    Raises:
        ToolFailed: git refuses.
    """
    return status.read()[0]


def read_committed(path: Path, revision: str, environ: Mapping[str, str], *, most: int) -> bytes:
    """Return the content that a file of a work tree had in a commit.

    Args:
        path: of the file; it need not exist now.
        revision: a commit, branch or tag, as git names it (gitrevisions(7)).
        most: the most bytes that are read.

    Raises:
        ToolMissing: git is not on PATH.
        ToolFailed: there is no repository, commit or such file in the commit, or the file is larger.
    """
    real = os.path.realpath(path)
    folder = next(str(parent) for parent in Path(real).parents if parent.is_dir())
    # git decides whether this is a repository, and whether its owner is trusted. This question starts no program.
    words = ("rev-parse", "--show-cdup", "--absolute-git-dir")
    up, place = [*os.fsdecode(_run(folder, git_folder.variables(environ), *words)).split("\n", 1), ""][:2]
    root = os.path.realpath(os.path.join(folder, up))
    blob = f"{revision}:{os.path.relpath(real, root)}"
    with _Repository(root, place.rstrip("\n"), environ) as repository:
        # Neither command accepts an option here: a revision that begins with `-` is none.
        size = int(repository.ask("cat-file", "-s", "--", blob))
        if size > most:
            raise ToolFailed(f"`{blob}` has {size} bytes", why=f"at most {most} are read")
        return repository.ask("cat-file", "blob", "--", blob)


@dataclass(frozen=True, kw_only=True)
class _Status:
    commit: str
    changed: tuple[str, ...]
    untracked: tuple[str, ...]
    links: Mapping[str, str]
    """Changed submodules: path -> the commit that HEAD names, empty if it names none."""


def _parse_status(said: bytes) -> _Status:
    """Parse git-status(1), porcelain format version 2 with `-z` (git 2.47; the format is promised not to change)."""
    commit, changed, untracked, links = "", [], [], {}
    for entry in said.split(b"\0"):
        kind, _, rest = entry.partition(b" ")
        if entry.startswith(b"# branch.oid "):
            word = rest.partition(b" ")[2].decode()
            commit = "" if word.startswith("(") else word
        elif kind == b"1":
            words = rest.split(b" ", 7)
            changed.append(os.fsdecode(words[-1]))
            if words[1].startswith(b"S"):
                links[changed[-1]] = words[5].decode().strip("0") and words[5].decode()
        elif kind == b"2":
            changed.append(os.fsdecode(rest.split(b" ", 8)[-1]))
        elif kind == b"u":
            changed.append(os.fsdecode(rest.split(b" ", 9)[-1]))
        elif kind == b"?":
            untracked.append(os.fsdecode(rest))
    return _Status(commit=commit, changed=tuple(changed), untracked=tuple(untracked), links=links)


def _parse_files(root: Path, said: bytes) -> tuple[dict[str, str], Tracked]:
    """Return the submodules (path -> commit in the index), and the tracked files with the submodules' folders."""
    files, unwatched, left_out, links = [], [], [], {}
    for entry in said.split(b"\0"):
        words, _, name = entry.partition(b"\t")
        if not name:
            continue
        tag, mode, commit = words.decode().split(" ")[:3]
        path = os.fsdecode(name)
        # git-ls-files(1), -t and -v: S for skip-worktree, lower case for assume-unchanged.
        if tag in ("S", "s") and not os.path.lexists(root / path):
            left_out.append(path)
            continue
        files.append(path)
        if mode == _GITLINK:
            links[path] = commit
        if tag.islower() or tag == "S":
            unwatched.append(path)
    # A path in conflict is listed one time for each side.
    files, unwatched = list(dict.fromkeys(files)), list(dict.fromkeys(unwatched))
    return links, Tracked(files=tuple(files), unwatched=tuple(unwatched), left_out=tuple(left_out))


# git may be configured to call a program, or to print in another form.
_LITERAL = (
    *("--binary", "--no-ext-diff", "--no-textconv", "--no-color"),
    *("--submodule=short", "--ignore-submodules=dirty"),
)


def read_diff(tree: WorkTree, new: tuple[str, ...], environ: Mapping[str, str]) -> bytes:
    """Return how the tracked files, and the untracked ones in `new`, differ from the commit: a patch for `git apply`.

    Raises:
        ToolMissing, ToolFailed: git is gone or refuses.
    """
    with _Repository(str(tree.root), os.path.join(tree.root, ".git"), environ) as repository:
        sides = ("--src-prefix=a/", "--dst-prefix=b/")
        parts = [repository.ask("diff", *_LITERAL, *sides, "HEAD", "--")]
        parts += [_submodule_diff(tree, submodule, environ) for submodule in tree.submodules]
        untracked = ("diff", "--no-index", *_LITERAL, *sides, "--", os.devnull)
        # Exit status 1 means that they differ (git-diff(1)).
        parts += [repository.ask(*untracked, path, accept=(0, 1)) for path in new]
    return b"".join(parts)


def _submodule_diff(tree: WorkTree, submodule: Submodule, environ: Mapping[str, str]) -> bytes:
    """Return how a submodule differs from the commit that the work tree's commit names, or else from its own."""
    folder = os.path.join(tree.root, submodule.path)
    sides = (f"--src-prefix=a/{submodule.path}/", f"--dst-prefix=b/{submodule.path}/")
    with _Repository(folder, os.path.join(folder, ".git"), environ) as repository:
        if submodule.commit:
            with contextlib.suppress(ToolFailed):  # it may not have that commit any more
                return repository.ask("diff", *_LITERAL, *sides, submodule.commit, "--")
        return repository.ask("diff", *_LITERAL, *sides, "HEAD", "--")


def said_by(error: ToolFailed) -> str:
    """Return the line with which git explains a failure."""
    lines = [line.removeprefix("fatal: ") for line in error.stderr.strip().splitlines()]
    return lines[0] if lines else error.what


def _run(folder: str, variables: Mapping[str, str], *words: str, stdin: bytes | None = None) -> bytes:
    with _begin(folder, variables, *words, stdin=stdin) as running:
        return running.read_bytes()


def _begin(
    folder: str, variables: Mapping[str, str], *words: str, stdin: bytes | None = None
) -> process.BackgroundProcess:
    git = process.find_tool("git", needed_for="record the commit of the code", path=variables.get("PATH"))
    argv = [git, *git_folder.OPTIONS, *words]
    return process.BackgroundProcess(argv, timeout=_SECONDS, env=variables, stdin=stdin, cwd=Path(folder))
