"""`hpcenv clean`: remove old run folders, and packed data that no run needs. Runs on: LOGIN NODE.

What waits, runs, or might still run is never removed, whatever was asked. A folder is
renamed first, so that a run is there as a whole or not at all, then removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcenv.errors import HpcenvError, UsageError
from hpcenv.steps.listing import STATES
from hpcenv.steps.runs import (
    Damaged,
    RunState,
    Submitted,
    Sweep,
    Unrecorded,
    find_any,
    is_element,
    list_runs,
    open_folder,
    read_states,
    runs_folder,
)
from hpcenv.steps.unrecorded import read_unrecorded
from hpcenv.wire import RunFolder

# A submission packs data some time before its run folder names it.
_SECONDS_FRESH = 3600.0

_LEFTOVER = ".removing-"


@dataclass(frozen=True, kw_only=True)
class CleanRequest:
    """Which runs to remove: those to which everything here applies.

    Attributes:
        words: runs and sweeps by name, folder or job id; empty for all of the project.
        older_than: seconds since the run ended, or was submitted where that is not known.
        states: only runs in one of these states.
        keep: leave so many of the newest runs alone.
    """

    words: tuple[str, ...] = ()
    older_than: float | None = None
    states: tuple[str, ...] = ()
    keep: int | None = None
    runs: str | None = None


@dataclass(frozen=True, kw_only=True)
class Removal:
    """Something to remove.

    Attributes:
        size: bytes on disk.
        why: its state or what else it is.
    """

    name: str
    path: Path
    size: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A run that was asked for and stays.

    Attributes:
        failed: it may go, and the operating system refused.
    """

    name: str
    why: str
    failed: bool = False


@dataclass(frozen=True, kw_only=True)
class CleanPlan:
    """What would be removed, and what stays although it was asked for."""

    folder: Path
    runs: tuple[Removal, ...]
    kept: tuple[Kept, ...]
    data: tuple[Removal, ...]
    leftovers: tuple[Removal, ...] = ()

    @property
    def removals(self) -> tuple[Removal, ...]:
        """Everything that would be removed."""
        return (*self.runs, *self.data, *self.leftovers)

    @property
    def frees(self) -> int:
        """Bytes."""
        return sum(one.size for one in self.removals)


@dataclass(frozen=True, kw_only=True)
class Cleaned:
    """What was removed, and what was not and why."""

    removed: tuple[Removal, ...]
    kept: tuple[Kept, ...] = field(default_factory=tuple)

    @property
    def failed(self) -> bool:
        """Whether something could not be removed although it may go."""
        return any(one.failed for one in self.kept)

    @property
    def freed(self) -> int:
        """Bytes."""
        return sum(one.size for one in self.removed)


def plan_clean(start: Path, request: CleanRequest, *, environ: Mapping[str, str], now: float) -> CleanPlan:
    """Return what would be removed; removes nothing.

    Args:
        now: seconds since the epoch.

    Raises:
        UsageError: nothing says which runs, or a state is none.
        RunNotFound: a run that is named is not there.
    """
    for state in request.states:
        if state not in STATES:
            raise UsageError(f"`--state {state}` is no state of a run", hint=f"one of {', '.join(STATES)}")
    if not request.words and request.older_than is None and not request.states and request.keep is None:
        raise UsageError("which runs?", hint="hpcenv clean --older-than 30d, --state failed, --keep 20, or their names")
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
            told = ", ".join(dict.fromkeys(state.state for state in own))
            removals.append(Removal(name=path.name, path=path, size=size_of(path), why=told))
        else:
            kept.append(Kept(name=path.name, why=why))
    gone = {one.path for one in removals}
    data = tuple(_unneeded_data(folder, gone, now))
    leftovers = tuple(_leftovers(folder))
    return CleanPlan(folder=folder, runs=tuple(removals), kept=tuple(kept), data=data, leftovers=leftovers)


def _named(start: Path, word: str, request: CleanRequest) -> Path:
    found = find_any(start, word, runs=request.runs)
    if isinstance(found, Sweep):
        return found.folder
    if is_element(found.folder.path):
        raise UsageError(f"`{word}` is one run of a sweep", hint=f"hpcenv clean {found.folder.path.parent.name}")
    return found.folder.path


_Entry = Submitted | Sweep | Unrecorded | Damaged


def _path(entry: _Entry) -> Path:
    return entry.folder if isinstance(entry, Sweep) else entry.folder.path


