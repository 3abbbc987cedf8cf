"""Runs of a project: finding them, and reading what is known of one.

Runs on: LOGIN NODE. Everything comes from the run folder; Slurm is asked for what only it
knows. What cannot be told is `unknown`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcenv import wire
from hpcenv.adapters import slurm, toml_files
from hpcenv.adapters.slurm import JobState
from hpcenv.errors import FileUnusable, HpcenvError, RecordInvalid, RunNotFound, UsageError
from hpcenv.model import failure
from hpcenv.model import sweep as sweep_model
from hpcenv.model.failure import FirstFailure
from hpcenv.node.former import is_over
from hpcenv.node.place import expand_hostlist
from hpcenv.wire import Manifest, NodeExit, RunFolder, Submission, SweepRecord, Verdict

# What makes a folder of runs of one: the elements of a sweep or an array lie in it.
SWEEP_RECORD = "sweep.json"

# Records of the job that are read whole; a longer one is none of ours.
_MOST_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A run folder with how it came to be: all that a line of a list needs.

    Attributes:
        problem: why its manifest cannot be read, where somebody tried.
    """

    folder: RunFolder
    submission: Submission
    problem: str = ""

    @property
    def job_ids(self) -> tuple[str, ...]:
        """Slurm's jobs of this run: one, or those of a chain in their order."""
        return self.submission.chain or (self.submission.job_id,)


@dataclass(frozen=True, kw_only=True)
class Run(Submitted):
    """A run folder with its two records that never change."""

    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The runs of one sweep or array.

    Attributes:
        record: what it consists of; None where that cannot be read.
    """

    folder: Path
    elements: tuple[Submitted, ...]
    record: SweepRecord | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names whose values the runs differ in; none of an array."""
        return () if self.record is None else self.record.names

    @property
    def values(self) -> dict[str, dict[str, str]]:
        """Name of a run's folder -> its values."""
        return {} if self.record is None else {one.folder: one.values for one in self.record.elements}


@dataclass(frozen=True, kw_only=True)
class Unrecorded:
    """The folder of a run or sweep whose submission was not recorded: nobody knows its job.

    Attributes:
        run: its name, which is that of its job.
        place: its folder as its job was told.
        changed: seconds since the epoch; of the last file that was made before sbatch was called.
        started: a job of it began.
    """

    folder: RunFolder
    run: str
    place: str
    cluster: str
    changed: float
    started: bool


