"""The entries of a folder of runs. An entry is a run, a sweep of runs, or a folder with missing or damaged records.

Runs on: LOGIN NODE. Only files are read. Slurm is not asked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcenv.errors import Command, HpcenvError, RecordInvalid, RunNotFound
from hpcenv.records import sweep as sweep_model
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.submission import Submission
from hpcenv.records.sweep import SweepRecord

# A folder with this file is a sweep or an array. Its runs are the subfolders.
SWEEP_RECORD = "sweep.json"


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A run folder and its submission record. `hpcenv list` needs only these two to print a run.

    Attributes:
        problem: why the manifest cannot be read; empty if it was read, or not needed.
    """

    folder: RunFolder
    submission: Submission
    problem: str = ""

    @property
    def job_ids(self) -> tuple[str, ...]:
        """Job ids of this run: one job id, or all job ids of a chain in their order."""
        return self.submission.chain or (self.submission.job_id,)


@dataclass(frozen=True, kw_only=True)
class Run(Submitted):
    """A run folder with its submission record and its manifest. These two records never change."""

    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The runs of one sweep or array.

    Attributes:
        elements: the runs that could be read.
        record: the list of all runs of the sweep; None if the list cannot be read.
    """

    folder: Path
    elements: tuple[Submitted, ...]
    record: SweepRecord | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the swept parameters; empty for an array."""
        return () if self.record is None else self.record.names

    @property
    def values(self) -> dict[str, dict[str, str]]:
        """Folder name of a run -> its parameter values."""
        return {} if self.record is None else {element.folder: element.values for element in self.record.elements}


@dataclass(frozen=True, kw_only=True)
class Unrecorded:
    """The folder of a run or sweep whose submission was not recorded. So the job id is unknown.

    Attributes:
        run: name of the run, and of its job.
        job_folder: the path of the run folder when the job was submitted.
        changed: modification time of the folder, in seconds since the epoch.
        started: whether a job of the run has started.
    """

    folder: RunFolder
    run: str
    job_folder: str
    cluster: str
    changed: float
    started: bool


@dataclass(frozen=True, kw_only=True)
class Damaged:
    """A run folder whose records cannot be read."""

    folder: RunFolder
    problem: str
    changed: float


Entry = Submitted | Sweep | Unrecorded | Damaged


def not_submitted(path: Path) -> RunNotFound:
    """Return the error for a run folder whose submission was not recorded."""
    return RunNotFound(
        f"`{path}` was not submitted",
        why=f"there is no {RunFolder(path).submission.name} in it: Slurm gave no answer, or hpcenv was interrupted",
        hint=(Command("hpcenv", "status", f"{path.name}"), " shows whether Slurm has a job for it"),
    )


def runs_of(entry: Submitted | Sweep) -> tuple[Submitted, ...]:
    """Return the runs of a sweep. For a single run, return this run."""
    return entry.elements if isinstance(entry, Sweep) else (entry,)


def is_element(folder: Path) -> bool:
    """Whether a run folder belongs to a sweep or array."""
    return os.path.lexists(folder.parent / SWEEP_RECORD)


def open_folder(folder: Path) -> Entry:
    """Read one folder in the folder of runs, without the long manifest if the submission was recorded."""
    try:
        if os.path.lexists(folder / SWEEP_RECORD):
            return _open_sweep(folder)
        return _open_unrecorded(folder) or _read_submitted(folder)
    except HpcenvError as error:
        return Damaged(folder=RunFolder(folder), problem=error.what, changed=_changed(folder))


def _open_unrecorded(path: Path) -> Unrecorded | None:
    """Return a run whose submission was not recorded; None if the submission was recorded."""
    folder = RunFolder(path)
    if os.path.lexists(folder.submission):
        return None
    if is_interrupted_submission(path):
        return _unrecorded(path, path.name, str(path), "", started=False)
    manifest = load_record(Manifest, folder.manifest)
    # A copy of a run folder does not count as a run.
    if not _is_same_folder(manifest.run_folder, path):
        raise RunNotFound(f"`{path}` was not submitted", why=f"it is a copy of {manifest.run_folder}")
    return _unrecorded(path, manifest.run, manifest.run_folder, manifest.cluster, os.path.lexists(folder.started))


def _unrecorded(path: Path, run: str, job_folder: str, cluster: str, started: bool) -> Unrecorded:
    # The name becomes an argument of squeue.
    if not _NAME_OF_JOB.fullmatch(run):
        raise RecordInvalid(f"`{path}`: {run!r} is not a valid run name")
    return Unrecorded(
        folder=RunFolder(path),
        run=run,
        job_folder=job_folder,
        cluster=cluster,
        changed=_changed(path),
        started=started,
    )


_NAME_OF_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")


def _is_same_folder(first: str, second: Path) -> bool:
    return os.path.realpath(first) == os.path.realpath(second)


def _changed(folder: Path) -> float:
    try:
        return os.lstat(folder).st_mtime
    except OSError:
        return 0.0


def is_interrupted_submission(folder: Path) -> bool:
    """Whether `hpcenv submit` was killed while it wrote this folder, so that the folder has code, but no manifest."""
    run = RunFolder(folder)
    records = (run.manifest, run.submission, run.sweep, run.started, run.log)
    return os.path.isdir(run.code / "hpcenv") and not any(os.path.lexists(path) for path in records)


