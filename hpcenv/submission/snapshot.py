"""The run's own copy of the project. A queued job uses this copy, so later edits of the project do not change the job.

Runs on: LOGIN NODE. `find` reads the project and decides what is copied; `make` copies.

Files that git tracks are copied as they are in the work tree. For a file of Git LFS, the copy gets the content of the
file. If this content was not fetched, the copy gets the pointer file. `project_files` decides which other files the
copy has.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hpcenv.errors import FileUnusable, HpcenvError, ScriptUnusable, ToolFailed, ToolMissing, UsageError
from hpcenv.project import git
from hpcenv.project.context import Context
from hpcenv.project.git import WorkTree
from hpcenv.project.lockfile import CodeTable
from hpcenv.project.spec import split_overlay
from hpcenv.project.workspace import Workspace
from hpcenv.records.code_listing import LINK, Listing, digest_of
from hpcenv.records.codec import SCHEMA
from hpcenv.records.files import save_record
from hpcenv.records.manifest import Source
from hpcenv.records.run_folder import RunFolder
from hpcenv.submission import project_files
from hpcenv.submission.plan import PlannedSource
from hpcenv.submission.project_files import CopyContent, CopyRules, plain, shorten
from hpcenv.submission.request import SubmitOptions
from hpcenv.text import listed

_SHOWN = 3
LIVE: Literal["live"] = "live"


@dataclass(frozen=True, kw_only=True)
class Code:
    """Information on the code of a run.

    Attributes:
        workdir: the working directory of the ranks.
        source: the copy to make; None if the script runs in the live project.
        tree: the work tree of the script; None outside of a repository.
        diff: the difference between the work tree and its commit; empty if there is no difference.
        reason: why the commit of the code is not known; None if the commit is known.
        notes: what the user should know.
    """

    workdir: Path
    source: PlannedSource | None = None
    tree: WorkTree | None = None
    diff: bytes = b""
    reason: str | None = None
    notes: tuple[str, ...] = ()

    def table(self, script_sha256: str) -> CodeTable:
        """Return the table [code] of the run's lockfile."""
        known = self.tree is not None and self.reason is None
        return CodeTable(
            commit=self.tree.commit or None if self.tree is not None else None,
            dirty=bool(self.diff) if known else None,
            diff_sha256=hashlib.sha256(self.diff).hexdigest() if self.diff else None,
            script_sha256=script_sha256 or None,
            workdir=LIVE if self.source is None else "copy",
            digest=None if self.source is None else self.source.record.digest,
            reason=self.reason,
        )


@dataclass(frozen=True, kw_only=True)
class CodePlace:
    """The source of a submission's code, and the place of its run.

    Attributes:
        script: the script, or the file of a module; None for a function without a module, and for a module of the
            environment.
        run_folder: the folder of the run.
    """

    script: Path | None
    run_folder: Path
    workspace: Workspace
    options: SubmitOptions
    context: Context

    @property
    def folder(self) -> Path | None:
        """The first folder that Python searches for code: the script's folder; for a module, the working directory."""
        return code_folder(self.options, self.context.cwd)

    @property
    def skipped(self) -> tuple[Path, ...]:
        """More folders that are not code: the folder of an executor, and the folder for the outputs of its function."""
        return () if self.options.call is None else self.options.call.folders


def code_folder(options: SubmitOptions, cwd: Path) -> Path | None:
    """Return the folder that Python searches first for the code; None if the run has no code."""
    if options.call is not None:
        return None if options.call.module is None else options.call.module.parent
    if options.script is None or options.module or options.entry:
        return None if options.script is None else cwd
    return Path(os.path.abspath(cwd / options.script)).parent


@dataclass(frozen=True, kw_only=True)
class _Committed:
    """The state of the code in git.

    Attributes:
        files: the files that git tracks, and the files in `new`.
        new: the script, if git does not track it.
        reason: why the code has no commit; None if the code has a commit.
        notes: what the user should know.
    """

    tree: WorkTree | None
    files: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    is_dirty: bool = False
    diff: bytes = b""
    reason: str | None = None
    notes: tuple[str, ...] = ()


