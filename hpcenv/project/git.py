"""A git work tree: its commit, the differences from this commit, and its files.

Runs on: LOGIN NODE. This module does not write to the repository, not even to its index. It does not start a program
that the repository names (see `incontainer/probe/git_folder.py`). git itself would read a submodule with the
submodule's own configuration. So hpcenv runs git in each submodule separately, in the same way as in the repository.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcenv import process
from hpcenv.errors import ToolFailed
from hpcenv.incontainer.probe import git_folder

if TYPE_CHECKING:
    from typing_extensions import Self

# A parallel file system may answer slowly, but a submission must not wait without end.
_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class FilteredFile:
    """A file that git compares through a filter (gitattributes(5))."""

    path: str
    filter: str


@dataclass(frozen=True, kw_only=True)
class Submodule:
    """An initialised submodule.

    Attributes:
        path: the path of the submodule's folder below the work tree.
        commit: the commit of the submodule that the work tree's commit names; empty if it names none.
    """

    path: str
    commit: str


@dataclass(frozen=True, kw_only=True)
class WorkTree:
    """The state of a work tree when git read it. Paths are relative to `root`. Bytes that are not UTF-8 are escaped.

    Attributes:
        root: the top folder, with symbolic links resolved.
        commit: the commit that is checked out; empty in a repository without commits.
        changed: tracked files that differ from the commit, including staged, removed and conflicting files. This list
            also has submodules with a different commit, and changed files of submodules.
        untracked: files and folders that git does not track and does not ignore. The path of a folder ends with `/`.
        unfiltered: files of `changed` that may be equal after a filter. The filter was not started, because only the
            repository's own configuration names it.
        filtered: files that have different bytes, but are equal after a filter that the user configured.
        submodules: initialised submodules; an outer submodule comes before the submodules in it.
    """

    root: Path
    commit: str
    changed: tuple[str, ...] = ()
    untracked: tuple[str, ...] = ()
    unfiltered: tuple[FilteredFile, ...] = ()
    filtered: tuple[FilteredFile, ...] = ()
    submodules: tuple[Submodule, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """The tracked files of a work tree, including the files of its initialised submodules.

    Attributes:
        files: in git's order.
        unwatched: files that git does not check for changes (`--assume-unchanged`).
        left_out: files that are missing in the work tree (sparse checkout).
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
    """Run git commands in one work tree, without the repository's own configuration. A context manager.

    Args:
        tree: the top folder of the work tree.
        place: the `.git` of the work tree.

    Raises:
        ToolMissing: git is not on PATH.
        ToolFailed: the git folder cannot be read.
    """

    def __init__(self, tree: str, place: str, environ: Mapping[str, str]) -> None:
        self.tree, self._folder = tree, None
        variables = git_folder.variables(environ)
        try:
            git, common = git_folder.find_folders(place)
            listing = _run("/", variables, *git_folder.LISTING, stdin=git_folder.read_configuration(common))
            self.filters = git_folder.filters(listing)
            folder = os.path.join(environ.get("TMPDIR") or "/tmp", f"hpcenv-git-{os.urandom(8).hex()}")  # noqa: S108
            os.mkdir(folder, 0o700)
            self._folder = folder
            git_folder.make(folder, common, listing)
        except (OSError, ValueError) as error:
            self.__exit__()
            raise ToolFailed(f"cannot read the git folder of `{tree}`", stderr=str(error), why=str(error)) from error
        self._variables = git_folder.placed(variables, git, folder, tree)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def ask(self, *words: str, stdin: bytes | None = None, accept: tuple[int, ...] = (0,)) -> bytes:
        return _run(self.tree, self._variables, *words, stdin=stdin, accept=accept)


# A work tree and the files that git tracks in it.
ReadTree = tuple[WorkTree, Tracked]


def read_tree(folder: Path, environ: Mapping[str, str]) -> ReadTree | None:
    """Return the work tree that a folder is in, and the files that git tracks in it; None outside of a repository.

    Raises:
        ToolMissing: there is a repository, but git is not on PATH.
        ToolFailed: git refuses the repository (`safe.directory`), or the repository is damaged.
    """
    real = os.path.realpath(folder)
    if not any(os.path.lexists(parent / ".git") for parent in (Path(real), *Path(real).parents)):
        return None
    # git decides whether this is a repository, and whether its owner is trusted (`safe.directory`). This
    # command starts no other program. `--show-cdup` prints no folder names, because a name can contain newlines.
    words = ("rev-parse", "--is-inside-work-tree", "--show-cdup", "--absolute-git-dir")
    answer = os.fsdecode(_run(real, git_folder.variables(environ), *words))
    inside, up, place = [*answer.split("\n", 2), "", ""][:3]
    if inside != "true":
        return None
    return _read_status(os.path.realpath(os.path.join(real, up)), place.rstrip("\n"), environ)


