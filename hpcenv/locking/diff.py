"""`hpcenv diff`: find the differences between two lockfiles, two runs, or a lockfile and a run.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcenv.errors import Command, RecordInvalid, ToolFailed, UsageError
from hpcenv.locking import difference as diff_model
from hpcenv.locking.difference import Change
from hpcenv.project import git
from hpcenv.project.lockfile import Lockfile, compares_gpus, severities_of
from hpcenv.project.workspace import LONGEST_LOCKFILE, find_lockfile, open_workspace, parse_lockfile, read_lockfile
from hpcenv.records.code_listing import Listing
from hpcenv.records.facts import Facts
from hpcenv.records.files import load_record
from hpcenv.records.manifest import DeterminismProfile, Value
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.severities import Severities, strictest
from hpcenv.records.verdict import Verdict
from hpcenv.runs.attempts import read_finished
from hpcenv.runs.find import find_run
from hpcenv.text import Shown


@dataclass(frozen=True, kw_only=True, repr=False)
class DiffResult(Shown):
    """Two sides and their differences. The differences that are hardest to remove come first.

    Attributes:
        not_compared: the parts that could not be compared, because one side has no record of them.
    """

    left: str
    right: str
    changes: tuple[Change, ...]
    not_compared: tuple[str, ...] = ()

    @property
    def blocking(self) -> tuple[Change, ...]:
        """Differences that would stop a job."""
        return tuple(change for change in self.changes if change.severity == "must")


def diff(
    left: str | Path,
    right: str | Path,
    *,
    project: str | Path = ".",
    determinism: DeterminismProfile | None = None,
    runs_dir: str | None = None,
    environ: Mapping[str, str],
) -> DiffResult:
    """Return the differences between two sides. See `hpcenv.diff` (api/environment.py).

    Args:
        environ: environment variables for git.
    """
    start, names = Path(project), (str(left), str(right))
    sides = [_read_side(start, name, determinism, runs=runs_dir, environ=environ) for name in names]
    both_runs = all(side.of_run is not None for side in sides)
    # A lockfile does not contain nodes, command and code. If one side is a lockfile, only environments are compared.
    values = [side.of_run if both_runs and side.of_run is not None else side.environment for side in sides]
    if both_runs:
        values = diff_model.with_files(values, [side.listing for side in sides])
    severities = [side.severities for side in sides]
    fit = all(side.sif_fits for side in sides)
    changes = diff_model.compare(*values, severities=severities, sifs_fit=fit)
    if both_runs:
        changes += _without_result(values, severities)
        missing = tuple(dict.fromkeys(text for side in sides for text in side.not_compared))
    elif any(side.of_run is not None for side in sides):
        missing = ("command, shape, code, settings and nodes of the run: a lockfile has none",)
    else:
        missing = ()
    return DiffResult(left=names[0], right=names[1], changes=changes, not_compared=missing)


def _without_result(values: Sequence[Mapping[str, Value]], severities: Sequence[Severities]) -> tuple[Change, ...]:
    """Return the outcome of two runs as a difference, if both have the same outcome, and did not complete."""
    outcome, other = (side.get(diff_model.OUTCOME) for side in values)
    if outcome != other or outcome == diff_model.COMPLETED:
        return ()
    severity = strictest(one.of(diff_model.OUTCOME) for one in severities)
    return (diff_model.change_of(diff_model.OUTCOME, outcome, other, severity),)


@dataclass(frozen=True, kw_only=True)
class _Side:
    """One side: its environment and severities. If the side is a run, also all fields and copied files of the run."""

    environment: Mapping[str, Value]
    severities: Severities
    of_run: Mapping[str, Value] | None = None
    sif_fits: bool = True
    not_compared: tuple[str, ...] = ()
    listing: Listing | None = None


def _read_side(
    start: Path, name: str, profile: DeterminismProfile | None, *, runs: str | None, environ: Mapping[str, str]
) -> _Side:
    path = Path(os.path.abspath(start / name))
    lockfile = path if path.is_file() else _named_lockfile(start, name)
    locked = _committed_lockfile(start, name, environ) if lockfile is None else read_lockfile(lockfile)
    if locked is not None:
        return _Side(environment=diff_model.of_lockfile(locked), severities=severities_of(locked, profile=profile))
    try:
        run = find_run(start, name, runs=runs)
    except Exception as error:
        raise UsageError(
            f"`{name}` is neither a lockfile nor a run",
            why=getattr(error, "what", str(error)),
            hint=Command("hpcenv", "diff", "lockfiles/default.lock.toml", "RUN"),
        ) from error
    locked = read_lockfile(run.folder.lockfile)
    verdict = load_record(Verdict, run.folder.verdict) if run.folder.verdict.exists() else None
    facts = _facts(run.folder)
    return _Side(
        environment=diff_model.environment_of_run(locked, verdict, facts),
        severities=severities_of(locked, gpus=compares_gpus(locked, run.manifest.gpus_per_node), profile=profile),
        of_run=diff_model.of_run(locked, run.manifest, verdict, facts, read_finished(run.folder)),
        sif_fits=diff_model.sif_fits(run.manifest, verdict, facts),
        not_compared=diff_model.not_compared(locked, run.manifest, facts),
        listing=_listing(run.folder),
    )


def _named_lockfile(start: Path, name: str) -> Path | None:
    """Return the path of the project's lockfile with this name; None if there is no such lockfile."""
    try:
        path = open_workspace(start).lockfile_path(name)
    except Exception:  # noqa: BLE001  (there is no project here, so there is no lockfile with this name)
        return None
    return path if path.is_file() else None


def _committed_lockfile(start: Path, name: str, environ: Mapping[str, str]) -> Lockfile | None:
    """Return the lockfile that REV:NAME names, as it was in that commit; None if `name` does not have this form."""
    revision, colon, lock = name.partition(":")
    if not (revision and colon and lock):
        return None
    path = find_lockfile(start, lock)
    try:
        content = git.read_committed(path, revision, environ, most=LONGEST_LOCKFILE)
    except ToolFailed as error:
        log = Command("git", "log", "--oneline", "--", str(path))
        raise UsageError(
            f"there is no lockfile `{name}`", why=git.said_by(error), hint=(log, " lists the commits that changed it")
        ) from error
    return parse_lockfile(content, Path(f"{revision}:{path.name}"))


def _listing(folder: RunFolder) -> Listing | None:
    """Return the files in the run's copy of the code; None if the run has no copy."""
    try:
        return load_record(Listing, folder.listing)
    except RecordInvalid:
        return None


def _facts(folder: RunFolder) -> dict[str, Facts]:
    found = {}
    for path in sorted(folder.facts.glob("*.json")):
        try:
            facts = load_record(Facts, path)
        except RecordInvalid:
            continue
        found[facts.node] = facts
    return found