def _elements(entry: _Entry) -> tuple[Submitted, ...]:
    if isinstance(entry, (Damaged, Unrecorded)):
        return ()
    return entry.elements if isinstance(entry, Sweep) else (entry,)


def _states(entries: Sequence[_Entry], environ: Mapping[str, str]) -> dict[Path, tuple[RunState, ...]]:
    """Return the states of each entry's runs: Slurm is asked once."""
    asked = [element for entry in entries for element in _elements(entry)]
    states = iter(read_states(asked, environ))
    found = {_path(entry): tuple(next(states) for _ in _elements(entry)) for entry in entries}
    unrecorded = [entry for entry in entries if isinstance(entry, Unrecorded)]
    if unrecorded:
        for entry, state in zip(unrecorded, read_unrecorded(unrecorded, environ), strict=True):
            found[_path(entry)] = (state,)
    return found


def _is_meant(entry: _Entry, states: Sequence[RunState], request: CleanRequest, now: float) -> bool:
    if request.states and not (states and all(state.state in request.states for state in states)):
        return False
    return request.older_than is None or now - _last(entry) > request.older_than


def _last(entry: _Entry) -> float:
    """Return when something happened last in a run, as well as its folder tells."""
    if isinstance(entry, (Damaged, Unrecorded)):
        return entry.changed
    moments = []
    for element in _elements(entry):
        moments.append(element.submission.submitted)
        for path in (element.folder.started, element.folder.finished, element.folder.log):
            with contextlib.suppress(OSError):
                moments.append(os.lstat(path).st_mtime)
    return max(moments)


def _protected(entry: _Entry, states: Sequence[RunState], *, named: bool) -> str | None:
    """Return why a run stays; None if it may go."""
    if isinstance(entry, Damaged):
        return f"its state cannot be told: {entry.problem}"
    if _path(entry).is_symlink():
        return "it is a link to another place"
    if isinstance(entry, Sweep) and (untold := _untold(entry)):
        return f"the state of {len(untold)} of its runs cannot be told: {', '.join(untold[:5])}"
    for state in states:
        if state.ended or (named and state.gone):
            continue
        return f"its state cannot be told: {state.detail}" if state.state == "unknown" else f"it is {state.state}"
    folders = [entry.folder] if isinstance(entry, Unrecorded) else [element.folder for element in _elements(entry)]
    if not named and any(_holds_checkpoint(folder) for folder in folders):
        return "it holds checkpoints; name it to remove it"
    return None


def _untold(sweep: Sweep) -> list[str]:
    """Return which runs of a sweep are there and have no record that can be read."""
    known = {element.folder.path.name for element in sweep.elements}
    elements = () if sweep.record is None else sweep.record.elements
    return [one.folder for one in elements if one.folder not in known and os.path.lexists(sweep.folder / one.folder)]


def _holds_checkpoint(folder: RunFolder) -> bool:
    try:
        with os.scandir(folder.checkpoints) as entries:
            return next(entries, None) is not None
    except FileNotFoundError:
        return False
    except OSError:
        return True


def size_of(path: Path) -> int:
    """Return the bytes that a file or folder takes on disk, each file once; what cannot be read counts nothing."""
    seen: set[tuple[int, int]] = set()
    total, waiting = 0, [path]
    while waiting:
        with contextlib.suppress(OSError):
            place = waiting.pop()
            status = os.lstat(place)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            total += status.st_blocks * 512  # lstat(2): st_blocks is in units of 512 bytes
            if os.path.isdir(place) and not os.path.islink(place):
                waiting += [Path(entry.path) for entry in os.scandir(place)]
    return total


# -- packed data --------------------------------------------------------------------------

_TAR = re.compile(r"sha256-[0-9a-f]{64}\.tar")


def _unneeded_data(folder: Path, gone: set[Path], now: float) -> Iterator[Removal]:
    """Give the packed data folders that no run names any more."""
    store = folder / ".data"
    tars = [path for path in store.glob("sha256-*.tar") if _TAR.fullmatch(path.name)]
    needed = _needed_data(folder, gone) if tars else set()
    if needed is None:
        return
    for path in sorted(tars):
        with contextlib.suppress(OSError):
            if path.name not in needed and now - os.lstat(path).st_mtime > _SECONDS_FRESH:
                yield Removal(name=f".data/{path.name[:19]}", path=path, size=size_of(path), why="data of no run")


