"""`hpcenv clean`: remove old run folders, and packed data that no run needs.

Runs on: LOGIN NODE. The folder of a run that waits, runs, or may still run is never removed. A folder is
renamed before it is removed. So a run folder is never left half removed under its own name.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcenv.errors import Command, UsageError
from hpcenv.records.files import LONGEST_RECORD, read_file, read_json
from hpcenv.records.run_folder import RunFolder
from hpcenv.runs.entries import Damaged, Entry, Submitted, Sweep, Unrecorded, is_element, open_folder
from hpcenv.runs.find import find_any, list_runs, runs_folder
from hpcenv.runs.outputs import read_outputs
from hpcenv.runs.run_list import STATES
from hpcenv.runs.state import RunState, read_states
from hpcenv.runs.unrecorded import read_unrecorded

# A submission packs data first, and then writes the run folder that names the packed data. Newer data are kept.
_SECONDS_FRESH = 3600.0

_LEFTOVER = ".removing-"


@dataclass(frozen=True, kw_only=True)
class CleanRequest:
    """Which runs to remove. A run is removed only if it matches all conditions.

    Attributes:
        words: runs and sweeps by name, folder or job id; empty for all runs of the project.
        older_than: remove only runs whose last change is more than this number of seconds ago.
        states: remove only runs in one of these states; empty for all states.
        keep: how many of the newest runs are kept.
        runs: folder of runs, if it is not the project's folder of runs.
    """

    words: tuple[str, ...] = ()
    older_than: float | None = None
    states: tuple[str, ...] = ()
    keep: int | None = None
    runs: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunRemoval:
    """A folder or file to remove.

    Attributes:
        size: bytes on disk.
        why: state of the run. For a folder that is not a run, the reason for the removal.
        outputs: number of files that the script left in the run's copy of the project.
        some_outputs: the first few names of these files.
    """

    name: str
    path: Path
    size: int
    why: str
    outputs: int = 0
    some_outputs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class KeptRun:
    """A run that matches the request, but is kept.

    Attributes:
        failed: whether hpcenv tried to remove the run, but the operating system refused.
    """

    name: str
    why: str
    failed: bool = False


@dataclass(frozen=True, kw_only=True)
class CleanPlan:
    """What would be removed, and which matching runs are kept."""

    folder: Path
    runs: tuple[RunRemoval, ...]
    kept: tuple[KeptRun, ...]
    data: tuple[RunRemoval, ...]
    leftovers: tuple[RunRemoval, ...] = ()

    @property
    def removals(self) -> tuple[RunRemoval, ...]:
        """All folders and files that would be removed."""
        return (*self.runs, *self.data, *self.leftovers)

    @property
    def frees(self) -> int:
        """Bytes that would be freed."""
        return sum(removal.size for removal in self.removals)


@dataclass(frozen=True, kw_only=True)
class Cleaned:
    """What was removed, and what was kept. Everything that was kept has a reason."""

    removed: tuple[RunRemoval, ...]
    kept: tuple[KeptRun, ...] = field(default_factory=tuple)

    @property
    def failed(self) -> bool:
        """Whether the operating system refused a removal."""
        return any(kept.failed for kept in self.kept)

    @property
    def freed(self) -> int:
        """Bytes that were freed."""
        return sum(removal.size for removal in self.removed)


def plan_clean(start: Path, request: CleanRequest, *, environ: Mapping[str, str], now: float) -> CleanPlan:
    """Return what would be removed. Nothing is changed.

    Args:
        start: current directory. The project is in this folder or in a folder above.
        request: which runs to remove.
        environ: environment variables, for the Slurm commands.
        now: current time in seconds since the epoch.

    Raises:
        UsageError: the request has no condition, or a state does not exist.
        RunNotFound: a named run does not exist.
    """
    for state in request.states:
        if state not in STATES:
            raise UsageError(f"`--state {state}` is not a state of a run", hint=f"one of {', '.join(STATES)}")
    if not request.words and request.older_than is None and not request.states and request.keep is None:
        raise UsageError(
            "no runs are named", hint="hpcenv clean --older-than 30d, --state failed, --keep 20, or their names"
        )
    named = [_named(start, word, request) for word in request.words]
    folder = named[0].parent if named else runs_folder(start, request.runs)
    entries = [open_folder(path) for path in named] if named else list_runs(folder)
    candidates = entries[request.keep or 0 :]
    states = _states(candidates, environ)
    removals, kept = [], []
    for entry in candidates:
        path, own = _path(entry), states[_path(entry)]
        if not _is_meant(entry, own, request, now):
            continue
        why = _protected(entry, own, named=bool(named))
        if why is None:
            summary = ", ".join(dict.fromkeys(state.state for state in own))
            removals.append(_removal(entry, summary))
        else:
            kept.append(KeptRun(name=path.name, why=why))
    gone = {removal.path for removal in removals}
    data = tuple(_unneeded_data(folder, gone, now))
    leftovers = tuple(_leftovers(folder))
    return CleanPlan(folder=folder, runs=tuple(removals), kept=tuple(kept), data=data, leftovers=leftovers)


def _removal(entry: Entry, why: str) -> RunRemoval:
    path = _path(entry)
    count, names = 0, []
    for element in _elements(entry):
        left = read_outputs(element.folder)
        if left is not None:
            count += left.count
            names += [os.path.relpath(element.folder.path / name, path) for name in left.names]
    return RunRemoval(
        name=path.name,
        path=path,
        size=size_of(path),
        why=why,
        outputs=count,
        some_outputs=tuple(names[:_OUTPUTS_SHOWN]),
    )


_OUTPUTS_SHOWN = 3


def _named(start: Path, word: str, request: CleanRequest) -> Path:
    entry = find_any(start, word, runs=request.runs)
    if isinstance(entry, Sweep):
        return entry.folder
    path = entry.folder.path
    if is_element(path):
        raise UsageError(f"`{word}` is one run of a sweep", hint=Command("hpcenv", "clean", path.parent.name))
    return path


def _path(entry: Entry) -> Path:
    return entry.folder if isinstance(entry, Sweep) else entry.folder.path


def _elements(entry: Entry) -> tuple[Submitted, ...]:
    if isinstance(entry, (Damaged, Unrecorded)):
        return ()
    return entry.elements if isinstance(entry, Sweep) else (entry,)


def _states(entries: Sequence[Entry], environ: Mapping[str, str]) -> dict[Path, tuple[RunState, ...]]:
    """Return the states of the runs of each entry, with one query to Slurm."""
    submitted = [element for entry in entries for element in _elements(entry)]
    states = iter(read_states(submitted, environ))
    result = {_path(entry): tuple(next(states) for _ in _elements(entry)) for entry in entries}
    unrecorded = [entry for entry in entries if isinstance(entry, Unrecorded)]
    if unrecorded:
        for entry, state in zip(unrecorded, read_unrecorded(unrecorded, environ), strict=True):
            result[_path(entry)] = (state,)
    return result


def _is_meant(entry: Entry, states: Sequence[RunState], request: CleanRequest, now: float) -> bool:
    if request.states and not (states and all(state.state in request.states for state in states)):
        return False
    return request.older_than is None or now - _last(entry) > request.older_than


def _last(entry: Entry) -> float:
    """Return the time of the last change in a run folder, in seconds since the epoch."""
    if isinstance(entry, (Damaged, Unrecorded)):
        return entry.changed
    moments = []
    for element in _elements(entry):
        moments.append(element.submission.submitted)
        for path in (element.folder.started, element.folder.finished, element.folder.log):
            with contextlib.suppress(OSError):
                moments.append(os.lstat(path).st_mtime)
    return max(moments)


def _protected(entry: Entry, states: Sequence[RunState], *, named: bool) -> str | None:
    """Return why a run must be kept; None if the run may be removed."""
    if isinstance(entry, Damaged):
        return f"its state is unknown: {entry.problem}"
    if _path(entry).is_symlink():
        return "it is a symbolic link"
    if isinstance(entry, Sweep) and (unreadable := _unreadable(entry)):
        return f"the state of {len(unreadable)} of its runs is unknown: {', '.join(unreadable[:5])}"
    for state in states:
        if state.ended or (named and state.gone):
            continue
        return f"its state is unknown: {state.detail}" if state.state == "unknown" else f"it is {state.state}"
    folders = [entry.folder] if isinstance(entry, Unrecorded) else [element.folder for element in _elements(entry)]
    if not named and any(_holds_checkpoint(folder) for folder in folders):
        return "it has checkpoints; name it to remove it"
    return None


def _unreadable(sweep: Sweep) -> list[str]:
    """Return the runs of a sweep that have a folder, but no readable record."""
    known = {element.folder.path.name for element in sweep.elements}
    elements = () if sweep.record is None else sweep.record.elements
    unknown = [element.folder for element in elements if element.folder not in known]
    return [folder for folder in unknown if os.path.lexists(sweep.folder / folder)]


def _holds_checkpoint(folder: RunFolder) -> bool:
    try:
        with os.scandir(folder.checkpoints) as entries:
            return next(entries, None) is not None
    except FileNotFoundError:
        return False
    except OSError:
        return True


def size_of(path: Path) -> int:
    """Return how many bytes a file or folder needs on disk. Each file counts once. Unreadable files do not count.

    A file that has another hard link outside this folder does not count either, because its bytes stay when this folder
    is removed.
    """
    seen: Counter[tuple[int, int]] = Counter()
    total, waiting = 0, [path]
    while waiting:
        with contextlib.suppress(OSError):
            current = waiting.pop()
            status = os.lstat(current)
            is_folder = stat.S_ISDIR(status.st_mode)
            seen[status.st_dev, status.st_ino] += 1
            if not is_folder and seen[status.st_dev, status.st_ino] != status.st_nlink:
                continue
            total += status.st_blocks * 512  # lstat(2): st_blocks is in units of 512 bytes
            if is_folder:
                waiting += [Path(entry.path) for entry in os.scandir(current)]
    return total


# -- packed data --------------------------------------------------------------------------

_TAR = re.compile(r"sha256-[0-9a-f]{64}\.tar")


def _unneeded_data(folder: Path, gone: set[Path], now: float) -> Iterator[RunRemoval]:
    """Yield the packed data, and the shared archives of hpcenv, that no run names any more."""
    yield from _unneeded_archives(folder, gone)
    store = folder / ".data"
    tars = [path for path in store.glob("sha256-*.tar") if _TAR.fullmatch(path.name)]
    needed = _needed_data(folder, gone) if tars else set()
    if needed is None:
        return
    for path in sorted(tars):
        with contextlib.suppress(OSError):
            if path.name not in needed and now - os.lstat(path).st_mtime > _SECONDS_FRESH:
                yield RunRemoval(
                    name=f".data/{path.name[:19]}", path=path, size=size_of(path), why="no run uses these data"
                )


def _unneeded_archives(folder: Path, gone: Iterable[Path]) -> Iterator[RunRemoval]:
    """Yield the shared archives of hpcenv to which no remaining run has a hard link."""
    for path in sorted((folder / ".data").glob("sha256-*.zip")):
        with contextlib.suppress(OSError):
            links = sum(os.path.exists(run.archive) and run.archive.samefile(path) for run in map(RunFolder, gone))
            if os.lstat(path).st_nlink <= 1 + links:
                size = os.lstat(path).st_blocks * 512
                yield RunRemoval(name=f".data/{path.name[:19]}", path=path, size=size, why="no run uses this archive")


def _needed_data(folder: Path, gone: Iterable[Path]) -> set[str] | None:
    """Return the packed files that runs name. If a manifest cannot be read, return None: it could name any file."""
    names: set[str] = set()
    try:
        for run in folder.iterdir():
            if run in gone or run.name.startswith(".") or not run.is_dir():
                continue
            for manifest in (*run.glob("manifest.json"), *run.glob("[0-9]*/manifest.json")):
                names |= set(_TAR.findall(read_file(manifest, most=LONGEST_RECORD, follow=False).decode("utf-8")))
    except (OSError, UnicodeDecodeError):
        return None
    return names


def _leftovers(folder: Path) -> Iterator[RunRemoval]:
    """Yield folders that an interrupted `hpcenv clean` has renamed, but not removed."""
    for path in sorted(folder.glob(f"{_LEFTOVER}*")):
        yield RunRemoval(name=path.name, path=path, size=size_of(path), why="left by an interrupted clean")


# -- removing -----------------------------------------------------------------------------


def clean(plan: CleanPlan, *, environ: Mapping[str, str]) -> Cleaned:
    """Remove what was planned. Runs that have become active since the plan was made are kept.

    Args:
        plan: what to remove.
        environ: environment variables, for the Slurm commands.
    """
    removed: list[RunRemoval] = []
    kept: list[KeptRun] = []
    for removal, why, failed in _remove_each(plan, environ):
        if why:
            kept.append(KeptRun(name=removal.name, why=why, failed=failed))
        else:
            removed.append(removal)
    return Cleaned(removed=tuple(removed), kept=tuple(kept))


def _remove_each(plan: CleanPlan, environ: Mapping[str, str]) -> Iterator[tuple[RunRemoval, str, bool]]:
    """Remove the items in order; yield each item, the reason why it still exists (or ""), and `KeptRun.failed`."""
    entries = {removal.path: open_folder(removal.path) for removal in plan.runs}
    states = _states(list(entries.values()), environ)
    for removal in plan.runs:
        # The run may have been requeued since the plan was made.
        why = _protected(entries[removal.path], states[removal.path], named=True)
        yield (removal, _remove_run(removal.path), True) if why is None else (removal, why, False)
    for removal in plan.data:
        why = _remove_data(plan.folder, removal.path)
        yield removal, why, why != _NEEDED_NOW
    for removal in plan.leftovers:
        shutil.rmtree(removal.path, ignore_errors=True)
        yield removal, "it cannot be removed" if os.path.lexists(removal.path) else "", True


_NEEDED_NOW = "a run needs it now"


def _remove_run(path: Path) -> str:
    """Remove a run folder. Return why the folder could not be removed; empty if the folder was removed."""
    aside = path.with_name(f"{_LEFTOVER}{path.name}-{secrets.token_hex(4)}")
    try:
        os.rename(path, aside)
    except OSError as error:
        return f"it cannot be renamed: {error.strerror}"
    problems: list[str] = []
    shutil.rmtree(aside, onerror=lambda _call, name, _error: problems.append(str(name)))
    return f"{len(problems)} of its files cannot be removed; they are in {aside}" if problems else ""


def _remove_data(folder: Path, tar: Path) -> str:
    """Remove packed data if no new run needs the data. Return why the data were kept; empty if they were removed."""
    aside = tar.with_name(f".{tar.name}.{secrets.token_hex(4)}")
    try:
        if tar.suffix == ".zip":  # if a run links to the file at this moment, the content stays
            if os.lstat(tar).st_nlink > 1:
                return _NEEDED_NOW
            tar.unlink()
            return ""
        os.rename(tar, aside)
        needed = _needed_data(folder, ())
        if needed is None or tar.name in needed:
            os.rename(aside, tar)
            return _NEEDED_NOW
        sha256 = tar.name.removeprefix("sha256-").removesuffix(".tar")
        for record in tar.parent.glob("*.json"):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                if read_json(record).get("sha256") == sha256:
                    record.unlink()
        aside.unlink()
    except OSError as error:
        return f"it cannot be removed: {error.strerror}"
    return ""