@dataclass(frozen=True, kw_only=True)
class Damaged:
    """A run folder whose record cannot be read."""

    folder: RunFolder
    problem: str
    changed: float


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run stands: what Slurm and the folder's small records say.

    Attributes:
        state: Slurm's word for it in lower case, `rejected` when the gate stopped it, `not-queued` when it never
            came to be a job.
        detail: the reason beside it, in words.
        exit_status: of the batch script: the gate's 90 or 91, else the training's.
        attempt: how often the job was started before this time.
        nodes: where it runs or ran; empty while that is not known.
        waits_again: the run is queued again, or has not begun again; what it left is of the attempt before.
        gone: Slurm answered and no longer knows the job, and nothing says how it ended.
    """

    state: str
    detail: str = ""
    exit_status: int | None = None
    attempt: int = 0
    nodes: tuple[str, ...] = ()
    elapsed: str = ""
    waits_again: bool = False
    gone: bool = False

    @property
    def ended(self) -> bool:
        """Whether it is known to be over; `unknown` does not say so, even of a job that is gone."""
        return self.state in slurm.ENDED or self.state in ("rejected", "not-queued")

    @property
    def quiet(self) -> bool:
        """Whether nothing more will happen, known how it ended or not."""
        return self.ended or self.gone


@dataclass(frozen=True, kw_only=True)
class RunStatus(RunState):
    """What is known of a run now.

    Attributes:
        job_id: of a chain the job that runs, or ran last.
        verdict, exits: of this attempt, or of the one before while `waits_again`.
        earlier: one line for each attempt that a later one has set aside.
        chain: job ids of a chain.
        failure: what went wrong first; None where nothing is known to have gone wrong.
    """

    run: str
    run_folder: Path
    job_id: str
    cluster: str
    verdict: Verdict | None
    exits: tuple[NodeExit, ...]
    earlier: tuple[str, ...] = ()
    chain: tuple[str, ...] = ()
    failure: FirstFailure | None = None


# -- finding runs -------------------------------------------------------------------------


def find_run(start: Path, word: str | None, *, runs: str | None = None) -> Run:
    """Find a run by folder, run name, job id, or the latest one.

    Args:
        start: where the user is; the project is looked for from here.
        word: what the user typed; None or `latest` for the newest run. `NAME/0003` names
            an element of a sweep.
        runs: another folder of runs than the project's.

    Raises:
        RunNotFound: nothing matches; says where it looked.
        RecordInvalid: the run that is meant is damaged; another one is never taken instead.
        UsageError: it is a sweep of several runs.
    """
    found = find_one(start, word, runs=runs)
    # What is damaged is told again.
    return found if isinstance(found, Run) else open_run(found.folder.path)


def find_one(start: Path, word: str | None, *, runs: str | None = None) -> Submitted:
    """Find a run as `find_run` does, for who needs no manifest: a job is ended or waited for by its id alone."""
    found = find_submitted(start, word, runs=runs)
    if isinstance(found, Sweep):
        name = found.folder.name
        raise UsageError(
            f"`{name}` is a sweep of {len(found.elements)} runs",
            why="one run is needed here",
            hint=f"name one of them: {name}/{found.elements[0].folder.path.name}; `hpcenv list {name}` lists them",
        )
    return found


def find(start: Path, word: str | None, *, runs: str | None = None) -> Run | Sweep:
    """Find a run, or a sweep by its folder or name: see `find_run`."""
    found = find_submitted(start, word, runs=runs)
    return found if isinstance(found, (Run, Sweep)) else open_run(found.folder.path)


def find_submitted(start: Path, word: str | None, *, runs: str | None = None) -> Submitted | Sweep:
    """Find a run as `find_one` does, or a sweep."""
    found = find_any(start, word, runs=runs)
    if isinstance(found, Unrecorded):
        raise _not_recorded(found.folder.path)
    return found


def _not_recorded(path: Path) -> RunNotFound:
    return RunNotFound(
        f"`{path}` was not submitted",
        why=f"there is no {RunFolder(path).submission.name} in it: Slurm gave no answer, or hpcenv was interrupted",
        hint=f"`hpcenv status {path.name}` says whether Slurm has a job of it",
    )


def find_any(start: Path, word: str | None, *, runs: str | None = None) -> Submitted | Sweep | Unrecorded:
    """Find a run or sweep as `find_submitted` does, or what may have become one."""
    if word not in (None, "latest"):
        assert word is not None
        candidate = Path(os.path.abspath(start / word))
        if "/" in word:
            _require_access(candidate)
        known = any(
            os.path.lexists(candidate / record) for record in (SWEEP_RECORD, "manifest.json", "submission.json")
        )
        if known or _is_unfinished(candidate):
            return _open(candidate)
    parent = runs_folder(start, runs, word=word)
    folders = sorted(_folders(parent), key=_submitted, reverse=True)
    if word in (None, "latest"):
        if not folders:
            raise RunNotFound(f"no runs in `{parent}`", hint="hpcenv submit SCRIPT --nodes N --gpus G")
        return _open(folders[0])
    assert word is not None
    # A name is the user's own choice and goes first; job ids are used again after years,
    # and the newest is meant.
    for folder in folders:
        if word == folder.name:
            return _open(folder)
    element = parent / word
    if "/" in word and is_element(element) and element.parent.parent == parent:
        return _open_known(element)
    for folder in folders:
        found = _with_job(folder, word)
        if found is not None:
            return found
    why = f"it is no run folder, and no run name or job id in {parent}"
    listed = "hpcenv list" if runs is None else f"hpcenv list --runs {shlex.quote(runs)}"
    raise RunNotFound(f"no run `{word}`", why=why, hint=f"`{listed}` names the runs that are there")


def _require_access(path: Path) -> None:
    """Let a folder that the user may not look into be no missing one.

    Raises:
        FileUnusable: the system does not let us look.
    """
    try:
        os.lstat(path / "manifest.json")
    except PermissionError as error:
        raise FileUnusable(f"cannot look into `{path}`", why=error.strerror, hint=f"ls -ld {path}") from error
    except (OSError, ValueError):
        return


def find_all(start: Path, words: Sequence[str], *, runs: str | None = None) -> list[Submitted]:
    """Find several runs, each once; a sweep stands for all of its runs, no word for the latest run.

    Raises:
        RunNotFound, RecordInvalid: see `find_submitted`; one that is not there spoils all.
    """
    found: dict[Path, Submitted] = {}
    for word in words or (None,):
        for run in runs_of(find_submitted(start, word, runs=runs)):
            found[run.folder.path] = run
    return list(found.values())


def runs_of(entry: Submitted | Sweep) -> tuple[Submitted, ...]:
    """Return the run itself, or those of a sweep."""
    return entry.elements if isinstance(entry, Sweep) else (entry,)


def is_element(folder: Path) -> bool:
    """Whether a run folder belongs to a sweep or array."""
    return os.path.lexists(folder.parent / SWEEP_RECORD)


def runs_folder(start: Path, runs: str | None = None, *, word: str | None = None) -> Path:
    """Return the folder of runs: the one that is named, else the project's.

    Reads one key of hpcenv.toml and holds it to no rules: runs are there whatever became
    of the rest of that file.

    Args:
        word: the run that is looked for, for the message.

    Raises:
        RunNotFound: there is no project around `start`, or its hpcenv.toml cannot be read; or
            the folder that is named is not there.
        FileUnusable: it may not be read.
    """
    start = Path(os.path.abspath(start))
    if runs is not None:
        folder = Path(os.path.abspath(start / runs))
        _require_folder(folder)
        return folder
    spec = next((path for folder in (start, *start.parents) if (path := folder / _SPEC).is_file()), None)
    what = f"no run `{word}`" if word else "no runs: this is no project"
    if spec is None:
        raise RunNotFound(what, why=f"no `{_SPEC}` in `{start}` or above it", hint="name a run folder, or --runs DIR")
    try:
        paths = toml_files.read_plain(spec, error=RunNotFound).get("paths")
    except RunNotFound as error:
        raise RunNotFound(what, why=f"{error.what}: {error.why}", hint="name a run folder") from error
    named = paths.get("runs") if isinstance(paths, dict) else None
    return spec.parent / (named if isinstance(named, str) and named else "runs")


_SPEC = "hpcenv.toml"


def _require_folder(folder: Path) -> None:
    try:
        os.scandir(folder).close()
    except (FileNotFoundError, NotADirectoryError) as error:
        hint = "--runs names the folder that holds the runs"
        raise RunNotFound(f"there is no folder of runs `{folder}`", why=error.strerror, hint=hint) from error
    except OSError as error:
        raise FileUnusable(f"cannot read the folder of runs `{folder}`", why=error.strerror) from error


def list_runs(parent: Path) -> list[Submitted | Sweep | Unrecorded | Damaged]:
    """Return what lies in a folder of runs, the newest first. Asks nobody."""
    found: list[tuple[float, Submitted | Sweep | Unrecorded | Damaged]] = []
    for folder in _folders(parent):
        entry = open_folder(folder)
        if isinstance(entry, (Unrecorded, Damaged)):
            moment = entry.changed
        elif isinstance(entry, Sweep):
            moment = max((element.submission.submitted for element in entry.elements), default=0.0)
        else:
            moment = entry.submission.submitted
        found.append((moment, entry))
    found.sort(key=lambda pair: pair[0], reverse=True)
    return [entry for _, entry in found]


def open_folder(folder: Path) -> Submitted | Sweep | Unrecorded | Damaged:
    """Return what a folder in the folder of runs is; without its manifest, which is long."""
    try:
        if os.path.lexists(folder / SWEEP_RECORD):
            return _open_sweep(folder)
        return _open_unrecorded(folder) or _open_submitted(folder)
    except HpcenvError as error:
        return Damaged(folder=RunFolder(folder), problem=error.what, changed=_changed(folder))


def _open_unrecorded(path: Path) -> Unrecorded | None:
    """Return a run without a record of its submission; None if it has one."""
    folder = RunFolder(path)
    if os.path.lexists(folder.submission):
        return None
    if _is_unfinished(path):
        return _unrecorded(path, path.name, str(path), "", started=False)
    manifest = wire.read(Manifest, folder.manifest)
    # A copy of a run, to look at or to hand on, was never meant to be a run here.
    if not _is_same(manifest.run_folder, path):
        raise RunNotFound(f"`{path}` was not submitted", why=f"it is a copy of {manifest.run_folder}")
    return _unrecorded(path, manifest.run, manifest.run_folder, manifest.cluster, os.path.lexists(folder.started))


def _unrecorded(path: Path, run: str, place: str, cluster: str, started: bool) -> Unrecorded:
    # They are words for squeue.
    if not _NAME_OF_JOB.fullmatch(run):
        raise RecordInvalid(f"`{path}`: {run!r} is no name of a run")
    return Unrecorded(
        folder=RunFolder(path), run=run, place=place, cluster=cluster, changed=_changed(path), started=started
    )


_NAME_OF_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")


def _is_same(one: str, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _changed(folder: Path) -> float:
    try:
        return os.lstat(folder).st_mtime
    except OSError:
        return 0.0


def _folders(parent: Path) -> list[Path]:
    """Return the run folders and sweeps in a folder of runs; hidden ones are on their way out."""
    try:
        with os.scandir(parent) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".")]
    except OSError:
        return []
    return [
        parent / name
        for name in names
        if any(os.path.lexists(parent / name / record) for record in ("submission.json", SWEEP_RECORD))
        or _may_be_a_run(parent / name)
    ]


def _is_unfinished(folder: Path) -> bool:
    """Whether a submission began to write it and was killed: the manifest comes before any job, and is not there."""
    run = RunFolder(folder)
    records = (run.manifest, run.submission, run.sweep, run.started, run.log)
    return os.path.isdir(run.code / "hpcenv") and not any(os.path.lexists(path) for path in records)


def _may_be_a_run(folder: Path) -> bool:
    """Whether it was written to be submitted, and nobody knows whether it was; a copy of a run was not."""
    if _is_unfinished(folder):
        return True
    try:
        return _is_same(wire.read(Manifest, RunFolder(folder).manifest).run_folder, folder)
    except RecordInvalid:
        return False


def _submitted(folder: Path) -> float:
    """Return when a run was submitted, as well as that can be told."""
    entry = open_folder(folder)
    if isinstance(entry, Submitted):
        return entry.submission.submitted
    if isinstance(entry, Sweep):
        return max((element.submission.submitted for element in entry.elements), default=0.0)
    return entry.changed


def _with_job(folder: Path, word: str) -> Submitted | Sweep | None:
    """Return the run of that job id; damaged folders are passed over: others must stay reachable."""
    entry = open_folder(folder)
    if isinstance(entry, (Damaged, Unrecorded)):
        return None
    if isinstance(entry, Sweep):
        for element in entry.elements:
            if word in element.job_ids:
                return _try_open(element.folder.path)
        return entry if any(one.partition("_")[0] == word for e in entry.elements for one in e.job_ids) else None
    return _try_open(folder) if word in (*entry.job_ids, entry.submission.run) else None


def _try_open(folder: Path) -> Submitted | None:
    try:
        return _open_known(folder)
    except HpcenvError:
        return None


def _open(folder: Path) -> Submitted | Sweep | Unrecorded:
    if os.path.lexists(folder / SWEEP_RECORD):
        return _open_sweep(folder)
    if is_element(folder):
        return _open_known(folder)
    return _open_unrecorded(folder) or _open_known(folder)


def read_sweep_record(folder: Path) -> SweepRecord:
    """Return what a sweep consists of.

    Raises:
        RecordInvalid: it is damaged, or says more than any sweep of ours has.
    """
    record = wire.read(SweepRecord, RunFolder(folder).sweep)
    for element in record.elements:
        # Names of folders come from a file: none may lead out of the sweep's own.
        if element.folder != sweep_model.folder_name(element.index):
            raise RecordInvalid(f"`{RunFolder(folder).sweep}`: {element.folder!r} is no element's folder")
    return record


def _open_sweep(folder: Path) -> Sweep | Unrecorded:
    try:
        record = read_sweep_record(folder)
    except RecordInvalid:
        record = None
    elements = []
    for path in sorted(folder.glob("[0-9]*/submission.json")):
        try:
            elements.append(_open_submitted(path.parent))
        except RecordInvalid:
            continue
    if elements:
        if record is not None and len(elements) < len(record.elements):
            elements += _unrecorded_elements(folder, record, elements)
            elements.sort(key=lambda element: element.folder.path.name)
        return Sweep(folder=folder, elements=tuple(elements), record=record)
    if record is None or not _is_same(record.run_folder, folder):
        raise RunNotFound(f"`{folder}` was not submitted", why="no run of this sweep has a record of its submission")
    return _unrecorded(folder, record.run, record.run_folder, "slurm", started=False)


def problem_of_element(folder: Path) -> str:
    """Return why an element of a sweep that `Sweep.elements` lacks cannot be told."""
    entry = open_folder(folder)
    return entry.problem if isinstance(entry, Damaged) else "its submission was not recorded"


def _unrecorded_elements(folder: Path, record: SweepRecord, known: Sequence[Submitted]) -> list[Submitted]:
    """Return the elements that have no record: where the submission got no answer, those that started wrote their own.

    They are of the same array: of the first one, where some were queued again since.
    """
    arrays = [number for one in known if (number := one.submission.job_id.partition("_")[0]).isdecimal()]
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


def _open_submitted(path: Path) -> Submitted:
    folder = RunFolder(path)
    return Submitted(folder=folder, submission=wire.read(Submission, folder.submission))


def open_run(path: Path) -> Run:
    """Read a run folder.

    Raises:
        RunNotFound: it was planned but never submitted.
        RecordInvalid: its records are damaged.
    """
    folder = RunFolder(path)
    try:
        submission = _how_submitted(folder)
        return Run(folder=folder, manifest=wire.read(Manifest, folder.manifest), submission=submission)
    except RecordInvalid as error:
        error.hint = error.hint or "a run's records are not to be changed; `hpcenv list` says what else is known of it"
        raise


def _open_known(path: Path) -> Submitted:
    """Read a run folder, or as much of it as names its job.

    Raises:
        RunNotFound, RecordInvalid: see `open_run`; not for a manifest that cannot be read.
    """
    folder = RunFolder(path)
    try:
        return open_run(path)
    except RecordInvalid as error:
        try:
            submission = _how_submitted(folder)
        except HpcenvError:
            raise error from None
        problem = f"{error.what}: its job is known from {folder.submission.name}"
        return Submitted(folder=folder, submission=submission, problem=problem)


def _how_submitted(folder: RunFolder) -> Submission:
    """Return how a run came to be; of an element of a sweep that has no record of its own, from the others."""
    path = folder.path
    if os.path.lexists(folder.submission):
        return wire.read(Submission, folder.submission)
    if not is_element(path):
        raise _not_recorded(path)
    found = _open_sweep(path.parent)
    elements = found.elements if isinstance(found, Sweep) else ()
    known = next((element.submission for element in elements if element.folder.path == path), None)
    if known is None:
        raise _not_recorded(path.parent)
    return known


# -- where they stand ---------------------------------------------------------------------


def read_status(run: Submitted, environ: Mapping[str, str]) -> RunStatus:
    """Return what Slurm and the run folder say; neither alone is trusted."""
    return read_statuses([run], environ)[0]


def read_statuses(runs: Sequence[Submitted], environ: Mapping[str, str]) -> list[RunStatus]:
    """Return everything that is known of some runs: one call of squeue and of sacct for all of them."""
    return [_detailed(run, found) for run, found in zip(runs, _states(runs, environ), strict=True)]


@dataclass(frozen=True, kw_only=True)
class _Standing:
    """Where a run stands, and by which records.

    Attributes:
        job_id: of a chain the job that says so.
        finished: how that job's last attempt ended; empty while it has not.
        waited: it was to go on, and ended before it did: what the folder holds is of the attempt before.
    """

    job_id: str
    state: RunState
    finished: Mapping[str, Any]
    waited: bool = False


def _detailed(run: Submitted, found: _Standing) -> RunStatus:
    state = found.state
    verdict, problem = _verdict(run.folder)
    exits = _exits(run.folder)
    if state.quiet and _is_of_former_job(run, _record(run.folder.started)):
        # It ended before it began: cancelled while it waited, for example.
        verdict, problem, exits = None, "", ()
    return RunStatus(
        run=run.submission.run,
        run_folder=run.folder.path,
        job_id=found.job_id,
        cluster=run.submission.cluster,
        verdict=verdict,
        exits=exits,
        earlier=_earlier(run),
        chain=run.submission.chain,
        failure=_failure(run, found, verdict, exits),
        **{**vars(state), "detail": "; ".join(filter(None, (state.detail, problem, run.problem)))},
    )


def _failure(
    run: Submitted, found: _Standing, verdict: Verdict | None, exits: tuple[NodeExit, ...]
) -> FirstFailure | None:
    """Return what went wrong first in this attempt, if something did."""
    state = found.state
    # What is there is of the attempt before, or nothing of the training ran.
    if (
        state.waits_again
        or state.state in ("pending", "rejected")
        or (state.state, state.exit_status) == ("completed", 0)
    ):
        return None
    try:
        manifest = run.manifest if isinstance(run, Run) else wire.read(Manifest, run.folder.manifest)
        launches, nproc = bool(manifest.script), manifest.nproc_per_node
    except RecordInvalid:
        launches, nproc = True, 1
    if verdict is None or verdict.result != "match" or not launches:
        nodes: tuple[str, ...] = ()
    else:
        nodes = verdict.launched or tuple(node.node for node in verdict.nodes)
    told = state.state if state.state != "unknown" else ""
    if found.waited:
        return failure.first_failure((), nodes=(), nproc=nproc, state=told, waited=True)
    # Of one that was cancelled that is what is to be said.
    unfinished = _unfinished(found.finished) if state.quiet and state.state != "cancelled" else ""
    first = failure.first_failure(
        exits,
        nodes=nodes,
        nproc=nproc,
        state=told,
        over=state.quiet,
        down=_down(found.finished),
        stopped=stopped_before_training(found.finished) if state.quiet else "",
        unfinished=unfinished,
    )
    if first is None or first.headline != unfinished:
        return first
    anew = f"to begin anew: hpcenv rerun {shlex.quote(str(run.folder.path))}"
    return replace(first, notes=(*first.notes, anew))


def read_finished(folder: RunFolder) -> Mapping[str, Any]:
    """Return how an attempt's batch script ended; empty where that cannot be read."""
    return _record(folder.finished) or {}


