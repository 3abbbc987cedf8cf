"""The copy of the code that a run uses, so that later edits do not reach a queued job.

Runs on: LOGIN NODE. `find` decides and reads; `make` copies.

What git tracks is copied as it is in the work tree (with LFS content where that was fetched,
a pointer where it was not); data that nobody tracks never is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcenv.adapters import git, process
from hpcenv.adapters.git import WorkTree
from hpcenv.dataclass import dataclass
from hpcenv.errors import FileUnusable, ScriptUnusable, ToolFailed, ToolMissing, UsageError
from hpcenv.model import size
from hpcenv.model.lockfile import CodeTable
from hpcenv.model.plan import PlannedSource
from hpcenv.steps.request import Asked, Surroundings
from hpcenv.wire import RunFolder, Source

if TYPE_CHECKING:
    from typing_extensions import Self

# Every run keeps its copy. A repository beyond this holds data: a shared file system takes
# minutes for so many files, and runs would eat its quota.
_MOST_FILES = 20_000
_MOST_BYTES = 10**9
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Code:
    """What is known of the code of a run.

    Attributes:
        source: the copy to make; None where the script runs from its own place.
        tree: the work tree around the script; None where there is none.
        diff: how it differs from its commit, where it does.
        reason: why nothing is known of it.
    """

    source: PlannedSource | None = None
    tree: WorkTree | None = None
    diff: bytes = b""
    reason: str | None = None

    def table(self, script_sha256: str) -> CodeTable:
        """Return what the run's lockfile says of it."""
        known = self.tree is not None and self.reason is None
        return CodeTable(
            commit=self.tree.commit or None if self.tree is not None else None,
            dirty=bool(self.diff) if known else None,
            diff_sha256=hashlib.sha256(self.diff).hexdigest() if self.diff else None,
            script_sha256=script_sha256,
            reason=self.reason,
        )


class Look:
    """What git is asked about the code around a script, while its caller does something else.

    To be used in a `with`. git's trouble is told by `find`, which knows whether it matters.

    Args:
        script: the script, or the module of a function; None where there is none.
    """

    def __init__(self, script: Path | None, environ: Mapping[str, str]) -> None:
        self._git: git.Look | None = None
        self._error: ToolMissing | ToolFailed | None = None
        try:
            self._git = None if script is None else git.Look(script.parent, environ)
        except (ToolFailed, ToolMissing) as error:
            self._error = error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._git is not None:
            self._git.__exit__()

    def answer(self) -> tuple[WorkTree | None, git.Tracked | None]:
        """Return the work tree and the tracked files, as far as there are any.

        Raises:
            ToolMissing, ToolFailed: it is under git, and git does not say what it is.
        """
        if self._error is not None:
            raise self._error
        tree = None if self._git is None else self._git.tree()
        return tree, None if self._git is None or tree is None or not tree.commit else self._git.files(tree)


def find(script: Path, look: Look, run_folder: Path, asked: Asked, around: Surroundings, notes: list[str]) -> Code:
    """Return what is copied, or why the script runs from its own place; that is noted too.

    Args:
        look: what git was asked about the script's folder.

    Raises:
        UsageError: the code is not that of a commit, and `--allow-dirty` is not given; or
            there is too much of it.
        ToolMissing, ToolFailed: it is under git, and git does not say what it is.
    """
    try:
        tree, known = look.answer()
    except (ToolFailed, ToolMissing) as error:
        return _unreadable(script, asked, error, notes)
    if tree is None or known is None:
        why = f"{script.parent} is not under git" if tree is None else f"{tree.root} has no commit yet"
        _tell_place(why, asked, notes)
        return Code(tree=tree, reason=why)
    inside = os.path.relpath(os.path.join(os.path.realpath(script.parent), script.name), tree.root)
    new = () if inside in known.files else (inside,)
    is_dirty = bool(tree.changed or known.unwatched or new)
    if not asked.snapshot:
        diff = git.read_diff(tree, new, around.environ) if is_dirty else b""
        _tell_place("--no-snapshot", asked, notes)
        return Code(tree=tree, diff=diff)
    if is_dirty and not asked.allow_dirty:
        raise _dirty(tree, known, new)
    files = _bounded(tree.root, (*known.files, *new), notes)
    notes.extend(_left_out(tree, known, new))
    diff = git.read_diff(tree, new, around.environ) if is_dirty else b""
    folder = RunFolder(run_folder).source
    record = Source(
        root=str(tree.root),
        folder=str(folder),
        commit=tree.commit,
        dirty=is_dirty,
        diff_sha256=hashlib.sha256(diff).hexdigest() if diff else "",
        files=len(files),
    )
    source = PlannedSource(record=record, script=folder / inside, files=files, diff=diff, new=new)
    return Code(source=source, tree=tree, diff=diff)


def _tell_place(why: str, asked: Asked, notes: list[str]) -> None:
    # A folder for others has its copy anyway: see handover.py.
    if not asked.handover:
        notes.append(f"the script runs from its own place, where later edits reach the job: {why}")


def _unreadable(script: Path, asked: Asked, error: ToolFailed | ToolMissing, notes: list[str]) -> Code:
    """Nobody asked for a copy: then git's trouble is a note. Otherwise it is the user's to decide."""
    why = git.said_by(error) if isinstance(error, ToolFailed) else error.what
    if not asked.snapshot:
        notes.append(f"the commit of the code is not known: {why}")
        return Code(reason=why)
    error.what = f"git does not say what the code of `{script.name}` is"
    error.why, error.hint = why, "--no-snapshot runs the script from its own place"
    raise error