def find(place: CodePlace, answer: Future[git.ReadTree | None] | None) -> Code:
    """Return the information about the code, with the copy to make. With `--workdir live`, there is no copy.

    Args:
        answer: the result of `git.read_tree` for the script's folder; None without code.

    Raises:
        UsageError: the code differs from its commit, and `--allow-dirty` is not given; or
            there are too many files.
        ToolMissing, ToolFailed: git cannot read the work tree, and the code must be copied.
    """
    try:
        committed = _committed(place, None if answer is None else answer.result())
    except (ToolFailed, ToolMissing) as error:
        return _unreadable(place, error)
    live = Code(workdir=place.context.cwd, tree=committed.tree, diff=committed.diff, reason=committed.reason)
    if place.options.workdir == LIVE:
        note = "the script runs in the live project (--workdir live): later edits change the job"
        return live if place.options.handover else replace(live, notes=(note,))
    source, workdir, notes = _planned(place, committed)
    return replace(live, source=source, workdir=workdir, notes=(*committed.notes, *notes))


def _committed(place: CodePlace, read: git.ReadTree | None) -> _Committed:
    """Return the state of the code in git. Refuse code that differs from its commit without --allow-dirty."""
    script, options = place.script, place.options
    if options.copied is not None:
        return _Committed(tree=None, files=options.copied.files, reason="the code is a copy of another run's code")
    if read is None:
        return _Committed(tree=None, reason="no script" if place.folder is None else f"{place.folder} is not under git")
    tree, known = read
    if not tree.commit:
        return _Committed(tree=tree, reason=f"{tree.root} has no commit yet")
    inside = None if script is None else os.path.relpath(_real(script), tree.root)
    # If a link leads to a script outside of the work tree, git does not know the state of this script.
    new = () if inside is None or inside in known.files or inside.startswith("../") else (inside,)
    is_dirty = bool(tree.changed or known.unwatched or new)
    notes: tuple[str, ...] = ()
    if options.workdir != LIVE:
        if is_dirty and not options.allow_dirty:
            raise _dirty(tree, known, new)
        project_files.require_bounded(tree.root, known.files)
        notes = (*_not_copied(tree, known), *_not_filtered(tree), *_only_filtered(tree))
    diff = git.read_diff(tree, new, place.context.environ) if is_dirty else b""
    return _Committed(tree=tree, files=(*known.files, *new), new=new, is_dirty=is_dirty, diff=diff, notes=notes)


def _not_copied(tree: WorkTree, known: git.Tracked) -> Iterable[str]:
    """Yield notes about tracked files that cannot be copied, because they are not in the work tree."""
    if known.left_out:
        yield f"not in the copy of the code, because they are not in the work tree: {_some(known.left_out)}"
    missing = [path for path in known.files if _is_folder(tree.root / path)]
    if missing:
        yield f"not in the copy of the code, the submodule is not initialised: {_some(missing)}"


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _unreadable(place: CodePlace, error: ToolFailed | ToolMissing) -> Code:
    """If no copy is needed, return a `Code` with a note about the failure of git; otherwise raise the error."""
    why = git.said_by(error) if isinstance(error, ToolFailed) else error.what
    if place.options.workdir == LIVE:
        return Code(workdir=place.context.cwd, reason=why, notes=(f"the commit of the code is not known: {why}",))
    raise error.changed(
        what=f"git fails for the code of `{'' if place.script is None else place.script.name}`",
        why=why,
        hint="--workdir live runs the script in the live project",
    ) from error


def _dirty(tree: WorkTree, known: git.Tracked, new: Sequence[str]) -> UsageError:
    lines = []
    if tree.changed:
        lines.append(f"changed: {_some(tree.changed)}")
    if new:
        lines.append(f"not under git: {_some(new)}")
    lines.extend(_not_filtered(tree))
    if known.unwatched:
        lines.append(f"git does not look at (assume-unchanged): {_some(known.unwatched)}")
    own = ""
    if tree.unfiltered:
        own = f"git config --global filter.{plain(tree.unfiltered[0].filter)}.clean COMMAND makes that filter yours; "
    return UsageError(
        f"the code in `{tree.root}` differs from commit {tree.commit[:12]}",
        why="\n".join(lines),
        hint=f"{own}git commit, or --allow-dirty to run and record it as it is, or --workdir live to run it in place",
    )


def _not_filtered(tree: WorkTree) -> Iterable[str]:
    """Yield a line about files that may equal the commit. Only a filter of the repository could show this."""
    names = sorted({found.filter for found in tree.unfiltered})
    if names:
        yield (
            f"not compared through filter {_some(names)}: {_some([found.path for found in tree.unfiltered])}: "
            "only this repository's own configuration names its program, and hpcenv starts no such program"
        )


def _only_filtered(tree: WorkTree) -> Iterable[str]:
    """Yield a note about files that differ from the commit, but are equal to it after a filter of git."""
    names = sorted({found.filter for found in tree.filtered})
    if names:
        files = _some([found.path for found in tree.filtered])
        yield f"not the bytes of the commit, filter {_some(names)} of git stands between them: {files}"