def down_of(folder: RunFolder) -> dict[str, str]:
    """Return which nodes Slurm held for down when an attempt ended, each with the reason."""
    return _down(read_finished(folder))


def _down(finished: Mapping[str, Any]) -> dict[str, str]:
    down = finished.get("down")
    return {str(node): str(reason) for node, reason in down.items()} if isinstance(down, dict) else {}


def read_states(runs: Sequence[Submitted], environ: Mapping[str, str]) -> list[RunState]:
    """Return where some runs stand: one call of squeue and of sacct, and the small records of each."""
    return [found.state for found in _states(runs, environ)]


def _states(runs: Sequence[Submitted], environ: Mapping[str, str]) -> list[_Standing]:
    # Slurm first: what a job wrote before it ended is then there to be read.
    on_slurm = [run for run in runs if run.submission.cluster == "slurm"]
    jobs = slurm.job_states((job_id for run in on_slurm for job_id in run.job_ids), environ) if on_slurm else {}
    return [_state(run, jobs) for run in runs]


def _state(run: Submitted, jobs: Mapping[str, JobState]) -> _Standing:
    started, left = _record(run.folder.started), _record(run.folder.finished)
    former = _is_of_former_job(run, started)
    if former:
        left = None
    if run.submission.cluster == "slurm":
        job_id, job = _link(run, jobs, started, left)
    else:
        job_id, job = run.submission.job_id, _local_state(run)
    if job_id == _ran(run, started, job_id) and _goes_on(job, left):
        job = replace(job, state="requeued", reason=job.reason or "the job is queued again")
    waited = left is not None and (job_id != _ran(run, started, job_id) or _was_to_go_on(job, left))
    finished = None if waited else left
    status = _exit_status(job, finished)
    state, detail = _explain(job, status, started, run, finished or {})
    if left is not None and not job.ended and (job.unconfirmed or (state == "unknown" and not job.gone)):
        state, detail = _of_files(state, detail, left)
    if state in ("pending", "requeued"):
        detail = "; ".join(filter(None, (_why_stopped(left or {}), detail)))
    found = RunState(
        state=state,
        detail=detail,
        exit_status=status,
        attempt=_attempt(started),
        nodes=(() if former else _nodes(started)) or _allocated(job),
        elapsed=job.elapsed,
        waits_again=_waits_again(state, former, started, left),
        gone=job.gone and state == "unknown",
    )
    return _Standing(job_id=job_id, state=found, finished=finished or {}, waited=waited and found.quiet)


