"""Rows of a report about the origin of a run: bundle, site, Slurm, verdict of the check, hours, and dates.

Runs on: LOGIN NODE. All values come from existing records. A value that no record has is `unknown`.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path

from hpcenv.errors import HpcenvError, RecordInvalid
from hpcenv.judge.verdict_table import brief
from hpcenv.records.files import load_record, sha256_at
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.reproduction import explain_op_text
from hpcenv.reproduction.attempt_record import total
from hpcenv.reproduction.bundle.archive import SUMS
from hpcenv.reproduction.run_record import RunRecord
from hpcenv.reproduction.traced_pair import explain_pair, find_pair
from hpcenv.runs.attempts import read_verdict

_UNKNOWN = "unknown"
_SITE = "site profile "


def origin_rows(
    run: RunFolder, record: RunRecord, reference: RunFolder | None, now: float
) -> Iterator[tuple[str, str]]:
    """Yield name and value of each row.

    Args:
        reference: the folder of the run with which the run is compared; None without a comparison. If one of the two
            folders is an unpacked bundle, the row `Bundle` contains the digest of the bundle.
        now: the time of the report, in seconds since the epoch.
    """
    yield "Bundle", next(filter(None, map(_bundle, (run, *([] if reference is None else [reference])))), _UNKNOWN)
    yield "Site", ", ".join(_sites(run)) or _UNKNOWN
    yield "Slurm", ", ".join(sorted({str(one.values.get("host.slurm", _UNKNOWN)) for one in record.nodes})) or _UNKNOWN
    yield "Check", _check(run)
    yield "Hours", _hours(record)
    yield "Submitted", date_of(record.submitted) or _UNKNOWN
    yield "Date of this report", date_of(now)


def date_of(seconds: float) -> str:
    """Return a time as ISO 8601 in UTC; empty for a number that cannot be the time of a run."""
    if not 1e9 < seconds < 1e11:
        return ""
    return dt.datetime.fromtimestamp(seconds, tz=dt.timezone.utc).isoformat(timespec="seconds")


def explained_lines(start: Path, reference: str, run: str, runs: str | None) -> tuple[str, ...]:
    """Return the text of `compare --explain-op` for two runs that have traces; otherwise, why the text is unknown."""
    try:
        pair = find_pair(start, reference, run, runs=runs)
        if pair is None:
            return ("the runs are equal to the last bit",)
        if not pair.missing():
            return tuple(explain_op_text.render(explain_pair(start, pair)).splitlines())
        return (f"unknown: no trace of the steps {pair.steps}",)
    except HpcenvError as error:
        return (f"unknown: {error.what}",)


def _bundle(run: RunFolder) -> str:
    """Return the digest of an unpacked bundle; empty for another folder."""
    try:
        return f"sha256:{sha256_at(run.path / SUMS)} ({SUMS} in {run.path.name})"
    except OSError:
        return ""


def _sites(run: RunFolder) -> list[str]:
    """Return the site profiles that set a variable or a bind."""
    try:
        manifest = load_record(Manifest, run.manifest)
    except RecordInvalid:
        return []
    origins = [one.origin for one in manifest.settings] + [one.origin for one in manifest.environment.binds]
    return sorted({origin.removeprefix(_SITE) for origin in origins if origin.startswith(_SITE)})


def _check(run: RunFolder) -> str:
    verdict, why = read_verdict(run)
    if verdict is None:
        return f"{_UNKNOWN}: {why or 'no verdict'}"
    headline = brief(verdict, lockfile=run.lockfile.name).partition("\n\n")[0]
    return " ".join(headline.removeprefix("hpcenv verdict: ").split())


def _hours(record: RunRecord) -> str:
    """Return node, CPU and GPU hours over all attempts, each from its start to its end."""
    cpus = {node.node: node.values.get("host.cpus") for node in record.nodes}
    spans = [(one.nodes, None if one.ended is None else (one.ended - one.began) / 3600) for one in record.attempts]
    of_nodes = [None if hours is None else len(names) * hours for names, hours in spans]
    of_cpus = [
        None if hours is None or not isinstance(count := cpus.get(name), int) else count * hours
        for names, hours in spans
        for name in names
    ]
    found = {"node": total(of_nodes), "CPU": total(of_cpus), "GPU": record.gpu_hours}
    return ", ".join(f"{_UNKNOWN if hours is None else f'{hours:.2f}'} {kind} hours" for kind, hours in found.items())