def _needed_data(folder: Path, gone: Iterable[Path]) -> set[str] | None:
    """Return the packed files that runs name; None where a manifest cannot be read: it may name any."""
    names: set[str] = set()
    try:
        for run in folder.iterdir():
            if run in gone or run.name.startswith(".") or not run.is_dir():
                continue
            for manifest in (*run.glob("manifest.json"), *run.glob("[0-9]*/manifest.json")):
                names |= set(_TAR.findall(manifest.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError):
        return None
    return names


def _leftovers(folder: Path) -> Iterator[Removal]:
    """Give what a clean that was interrupted has renamed and not removed."""
    for path in sorted(folder.glob(f"{_LEFTOVER}*")):
        yield Removal(name=path.name, path=path, size=size_of(path), why="left by an interrupted clean")


# -- removing -----------------------------------------------------------------------------


def clean(plan: CleanPlan, *, environ: Mapping[str, str]) -> Cleaned:
    """Remove what was planned, as far as it still may go."""
    removed: list[Removal] = []
    kept: list[Kept] = []
    for one, why, failed in _removing(plan, environ):
        if why:
            kept.append(Kept(name=one.name, why=why, failed=failed))
        else:
            removed.append(one)
    return Cleaned(removed=tuple(removed), kept=tuple(kept))


def _removing(plan: CleanPlan, environ: Mapping[str, str]) -> Iterator[tuple[Removal, str, bool]]:
    """Remove one after the other; give each with why it is still there, empty when it is gone, and `Kept.failed`."""
    entries = {one.path: open_folder(one.path) for one in plan.runs}
    states = _states(list(entries.values()), environ)
    for one in plan.runs:
        # Since it was planned, it may have been queued again.
        why = _protected(entries[one.path], states[one.path], named=True)
        yield (one, _remove_run(one.path), True) if why is None else (one, why, False)
    for one in plan.data:
        why = _remove_data(plan.folder, one.path)
        yield one, why, why != _NEEDED_NOW
    for one in plan.leftovers:
        shutil.rmtree(one.path, ignore_errors=True)
        yield one, "it cannot be removed" if os.path.lexists(one.path) else "", True


_NEEDED_NOW = "a run needs it now"


def _remove_run(path: Path) -> str:
    """Remove a run folder; return why that was not possible, empty when it was."""
    aside = path.with_name(f"{_LEFTOVER}{path.name}-{secrets.token_hex(4)}")
    image = _image(path)
    try:
        os.rename(path, aside)
    except OSError as error:
        return f"it cannot be renamed: {error.strerror}"
    _release_image(path, image)
    problems: list[str] = []
    shutil.rmtree(aside, onerror=lambda _call, name, _error: problems.append(str(name)))
    return f"{len(problems)} of its files cannot be removed; they are in {aside}" if problems else ""


def _image(path: Path) -> Path | None:
    """Return the SIF that a run, or the runs of a sweep, used."""
    for manifest in (path / "manifest.json", *sorted(path.glob("[0-9]*/manifest.json"))[:1]):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            return Path(str(json.loads(manifest.read_text(encoding="utf-8"))["environment"]["sif"]))
    return None


def _release_image(run: Path, image: Path | None) -> None:
    """Let the store know that the run no longer needs its image."""
    if image is None or image.parent.name != "images" or not re.fullmatch(r"sha256-[0-9a-f]{64}\.sif", image.name):
        return
    from hpcenv.adapters.store import open_store

    # A store that is not ours to write to, or is gone: a root whose folder is gone says nothing either.
    with contextlib.suppress(HpcenvError, OSError):
        open_store(image.parents[1]).add_root("run", run, [])


def _remove_data(folder: Path, tar: Path) -> str:
    """Remove a packed data folder, unless a run has come to need it meanwhile."""
    aside = tar.with_name(f".{tar.name}.{secrets.token_hex(4)}")
    try:
        os.rename(tar, aside)
        needed = _needed_data(folder, ())
        if needed is None or tar.name in needed:
            os.rename(aside, tar)
            return _NEEDED_NOW
        sha256 = tar.name.removeprefix("sha256-").removesuffix(".tar")
        for record in tar.parent.glob("*.json"):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                if json.loads(record.read_text(encoding="utf-8")).get("sha256") == sha256:
                    record.unlink()
        aside.unlink()
    except OSError as error:
        return f"it cannot be removed: {error.strerror}"
    return ""
