"""`hpcenv diff`: what differs between two locks, two runs, or a lock and a run.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcenv import wire
from hpcenv.errors import RecordInvalid, UsageError
from hpcenv.model import diff as diff_model
from hpcenv.model.diff import Change
from hpcenv.model.fields import Profile
from hpcenv.steps.runs import find_run
from hpcenv.steps.workspace import open_workspace, read_lockfile
from hpcenv.wire import Facts, RunFolder, Value, Verdict


@dataclass(frozen=True, kw_only=True)
class DiffResult:
    """Two sides and their differences, hardest to repair first."""

    left: str
    right: str
    changes: tuple[Change, ...]

    @property
    def blocking(self) -> tuple[Change, ...]:
        """Differences that would stop a job."""
        return tuple(change for change in self.changes if change.severity == "must")


def diff(start: Path, left: str, right: str, *, profile: Profile = "default", runs: str | None = None) -> DiffResult:
    """Compare two sides.

    Args:
        start: where the user is.
        left, right: each a lockfile's path, the name of one of the project's lockfiles, or
            a run (folder, name, job id).
        profile: whose severities to give; `bitwise` for runs that shall agree in every bit.

    Raises:
        UsageError: a word is none of these.
    """
    sides = [_side(start, word, runs=runs) for word in (left, right)]
    both_runs = all(side.of_run is not None for side in sides)
    # A lockfile knows nothing of nodes, command and code: a run is compared in its environment.
    values = [side.of_run if both_runs and side.of_run is not None else side.environment for side in sides]
    return DiffResult(left=left, right=right, changes=diff_model.compare(*values, profile=profile))


@dataclass(frozen=True, kw_only=True)
class _Side:
    """One side: its environment, and all of a run if it is one."""

    environment: Mapping[str, Value]
    of_run: Mapping[str, Value] | None = None


def _side(start: Path, word: str, *, runs: str | None) -> _Side:
    path = Path(os.path.abspath(start / word))
    if path.is_file():
        return _Side(environment=diff_model.of_lockfile(read_lockfile(path)))
    named = _named_lockfile(start, word)
    if named is not None:
        return _Side(environment=diff_model.of_lockfile(read_lockfile(named)))
    try:
        run = find_run(start, word, runs=runs)
    except Exception as error:
        raise UsageError(
            f"`{word}` is neither a lockfile nor a run",
            why=getattr(error, "what", str(error)),
            hint="hpcenv diff lockfiles/default.lock.toml RUN",
        ) from error
    locked = read_lockfile(run.folder.lockfile)
    verdict = wire.read(Verdict, run.folder.verdict) if run.folder.verdict.exists() else None
    facts = _facts(run.folder)
    return _Side(
        environment=diff_model.environment_of_run(locked, verdict, facts),
        of_run=diff_model.of_run(locked, run.manifest, verdict, facts),
    )


def _named_lockfile(start: Path, word: str) -> Path | None:
    """Return the project's lockfile of that name, if there is one."""
    try:
        path = open_workspace(start).lockfile_path(word)
    except Exception:  # noqa: BLE001  (no project here: then the word is something else)
        return None
    return path if path.is_file() else None


def _facts(folder: RunFolder) -> dict[str, Facts]:
    found = {}
    for path in sorted(folder.facts.glob("*.json")):
        try:
            facts = wire.read(Facts, path)
        except RecordInvalid:
            continue
        found[facts.node] = facts
    return found
