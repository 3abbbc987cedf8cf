"""One line of `hpcenv list`, with values from the records of its run: arguments, commit, fingerprint, last metrics.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpcenv.errors import RecordInvalid
from hpcenv.launch.run_variables import commit_of
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Source
from hpcenv.records.metrics import read_last
from hpcenv.records.run_folder import RunFolder
from hpcenv.runs.fingerprint import read_fingerprint


@dataclass(frozen=True, kw_only=True)
class RunLine:
    """One line of the list: a run, or a sweep.

    Attributes:
        job_id: for a sweep, the id of the array job.
        state, detail, exit_status, attempt, elapsed: see `RunState`. The state of a sweep is the state of those runs
            that need most attention.
        nodes: number of nodes; None if the value is unknown.
        submitted: time of the submission, in seconds since the epoch; None if the value is unknown.
        elements: for a sweep, state -> number of runs in this state; empty for a single run.
        values: for a run of a sweep, parameter name -> value.
        kind: `session`, `verification` (`hpcenv verify --nodes`) or `training`; empty if the value is unknown.
        commit: commit of the code, as in `hpcenv.training.environment()`; empty if the value is unknown, or not read.
        fingerprint: fingerprint of the lockfile; empty if the value is unknown, or not read.
        arguments: name of an argument of the script -> its text (`arguments_of`); empty for a sweep, or if not read.
        metrics: name of a metric -> last value that the run recorded; empty for a sweep, or if not read.
    """

    run: str
    run_folder: Path
    job_id: str = ""
    cluster: str = ""
    state: str
    detail: str = ""
    exit_status: int | None = None
    nodes: int | None = None
    attempt: int = 0
    elapsed: str = ""
    submitted: float | None = None
    elements: dict[str, int] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    kind: str = ""
    commit: str = ""
    fingerprint: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _ManifestPart:
    """The part of a manifest that is read. A whole `Manifest` takes ten times as long: it checks all packages."""

    args: tuple[str, ...] = ()
    element: dict[str, str] = field(default_factory=dict)
    fingerprint: str = ""
    source: Source | None = None


def with_records(line: RunLine) -> RunLine:
    """Add to a line what the records of its run say. For a sweep, add only the fingerprint."""
    folder = RunFolder(line.run_folder)
    if line.elements:
        return replace(line, fingerprint=fingerprint_of(folder))
    part = _read(folder)
    return replace(
        line,
        commit=commit_of(part.source),
        fingerprint=part.fingerprint or read_fingerprint(folder),
        # An argument that the script got has priority. A value of the sweep is added if it is only a part of another
        # argument.
        arguments={**part.element, **arguments_of(part.args)},
        metrics=read_last(folder),
    )


def fingerprint_of(folder: RunFolder) -> str:
    """Return the fingerprint of the lockfile of a run or sweep; empty if it is unknown."""
    return _read(folder).fingerprint or read_fingerprint(folder)


def _read(folder: RunFolder) -> _ManifestPart:
    try:
        return load_record(_ManifestPart, folder.manifest)
    except RecordInvalid:
        return _ManifestPart()


_OPTION = re.compile(r"--?([A-Za-z][^=\s]*)(?:=(.*))?", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_+~][\w.@/+-]*)=(.*)", re.DOTALL)


def arguments_of(words: Sequence[str]) -> dict[str, str]:
    """Return the named arguments of a command line: name without dashes -> text. The last use of a name counts.

    `--NAME=VALUE`, `--NAME VALUE` and `NAME=VALUE` have a value. A `--NAME` before another option, or at the end, has
    the value `true`. hpcenv does not know the script's options, so a word after a switch is taken as its value.
    """
    found: dict[str, str] = {}
    waiting = ""
    for word in words:
        match = _OPTION.fullmatch(word) or (None if waiting else _ASSIGNMENT.fullmatch(word))
        if match is not None:
            found[match[1]] = "true" if match[2] is None else match[2]
        elif waiting and word != "--":
            found[waiting] = word
        waiting = match[1] if match is not None and match[2] is None else ""
    return found
