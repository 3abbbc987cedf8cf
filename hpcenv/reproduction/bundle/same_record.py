"""Check that record.json in a bundle, and its values in README.md and CITATION.cff, agree with the other files.

Runs on: LOGIN NODE. The record is made again from the other records and measured values in the bundle, in a temporary
folder. Only values are compared. Text (reasons, notes, and the words around the values) is not compared.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcenv.errors import BundleInvalid, RecordInvalid
from hpcenv.records.codec import encode_record
from hpcenv.reproduction.bundle import citation
from hpcenv.reproduction.bundle.archive import Archive
from hpcenv.reproduction.run_record import RunRecord, read_record

# Keys that are not compared: they have text, or facts about hpcenv itself.
_TEXT = frozenset(("notes", "recorded_with", "source", "unknown", "schema"))
# The keys of these tables are names from the run, so a missing key is a difference. In other tables, a key can be
# missing because an older hpcenv wrote the record.
_NAMED = frozenset(("environment", "determinism", "values"))
_LONGEST_TEXT = 1 << 20


def record_again(archive: Archive, without: Iterable[str]) -> RunRecord | str:
    """Return the record that is made from the files of a bundle, or why it cannot be made.

    Args:
        without: names of files that are not needed for the record.
    """
    left = set(without)
    with tempfile.TemporaryDirectory(prefix="hpcenv-bundle-") as folder:
        archive.extract(Path(folder), [name for name in archive.sums if name not in left])
        try:
            return read_record(Path(folder))
        except RecordInvalid as error:
            return error.what


def differences(text: bytes, again: RunRecord) -> tuple[tuple[str, ...], int]:
    """Return where record.json differs from the record that was made again, and how many metrics cannot be made again.

    Metrics from files of the training cannot be made again, because a bundle does not have these files.
    """
    made = json.loads(encode_record(again))
    try:
        stored = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        return ("it is no record",), 0
    if not isinstance(stored, dict) or not isinstance(stored.get("metrics"), list):
        return ("it is no record",), 0
    files = {"metrics", *(one["file"] for one in made["metrics"])}
    own = [one for one in stored["metrics"] if not isinstance(one, dict) or one.get("file") in files]
    unmade = len(stored["metrics"]) - len(own)
    return tuple(_differences({**stored, "metrics": own}, made, "", named=False)), unmade


def _differences(stored: Any, made: Any, path: str, *, named: bool) -> Iterator[str]:
    if isinstance(stored, dict) and isinstance(made, dict):
        missing = made.keys() - stored.keys() if named else set[str]()
        yield from sorted(f"{path}{key}" for key in (stored.keys() - made.keys()) | missing)
        for key in sorted(stored.keys() & made.keys()):
            if named or key not in _TEXT:
                inside = named or key in _NAMED
                yield from _differences(stored[key], made[key], f"{path}{key}.", named=inside)
    elif isinstance(stored, list) and isinstance(made, list) and len(stored) == len(made):
        for at, pair in enumerate(zip(stored, made, strict=True)):
            yield from _differences(*pair, f"{path}{at}.", named=False)
    elif stored != made or isinstance(stored, bool) is not isinstance(made, bool):
        yield path.rstrip(".")


def repeated(archive: Archive, name: str, again: RunRecord) -> tuple[str, ...]:
    """Return the values in README.md or CITATION.cff that are not the values of the run."""
    try:
        text = archive.read(name, most=_LONGEST_TEXT).decode("utf-8")
    except (BundleInvalid, UnicodeDecodeError):
        return ()
    shape, lock = again.shape, again.lock
    expected: Mapping[str, str] = {
        r"\b(hpc[0-9]+-[0-9a-z]+)\b": "" if lock is None else lock.fingerprint,
        r"^# Run (.*)$": again.run,
        r"^([0-9]+ nodes with [0-9]+ ranks)": f"{shape.nodes} nodes with {shape.world_size} ranks",
        r"^title: \"Training run (.*?)(?:, environment [^\"]*)?\"$": json.dumps(again.run)[1:-1],
        r"^date-released: \"(.*)\"$": citation.day_of(again.submitted),
        r"^commit: \"(.*)\"$": again.code.commit,
    }
    found = ((value, wanted) for rule, wanted in expected.items() for value in re.findall(rule, text, re.MULTILINE))
    return tuple(dict.fromkeys(value for value, wanted in found if value != wanted))
