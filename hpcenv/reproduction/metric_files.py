"""Find and read metrics that the training itself wrote into its run folder: TensorBoard, CSV and JSONL files.

Runs on: LOGIN NODE. The files in a run folder are untrusted. So the search is limited, links are not followed, and
`problems` names files that were not read.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hpcenv.errors import RecordInvalid
from hpcenv.records.code_listing import BYTECODE, Listing
from hpcenv.records.files import load_record
from hpcenv.records.run_folder import RunFolder
from hpcenv.reproduction import metric_tables, tensorboard
from hpcenv.reproduction.series import Series, by_step

_MOST_ENTRIES = 20_000
_MOST_FILES = 100
_DEEPEST = 12

_EVENTS = re.compile(r"events\.out\.tfevents\.([0-9]{1,12})\..*", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class FoundMetrics:
    """The metrics of all files. `problems` says which files were not read, and why."""

    series: tuple[Series, ...]
    problems: tuple[str, ...] = ()


def read_metric_files(run: RunFolder) -> FoundMetrics:
    """Return the metrics in the files that a run wrote into its copy of the project."""
    problems: list[str] = []
    series: list[Series] = []
    events: dict[str, list[str]] = {}
    paths, problems = _candidates(run)
    for count, name in enumerate(paths):
        if count >= _MOST_FILES:
            problems.append(f"only the first {_MOST_FILES} files with metrics were read")
            break
        if _EVENTS.fullmatch(PurePosixPath(name).name):
            events.setdefault(str(PurePosixPath(name).parent), []).append(name)
            continue
        read = metric_tables.read_csv if name.endswith(".csv") else metric_tables.read_jsonl
        try:
            series.extend(read(run.path / name, name=name))
        except OSError as error:
            problems.append(f"{name} was not read: {error.strerror}")
    for folder, names in events.items():
        of_folder, unread = _read_events(run, folder, names)
        series.extend(of_folder)
        problems.extend(unread)
    problems += [note for one in series for note in one.notes]
    return FoundMetrics(series=tuple(one for one in series if one.steps), problems=tuple(dict.fromkeys(problems)))


def _candidates(run: RunFolder) -> tuple[list[str], list[str]]:
    """Return paths of files that the run wrote, if they can contain metrics, and notes on skipped files."""
    try:
        brought = set(load_record(Listing, run.listing).files)
    except RecordInvalid:
        brought = set()
    left, found, problems = _MOST_ENTRIES, [], []
    waiting = [(part.name, 1) for part in (run.source, run.other_folder) if part.is_dir() and not part.is_symlink()]
    while waiting:
        folder, depth = waiting.pop()
        entries, problem = _entries(run.path / folder)
        problems += [problem] if problem else []
        left -= len(entries)
        if left < 0:
            problems.append(f"only {_MOST_ENTRIES} files of the run folder were looked at for metrics")
            break
        for name, is_folder in entries:
            path = f"{folder}/{name}"
            if is_folder and depth < _DEEPEST and name != BYTECODE and not name.startswith(".git"):
                waiting.append((path, depth + 1))
            elif not is_folder and path not in brought and _is_candidate(name):
                found.append(path)
    return found, problems


def _is_candidate(name: str) -> bool:
    return name.endswith((".csv", ".jsonl")) or _EVENTS.fullmatch(name) is not None


def _entries(folder: Path) -> tuple[list[tuple[str, bool]], str]:
    """Return the sorted files and folders in a folder (no links, no special files), and why names may be missing."""
    found, problem = [], ""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False):
                    found.append((entry.name, entry.is_dir(follow_symlinks=False)))
                if len(found) > _MOST_ENTRIES:
                    break
    except OSError as error:
        problem = f"{folder.name} was not looked at for metrics: {error.strerror}"
    return sorted(found), problem


def _read_events(run: RunFolder, folder: str, names: list[str]) -> tuple[list[Series], list[str]]:
    """Return the scalars of the event files in one folder, and notes on what was not read.

    A folder can have several files, because a training that starts again writes a new file.
    """
    series, problems = [], []
    found: dict[str, list[tuple[int, float]]] = {}
    dtypes: dict[str, str] = {}
    for name in sorted(names, key=_begun):
        try:
            events = tensorboard.read_events(run.path / name)
        except OSError as error:
            problems.append(f"{name} was not read: {error.strerror}")
            continue
        if events.problem:
            problems.append(f"{name}: {events.problem}; it was read up to there")
        for scalar in events.scalars:
            found.setdefault(scalar.tag, []).append((scalar.step, scalar.value))
            dtypes[scalar.tag] = scalar.dtype
    for tag, pairs in found.items():
        steps, values, twice = by_step(pairs)
        notes = (f"{folder}: {tag} has {twice} steps more than once; the last value counts",) if twice else ()
        series.append(
            Series(
                name=tag, source="tensorboard", file=folder, dtype=dtypes[tag], steps=steps, values=values, notes=notes
            )
        )
    return series, problems


def _begun(path: str) -> tuple[int, str]:
    """Return a key for sorting: the start time in the file's name, in seconds, and the path."""
    match = _EVENTS.fullmatch(PurePosixPath(path).name)
    return int(match[1]) if match else 0, path