def _ran(run: Submitted, started: Mapping[str, Any] | None, otherwise: str) -> str:
    """Return which job of a chain ran last; `otherwise` where that is not known, or it is no chain."""
    ran = (started or {}).get("job_id")
    return ran if isinstance(ran, str) and len(run.job_ids) > 1 and ran in run.job_ids else otherwise


def _was_to_go_on(job: JobState, left: Mapping[str, Any]) -> bool:
    """Whether a job ended, or is gone, while it was in the queue again: its last attempt does not say how."""
    # One that completed was not queued again after all.
    over = job.state != "completed" if job.ended else job.gone or job.no_slurm
    return left.get("again") is True and over


def _is_of_former_job(run: Submitted, started: Mapping[str, Any] | None) -> bool:
    """Whether what lies there was left by another job: of an element that was queued again and has not begun."""
    job_id = (started or {}).get("submitted_as")
    return isinstance(job_id, str) and "_" in job_id and job_id not in run.job_ids


def _waits_again(
    state: str, former: bool, started: Mapping[str, Any] | None, finished: Mapping[str, Any] | None
) -> bool:
    """Whether the run goes on, and what it left is of the attempt before: Slurm runs a job before its script does."""
    if state in ("pending", "requeued"):
        return started is not None
    again = former or (finished is not None and finished.get("again") is True)
    return again and state in ("running", "suspended")