def may_have_been_submitted(folder: Path) -> bool:
    """Whether hpcenv wrote this folder for a submission; False for a copy of a run folder."""
    if is_interrupted_submission(folder):
        return True
    try:
        return _is_same_folder(load_record(Manifest, RunFolder(folder).manifest).run_folder, folder)
    except RecordInvalid:
        return False


def open_entry(folder: Path) -> Submitted | Sweep | Unrecorded:
    """Read a folder: a run, an element of a sweep, a sweep, or a run whose submission was not recorded."""
    if os.path.lexists(folder / SWEEP_RECORD):
        return _open_sweep(folder)
    if is_element(folder):
        return open_submitted(folder)
    return _open_unrecorded(folder) or open_submitted(folder)


def read_sweep_record(folder: Path) -> SweepRecord:
    """Return the list of runs of a sweep.

    Raises:
        RecordInvalid: the record is damaged, or names a folder that is not a sweep element.
    """
    record = load_record(SweepRecord, RunFolder(folder).sweep)
    for element in record.elements:
        # The names are read from a file, so they are checked: they must not lead out of the sweep's folder.
        if element.folder != sweep_model.folder_name(element.index):
            raise RecordInvalid(f"`{RunFolder(folder).sweep}`: {element.folder!r} is not the folder of an element")
    return record


def _open_sweep(folder: Path) -> Sweep | Unrecorded:
    try:
        record = read_sweep_record(folder)
    except RecordInvalid:
        record = None
    elements = []
    for path in sorted(folder.glob("[0-9]*/submission.json")):
        try:
            elements.append(_read_submitted(path.parent))
        except RecordInvalid:
            continue
    if elements:
        if record is not None and len(elements) < len(record.elements):
            elements += _unrecorded_elements(folder, record, elements)
            elements.sort(key=lambda element: element.folder.path.name)
        return Sweep(folder=folder, elements=tuple(elements), record=record)
    if record is None or not _is_same_folder(record.run_folder, folder):
        raise RunNotFound(f"`{folder}` was not submitted", why="no run of this sweep has a record of its submission")
    return _unrecorded(folder, record.run, record.run_folder, "slurm", started=False)


def problem_of_element(folder: Path) -> str:
    """Return why a run of a sweep is missing from `Sweep.elements`."""
    entry = open_folder(folder)
    return entry.problem if isinstance(entry, Damaged) else "its submission was not recorded"


def _unrecorded_elements(folder: Path, record: SweepRecord, known: Sequence[Submitted]) -> list[Submitted]:
    """Return the elements of a sweep that have no submission record.

    If sbatch gave no answer, only elements that have started have a record. The other elements belong to
    the same job array. If some elements were submitted again later, the other elements belong to the first array.
    """
    arrays = [number for run in known if (number := run.submission.job_id.partition("_")[0]).isdecimal()]
    if not arrays:
        return []
    array, like = min(arrays, key=int), known[0].submission
    return [
        Submitted(
            folder=own,
            submission=replace(like, run=f"{record.run}/{element.folder}", job_id=f"{array}_{element.index}"),
        )
        for element in record.elements
        if not os.path.lexists((own := RunFolder(folder / element.folder)).submission) and os.path.lexists(own.manifest)
    ]


def _read_submitted(path: Path) -> Submitted:
    folder = RunFolder(path)
    return Submitted(folder=folder, submission=load_record(Submission, folder.submission))


def open_run(path: Path) -> Run:
    """Read a run folder.

    Raises:
        RunNotFound: the run was written but not submitted.
        RecordInvalid: a record of the run is damaged.
    """
    folder = RunFolder(path)
    try:
        submission = _read_submission(folder)
        return Run(folder=folder, manifest=load_record(Manifest, folder.manifest), submission=submission)
    except RecordInvalid as error:
        if error.hint_parts:
            raise
        hint = (
            "do not edit the records of a run; ",
            Command("hpcenv", "list"),
            " shows what else is known of this run",
        )
        raise error.changed(hint=hint) from error


def open_submitted(path: Path) -> Submitted:
    """Read a run folder. If the manifest cannot be read, read only the submission record, which has the job id.

    Raises:
        RunNotFound, RecordInvalid: see `open_run`.
    """
    folder = RunFolder(path)
    try:
        return open_run(path)
    except RecordInvalid as error:
        try:
            submission = _read_submission(folder)
        except HpcenvError:
            raise error from None
        problem = f"{error.what}; the job id is from {folder.submission.name}"
        return Submitted(folder=folder, submission=submission, problem=problem)


def _read_submission(folder: RunFolder) -> Submission:
    """Return the submission record of a run.

    Derive a missing record of an element of a sweep from the other elements.
    """
    path = folder.path
    if os.path.lexists(folder.submission):
        return load_record(Submission, folder.submission)
    if not is_element(path):
        raise not_submitted(path)
    sweep = _open_sweep(path.parent)
    elements = sweep.elements if isinstance(sweep, Sweep) else ()
    known = next((element.submission for element in elements if element.folder.path == path), None)
    if known is None:
        raise not_submitted(path.parent)
    return known
