"""Files that a script has created or changed in the run's own copy of the project.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from hpcenv.errors import RecordInvalid
from hpcenv.identity import code
from hpcenv.records.code_listing import BYTECODE, CopyAfterAttempt, Listing
from hpcenv.records.files import load_record
from hpcenv.records.run_folder import RunFolder

_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Files that were added to the copy of the project after it was made.

    Attributes:
        names: the first few names, relative to the run folder.
        count: number of all such files.
        size: size of all such files, in bytes.
        changed: copied files that the script has changed, as recorded at the end of the last attempt.
    """

    names: tuple[str, ...] = ()
    count: int = 0
    size: int = 0
    changed: tuple[str, ...] = ()


def read_outputs(run: RunFolder) -> Outputs | None:
    """Return the files that a script has left in the copy; None if there is no copy, or if it cannot be read."""
    try:
        listed = load_record(Listing, run.listing)
        made = [(path, entry) for path, entry in code.extras(listed, run) if BYTECODE not in path.split("/")]
        files = [(path, entry) for path, entry in made if not entry.is_dir(follow_symlinks=False)]
        size = sum(entry.stat(follow_symlinks=False).st_size for _, entry in files)
        after = load_record(CopyAfterAttempt, run.listing_after) if os.path.lexists(run.listing_after) else None
    except (OSError, RecordInvalid):
        return None
    changed = () if after is None else tuple(path for path in after.changed if path in listed.files)
    names = tuple(path for path, _ in files[:_SHOWN])
    return Outputs(names=names, count=len(files), size=size, changed=changed[:_SHOWN])