def _goes_on(job: JobState, finished: Mapping[str, Any] | None) -> bool:
    """Whether the attempt that ended was not the last: Slurm shows it as completing before it is pending."""
    unsure = job.state == "completing" or (job.state == "unknown" and not job.gone and not job.no_slurm)
    return unsure and finished is not None and finished.get("again") is True


def _of_files(state: str, detail: str, finished: Mapping[str, Any]) -> tuple[str, str]:
    """Return where a run stands whose batch script has ended, as Slurm would say it if it answered."""
    said = f"the batch script recorded status {finished.get('status')}"
    if state == "running" and not finished.get("again"):
        state = "completing"
    return state, "; ".join(filter(None, (said, detail)))


def _link(
    run: Submitted, jobs: Mapping[str, JobState], started: Mapping[str, Any] | None, finished: Mapping[str, Any] | None
) -> tuple[str, JobState]:
    """Return the job of a chain that says where the run stands, with its state."""
    ids = run.job_ids
    last = _ran(run, started, ids[0])
    for job_id in ids:
        if not jobs[job_id].ended and jobs[job_id].state not in ("unknown", "pending", "requeued"):
            return job_id, jobs[job_id]
    # Links that still wait have nothing left to do once one came to its end.
    if is_over(finished or {}):
        return last, jobs[last]
    waiting = [job_id for job_id in ids if jobs[job_id].state in ("pending", "requeued")]
    # Else the next one was to go on, and did not.
    after = ids[ids.index(last) + 1 :] if finished is not None else ()
    chosen = next(iter((*waiting, *after)), last)
    return chosen, jobs[chosen]


