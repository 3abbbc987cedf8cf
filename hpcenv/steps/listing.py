"""`hpcenv list`: every run of a project in one line. Runs on: LOGIN NODE.

One call of squeue and one of sacct for all of them, and the small records of each run
folder: manifests, which are long, are not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcenv.adapters import slurm
from hpcenv.errors import UsageError
from hpcenv.steps.runs import Damaged, RunState, Submitted, Sweep, Unrecorded, find, list_runs, read_states, runs_folder
from hpcenv.steps.unrecorded import read_unrecorded

Entry = Submitted | Sweep | Unrecorded | Damaged


@dataclass(frozen=True, kw_only=True)
class RunLine:
    """A run, or a sweep of runs, in one line.

    Attributes:
        job_id: of the array job for a sweep.
        state, detail, exit_status, attempt, elapsed: see `RunState`; of a sweep the state
            that asks for most attention.
        nodes: how many; None where that is not known.
        submitted: seconds since the epoch; None where that is not known.
        elements: how many runs of a sweep are in each state; empty for one run.
        values: of a run of a sweep: name -> its value.
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


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Lines of a list, the newest run first, and how many there would be without a limit.

    Attributes:
        names: of a sweep, in the order in which they were given.
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
    limit: int | None = None,
) -> Listing:
    """Return the runs of a project, or of a sweep.

    Args:
        start: where the user is.
        sweep: list the runs of this sweep.
        runs: another folder of runs than the project's.
        states: only runs in one of these states.
        limit: at most so many; None for all.

    Raises:
        RunNotFound: no project, or no such sweep.
        UsageError: there is no such state.
    """
    _require_states(states)
    found = None if sweep is None else find(start, sweep, runs=runs)
    if found is None:
        folder = runs_folder(start, runs)
        entries = list_runs(folder)
    else:
        folder = found.folder if isinstance(found, Sweep) else found.folder.path
        entries = [*found.elements] if isinstance(found, Sweep) else [found]
    values, names = (found.values, found.names) if isinstance(found, Sweep) else ({}, ())
    shown = entries[:limit] if limit is not None and not states else entries
    lines = lines_of(shown, environ, within=folder, values=values)
    if not states:
        return Listing(folder=folder, runs=lines, total=len(entries), names=names)
    lines = tuple(line for line in lines if _is_one_of(line, states))
    return Listing(folder=folder, runs=lines if limit is None else lines[:limit], total=len(lines), names=names)


# What RunState.state can be.
STATES = (
    *("pending", "running", "completing", "suspended", "requeued", "completed", "failed", "rejected", "not-queued"),
    *("cancelled", "timeout", "preempted", "node-fail", "out-of-memory", "unknown"),
)


def _require_states(states: Sequence[str]) -> None:
    for state in states:
        if state not in STATES:
            raise UsageError(f"`--state {state}` is no state of a run", hint=f"one of {', '.join(STATES)}")


def _is_one_of(line: RunLine, states: Sequence[str]) -> bool:
    return any(state in states for state in (line.elements or (line.state,)))


def lines_of(
    entries: Sequence[Entry],
    environ: Mapping[str, str],
    *,
    within: Path,
    values: Mapping[str, dict[str, str]] | None = None,
) -> tuple[RunLine, ...]:
    """Return the lines of some run folders; Slurm is asked once for all of them.

    Args:
        within: their names are told relative to this folder.
        values: of runs of a sweep: name of the folder -> its values.
    """
    asked: list[Submitted] = []
    unrecorded = [entry for entry in entries if isinstance(entry, Unrecorded)]
    for entry in entries:
        if not isinstance(entry, (Damaged, Unrecorded)):
            asked.extend(entry.elements if isinstance(entry, Sweep) else (entry,))
    states = dict(zip((run.folder.path for run in asked), read_states(asked, environ), strict=True))
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
    )


def _name(path: Path, within: Path) -> str:
    return str(path.relative_to(within)) if path != within and path.is_relative_to(within) else path.name


def _sweep_line(sweep: Sweep, states: Mapping[Path, RunState], within: Path) -> RunLine:
    counts = Counter(states[element.folder.path].state for element in sweep.elements)
    # What goes on before what went wrong, and that before what went well.
    active = [state for state in counts if state not in slurm.ENDED and state not in ("unknown", "rejected")]
    order = ("running", *active, "rejected", "failed", *sorted(counts), "completed")
    wrong = [state for state in counts if state != "completed"]
    state = next(state for state in order if state in counts and (state in wrong or not wrong))
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
        elements=dict(counts),
    )
