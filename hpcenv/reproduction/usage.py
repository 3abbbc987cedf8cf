"""What runs cost: GPU hours requested, used and idle, energy of the GPUs, and hours that failed runs lost.

Runs on: LOGIN NODE. The numbers come from the run folders. For a run whose folder was removed, Slurm's accounting still
has the requested hours.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hpcenv.cluster.accounting import AccountedJob, jobs_since
from hpcenv.errors import HpcenvError
from hpcenv.incontainer.provenance import newest_checkpoint
from hpcenv.records.files import read_file, read_lines
from hpcenv.records.run_folder import RunFolder
from hpcenv.reproduction.attempt_record import AttemptRecord, read_attempts
from hpcenv.runs.attempts import read_record
from hpcenv.runs.entries import Entry, Sweep
from hpcenv.runs.find import list_runs, runs_folder
from hpcenv.text import Shown

By = Literal["run", "lockfile", "partition"]
_NOT_FAILED = ("completed", "cancelled", "stopped and queued again", "has not ended")
_STATES_OF_FAILURE = ("failed", "timeout", "node-fail", "out-of-memory")


@dataclass(frozen=True, kw_only=True)
class UsageRow:
    """What the runs of one row cost. All hours are GPU hours. A number is None if it is unknown.

    Attributes:
        name: name of the run, fingerprint of the lockfile, or name of the partition; `unknown` if this is not known.
        asked: GPU hours of the jobs: the hours of each job times its number of GPUs.
        used, idle: the parts of `asked` in which the GPUs were in use or idle, from the samples.
        unknown: the part of `asked` for which there is no sample.
        energy: energy of the GPUs alone, in joules. This energy covers `energy_hours` of the hours.
        failed: how many of the runs failed.
        lost: hours of failed runs after their last checkpoint.
        without_hours: number of runs that are not in `asked`, because their time or their number of GPUs is unknown.
        without_checkpoint: number of failed runs that are not in `lost`, because hpcenv knows no checkpoint of these
            runs.
        gone: number of runs whose folder was removed.
    """

    name: str
    runs: int = 1
    asked: float | None = None
    used: float | None = None
    idle: float | None = None
    unknown: float | None = None
    energy: float | None = None
    energy_hours: float | None = None
    failed: int = 0
    lost: float | None = None
    without_hours: int = 0
    without_checkpoint: int = 0
    gone: int = 0


@dataclass(frozen=True, kw_only=True, repr=False)
class Usage(Shown):
    """The cost of all runs that began after a given time.

    Attributes:
        since: time in seconds since the epoch. Only attempts that began at this time or later are counted.
        rows: the rows, the row with most GPU hours first.
        no_accounting: why sacct did not answer. Without sacct, jobs whose folder was removed are missing.
    """

    since: float
    by: By
    rows: tuple[UsageRow, ...]
    total: UsageRow
    no_accounting: str = ""


# Index, use, power and energy of one GPU in a sample (`records/samples.py`). Only these values are read, because
# decoding the whole record takes ten times as long.
_Look = tuple[int, "float | None", "float | None", "float | None"]


def read_usage(
    start: Path, *, environ: Mapping[str, str], since: float, by: By = "run", runs: str | None = None
) -> Usage:
    """Return what the runs of a project cost.

    Args:
        start: current folder; the project is searched in this folder and the folders above it.
        environ: environment variables, for sacct.
        since: time in seconds since the epoch. Only attempts and jobs that began at this time or later are
            counted.
        by: whether a row stands for a run, a lockfile or a partition.
        runs: folder of runs; None for the project's folder of runs.

    Raises:
        RunNotFound: there is no project.
    """
    parent = runs_folder(start, runs)
    try:
        jobs, problem = jobs_since(since, environ), ""
    except HpcenvError as error:
        jobs, problem = (), error.what
    below = os.path.realpath(parent)
    own = [job for job in jobs if Path(os.path.realpath(job.folder)).is_relative_to(below)]
    found, recorded = [], set()
    for folder in _folders(list_runs(parent)):
        attempts = tuple(one for one in read_attempts(folder) if one.began >= since)
        if attempts:
            recorded |= {one.job_id for one in attempts}
            found.append(_of_run(folder, attempts, own, parent, by))
    found += _of_jobs([job for job in own if job.job_id not in recorded], parent, by)
    names = dict.fromkeys(row.name for row in found)
    rows = [_sum(name, [row for row in found if row.name == name]) for name in names] if by != "run" else found
    rows.sort(key=lambda row: (-(row.asked or 0.0), row.name))
    return Usage(since=since, by=by, rows=tuple(rows), total=_sum("all", found), no_accounting=problem)


def _folders(entries: Iterable[Entry]) -> Iterator[RunFolder]:
    for entry in entries:
        if isinstance(entry, Sweep):
            yield from (one.folder for one in entry.elements)
        else:
            yield entry.folder


def _sum(name: str, rows: Sequence[UsageRow]) -> UsageRow:
    def known(values: Iterable[float | None]) -> float | None:
        numbers = [value for value in values if value is not None]
        return math.fsum(numbers) if numbers else None

    hours = ("asked", "used", "idle", "unknown", "energy", "energy_hours", "lost")
    counts = ("runs", "failed", "without_hours", "without_checkpoint", "gone")
    sums: dict[str, Any] = {one: known(getattr(row, one) for row in rows) for one in hours}
    sums |= {one: sum(getattr(row, one) for row in rows) for one in counts}
    return UsageRow(name=name, **sums)


# -- runs with a folder -------------------------------------------------------------------


def _of_run(
    folder: RunFolder, attempts: Sequence[AttemptRecord], jobs: Sequence[AccountedJob], parent: Path, by: By
) -> UsageRow:
    manifest = read_record(folder.manifest) or {}
    last = [job for job in jobs if job.job_id == attempts[-1].job_id][-1:]
    name = os.path.relpath(folder.path, parent)
    if by == "lockfile":
        name = str(manifest.get("fingerprint") or "unknown")
    elif by == "partition":
        name = last[0].partition if last else _partition(folder)
    outcome = attempts[-1].outcome
    failed = outcome not in _NOT_FAILED
    if outcome == "has not ended" and last:
        failed = last[0].state in _STATES_OF_FAILURE
    asked = _hours(manifest, attempts, jobs, after=0.0)
    saved = _last_checkpoint(folder) if failed else None
    lost = None if saved is None else _hours(manifest, attempts, jobs, after=saved)
    row = UsageRow(
        name=name,
        asked=asked,
        failed=int(failed),
        lost=lost,
        without_hours=int(asked is None),
        without_checkpoint=int(failed and lost is None),
    )
    return _with_samples(row, folder, {one.attempt for one in attempts})


def _hours(
    manifest: Mapping[str, Any], attempts: Sequence[AttemptRecord], jobs: Sequence[AccountedJob], *, after: float
) -> float | None:
    """Return the GPU hours of attempts after a time; None if an attempt's end, or the number of GPUs, is unknown."""
    gpus, hours = manifest.get("gpus_per_node"), 0.0
    if type(gpus) is not int:
        return None
    for one in attempts:
        ended = one.ended
        if ended is None:
            # The batch script was killed, or still runs. Slurm starts the script some seconds after the job.
            own = [job for job in jobs if job.job_id == one.job_id]
            job = min(own, key=lambda job: abs(job.started - one.began), default=None)
            if job is None:
                return None
            ended = job.started + job.seconds
        hours += len(one.nodes) * max(0.0, ended - max(one.began, after)) * gpus / 3600
    return hours