def _allocated(job: JobState) -> tuple[str, ...]:
    if not job.nodelist:
        return ()
    try:
        return expand_hostlist(job.nodelist)
    except ValueError:
        return ()


def link_of(run: Submitted, attempt: RunFolder) -> str:
    """Return which job of a chain made an attempt, `link 2 of 3, job 124`; empty of what is no chain."""
    chain = run.submission.chain
    job_id = (_record(attempt.started) or {}).get("job_id")
    if len(chain) < 2 or job_id not in chain:
        return ""
    return f"link {chain.index(job_id) + 1} of {len(chain)}, job {job_id}"


def _earlier(run: Submitted) -> tuple[str, ...]:
    """Return one line for each attempt that a later one has set aside."""
    lines, attempts = [], run.folder.attempts
    for path in sorted(attempts.glob("*"), key=lambda p: [int(n) for n in p.name.split(".") if n.isdigit()]):
        attempt = RunFolder(path)
        link = link_of(run, attempt)
        verdict, problem = _verdict(attempt)
        ends = ", ".join(_ended(record) for record in _exits(attempt)) or "no node reported an end"
        said = verdict.result if verdict is not None else problem or "no verdict"
        told = _why_stopped(read_finished(attempt)) or f"{said}; {ends}"
        lines.append(f"attempt {path.name}{f' ({link})' if link else ''}: {told}")
    return tuple(lines)


