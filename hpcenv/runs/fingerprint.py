"""The fingerprint of a run's lockfile: a short name for the environment of the run.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from hpcenv.errors import HpcenvError, LockfileInvalid
from hpcenv.project import toml_files
from hpcenv.project.workspace import lockfile_bytes
from hpcenv.records.run_folder import RunFolder


def read_fingerprint(folder: RunFolder) -> str:
    """Return the fingerprint in the run's copy of the lockfile; empty if the copy cannot be read."""
    try:
        content = lockfile_bytes(folder.lockfile)
        found = toml_files.loads(content, folder.lockfile, error=LockfileInvalid).get("fingerprint")
    except HpcenvError:
        return ""
    return found if isinstance(found, str) else ""