# -- the files to copy --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _CopiedFolder:
    """One folder that is copied.

    Attributes:
        root: the path of the folder, links resolved.
        shown: the path of the folder as the user typed it, for messages.
        folder: the path of the copy.
        tracked: the files that git tracks, relative to the folder.
    """

    root: str
    shown: str
    folder: Path
    tracked: tuple[str, ...] = ()


def _planned(place: CodePlace, committed: _Committed) -> tuple[PlannedSource, Path, Iterable[str]]:
    """Return the copy to make, the working directory in the copy, and notes about the copy."""
    parts = _parts(place, committed)
    rules = _rules(place, parts)
    ask = functools.partial(_ask_ignored, environ=place.context.environ)
    found = [(part, project_files.find(part.root, part.shown, part.tracked, rules, ask)) for part in parts]
    cwd = os.path.realpath(place.context.cwd)
    working = parts[-1]
    workdir = Path(os.path.normpath(working.folder / os.path.relpath(cwd, working.root)))
    listing = _listing(found, committed.new)
    main = parts[0]
    script = None
    if place.script is not None:
        real = _real(place.script)
        inside = _is_in(real, main.root)
        # A link may lead to the folder of a module. The path is then relative to the working directory, as for Python.
        script = main.folder / os.path.relpath(real, main.root) if inside else workdir / _below(place)
    planned = PlannedSource(
        record=_record(committed, found, listing),
        script=script,
        files={f"{part.folder.name}/{path}": origin for part, one in found for path, origin in one.copies.items()},
        texts={f"{part.folder.name}/{path}": text for part, one in found for path, text in one.texts.items()},
        listing=listing,
        workdir=str(workdir.relative_to(place.run_folder)),
        roots={part.folder.name: part.root for part in parts},
        live_folders=_live_folders(place),
        diff=committed.diff,
        new=committed.new,
        has_submodules=committed.tree is not None and bool(committed.tree.submodules),
    )
    return planned, workdir, _notes(found, has_commit=committed.tree is not None and committed.reason is None)


def _ask_ignored(tree: str, paths: Sequence[str], *, environ: Mapping[str, str]) -> frozenset[str] | None:
    try:
        return git.ignored(tree, paths, environ)
    except (ToolFailed, ToolMissing):
        return None


def _parts(place: CodePlace, committed: _Committed) -> list[_CopiedFolder]:
    """Return the folders to copy: the folder of the code, and the project of a working directory that is elsewhere."""
    run, cwd = RunFolder(place.run_folder), os.path.realpath(place.context.cwd)
    project = os.path.realpath(place.workspace.root)
    of_cwd = project if _is_in(cwd, project) else cwd
    if place.folder is None:
        return [_part(of_cwd, run.source, place)]
    folder = os.path.realpath(place.folder)
    beside = of_cwd if _is_in(folder, of_cwd) else folder
    code = beside if committed.tree is None else str(committed.tree.root)
    if place.options.copied is not None:
        code = os.path.realpath(place.options.copied.root)
    first = _part(code, run.source, place, tracked=committed.files)
    return [first] if _is_in(cwd, code) else [first, _part(of_cwd, run.other_folder, place)]


def _part(root: str, folder: Path, place: CodePlace, *, tracked: tuple[str, ...] = ()) -> _CopiedFolder:
    # With an automounter, nodes may be able to open a folder only at the path that the user typed.
    given = [place.context.cwd, *place.context.cwd.parents]
    if place.script is not None:
        given += place.script.parents
    shown = next((str(one) for one in given if os.path.realpath(one) == root), root)
    return _CopiedFolder(root=root, shown=shown, folder=folder, tracked=tracked)


def _real(script: Path) -> str:
    return os.path.join(os.path.realpath(script.parent), script.name)


def _below(place: CodePlace) -> str:
    return os.path.relpath(place.script or "", place.context.cwd)


def _is_in(path: str, folder: str) -> bool:
    return Path(path).is_relative_to(folder)


def _store(workspace: Workspace) -> tuple[Path, ...]:
    """Return the folder of images; empty if it is unknown. Another check then refuses a run with a SIF."""
    try:
        return (workspace.store,)
    except HpcenvError:
        return ()


