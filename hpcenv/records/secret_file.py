"""The file with the values of the `env:NAME` secrets of a run. Only the user who submitted the run can read this file.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only. Each run has its own file. The file is in the user's state
folder, because other users may be able to read the run folder. The file is written before the job is queued, read at
each launch, and removed when the run has ended. No message contains a value.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpcenv.records.files import open_regular

_SCHEMA = 1
_MOST_BYTES = 16 << 20


def path_of(state: Path, run_folder: str) -> Path:
    """Return the path of the file of a run.

    Args:
        state: hpcenv's folder in the user's state folder.
    """
    return _folder(state) / name_of(run_folder)


def _folder(state: Path) -> Path:
    return state / "secrets"


def name_of(run_folder: str) -> str:
    """Return the name of the file of a run."""
    return hashlib.sha256(os.fsencode(run_folder)).hexdigest()[:32] + ".json"


def write(state: Path, run_folder: str, values: Mapping[str, str]) -> None:
    """Write the values of a run, and remove the files of runs whose run folder does not exist any more.

    Raises:
        OSError: the file cannot be written.
    """
    path = path_of(state, run_folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.chmod(path.parent, 0o700)
    _remove_orphans(path.parent)
    aside = path.with_suffix(f".{os.getpid()}.new")
    text = json.dumps({"schema": _SCHEMA, "run_folder": run_folder, "values": dict(values)})
    try:
        # The file gets these permissions when it is created, before any value is written.
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _remove_orphans(folder: Path) -> None:
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if not os.path.lexists(_load(path)["run_folder"]):
                path.unlink()


def read(path: Path) -> dict[str, str]:
    """Return name -> value of the secrets in a file.

    Raises:
        OSError: the file does not exist, or other users could read or change it; `strerror` has the reason.
        ValueError: the file is damaged.
    """
    data = _load(path)
    try:
        return {str(name): str(value) for name, value in data["values"].items()}
    except (KeyError, AttributeError, TypeError):
        raise ValueError("it has no values") from None


def _load(path: Path) -> dict[str, Any]:
    with open(open_regular(path), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise OSError(errno.EPERM, "other users could read or change it", os.fspath(path))
        content = file.read(_MOST_BYTES)
    try:
        data = json.loads(content)
    except ValueError:
        # The parser's message may quote the file.
        raise ValueError("it is not JSON") from None
    if not isinstance(data, dict) or data.get("schema") != _SCHEMA:
        raise ValueError("it is not of this version of hpcenv")
    return data


def remove(state: Path, run_folders: Iterable[str]) -> None:
    """Remove the files of runs that have ended, if they exist."""
    try:
        present = set(os.listdir(_folder(state)))
    except OSError:
        return
    for run_folder in run_folders if present else ():
        name = name_of(run_folder)
        if name in present:
            with contextlib.suppress(OSError):
                (_folder(state) / name).unlink()