def read_status(tree: Path, environ: Mapping[str, str], *, submodules: bool) -> WorkTree:
    """Return the current state of a work tree.

    Args:
        tree: the top folder of the work tree.
        submodules: whether to look into submodules, too.

    Raises:
        ToolMissing, ToolFailed: git is not installed, git refuses the command, or the git folder cannot be read.
    """
    return _read_status(str(tree), os.path.join(tree, ".git"), environ, files=submodules)[0]


def _read_status(root: str, place: str, environ: Mapping[str, str], *, files: bool = True) -> ReadTree:
    """Return the changed and the tracked files of a work tree.

    Args:
        place: the `.git` of the work tree.
        files: whether to list tracked files and to read submodules.
    """
    with _Repository(root, place, environ) as repository:
        found = _parse_status(repository.ask(*_STATUS))
        links, blobs, tracked = _parse_files(Path(root), repository.ask(*_FILES) if files else b"")
        unfiltered = list(_unfiltered(repository, found.changed))
        same = {path: blob for path, blob in blobs.items() if path not in found.changed}
        filters = list(_with_filter(repository, same))
        # Files of Git LFS are not read here, because the commit has a digest of their bytes.
        own = [file for file in filters if file.filter != "lfs"]
        filtered = [file for file in own if git_folder.is_other(root, file.path, same[file.path])]
        unseen = git_folder.unseen(repository.ask, root, same)
    changed = [*found.changed, *unseen]
    names, unwatched, left_out = list(tracked.files), list(tracked.unwatched), list(tracked.left_out)
    submodules = []
    for path, commit in links.items():
        folder = os.path.join(root, path)
        # A link could lead to a folder that contains this work tree.
        if os.path.realpath(folder) != folder or not os.path.lexists(os.path.join(folder, ".git")):
            continue
        nested, theirs = _read_status(folder, os.path.join(folder, ".git"), environ)
        names.remove(path)
        names += _below(path, theirs.files)
        unwatched += _below(path, theirs.unwatched)
        left_out += _below(path, theirs.left_out)
        changed += _below(path, nested.changed)
        unfiltered += [FilteredFile(path=f"{path}/{u.path}", filter=u.filter) for u in nested.unfiltered]
        filtered += [FilteredFile(path=f"{path}/{u.path}", filter=u.filter) for u in nested.filtered]
        submodules.append(Submodule(path=path, commit=found.links.get(path, commit)))
        submodules += [Submodule(path=f"{path}/{s.path}", commit=s.commit) for s in nested.submodules]
    tree = WorkTree(
        root=Path(root),
        commit=found.commit,
        changed=tuple(changed),
        untracked=found.untracked,
        unfiltered=tuple(unfiltered),
        filtered=tuple(filtered),
        submodules=tuple(submodules),
    )
    return tree, Tracked(files=tuple(names), unwatched=tuple(unwatched), left_out=tuple(left_out))


def _below(folder: str, paths: Iterable[str]) -> Iterator[str]:
    return (f"{folder}/{path}" for path in paths)


def _unfiltered(repository: _Repository, changed: tuple[str, ...]) -> Iterator[FilteredFile]:
    """Yield the changed files whose filter only the repository's own configuration defines."""
    if not changed or not repository.filters:
        return
    # These are the filters of the user and the system. git reads a folder without the repository's own filters here.
    known = git_folder.filters(repository.ask("config", "-z", "--list"))
    yield from (file for file in _with_filter(repository, changed) if file.filter in repository.filters - known)


def _with_filter(repository: _Repository, paths: Iterable[str]) -> Iterator[FilteredFile]:
    found = git_folder.filtered(repository.ask, paths)
    return (FilteredFile(path=path, filter=name) for path, name in found.items())


def ignored(tree: str, paths: Sequence[str], environ: Mapping[str, str]) -> frozenset[str]:
    """Return the untracked paths that git ignores.

    Args:
        tree: the top folder of a work tree.
        paths: paths relative to `tree`. No path is behind a link or in a nested work tree.

    Raises:
        ToolMissing, ToolFailed: git is not installed, git refuses the command, or the git folder cannot be read.
    """
    # A colon at the beginning of a pathspec would have a special meaning.
    names = b"".join(b"./" + os.fsencode(path) + b"\0" for path in paths)
    with _Repository(tree, os.path.join(tree, ".git"), environ) as repository:
        # Exit status 1 means that git ignores none of the paths (git-check-ignore(1)).
        answer = repository.ask("check-ignore", "-z", "--stdin", stdin=names, accept=(0, 1))
    return frozenset(os.fsdecode(path[2:]) for path in answer.split(b"\0") if path)


