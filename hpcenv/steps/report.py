"""`hpcenv report`: what became of a run, its first failure first. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcenv import wire
from hpcenv.errors import RecordInvalid
from hpcenv.model.failure import FirstFailure, first_failure
from hpcenv.node import table
from hpcenv.steps.listing import RunLine, lines_of
from hpcenv.steps.runs import (
    Run,
    RunStatus,
    Sweep,
    down_of,
    find,
    link_of,
    problem_of_element,
    read_finished,
    read_status,
    read_statuses,
    stopped_before_training,
)
from hpcenv.wire import Manifest, NodeExit, RunFolder, Verdict

# Attempts that are told one by one, the newest of them.
_MOST_ATTEMPTS = 50


@dataclass(frozen=True, kw_only=True)
class EarlierFailure:
    """What went wrong first in an attempt that a later one has set aside, or will.

    Attributes:
        link: which job of a chain it was, in words; empty of what is no chain.
    """

    attempt: str
    failure: FirstFailure
    link: str = ""


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """A run's story.

    Attributes:
        failure: what went wrong first; None where nothing is known to have gone wrong.
        earlier: the same of earlier attempts, the first one first.
        status: where it stands.
        table: the verdict as text, empty before there is one.
        last_lines: the end of the log.
    """

    failure: FirstFailure | None
    earlier: tuple[EarlierFailure, ...]
    status: RunStatus
    manifest: Manifest
    table: str
    last_lines: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the run ended well; a run that goes on has not."""
        return self.status.state == "completed" and self.status.exit_status == 0


@dataclass(frozen=True, kw_only=True)
class SweepReport:
    """The story of a sweep or array.

    Attributes:
        sweep: all of it in one line.
        runs: a line for each of its runs, with its values.
        failures: run -> what went wrong first, of those that did not end well.
        names: what the runs differ in, in the order in which it was given; empty for an array.
        problems: runs of which nothing can be told, and why.
    """

    sweep: RunLine
    runs: tuple[RunLine, ...]
    failures: dict[str, FirstFailure]
    names: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all of its runs ended well."""
        return not self.problems and all(run.state == "completed" and run.exit_status in (0, None) for run in self.runs)


def report(
    start: Path, word: str | None, *, environ: Mapping[str, str], runs: str | None = None, lines: int = 10
) -> RunReport | SweepReport:
    """Return the report of a run or of a sweep.

    Args:
        lines: how much of the log's end to include.

    Raises:
        RunNotFound, RecordInvalid: see `steps.runs.find_run`.
    """
    found = find(start, word, runs=runs)
    return _of_sweep(found, environ) if isinstance(found, Sweep) else _of_run(found, environ, lines)


def _of_run(run: Run, environ: Mapping[str, str], lines: int) -> RunReport:
    status = read_status(run, environ)
    return RunReport(
        failure=status.failure,
        earlier=_earlier(run, status),
        status=status,
        manifest=run.manifest,
        table="" if status.verdict is None else table.render(status.verdict, lockfile=run.manifest.lockfile),
        last_lines=_last_lines(run.folder.log, lines),
    )


def _of_sweep(sweep: Sweep, environ: Mapping[str, str]) -> SweepReport:
    whole = lines_of([sweep], environ, within=sweep.folder.parent)[0]
    rows = lines_of(sweep.elements, environ, within=sweep.folder, values=sweep.values)
    wrong = [n for n, row in enumerate(rows) if row.state != "completed" or row.exit_status not in (0, None)]
    statuses = read_statuses([sweep.elements[n] for n in wrong], environ) if wrong else []
    told = {rows[n].run: status.failure for n, status in zip(wrong, statuses, strict=True)}
    return SweepReport(
        sweep=whole,
        runs=rows,
        failures={run: failure for run, failure in told.items() if failure is not None},
        names=sweep.names,
        problems=tuple(_problems(sweep)),
    )


def _problems(sweep: Sweep) -> Iterator[str]:
    if sweep.record is None:
        yield f"`{RunFolder(sweep.folder).sweep}` cannot be read: which runs there are, and their values, is not known"
        return
    known = {element.folder.path.name for element in sweep.elements}
    for element in sweep.record.elements:
        if element.folder not in known:
            yield f"{element.folder}: {problem_of_element(sweep.folder / element.folder)}"


# -- attempts before this one -------------------------------------------------------------


def _earlier(run: Run, status: RunStatus) -> tuple[EarlierFailure, ...]:
    """Return what went wrong first in each attempt that is over while the job is not."""
    folders = [(path.name, RunFolder(path)) for path in _attempts(run.folder)]
    if status.waits_again:
        folders.append((str(status.attempt), run.folder))
    return tuple(
        EarlierFailure(attempt=name, failure=failure, link=link_of(run, folder))
        for name, folder in folders
        if (failure := _failure_in(folder, run.manifest)) is not None
    )


def _attempts(folder: RunFolder) -> list[Path]:
    try:
        names = [path for path in folder.attempts.iterdir() if path.name.replace(".", "").isdecimal()]
    except OSError:
        return []
    return sorted(names, key=lambda path: [int(part) for part in path.name.split(".") if part])[-_MOST_ATTEMPTS:]


def _failure_in(attempt: RunFolder, manifest: Manifest) -> FirstFailure | None:
    """Return what went wrong first in one attempt: of what Slurm said then nothing is kept but its own files."""
    stopped = stopped_before_training(read_finished(attempt))
    if stopped:
        return first_failure((), nodes=(), nproc=manifest.nproc_per_node, stopped=stopped)
    verdict = _read(Verdict, attempt.verdict)
    if verdict is None or verdict.result != "match" or not manifest.script:
        return None
    nodes = verdict.launched or tuple(node.node for node in verdict.nodes)
    exits = tuple(record for node in nodes if (record := _read(NodeExit, attempt.exit_of(node))) is not None)
    return first_failure(exits, nodes=nodes, nproc=manifest.nproc_per_node, down=down_of(attempt))


def _read(kind: type[wire.Record], path: Path) -> wire.Record | None:
    try:
        return wire.read(kind, path)
    except RecordInvalid:
        return None


# -- the log ------------------------------------------------------------------------------

# Enough for some hundred lines; a log may have gigabytes.
_TAIL_BYTES = 256 * 1024


def _last_lines(log: Path, count: int) -> tuple[str, ...]:
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ()
    lines = text.removesuffix("\n").split("\n") if text else []
    return tuple(lines[max(0, len(lines) - count) :])
