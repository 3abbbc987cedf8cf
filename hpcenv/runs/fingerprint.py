"""The fingerprint of a run's lockfile: the short name of the environment that the run had.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from hpcenv.errors import RecordInvalid
from hpcenv.project import toml_files
from hpcenv.records.run_folder import RunFolder


def read_fingerprint(folder: RunFolder) -> str:
    """Return the fingerprint in the copy of the lockfile that the run keeps; empty if it cannot be read."""
    try:
        found = toml_files.read(folder.lockfile, error=RecordInvalid).get("fingerprint")
    except RecordInvalid:
        return ""
    return found if isinstance(found, str) else ""