def _rules(place: CodePlace, parts: Sequence[_CopiedFolder]) -> CopyRules:
    project, options, root = place.workspace.project, place.options, place.workspace.root
    real = os.path.realpath(root)
    links = {os.path.join(real, name): os.path.join(root, name) for name in project.code.live}
    staged = (os.path.abspath(place.context.cwd / os.path.expanduser(given)) for given in options.stage_data)
    for named in (*(data_path(root, one.path) for one in project.data if one.path is not None), *staged):
        folder, name = os.path.split(named)
        links[os.path.join(os.path.realpath(folder), name)] = named
    for name in project.code.live:
        if not any(_is_in(os.path.join(real, name), part.root) for part in parts):
            raise UsageError(
                f"`{name}` is not in the copy of the code",
                why=f"[code] live in {place.workspace.spec} names it; the copy is made of {parts[-1].shown}",
                hint="submit from the folder of hpcenv.toml",
            )
    files = (source.partition(":")[2] for source in (*project.secrets.values(), *options.secret.values()))
    own = [place.workspace.runs, *_store(place.workspace), root / ".hpcenv", *place.skipped]
    overlays = (*place.workspace.overlays, *([project.overlay] if project.overlay else []))
    own += [root / os.path.expanduser(split_overlay(overlay)[0]) for overlay in overlays]
    return CopyRules(
        project=real,
        links=links,
        # A folder that is copied is never skipped, even if the project keeps its runs directly in this folder.
        skipped=frozenset(os.path.realpath(one) for one in own) - {part.root for part in parts},
        lockfiles=os.path.normpath(project.paths.lockfiles),
        ignore=project.code.ignore,
        include=options.include,
        to_others=options.handover,
        secrets=frozenset(os.path.realpath(os.path.expanduser(file)) for file in files if "/" in file),
    )


def data_path(root: Path, path: str) -> str:
    """Return the absolute path for `path` of a [[data]] table."""
    return os.path.normpath(root / os.path.expanduser(path))


def _listing(found: Sequence[tuple[_CopiedFolder, CopyContent]], new: Sequence[str]) -> Listing:
    files = {f"{part.folder.name}/{path}": content for part, one in found for path, content in one.contents.items()}
    live = {f"{part.folder.name}/{path}": target for part, one in found for path, target in one.live.items()}
    known = {f"{part.folder.name}/{path}": kind for part, one in found for path, kind in one.known.items()}
    # A script that git does not track is copied and recorded like a tracked file. But the listing marks this script,
    # because the published repository does not have it.
    known |= {f"{found[0][0].folder.name}/{path}": "other" for path in new}
    return Listing(schema=SCHEMA, files=files, live=live, untracked=known)


def _record(committed: _Committed, found: Sequence[tuple[_CopiedFolder, CopyContent]], listing: Listing) -> Source:
    main = found[0][0]
    uncovered = [path for _, one in found for path in one.uncovered]
    return Source(
        root=main.shown,
        folder=str(main.folder),
        commit="" if committed.tree is None else committed.tree.commit,
        dirty=committed.is_dirty,
        diff_sha256=hashlib.sha256(committed.diff).hexdigest() if committed.diff else "",
        files=len(listing.files),
        digest=digest_of(listing.files),
        roots=tuple(part.shown for part, _ in found),
        live=shorten(uncovered),
    )


def _live_folders(place: CodePlace) -> tuple[str, ...]:
    if place.options.handover:
        return ()
    return tuple(str(place.workspace.root / name) for name in place.workspace.project.code.live)


def _notes(found: Sequence[tuple[_CopiedFolder, CopyContent]], *, has_commit: bool) -> Iterable[str]:
    """Return notes about files that the commit does not contain, and about files that no node compares."""
    untracked = [path for _, one in found for path in one.untracked]
    if untracked and has_commit:
        yield f"git does not track these modules of the copy: {_some(untracked)}"
    pointers = [path for _, one in found for path in one.pointers]
    if pointers:
        count = "1 file is a pointer" if len(pointers) == 1 else f"{len(pointers)} files are pointers"
        yield f"{count} of Git LFS without its content: {_some(pointers)}; `git lfs pull` fetches it"
    uncovered = [path for _, one in found for path in one.uncovered]
    if uncovered:
        ignored = [path for _, one in found for path in one.live if one.known.get(path) == "ignored"]
        more = f"; git ignores {len(ignored)} of them, --include PATTERN copies such files" if ignored else ""
        yield f"live, not covered (links to your project): {', '.join(shorten(uncovered))}{more}"
    included = [path for _, one in found for path in one.ignored]
    if included:
        yield f"copied, also into a bundle, although git ignores them (include): {', '.join(shorten(included))}"
    for tree in dict.fromkeys(tree for _, one in found for tree in one.unasked):
        yield f"git does not say what it ignores in {plain(tree)}: the text that it does not track there is linked"
    left_out = [path for _, one in found for path in one.left_out]
    if left_out:
        yield f"not in the exported folder: {', '.join(shorten(left_out))}"