def _last_checkpoint(folder: RunFolder) -> float | None:
    newest = newest_checkpoint(folder.checkpoints)
    try:
        return None if newest is None else newest.lstat().st_mtime
    except OSError:
        return None


def _partition(folder: RunFolder) -> str:
    """Return the partition that the batch script names. For the default partition the script has no such line."""
    try:
        text = read_file(folder.script, follow=False).decode(errors="replace")
    except OSError:
        return "unknown"
    found = re.search(r"^#SBATCH --partition=(\S+)", text, re.MULTILINE)
    return found[1] if found else "unknown"


# -- samples ------------------------------------------------------------------------------


def _with_samples(row: UsageRow, folder: RunFolder, attempts: Iterable[int]) -> UsageRow:
    """Return the row of one run with the numbers from its samples added."""
    used, idle, joules, seconds = 0.0, 0.0, 0.0, 0.0
    for attempt in attempts:
        for path in folder.samples_of(attempt, "x").parent.glob("*.jsonl"):
            before: dict[int, float] = {}
            for length, gpus in _samples(path):
                for index, use, power, energy in gpus:
                    if use is not None:
                        used, idle = used + length * use / 100, idle + length * (1 - use / 100)
                    taken = _joules(before.get(index), energy, power, length)
                    if taken is not None:
                        joules, seconds = joules + taken, seconds + length
                    if energy is not None:
                        before[index] = energy
    sampled = (used + idle) / 3600
    unknown = None if row.asked is None else max(0.0, row.asked - sampled)
    row = replace(row, unknown=unknown)
    if seconds:
        row = replace(row, energy=joules, energy_hours=seconds / 3600)
    return replace(row, used=used / 3600, idle=idle / 3600) if sampled else row


def _joules(before: float | None, energy: float | None, power: float | None, seconds: float) -> float | None:
    """Return the energy of a GPU in a sample, from its energy counter; without a usable counter, from its power."""
    if before is not None and energy is not None and energy >= before:
        return energy - before
    return None if power is None else power * seconds


def _samples(path: Path) -> Iterator[tuple[float, list[_Look]]]:
    with suppress(OSError):
        for line in read_lines(path):
            # If a line has no line end, it is still being written, or its node was lost.
            with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
                data = json.loads(line)
                gpus = [_look(gpu) for gpu in data.get("gpus", ())]
                yield float(data["seconds"]), gpus


def _look(gpu: Mapping[str, Any]) -> _Look:
    return int(gpu["index"]), _number(gpu.get("use")), _number(gpu.get("power")), _number(gpu.get("energy"))


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


# -- jobs without a record ----------------------------------------------------------------


def _of_jobs(jobs: Sequence[AccountedJob], parent: Path, by: By) -> Iterator[UsageRow]:
    """Yield a row for each job that no run folder records, with the numbers of sacct for all its starts."""
    for job_id, job in {job.job_id: job for job in jobs}.items():
        starts = [(one.gpus or 0) * one.seconds for one in jobs if one.job_id == job_id]
        asked = None if job.gpus is None else sum(starts) / 3600
        folder = os.path.relpath(os.path.realpath(job.folder), os.path.realpath(parent))
        failed = job.state in _STATES_OF_FAILURE
        names = {"run": f"{folder} (job {job_id})", "lockfile": "unknown", "partition": job.partition or "unknown"}
        yield UsageRow(
            name=names[by],
            asked=asked,
            unknown=asked,
            failed=int(failed),
            without_hours=int(asked is None),
            without_checkpoint=int(failed),
            gone=int(not os.path.lexists(job.folder)),
        )