def _ended(record: NodeExit) -> str:
    because = f" after {record.asked_to_end}" if record.asked_to_end else ""
    return f"{record.node} ended with {record.status}{because}"


def _verdict(folder: RunFolder) -> tuple[Verdict | None, str]:
    """Return the verdict, or why it cannot be read: the rest is worth telling all the same."""
    if not os.path.lexists(folder.verdict):
        return None, ""
    try:
        return wire.read(Verdict, folder.verdict), ""
    except RecordInvalid as error:
        return None, error.what


def _attempt(started: Mapping[str, Any] | None) -> int:
    value = (started or {}).get("attempt")
    return value if type(value) is int else 0


def _nodes(started: Mapping[str, Any] | None) -> tuple[str, ...]:
    value = (started or {}).get("nodes")
    return tuple(str(node) for node in value) if isinstance(value, list) else ()


def _exits(folder: RunFolder) -> tuple[NodeExit, ...]:
    found = []
    for path in sorted(folder.exits.glob("*.json")):
        try:
            found.append(wire.read(NodeExit, path))
        except RecordInvalid:
            continue
    return tuple(found)


def _record(path: Path) -> dict[str, Any] | None:
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES + 1)
        data = json.loads(text) if len(text) <= _MOST_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _exit_status(job: JobState, finished: Mapping[str, Any] | None) -> int | None:
    """The batch script's own record first: it needs no accounting.

    Not of a job that waits or runs: then the record is of an attempt before a requeue.
    """
    if not job.ended and job.state not in ("unknown", "completing"):
        return None
    if job.state == "unknown" and not job.gone and not job.no_slurm:
        # It may be queued again: that is known once squeue answers.
        return None
    if finished is not None and isinstance(finished.get("status"), int):
        status: int | None = int(finished["status"])
        return None if status == 0 and _unfinished(finished) else status
    status = 128 + job.exit_signal if job.exit_signal else job.exit_status
    # Accounting writes 0:0 for jobs that were cancelled, timed out or lost a node.
    return status if job.ended and (status != 0 or job.state == "completed") else None


