"""`hpcenv list`: one line for each run of a project.

Runs on: LOGIN NODE. One call of squeue and sacct is enough for all runs. Only small records are read in
each run folder. The long manifest of a run is read only if a condition, the sorting or a column needs a value in the
manifest.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcenv.cluster import slurm
from hpcenv.errors import Command, ToolMissing, UsageError
from hpcenv.records.run_folder import RunFolder
from hpcenv.runs.entries import Damaged, Entry, Submitted, Sweep, Unrecorded, runs_of
from hpcenv.runs.find import find, list_runs, runs_folder
from hpcenv.runs.run_columns import cell, find_names, full_names, in_order, read_condition
from hpcenv.runs.run_line import RunLine, fingerprint_of, with_records
from hpcenv.runs.state import RunState, read_states
from hpcenv.runs.unrecorded import read_unrecorded
from hpcenv.text import Shown


@dataclass(frozen=True, kw_only=True, repr=False)
class RunListing(Shown):
    """Lines of the list, the newest run first. Iteration over the object gives the lines.

    Attributes:
        folder: the folder of runs, or of the sweep.
        runs: the lines.
        total: number of lines without the limit.
        names: for a sweep, the parameter names in the given order.
        columns: heading -> full name of a column (`runs/run_columns.py`), for the requested columns in their order.
    """

    folder: Path
    runs: tuple[RunLine, ...]
    total: int
    names: tuple[str, ...] = ()
    columns: dict[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[RunLine]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame with a row for each line.

        Arguments are in columns `arg.NAME`, metrics in columns `metric.NAME`.

        Raises:
            ToolMissing: pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise ToolMissing(
                "pandas is not installed", why=str(error), hint=Command("python", "-m", "pip", "install", "pandas")
            ) from error
        known = full_names(self.runs)
        return pandas.DataFrame([[cell(line, full) for full in known] for line in self.runs], columns=list(known))


def list_lines(
    start: Path,
    *,
    environ: Mapping[str, str],
    sweep: str | None = None,
    runs: str | None = None,
    states: Sequence[str] = (),
    fingerprint: str = "",
    where: Sequence[str] = (),
    sort: str = "",
    columns: Sequence[str] = (),
    records: bool = False,
    each_run: bool = False,
    limit: int | None = None,
) -> RunListing:
    """Return the runs of a project, or of a sweep.

    Args:
        start: current directory. The project is in this folder or in a folder above.
        environ: environment variables, for the Slurm commands.
        sweep: name of a sweep, to list its runs.
        runs: folder of runs, if it is not the project's folder of runs.
        states: list only runs in one of these states.
        fingerprint: list only runs and sweeps whose lockfile has this fingerprint.
        where: list only runs that fulfil all of these conditions, for example `lr=3e-4`.
        sort: name of a column to sort by. `-` before the name means descending order. Empty means that the newest run
            is first.
        columns: names of columns to show.
        records: read arguments, commit, fingerprint and last metrics, too.
        each_run: read the same records, and give each run of a sweep its own line. `where`, `sort` and `columns` imply
            `each_run`.
        limit: maximum number of lines; None for all.

    Raises:
        RunNotFound: the folder belongs to no project, or there is no such sweep.
        UsageError: a state or column does not exist, or a condition is not valid.
    """
    _require_states(states)
    conditions = [read_condition(text) for text in where]
    key = sort.removeprefix("-")
    each_run = each_run or bool(where or sort or columns)
    entry = None if sweep is None else find(start, sweep, runs=runs)
    folder = runs_folder(start, runs) if entry is None else _folder_of(entry)
    entries = _entries(folder, entry, fingerprint, each_run=each_run)
    values, names = (entry.values, entry.names) if isinstance(entry, Sweep) else ({}, ())
    all_needed = limit is None or states or where or sort
    lines = lines_of(entries if all_needed else entries[:limit], environ, within=folder, values=values)
    if records or each_run:
        lines = tuple(map(with_records, lines))
    full = find_names((*(one.name for one in conditions), key, *columns), lines)
    chosen: Sequence[RunLine] = [
        line
        for line in lines
        if (not states or _is_one_of(line, states)) and all(one.chooses(line, full[one.name]) for one in conditions)
    ]
    if sort:
        chosen = in_order(chosen, full[key], descending=sort != key)
    return RunListing(
        folder=folder,
        runs=tuple(chosen[:limit]),
        total=len(chosen) if all_needed else len(entries),
        names=names,
        columns={name: full[name] for name in columns or full},
    )


def _folder_of(entry: Submitted | Sweep) -> Path:
    return entry.folder if isinstance(entry, Sweep) else entry.folder.path


def _entries(folder: Path, entry: Submitted | Sweep | None, fingerprint: str, *, each_run: bool) -> list[Entry]:
    """Return the runs of a sweep, or the entries of a folder.

    If `each_run` is set, the runs of a sweep replace the sweep.
    """
    found: list[Entry] = list_runs(folder) if entry is None else [*runs_of(entry)]
    if fingerprint:
        found = [one for one in found if _fingerprint_of(one) == fingerprint]
    return [run for one in found for run in (one.elements if each_run and isinstance(one, Sweep) else (one,))]


def _fingerprint_of(entry: Entry) -> str:
    return fingerprint_of(RunFolder(entry.folder) if isinstance(entry, Sweep) else entry.folder)


# Values of RunState.state.
STATES = (
    *("pending", "running", "completing", "suspended", "requeued", "completed", "failed", "rejected", "not-queued"),
    *("cancelled", "timeout", "preempted", "node-fail", "out-of-memory", "unknown"),
)


def _require_states(states: Sequence[str]) -> None:
    for state in states:
        if state not in STATES:
            raise UsageError(f"`--state {state}` is not a state of a run", hint=f"one of {', '.join(STATES)}")


def _is_one_of(line: RunLine, states: Sequence[str]) -> bool:
    return any(state in states for state in (line.elements or (line.state,)))


def lines_of(
    entries: Sequence[Entry],
    environ: Mapping[str, str],
    *,
    within: Path,
    values: Mapping[str, dict[str, str]] | None = None,
) -> tuple[RunLine, ...]:
    """Return the lines of some entries. Slurm is asked once for all entries.

    Args:
        entries: runs and sweeps.
        environ: environment variables, for the Slurm commands.
        within: names are shown relative to this folder.
        values: for runs of a sweep, folder name -> parameter values.
    """
    submitted: list[Submitted] = []
    unrecorded = [entry for entry in entries if isinstance(entry, Unrecorded)]
    for entry in entries:
        if not isinstance(entry, (Damaged, Unrecorded)):
            submitted.extend(entry.elements if isinstance(entry, Sweep) else (entry,))
    states = dict(zip((run.folder.path for run in submitted), read_states(submitted, environ), strict=True))
    if unrecorded:
        paths = (entry.folder.path for entry in unrecorded)
        states |= zip(paths, read_unrecorded(unrecorded, environ), strict=True)
    return tuple(_line(entry, states, within, values or {}) for entry in entries)


def _line(entry: Entry, states: Mapping[Path, RunState], within: Path, values: Mapping[str, dict[str, str]]) -> RunLine:
    if isinstance(entry, Damaged):
        path = entry.folder.path
        return RunLine(run=_name(path, within), run_folder=path, state="unknown", detail=entry.problem)
    if isinstance(entry, Sweep):
        return _sweep_line(entry, states, within)
    state, path = states[entry.folder.path], entry.folder.path
    if isinstance(entry, Unrecorded):
        return RunLine(
            run=_name(path, within),
            run_folder=path,
            cluster=entry.cluster,
            state=state.state,
            detail=state.detail,
            submitted=entry.changed,
        )
    return RunLine(
        run=_name(path, within),
        run_folder=path,
        job_id=entry.submission.job_id,
        cluster=entry.submission.cluster,
        state=state.state,
        detail=state.detail,
        exit_status=state.exit_status,
        nodes=len(state.nodes) or entry.submission.nodes or None,
        attempt=state.attempt,
        elapsed=state.elapsed,
        submitted=entry.submission.submitted,
        values=values.get(path.name, {}),
        kind="session" if entry.submission.session else "verification" if entry.submission.verifies else "training",
    )


def _name(path: Path, within: Path) -> str:
    return str(path.relative_to(within)) if path != within and path.is_relative_to(within) else path.name


def _sweep_line(sweep: Sweep, states: Mapping[Path, RunState], within: Path) -> RunLine:
    counts = Counter(states[element.folder.path].state for element in sweep.elements)
    # Active states have priority, then failures. A sweep is `completed` only if all its runs have completed.
    active = [state for state in counts if state not in slurm.ENDED and state not in ("unknown", "rejected")]
    order = ("running", *active, "rejected", "failed", *sorted(counts), "completed")
    others = [state for state in counts if state != "completed"]
    state = next(state for state in order if state in counts and (state in others or not others))
    first = sweep.elements[0].submission
    return RunLine(
        run=_name(sweep.folder, within),
        run_folder=sweep.folder,
        job_id=first.job_id.partition("_")[0],
        cluster=first.cluster,
        state=state,
        detail=", ".join(f"{count} {state}" for state, count in counts.most_common()),
        nodes=first.nodes or None,
        submitted=max(element.submission.submitted for element in sweep.elements),
        kind="training",
        elements=dict(counts),
    )
