"""Results of smoke tests that are kept for later jobs on the same nodes.

Runs on: COMPUTE NODE (the batch node). Standard library only. A result holds for the nodes, their boots and drivers,
the image and the settings of the network. The folder is the user's; what is in it is read as data from somebody else.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hpcenv.errors import RecordInvalid
from hpcenv.records.codec import decode_record, encode_record
from hpcenv.records.files import open_regular, write_text
from hpcenv.records.smoke import SmokePlan, SmokeResult

# A link can break while its nodes keep running. Judgement: once a day the test is worth its seconds.
_SECONDS_KEPT = 24 * 3600.0
_MOST_BYTES = 1 << 20
_MOST_FILES = 512


def find(plan: SmokePlan, *, now: float) -> SmokeResult | None:
    """Return a kept result that holds for this plan; None without one.

    Args:
        plan: of this attempt.
        now: the time, in seconds since the epoch.
    """
    if not (plan.key and plan.kept and plan.reuse):
        return None
    folder = Path(plan.kept)
    try:
        kept = _read(folder, _name(plan.key))
    except (OSError, RecordInvalid, UnicodeDecodeError):
        return None
    wanted = {node.name: (node.boot_id, node.driver) for node in plan.nodes}
    boots = {name: (boot, kept.drivers.get(name, "")) for name, boot in kept.boots.items()}
    age = now - kept.tested
    if kept.key != plan.key or kept.result != "match" or boots != wanted or not 0 <= age <= _SECONDS_KEPT:
        return None
    return replace(kept, run=plan.run, attempt=plan.attempt, kept_from=kept.kept_from or kept.run)


def keep(result: SmokeResult, plan: SmokePlan) -> None:
    """Keep a result for later jobs, if nothing was wrong and it is of this run.

    Raises:
        OSError: it could not be written.
    """
    if not plan.kept or not result.key or result.result != "match" or result.kept_from:
        return
    folder = Path(plan.kept)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_own(folder):
        return
    write_text(encode_record(result), folder / _name(result.key), mode=0o600)
    for old in _oldest(folder):
        old.unlink(missing_ok=True)


def _name(key: str) -> str:
    return f"{key}.json"


def _read(folder: Path, name: str) -> SmokeResult:
    """Return the record in a file.

    Raises:
        OSError: it cannot be read, or folder or file are not only the user's to write.
        RecordInvalid: it is no such record.
    """
    if not _is_own(folder):
        raise PermissionError(f"{folder} is not only yours")
    with open(open_regular(folder / name), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & 0o022 or status.st_size > _MOST_BYTES:
            raise PermissionError(f"{folder / name} is not only yours, or too large")
        text = file.read(_MOST_BYTES).decode("utf-8")
    return decode_record(SmokeResult, text, origin=str(folder / name))


def _is_own(folder: Path) -> bool:
    status = os.lstat(folder)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _oldest(folder: Path) -> Iterator[Path]:
    """Yield the files beyond the limit, the oldest first."""
    files = sorted((entry.stat(follow_symlinks=False).st_mtime, entry.path) for entry in os.scandir(folder))
    for _, path in files[: max(0, len(files) - _MOST_FILES)]:
        yield Path(path)
