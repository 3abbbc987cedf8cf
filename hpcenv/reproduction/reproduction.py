"""A reproduction: the run that is reproduced, the proofs, the cost and the result. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpcenv.errors import HpcenvError, RecordInvalid, RunNotFound, UsageError
from hpcenv.hostlist import fold_hostlist
from hpcenv.project.acceptance import Review
from hpcenv.project.lockfile import Lockfile
from hpcenv.project.workspace import find_lockfile, read_lockfile
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import Verdict
from hpcenv.reproduction.attainable import Attainable
from hpcenv.reproduction.bundle.unpacked import prove_published
from hpcenv.reproduction.compare import RunComparison
from hpcenv.reproduction.cost import Cost
from hpcenv.reproduction.measured import Measured, read_measured
from hpcenv.reproduction.proofs import StatementProof, prove_lockfile, prove_run
from hpcenv.reproduction.run_record import RunRecord, record_of
from hpcenv.reproduction.rungs import Rung
from hpcenv.runs.find import find_run
from hpcenv.text import Shown

# The largest number of fields of a rejected run that an error names.
_NAMED = 5

ReproductionVerdict = Literal[
    "proved", "not-proved", "planned", "reproduced-bitwise", "reproduced-within", "not-reproduced", "not-comparable"
]


@dataclass(frozen=True, kw_only=True)
class Target:
    """The run or the lockfile that is reproduced.

    Attributes:
        run: the run's folder; None for a lockfile alone, for which only `--rung 0` is possible.
        lockfile: path of the lockfile.
        record, measured, manifest: the record, the measured values and the manifest of the run.
        published: whether the files are the published files of a bundle; empty if the run is not an unpacked bundle.
    """

    name: str
    lockfile: Path
    run: RunFolder | None = None
    manifest: Manifest | None = None
    record: RunRecord | None = None
    measured: Measured = field(default_factory=Measured)
    published: tuple[StatementProof, ...] = ()

    def locked(self) -> Lockfile | None:
        """Return the lockfile; None if it cannot be read."""
        try:
            return read_lockfile(self.lockfile)
        except HpcenvError:
            return None

    def proofs(self) -> tuple[StatementProof, ...]:
        """Return what the files alone prove."""
        if self.run is None:
            return prove_lockfile(self.lockfile)
        return (*self.published, *prove_run(self.run, self.measured))


@dataclass(frozen=True, kw_only=True, repr=False)
class Reproduction(Shown):
    """The result of a reproduction: the verdict, and everything on which it is based.

    Attributes:
        headline: the verdict in one sentence.
        image: how the environment was obtained; empty with `--rung 0`.
        asks: the project's requests to this machine; None with `--rung 0`.
        expected: the best agreement that can be expected, with reasons.
        run, run_folder: the new run and its folder; empty and None without a new run.
        outcome: how the new run ended.
        notes: options that were left out, code that differs, and the like.
    """

    target: str
    rung: Rung
    verdict: ReproductionVerdict
    headline: str
    proofs: tuple[StatementProof, ...]
    cost: Cost
    image: str = ""
    asks: Review | None = None
    expected: Attainable | None = None
    run: str = ""
    run_folder: Path | None = None
    outcome: str = ""
    comparison: RunComparison | None = None
    notes: tuple[str, ...] = ()


def find_target(start: Path, word: str, *, runs: str | None = None, compared: bool = False) -> Target:
    """Return the run or the lockfile that `word` names.

    `word` is a run folder, the name or job id of a run, the path of a lockfile (also in a run folder), or its name.

    Args:
        compared: whether the files of the folder were compared with the archive of a bundle a moment ago.

    Raises:
        BundleInvalid: the folder is an unpacked bundle, and one of its files was changed.
        UsageError: the file is neither a lockfile nor in a run folder.
        RunNotFound, RecordInvalid, LockfileMissing: the run or the lockfile does not exist, or cannot be read.
    """
    path = Path(os.path.abspath(start / word))
    if path.is_file():
        if path.suffix != ".toml":
            raise UsageError(
                f"`{word}` is neither a lockfile nor a run folder",
                why="only a folder has the files of a run",
                hint="name the run folder",
            )
        if path.name == RunFolder(path.parent).lockfile.name and RunFolder(path.parent).manifest.is_file():
            return _target_of(path.parent, compared=compared)
        return Target(name=path.name, lockfile=path)
    if RunFolder(path).manifest.is_file():
        return _target_of(path, compared=compared)
    try:
        return _target_of(find_run(start, word, runs=runs).folder.path, compared=compared)
    except RunNotFound:
        lockfile = _lockfile_named(start, word)
        if lockfile is None:
            raise
        return Target(name=word, lockfile=lockfile)


def _lockfile_named(start: Path, word: str) -> Path | None:
    try:
        path = find_lockfile(start, word)
    except HpcenvError:
        return None
    return path if path.is_file() else None


def _target_of(folder: Path, *, compared: bool) -> Target:
    run = RunFolder(folder)
    published = prove_published(folder, compared=compared)
    measured = read_measured(run)
    manifest = load_record(Manifest, run.manifest)
    record = record_of(run, measured)
    return Target(
        name=manifest.run, lockfile=run.lockfile, run=run, manifest=manifest, record=record, measured=measured,
        published=published,
    )  # fmt: skip


def proved(target: Target, proofs: tuple[StatementProof, ...], cost: Cost) -> Reproduction:
    """Return the result of `--rung 0`."""
    wrong = [one for one in proofs if one.result == "differs"]
    unknown = [one for one in proofs if one.result == "unknown"]
    good = len(proofs) - len(wrong) - len(unknown)
    if wrong:
        headline = f"not proved: {wrong[0].what}: {wrong[0].why}"
    else:
        headline = f"proved from the files: {good} of {len(proofs)} statements; unknown here: {len(unknown)}"
    return Reproduction(
        target=target.name,
        rung=0,
        verdict="not-proved" if wrong else "proved",
        headline=headline,
        proofs=proofs,
        cost=cost,
    )


def why_rejected(folder: Path) -> tuple[str, ...]:
    """Return why the gate rejected a run: a line for each field that did not match; empty if the reason is unknown."""
    try:
        verdict = load_record(Verdict, RunFolder(folder).verdict)
    except RecordInvalid:
        return ()
    nodes: dict[tuple[str, str, str], list[str]] = {}
    for one in verdict.findings:
        if one.severity == "must" and one.result != "match":
            nodes.setdefault((one.field, one.locked, one.found), []).append(one.node)
    lines = [
        f"{fold_hostlist(names)}: {field}: locked {left}, found {right}"
        for (field, left, right), names in nodes.items()
    ]
    more = [f"and {len(lines) - _NAMED} more fields"] if len(lines) > _NAMED else []
    return (*lines[:_NAMED], *more)


def verdict_of(comparison: RunComparison, expected: Attainable, rung: Rung) -> tuple[ReproductionVerdict, str]:
    """Return the verdict of a reproduction, and a sentence with the result and the most likely reason."""
    part = "" if rung == 3 else f" in the first steps (rung {rung})"
    if expected.best == "nothing":
        why = f"; it is another experiment: {expected.reasons[0]}"
    elif expected.best == "within" and comparison.verdict != "equal":
        why = f"; the last bit was not to be expected: {expected.reasons[0]}"
    else:
        why = ""
    if comparison.verdict == "equal":
        return "reproduced-bitwise", f"reproduced, bitwise{part}: {comparison.headline}{why}"
    if comparison.verdict == "within":
        return "reproduced-within", f"reproduced within the tolerance{part}: {comparison.headline}{why}"
    if not why and all(cause.likelihood == "unlikely" for cause in comparison.causes):
        why = "; nothing that is recorded of the two runs explains it"
    return "not-reproduced", f"not reproduced{part}: {comparison.headline}{why}"