def _explain(
    job: JobState,
    status: int | None,
    started: Mapping[str, Any] | None,
    run: Submitted,
    finished: Mapping[str, Any],
) -> tuple[str, str]:
    cancelled = finished.get("cancelled") is True
    if job.state == "unknown" and status is not None and cancelled:
        return "cancelled", "from the run folder"
    if job.state == "unknown" and status is not None:
        # Only the batch script itself writes this, as its last act.
        job = JobState(state="completed" if status == 0 else "failed", reason="from the run folder")
    # A job that Slurm ended while its nodes were checked was not judged.
    by_slurm = job.state in ("cancelled", "timeout", "preempted", "node-fail", "out-of-memory")
    if stopped_before_training(finished) and (by_slurm or job.state == "failed"):
        return (job.state if by_slurm else _stopped_state(finished)), _why_stopped(finished)
    if _unfinished(finished) and job.state != "cancelled" and (by_slurm or job.state in ("failed", "completed")):
        return (job.state if by_slurm else _stopped_state(finished)), _unfinished(finished)
    # Who is ended because of `scancel` may have found time for a verdict: Slurm will say so.
    if status == 91 and job.state == "completing":
        return job.state, job.reason
    if status in (90, 91) and not by_slurm and _result(run.folder) not in (None, "match"):
        words = "a node is not as locked" if status == 90 else "could not tell on every node"
        return "rejected", f"before training: {words}"
    if job.state == "failed" and started is None and not run.folder.log.exists():
        return "failed", f"the batch node wrote nothing into {run.folder.path}: does it see this file system?"
    return job.state, job.reason


# Why an attempt was stopped: Slurm's word for such a job, and ours.
_STOPPED = {"time-limit": ("timeout", "the time limit"), "preemption": ("preempted", "preempted")}


def _stopped_state(finished: Mapping[str, Any]) -> str:
    return _STOPPED.get(str(finished.get("stopped")), ("failed", ""))[0]


def _why_stopped(finished: Mapping[str, Any]) -> str:
    """Return in words that an attempt was stopped before its training began, and why; empty when it was not."""
    why = stopped_before_training(finished)
    return f"stopped before the training began: {_STOPPED.get(why, ('', 'asked to stop'))[1]}" if why else ""


def stopped_before_training(finished: Mapping[str, Any]) -> str:
    """Return why an attempt was stopped before its training began, as `NodeExit.stopped` has it; else empty."""
    why = finished.get("stopped")
    return why if finished.get("before_training") is True and isinstance(why, str) else ""


def _unfinished(finished: Mapping[str, Any]) -> str:
    """Return in words that a training was stopped that has more to do; empty of one that ended by itself."""
    if finished.get("unfinished") is not True:
        return ""
    stopped, not_again = (str(finished.get(key) or "") for key in ("stopped", "not_again"))
    return failure.unfinished(stopped, saved=finished.get("saved") is True, not_again=not_again)


def _result(folder: RunFolder) -> str | None:
    value = (_record(folder.verdict) or {}).get("result")
    return value if isinstance(value, str) else None


def _local_state(run: Submitted) -> JobState:
    """A local run is what its processes and its last record say."""
    pid = run.submission.job_id.rpartition("-")[2]
    alive = pid.isdigit() and _is_ours(int(pid), run)
    # Read after looking for the process: it writes the record and then goes.
    finished = _record(run.folder.finished)
    if finished is not None and isinstance(finished.get("status"), int):
        status = int(finished["status"])
        ended = finished.get("time")
        took = ended - run.submission.submitted if isinstance(ended, (int, float)) else -1.0
        elapsed = _elapsed(took) if 0 <= took < _LONGEST else ""
        if finished.get("cancelled") is True:
            return JobState(state="cancelled", exit_status=status, elapsed=elapsed)
        return JobState(state="completed" if status == 0 else "failed", exit_status=status, elapsed=elapsed)
    if alive:
        return JobState(state="running", elapsed=_elapsed(time.time() - run.submission.submitted))
    return JobState(state="failed", reason="no process of it is on this machine, and it left no exit status")


def _is_ours(pid: int, run: Submitted) -> bool:
    """Whether process `pid` still is the run's: numbers are used again."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        zombie = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return False
    return os.fsencode(str(run.folder.path)) in command and not zombie


_LONGEST = 10.0 * 365 * 86400


def _elapsed(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{rest:02d}"