def _dirty(tree: WorkTree, known: git.Tracked, new: Sequence[str]) -> UsageError:
    lines = []
    if tree.changed:
        lines.append(f"changed: {_some(tree.changed)}")
    if new:
        lines.append(f"not under git: {_some(new)}")
    if known.unwatched:
        lines.append(f"git was told not to look at: {_some(known.unwatched)}")
    return UsageError(
        f"the code in `{tree.root}` is not that of commit {tree.commit[:12]}",
        why="\n".join(lines),
        hint="git commit, or --allow-dirty to run and record it as it is, or --no-snapshot to run it in place",
    )


def _left_out(tree: WorkTree, known: git.Tracked, new: Sequence[str]) -> Iterable[str]:
    """Say what somebody may miss in the copy."""
    modules = [path for path in tree.untracked if path.endswith(".py") and path not in new]
    if modules:
        yield f"not in the copy of the code, git does not track them: {_some(modules)}"
    if known.left_out:
        yield f"not in the copy of the code, they are not in the work tree: {_some(known.left_out)}"


def _bounded(root: Path, paths: Sequence[str], notes: list[str]) -> tuple[str, ...]:
    """Return those that are files or links.

    Raises:
        UsageError: there are too many, or they are too large.
    """
    sizes: dict[str, int] = {}
    folders = []
    for path in paths:
        try:
            found = os.lstat(root / path)
        except OSError:
            continue  # removed, which the difference says
        if stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode):
            sizes[path] = found.st_size
        elif stat.S_ISDIR(found.st_mode):
            folders.append(path)
    if folders:
        notes.append(f"not in the copy of the code, the submodule is not initialised: {_some(folders)}")
    total = sum(sizes.values())
    if len(sizes) > _MOST_FILES or total > _MOST_BYTES:
        biggest = sorted(sizes, key=lambda path: -sizes[path])[:_SHOWN]
        named = ", ".join(f"{_shown(path)} ({size.shown(sizes[path])})" for path in biggest)
        raise UsageError(
            f"git tracks too much in `{root}` to copy it for every run",
            why=f"{len(sizes)} files, {size.shown(total)}; at most {_MOST_FILES} and {size.shown(_MOST_BYTES)}\n"
            f"the biggest: {named}",
            hint="keep data out of the repository, or --no-snapshot to run the script from its own place",
        )
    return tuple(sizes)


def _some(paths: Sequence[str]) -> str:
    named = ", ".join(_shown(path) for path in paths[:_SHOWN])
    return named if len(paths) <= _SHOWN else f"{named} and {len(paths) - _SHOWN} more"


def _shown(path: str) -> str:
    """Return a name as a terminal can show it."""
    return path if path.isprintable() else ascii(path)


def make(source: PlannedSource, run: RunFolder, environ: Mapping[str, str]) -> process.Begun:
    """Copy the files into the run folder, and begin to ask whether somebody changed one: see `require_unchanged`.

    Raises:
        FileUnusable: it cannot be copied.
    """
    root, folder = source.record.root, source.record.folder
    made = set()
    try:
        for path in source.files:
            target = os.path.join(folder, path)
            parent = os.path.dirname(target)
            if parent not in made:
                os.makedirs(parent, exist_ok=True)
                made.add(parent)
            _copy(root, path, target)
        if source.diff:
            run.source_diff.write_bytes(source.diff)
    except OSError as error:
        raise FileUnusable(f"cannot copy the code to `{folder}`", why=str(error)) from error
    return git.begin_status(Path(root), environ)


def _copy(root: str, path: str, target: str) -> None:
    place = os.path.join(root, path)
    found = os.lstat(place)
    if stat.S_ISLNK(found.st_mode):
        aim = os.readlink(place)
        leads_to = os.path.normpath(os.path.join(os.path.dirname(place), aim))
        # A relative way out of the tree would lead elsewhere from the copy.
        outside = not os.path.isabs(aim) and os.path.commonpath([root, leads_to]) != root
        os.symlink(leads_to if outside else aim, target)
        return
    shutil.copyfile(place, target, follow_symlinks=False)
    os.chmod(target, stat.S_IMODE(found.st_mode) & 0o777 | stat.S_IRUSR | stat.S_IWUSR)


def require_unchanged(
    source: PlannedSource, asked: process.Begun, script_sha256: str, environ: Mapping[str, str]
) -> None:
    """Make sure that the code is still the one that was looked at.

    Args:
        asked: what `make` returned.
        script_sha256: of the script when it was read; empty where it was not.

    Raises:
        ScriptUnusable: the code changed since.
    """
    record = source.record
    root = Path(record.root)
    now = git.read_status(root, asked) if os.path.lexists(root / ".git") else None
    same = now is not None and now.commit == record.commit and (record.dirty or not now.changed)
    if same and now is not None and record.dirty:
        diff = git.read_diff(now, source.new, environ)
        same = (hashlib.sha256(diff).hexdigest() if diff else "") == record.diff_sha256
    copied = hashlib.sha256(source.script.read_bytes()).hexdigest()
    if same and script_sha256 in ("", copied):
        return
    raise ScriptUnusable(
        f"the code in `{record.root}` changed while it was copied", why="nothing is queued", hint="submit again"
    )