def _some(paths: Sequence[str]) -> str:
    return listed([plain(path) for path in paths], _SHOWN)


# -- copying ------------------------------------------------------------------------------


def make(source: PlannedSource, run: RunFolder) -> None:
    """Copy the files into the run folder.

    Raises:
        FileUnusable: a file cannot be copied.
        ScriptUnusable: a file has changed since it was read.
    """
    changed: list[str] = []
    links = tuple(_links(source))
    try:
        _make_parents((*source.files, *(path for path, _target in links)), source, run)
        for path, origin in source.files.items():
            target = str(run.path / path)
            if path in source.texts:
                _write(source.texts[path], target, like=origin)
            elif _copy(origin, target) != source.listing.files[path]:
                changed.append(path.partition("/")[2])
        for path, target in links:
            os.symlink(target, run.path / path)
        (run.path / source.workdir).mkdir(parents=True, exist_ok=True)
        for folder in source.live_folders:
            os.makedirs(folder, exist_ok=True)
        if source.diff:
            run.source_diff.write_bytes(source.diff)
        save_record(source.listing, run.listing, durable=False)
    except OSError as error:
        raise FileUnusable(f"cannot copy the code to `{run.source}`", why=str(error)) from error
    if changed:
        raise _changed(source.record.root, f"changed: {_some(changed)}")


def _links(source: PlannedSource) -> Iterable[tuple[str, str]]:
    yield from source.listing.live.items()
    for path, content in source.listing.files.items():
        if path not in source.files:
            yield path, content.removeprefix(LINK)


def _make_parents(paths: Sequence[str], source: PlannedSource, run: RunFolder) -> None:
    """Make the parent folders of paths, with the permissions that these folders have in the project."""
    for parent in dict.fromkeys(os.path.dirname(path) for path in paths):
        top, _, below = parent.partition("/")
        place = run.path / top
        for name in ("", *below.split("/")):
            place = place / name
            if not place.exists():
                place.mkdir()
                original = Path(source.roots[top]) / place.relative_to(run.path / top)
                with suppress(OSError):  # the parent folder of a live folder may not exist yet
                    place.chmod(stat.S_IMODE(original.stat().st_mode) & 0o777 | stat.S_IRWXU)


def _write(content: bytes, target: str, *, like: str) -> None:
    """Write a file with the permissions of the file `like`. If `like` no longer exists, use default permissions."""
    with open(target, "xb") as copy:
        copy.write(content)
        with suppress(OSError):
            os.fchmod(copy.fileno(), _mode_of_copy(os.stat(like)))


def _copy(place: str, target: str) -> str:
    """Copy a file, and return the sha256 of the copied content."""
    digest = hashlib.sha256()
    descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb", buffering=0) as file, open(target, "xb", buffering=0) as copy:
        while block := file.read(1 << 20):
            digest.update(block)
            copy.write(block)
        os.fchmod(copy.fileno(), _mode_of_copy(os.fstat(descriptor)))
    return digest.hexdigest()


def _mode_of_copy(original: os.stat_result) -> int:
    return stat.S_IMODE(original.st_mode) & 0o777 | stat.S_IRUSR | stat.S_IWUSR


def require_unchanged(source: PlannedSource, script_sha256: str, environ: Mapping[str, str]) -> None:
    """Check that the code has not changed since it was read.

    Args:
        script_sha256: the sha256 of the script when it was read; empty if the script was not read.

    Raises:
        ScriptUnusable: the code has changed.
    """
    record, same = source.record, True
    if record.commit:
        root, now = Path(source.roots["source"]), None
        if os.path.lexists(root / ".git"):
            now = git.read_status(root, environ, submodules=source.has_submodules)
        same = now is not None and now.commit == record.commit and (record.dirty or not now.changed)
        if same and now is not None and record.dirty:
            diff = git.read_diff(now, source.new, environ)
            same = (hashlib.sha256(diff).hexdigest() if diff else "") == record.diff_sha256
    copied = "" if source.script is None else hashlib.sha256(source.script.read_bytes()).hexdigest()
    if not same or script_sha256 not in ("", copied):
        raise _changed(record.root, None)


def _changed(root: str, why: str | None) -> ScriptUnusable:
    what = f"the code in `{root}` changed while it was copied"
    return ScriptUnusable(what, why=why or "nothing is queued", hint="submit again")