def read_committed(path: Path, revision: str, environ: Mapping[str, str], *, most: int) -> bytes:
    """Return the content that a file of a work tree had in a commit.

    Args:
        path: the path of the file. The file may be missing now.
        revision: a commit, branch or tag, as git names it (gitrevisions(7)).
        most: the most bytes that are read.

    Raises:
        ToolMissing: git is not on PATH.
        ToolFailed: there is no repository, the commit or the file does not exist, or the file is larger than `most`.
    """
    real = os.path.realpath(path)
    folder = next(str(parent) for parent in Path(real).parents if parent.is_dir())
    # git decides whether this is a repository, and whether its owner is trusted. This command starts no other program.
    words = ("rev-parse", "--show-cdup", "--absolute-git-dir")
    up, place = [*os.fsdecode(_run(folder, git_folder.variables(environ), *words)).split("\n", 1), ""][:2]
    root = os.path.realpath(os.path.join(folder, up))
    blob = f"{revision}:{os.path.relpath(real, root)}"
    with _Repository(root, place.rstrip("\n"), environ) as repository:
        # After `--`, both commands accept no option. So a revision that begins with `-` is not read as an option.
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
    """Parse git-status(1), porcelain format version 2 with `-z` (git 2.47; git promises not to change this format)."""
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


def _parse_files(root: Path, said: bytes) -> tuple[dict[str, str], dict[str, str], Tracked]:
    """Return submodules (path -> commit in the index), files (path -> blob), and the paths of files and submodules."""
    files, unwatched, left_out, links, blobs = [], [], [], {}, {}
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
        elif mode.startswith("100"):
            blobs[path] = commit
        if tag.islower() or tag == "S":
            unwatched.append(path)
    # git lists a path in conflict several times, once for each side.
    files, unwatched = list(dict.fromkeys(files)), list(dict.fromkeys(unwatched))
    return links, blobs, Tracked(files=tuple(files), unwatched=tuple(unwatched), left_out=tuple(left_out))


# The user may have configured git to call a program, or to print a different format.
_LITERAL = (
    *("--binary", "--no-ext-diff", "--no-textconv", "--no-color"),
    *("--submodule=short", "--ignore-submodules=dirty"),
)


def read_diff(tree: WorkTree, new: tuple[str, ...], environ: Mapping[str, str]) -> bytes:
    """Return a patch for `git apply`: the differences of tracked files, and of the files in `new`, from the commit.

    Raises:
        ToolMissing, ToolFailed: git is not installed, or git refuses the command.
    """
    with _Repository(str(tree.root), os.path.join(tree.root, ".git"), environ) as repository:
        sides = ("--src-prefix=a/", "--dst-prefix=b/")
        parts = [repository.ask("diff", *_LITERAL, *sides, "HEAD", "--")]
        parts += [_submodule_diff(tree, submodule, environ) for submodule in tree.submodules]
        untracked = ("diff", "--no-index", *_LITERAL, *sides, "--", os.devnull)
        # Exit status 1 means that the two files differ (git-diff(1)).
        parts += [repository.ask(*untracked, path, accept=(0, 1)) for path in new]
    return b"".join(parts)


def _submodule_diff(tree: WorkTree, submodule: Submodule, environ: Mapping[str, str]) -> bytes:
    """Return how a submodule differs from the commit that the work tree names, or from its own HEAD."""
    folder = os.path.join(tree.root, submodule.path)
    sides = (f"--src-prefix=a/{submodule.path}/", f"--dst-prefix=b/{submodule.path}/")
    with _Repository(folder, os.path.join(folder, ".git"), environ) as repository:
        if submodule.commit:
            with contextlib.suppress(ToolFailed):  # the submodule may no longer have that commit
                return repository.ask("diff", *_LITERAL, *sides, submodule.commit, "--")
        return repository.ask("diff", *_LITERAL, *sides, "HEAD", "--")


def said_by(error: ToolFailed) -> str:
    """Return the line with which git explains a failure."""
    lines = [line.removeprefix("fatal: ") for line in error.stderr.strip().splitlines()]
    return lines[0] if lines else error.what


def _run(
    folder: str,
    variables: Mapping[str, str],
    *words: str,
    stdin: bytes | None = None,
    accept: tuple[int, ...] = (0,),
) -> bytes:
    git = process.find_tool("git", needed_for="record the commit of the code", path=variables.get("PATH"))
    argv = [git, *git_folder.OPTIONS, *words]
    return process.read_bytes(argv, timeout=_SECONDS, env=variables, stdin=stdin, cwd=Path(folder), accept=accept)
