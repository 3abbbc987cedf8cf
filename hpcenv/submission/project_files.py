"""Decide for each file of a project whether the run gets a copy of the file, a link to the file, or nothing.

Runs on: LOGIN NODE. Reads files, and writes nothing.

These files are copied and hashed: files that git tracks; files that Python can import; files that `--include` names;
and text up to 1 MiB, if git does not ignore the file, and if no line and no part of the name looks like a credential.
Lockfiles are not copied here, because a run keeps its own lockfile. For every other file that exists at submission, the
copy has a link to the file in the live project, at the same relative path. These other files are not copied for two
reasons: more people can read a run folder than a home folder, and a bundle of the run folder may be published. If a
link leads out of the folder, the copy gets the target instead of the link.

The same rules are used for a project without git: no file is tracked, and no file is ignored. If the project is the
copy of the code in a bundle, the files in the list of this copy are used as the tracked files.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from hpcenv import size
from hpcenv.errors import UsageError
from hpcenv.project.code_listing import LOCKFILE_SUFFIX
from hpcenv.records.code_listing import BYTECODE, LINK, Untracked, is_importable
from hpcenv.records.files import sha256_at
from hpcenv.submission import credentials

# Text up to this size is copied, because it is probably a configuration or a note.
_LONGEST_TEXT = 1 << 20
# Limits for the number and the total size of the copied files that git does not track.
_MOST_LOOSE = 5_000
_MOST_LOOSE_BYTES = 64 << 20
# Files that git does not track are checked one by one: 0.1 ms each on a parallel file system.
_MOST_LOOKED_AT = 20_000
_DEEPEST = 100
# If a linked folder has more files and folders than this number, the folder counts as data.
_MOST_BEHIND_LINK = 2_000
# Limits for all copied files together. A larger project probably has data, and each run would have a copy of the data.
_MOST_FILES = 20_000
_MOST_BYTES = 10**9
_SHOWN = 3

# The first line of a pointer of Git LFS. A pointer has less than 1024 bytes (docs/spec.md of Git LFS 3.7).
_POINTER, _POINTER_BYTES = b"version https://git-lfs.github.com/spec/", range(60, 1024)

_ENVIRONMENT = ("pyvenv.cfg", "conda-meta")


@dataclass(frozen=True, kw_only=True)
class CopyRules:
    """The special paths of a project.

    Attributes:
        project: the folder of hpcenv.toml, links resolved. Patterns are relative to this folder.
        links: absolute path -> target. The copy has a link to the target at this path. These links are for data, live
            folders and staged folders.
        skipped: folders of hpcenv, links resolved: for example the folder of runs and the store.
        lockfiles: the folder of lockfiles, relative to `project`. This folder is not copied, because a run has its own
            lockfile.
        ignore, include: patterns for paths that are left out, and patterns for paths that are always copied.
        to_others: whether the copy is for another person. A copy for another person has no links, and no hidden files
            that git does not track.
        secrets: files that [secrets] or --secret name, links resolved; never copied.
    """

    project: str
    links: Mapping[str, str] = field(default_factory=dict)
    skipped: frozenset[str] = frozenset()
    lockfiles: str = "lockfiles"
    ignore: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    to_others: bool = False
    secrets: frozenset[str] = frozenset()


@dataclass(kw_only=True)
class CopyContent:
    """The content of a copy. Paths are relative to the top folder of the copy.

    Attributes:
        copies: path -> the file to copy.
        contents: path -> sha256 of a copied file, or `link:TARGET`.
        texts: path -> content of a copied text that git does not track. The copy gets the content that was read here,
            because the file may change at any time (for example a log).
        live: path of a link in the copy -> target of the link.
        uncovered: the paths in `live` whose content no node compares.
        untracked: copied files that Python can import and that git does not track.
        known: path -> the kind of a file that git does not track. The file may be copied or not.
        ignored: copied files that git ignores and that `--include` names.
        unasked: work trees for which git did not answer which files it ignores.
        left_out: paths that a copy for others does not contain.
        pointers: files of Git LFS whose content was not fetched. The copy gets the pointer file.
    """

    copies: dict[str, str] = field(default_factory=dict)
    contents: dict[str, str] = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    live: dict[str, str] = field(default_factory=dict)
    uncovered: list[str] = field(default_factory=list)
    untracked: list[str] = field(default_factory=list)
    known: dict[str, Untracked] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    pointers: list[str] = field(default_factory=list)


# A function that asks git which paths of a work tree it ignores. It returns None if git does not answer.
AskIgnored = Callable[[str, Sequence[str]], frozenset[str] | None]


def find(root: str, shown: str, tracked: Sequence[str], rules: CopyRules, ask_ignored: AskIgnored) -> CopyContent:
    """Return the content of the copy of a folder.

    Args:
        root: the folder, links resolved.
        shown: the path of the folder that the user typed and that the nodes see. Links of the copy lead to this path.
        tracked: files that git tracks, relative to the folder; for a copy in a bundle, the files in the copy's list.
        ask_ignored: called once for each work tree with untracked files that git may ignore.

    Raises:
        UsageError: there are too many files, or they are too large.
    """
    return _ProjectWalk(root, shown, tracked, rules, ask_ignored).found


def require_bounded(root: Path, tracked: Sequence[str]) -> None:
    """Refuse a repository that is too large to be copied. Only the sizes of its files are used; no file is read.

    Raises:
        UsageError: there are too many files, or they are too large.
    """
    sizes = {path: _length(os.path.join(root, path), follow=False) for path in tracked}
    if len(sizes) > _MOST_FILES or sum(sizes.values()) > _MOST_BYTES:
        raise _too_much(str(root), sizes)


def _too_much(shown: str, sizes: Mapping[str, int]) -> UsageError:
    biggest = sorted(sizes, key=lambda path: -sizes[path])[:_SHOWN]
    named = ", ".join(f"{plain(path)} ({size.shown(sizes[path])})" for path in biggest)
    return UsageError(
        f"there is too much in `{shown}` to copy it for every run",
        why=f"more than {_MOST_FILES} files or {size.shown(_MOST_BYTES)}\nthe biggest: {named}",
        hint="keep data out of the repository, or --workdir live to run in the live project",
    )


@dataclass(frozen=True, kw_only=True)
class _LooseFile:
    """An untracked file. Whether it is copied depends on whether git ignores it.

    Attributes:
        place: the path at which the file is read. If a link leads to the file, this path is outside of the folder.
        asked: pairs of a work tree and a path in this work tree. git is asked about each pair. The paths are the path
            of the file, and the path of each link or nested work tree that leads to the file.
    """

    place: str
    path: str
    length: int
    asked: tuple[tuple[str, str], ...]


class _ProjectWalk:
    """Walks once through a project, and collects the content of the copy in `found`."""

    def __init__(
        self, root: str, shown: str, tracked: Sequence[str], rules: CopyRules, ask_ignored: AskIgnored
    ) -> None:
        self.found = CopyContent()
        self._root, self._shown, self._rules, self._ask_ignored = root, shown, rules, ask_ignored
        self._repository = _repository_of(root)
        self._passed: tuple[tuple[str, str], ...] = ()
        self._loose_files: list[_LooseFile] = []
        self._base = os.path.relpath(root, rules.project)
        self._tracked = frozenset(tracked)
        self._size = self._looked_at = self._loose_count = self._loose_bytes = 0
        self._loose: Counter[str] = Counter()
        self._own_links: dict[str, str] = {}
        self._outside: list[str] = []
        self._links = {
            os.path.relpath(place, root): target for place, target in rules.links.items() if _is_in(place, root)
        }
        for path, target in self._links.items():
            if not any(parent in self._links for parent in _parents(path)):
                self._live(target, path, uncovered=False)
        for path in tracked:
            if not self._is_special(path) and not self._is_lockfile(path):
                self._take_tracked(path)
        self._folder(root, "")
        ignored = self._ignored()
        for file in self._loose_files:
            self._take_text(file, is_ignored=file.path in ignored)
        self._require_own_links()
        self.found.uncovered.sort()

    # -- tracked ----------------------------------------------------------------------

    def _is_special(self, path: str) -> bool:
        return any(_is_in(path, link) for link in self._links)

    def _take_tracked(self, path: str) -> None:
        place = os.path.join(self._root, path)
        try:
            status = os.lstat(place)
        except OSError:
            return  # the diff shows that the file was removed
        if stat.S_ISLNK(status.st_mode):
            self._link(place, path)
        elif stat.S_ISREG(status.st_mode):
            self._copy(place, path, status.st_size)

    def _copy(self, place: str, path: str, length: int, content: str | None = None) -> None:
        self._size += length
        self.found.copies[path] = place
        if len(self.found.copies) > _MOST_FILES or self._size > _MOST_BYTES:
            raise _too_much(self._shown, {path: _length(place) for path, place in self.found.copies.items()})
        try:
            self.found.contents[path] = content or sha256_at(place)
            if length in _POINTER_BYTES and _starts_with(place, _POINTER):
                self.found.pointers.append(path)
        except OSError as error:
            raise UsageError(f"cannot read `{place}`", why=error.strerror, hint=_hint(path)) from error

    # -- all other files --------------------------------------------------------------

    def _folder(self, place: str, below: str) -> None:
        try:
            with os.scandir(place) as scanned:
                entries = sorted(scanned, key=lambda entry: entry.name)
        except OSError:
            if below:
                self._live(place, below)
            return
        names = {entry.name for entry in entries}
        if below and not self._is_project_folder(place, below, names):
            return
        with self._through(place, place) if below and ".git" in names else nullcontext():
            for entry in entries:
                path = f"{below}/{entry.name}" if below else entry.name
                if path not in self._tracked and not self._is_left_out(entry.name, path):
                    self._entry(entry, path)

    @contextmanager
    def _through(self, passed: str, repository: str | None) -> Iterator[None]:
        """Visit the content of a link or a nested work tree.

        Args:
            passed: the link or the work tree; git may ignore it.
            repository: the work tree in which the files are.
        """
        before = self._repository, self._passed
        if self._repository is not None:
            self._passed = (*self._passed, (self._repository, os.path.relpath(passed, self._repository)))
        self._repository = repository
        yield
        self._repository, self._passed = before

    def _is_project_folder(self, place: str, path: str, names: set[str]) -> bool:
        """Return whether a folder belongs to the project. For a Python environment, add a link and return False."""
        if not names.isdisjoint(_ENVIRONMENT):
            self._live(place, path, uncovered=False)
            return False
        is_run = "sweep.json" in names or {"manifest.json", "code"} <= names or {"check", "lock", "code"} <= names
        is_of_executor = any(name.endswith("_submitted.pkl") for name in names)
        is_cache = "CACHEDIR.TAG" in names
        return not (is_run or is_of_executor or is_cache or os.path.realpath(place) in self._rules.skipped)

    def _is_left_out(self, name: str, path: str) -> bool:
        if name in (".git", BYTECODE) or self._is_lockfile(path):
            return True
        if self._rules.to_others and name.startswith("."):
            return True
        return bool(self._rules.ignore) and self._fits(path, self._rules.ignore)

    def _is_lockfile(self, path: str) -> bool:
        return is_lockfile(os.path.normpath(os.path.join(self._base, path)), self._rules.lockfiles)

    def _fits(self, path: str, patterns: Sequence[str]) -> bool:
        named = os.path.normpath(os.path.join(self._base, path))
        for pattern in (pattern.rstrip("/") for pattern in patterns):
            if _is_in(named, pattern) or fnmatch.fnmatchcase(named, pattern):
                return True
            if "/" not in pattern and fnmatch.fnmatchcase(os.path.basename(path), pattern):
                return True
        return False

    def _entry(self, entry: os.DirEntry[str], path: str) -> None:
        if path in self._links:
            return
        self._looked_at += 1
        if self._looked_at > _MOST_LOOKED_AT:
            self._refuse_number(f"more than {_MOST_LOOKED_AT} files that git does not track")
        if entry.is_symlink():
            self._link(entry.path, path)
        elif entry.is_dir(follow_symlinks=False):
            if path.count("/") < _DEEPEST:
                self._folder(entry.path, path)
            else:
                self._live(entry.path, path)
        elif entry.is_file(follow_symlinks=False):
            self._file(entry.path, path)

    def _file(self, place: str, path: str) -> None:
        """Copy or link a file. If this depends on git, put the file into `_loose_files` until git has answered.

        If a link leads to the file, `place` is outside of the project.
        """
        self._loose[_top_of(path)] += 1
        try:
            length = os.stat(place).st_size
        except OSError:
            return
        # If this process cannot read a file, a rank cannot import it.
        if os.path.realpath(place) in self._rules.secrets or not os.access(place, os.R_OK):
            self._live_file(place, path)
        elif is_importable(path) and not self._is_included(path):
            self._take_module(place, path, length)
        elif length <= _LONGEST_TEXT or self._is_included(path):
            asked = self._passed
            if self._repository is not None:
                asked = (*asked, (self._repository, os.path.relpath(place, self._repository)))
            self._loose_files.append(_LooseFile(place=place, path=path, length=length, asked=asked))
        else:
            self._live_file(place, path)

    def _is_included(self, path: str) -> bool:
        return bool(self._rules.include) and self._fits(path, self._rules.include)

    def _take_module(self, place: str, path: str, length: int) -> None:
        if self._rules.to_others and credentials.line_of(path, _start_of(place) or b""):
            self.found.left_out.append(path)
            return
        self._count(length)
        self.found.known[path] = "other"
        self.found.untracked.append(path)
        self._copy(place, path, length)

    def _ignored(self) -> frozenset[str]:
        """Return which files of `_loose_files` git ignores.

        If git does not answer for a work tree, return all files of `_loose_files` that are in this work tree.
        """
        questions: dict[str, list[str]] = {}
        for file in self._loose_files:
            for repository, path in file.asked:
                questions.setdefault(repository, []).append(path)
        answers = {tree: self._ask_ignored(tree, list(dict.fromkeys(paths))) for tree, paths in questions.items()}
        self.found.unasked += [tree for tree, answer in answers.items() if answer is None]
        return frozenset(
            file.path
            for file in self._loose_files
            if any((answer := answers[tree]) is None or path in answer for tree, path in file.asked)
        )

    def _take_text(self, file: _LooseFile, *, is_ignored: bool) -> None:
        """Copy a file if `--include` names it, or if it has text that other people may read; otherwise link it."""
        if self._is_included(file.path):
            self.found.known[file.path] = "include"
            self.found.ignored += [file.path] if is_ignored else []
            self._copy(file.place, file.path, file.length)
            return
        if is_ignored or credentials.is_named_like_one(file.path):
            self._live_file(file.place, file.path, "ignored" if is_ignored else "credential")
            return
        content = _text(file.place)
        if content is None or credentials.line_of(file.path, content):
            self._live_file(file.place, file.path, None if content is None else "credential")
            return
        self._count(file.length)
        self.found.known[file.path] = "other"
        self.found.texts[file.path] = content
        self._copy(file.place, file.path, file.length, hashlib.sha256(content).hexdigest())

    def _live_file(self, place: str, path: str, known: Untracked | None = None) -> None:
        if known is not None:
            self.found.known[path] = known
        self._live(self._seen(path) if _is_in(place, self._root) else place, path)

    def _count(self, length: int) -> None:
        self._loose_count, self._loose_bytes = self._loose_count + 1, self._loose_bytes + length
        if self._loose_count > _MOST_LOOSE or self._loose_bytes > _MOST_LOOSE_BYTES:
            limit = f"{_MOST_LOOSE} files or {size.shown(_MOST_LOOSE_BYTES)}"
            self._refuse_number(f"more than {limit} of modules and text that git does not track")

    def _refuse_number(self, why: str) -> None:
        most = self._loose.most_common(_SHOWN) or [("FOLDER", 0)]
        named = ", ".join(f"{plain(path)} ({count} files)" for path, count in most)
        raise UsageError(
            f"there is too much in `{self._shown}` to copy it for every run",
            why=f"{why}; most of them so far: {named}",
            hint=_hint(most[0][0]),
        )

    def _live(self, target: str, path: str, *, uncovered: bool = True) -> None:
        if self._rules.to_others:
            self.found.left_out.append(path)
            return
        self.found.live[path] = target
        if uncovered:
            self.found.uncovered.append(path)

    def _seen(self, path: str) -> str:
        return os.path.join(self._shown, path)

    # -- links ------------------------------------------------------------------------

    def _link(self, place: str, path: str) -> None:
        aim, real = os.readlink(place), os.path.realpath(place)
        if not os.path.exists(real):
            leads_to = os.path.normpath(os.path.join(os.path.dirname(place), aim))
            inside = os.path.isabs(aim) or _is_in(leads_to, self._root)
            self.found.contents[path] = LINK + (aim if inside else leads_to)
        elif _is_in(real, self._root):
            leads_to = os.path.normpath(os.path.join(os.path.dirname(place), aim))
            relative = not os.path.isabs(aim) and _is_in(place, self._root) and _is_in(leads_to, self._root)
            self._own_links[path] = os.path.relpath(real, self._root)
            self.found.contents[path] = LINK + (
                aim if relative else os.path.relpath(real, os.path.join(self._root, os.path.dirname(path)))
            )
        elif os.path.isdir(real):
            with self._through(place, _repository_of(real)):
                self._linked_folder(real, path)
        elif os.path.isfile(real):
            with self._through(place, _repository_of(os.path.dirname(real))):
                self._file(real, path)

    def _linked_folder(self, real: str, path: str) -> None:
        """Add the content of a folder outside of the project, as if the folder were at `path`.

        If the folder is large, or contains the project, add only a link to the folder.
        """
        leads_back = any(_is_in(one, real) for one in (self._root, *self._outside))
        if leads_back or _names_below(real, _MOST_BEHIND_LINK) is None:
            self._live(real, path)
            return
        self._outside.append(real)
        self._folder(real, path)
        self._outside.pop()

    def _require_own_links(self) -> None:
        """Change each link whose target is not in the copy. The changed link leads to the live project."""
        have = {*self.found.contents, *self.found.live}
        have |= {parent for path in [*have] for parent in _parents(path)}
        for path, target in self._own_links.items():
            if target not in have and not any(parent in self.found.live for parent in _parents(target)):
                del self.found.contents[path]
                self._live(self._seen(target), path)


def _hint(path: str) -> str:
    place = plain(path)
    return (
        f'in hpcenv.toml, leave it out ([code] ignore = ["{place}"]) or name it as data ([[data]] path = "{place}"); '
        "or --workdir live"
    )


def _names_below(folder: str, most: int) -> int | None:
    """Return the number of names below a folder; None if there are more than `most`."""
    count, waiting = 0, [folder]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    count += 1
                    if count > most:
                        return None
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError:
            continue
    return count


def is_lockfile(path: str, lockfiles: str) -> bool:
    """Return whether a file is a lockfile of the project. Lockfiles are not code; a run keeps a copy of its lockfile.

    Args:
        path: the path of the file, relative to the folder of hpcenv.toml.
        lockfiles: the folder of lockfiles, also relative to the folder of hpcenv.toml.
    """
    return path.endswith(LOCKFILE_SUFFIX) and _is_in(os.path.dirname(path) or ".", lockfiles)


def _repository_of(folder: str) -> str | None:
    """Return the nearest folder with a `.git`: the folder itself or a parent; None if no folder has one."""
    return next((str(one) for one in (Path(folder), *Path(folder).parents) if os.path.lexists(one / ".git")), None)


def _start_of(place: str) -> bytes | None:
    """Return the beginning of a file, one byte more than the longest text; None if the file cannot be read."""
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            return file.read(_LONGEST_TEXT + 1)
    except OSError:
        return None


def _starts_with(place: str, start: bytes) -> bool:
    with open(os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        return file.read(len(start)) == start


def _text(place: str) -> bytes | None:
    """Return the content of a text file; None if the file is not text, is too long, or cannot be read."""
    content = _start_of(place)
    # git uses the same rule (buffer_is_binary, git 2.47): a NUL in the first 8000 bytes means that the file is binary.
    is_text = content is not None and b"\0" not in content[:8000] and len(content) <= _LONGEST_TEXT
    return content if is_text else None


def _length(place: str, *, follow: bool = True) -> int:
    try:
        return os.stat(place, follow_symlinks=follow).st_size
    except OSError:
        return 0


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _parents(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _top_of(path: str) -> str:
    """Return a path in short for a message: its first one or two folders; the path itself if it has no folder."""
    folders = path.split("/")[:-1]
    return "/".join(folders[:2]) if folders else path


def shorten(paths: Sequence[str], most: int = 8) -> tuple[str, ...]:
    """Return a short list of many files. If a folder has many of them, the list has the folder and their number."""
    grouped: dict[str, list[str]] = {}
    for path in paths:
        grouped.setdefault(_top_of(path) if "/" in path else "", []).append(path)
    names: list[str] = []
    for folder, inside in grouped.items():
        many = folder and len(inside) > _SHOWN
        names += [f"{plain(folder)}/ ({len(inside)} files)"] if many else [plain(path) for path in inside]
    rest = len(names) - most
    return (*names[:most], *([f"and {rest} more"] if rest > 0 else []))


def plain(path: str) -> str:
    """Return a path for a message. Characters that are not printable are written as escapes."""
    return path if path.isprintable() else ascii(path)
