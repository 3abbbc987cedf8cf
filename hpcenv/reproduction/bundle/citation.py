"""CITATION.cff of a bundle: how to cite the run. Citation File Format 1.2.0 (doi:10.5281/zenodo.5171937). Pure."""

from __future__ import annotations

import datetime as dt
import json

from hpcenv.reproduction.run_record import RunRecord


def citation(record: RunRecord, authors: tuple[str, ...]) -> str:
    """Return the text of the file. Every value is written as a JSON string, because YAML accepts JSON strings.

    Args:
        authors: each as `Family, Given`, or as one name without a comma. Without authors, the file has a line to fill
            in.
    """
    names = authors or ("(name the authors)",)
    fingerprint = "" if record.lock is None else f", environment {record.lock.fingerprint}"
    lines = [
        "cff-version: 1.2.0",
        'message: "Cite this dataset as below."',
        "type: dataset",
        f"title: {json.dumps(f'Training run {record.run}{fingerprint}')}",
        f"date-released: {json.dumps(day_of(record.submitted))}",
        "authors:",
    ]
    for name in names:
        family, comma, given = name.partition(",")
        if comma:
            lines += [
                f"  - family-names: {json.dumps(family.strip())}",
                f"    given-names: {json.dumps(given.strip())}",
            ]
        else:
            lines.append(f"  - name: {json.dumps(name)}")
    if record.code.commit:
        lines.append(f"commit: {json.dumps(record.code.commit)}")
    return "\n".join(lines) + "\n"


def day_of(seconds: float) -> str:
    """Return the day of a time in seconds since the epoch, in UTC: `2026-11-23`."""
    return dt.datetime.fromtimestamp(seconds, tz=dt.timezone.utc).strftime("%Y-%m-%d")
