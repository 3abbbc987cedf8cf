"""`hpcenv list`: one line for each run of a project.

Runs on: LOGIN NODE. It needs one call of squeue and sacct for all runs, and the small records in
each run folder. Manifests, which are long, are not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcenv.cluster import slurm
from hpcenv.errors import UsageError
from hpcenv.records.run_folder import RunFolder
from hpcenv.runs.entries import Damaged, Entry, Submitted, Sweep, Unrecorded
from hpcenv.runs.find import find, list_runs, runs_folder
from hpcenv.runs.fingerprint import read_fingerprint
from hpcenv.runs.state import RunState, read_states
from hpcenv.runs.unrecorded import read_unrecorded


@dataclass(frozen=True, kw_only=True)
class RunLine:
    """One line of the list: a run, or a sweep.

    Attributes:
        job_id: for a sweep, the id of the array job.
        state, detail, exit_status, attempt, elapsed: see `RunState`; for a sweep, the state that
            needs most attention.
        nodes: number of nodes; None if unknown.
        submitted: seconds since the epoch; None if unknown.
        elements: for a sweep, number of runs in each state; empty for one run.
        values: for a run of a sweep, parameter name -> value.
        kind: `session`, `verification` (`hpcenv verify --nodes`) or `training`; empty if unknown.
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


@dataclass(frozen=True, kw_only=True)
class RunListing:
    """Lines of the list, the newest run first.

    Attributes:
        folder: the folder of runs, or of the sweep.
        runs: the lines.
        total: number of lines without the limit.
        names: for a sweep, the parameter names in the given order.
    """

    folder: Path
    runs: tuple[RunLine, ...]
    total: int
    names: tuple[str, ...] = ()


def list_lines(
    start: Path,
    *,
    environ: Mapping[str, str],
    sweep: str | None = None,
    runs: str | None = None,
    states: Sequence[str] = (),
    fingerprint: str = "",
    limit: int | None = None,
) -> RunListing:
    """Return the runs of a project, or of a sweep.

    Args:
        start: current directory; the project is searched from here upwards.
        environ: environment variables, for the Slurm commands.
        sweep: name of a sweep, to list its runs.
        runs: folder of runs, if not the project's.
        states: list only runs in one of these states.
        fingerprint: list only runs and sweeps whose lockfile has this fingerprint.
        limit: maximum number of lines; None for all.

    Raises:
        RunNotFound: no project, or no such sweep.
        UsageError: a state does not exist.
    """
    _require_states(states)
    entry = None if sweep is None else find(start, sweep, runs=runs)
    if entry is None:
        folder = runs_folder(start, runs)
        entries = list_runs(folder)
    else:
        folder = entry.folder if isinstance(entry, Sweep) else entry.folder.path
        entries = [*entry.elements] if isinstance(entry, Sweep) else [entry]
    values, names = (entry.values, entry.names) if isinstance(entry, Sweep) else ({}, ())
    if fingerprint:
        entries = [entry for entry in entries if _fingerprint_of(entry) == fingerprint]
    shown = entries[:limit] if limit is not None and not states else entries
    lines = lines_of(shown, environ, within=folder, values=values)
    if not states:
        return RunListing(folder=folder, runs=lines, total=len(entries), names=names)
    lines = tuple(line for line in lines if _is_one_of(line, states))
    return RunListing(folder=folder, runs=lines if limit is None else lines[:limit], total=len(lines), names=names)


def _fingerprint_of(entry: Entry) -> str:
    return read_fingerprint(RunFolder(entry.folder) if isinstance(entry, Sweep) else entry.folder)


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
    """Return the lines of some entries, with one query to Slurm for all.

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
    # Active runs come first, then failed ones; `completed` only if all have completed.
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
