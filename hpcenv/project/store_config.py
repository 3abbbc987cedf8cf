"""The folder of images, as data. `hpcenv.image.store` opens it.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcenv.records.frozen import Frozen


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StorePlace(Frozen):
    """The folder of a store, and the users who are trusted to own it; see `open_store`."""

    root: Path
    trusted_owners: tuple[str, ...] = ()
    shared: bool = False


def default_store(environ: Mapping[str, str], cache: Path) -> tuple[Path, str]:
    """Return the folder of images that is used where nothing names one, and why it is this one.

    Homes are small on most clusters, and images are not, so $SCRATCH comes before them where a site sets it. A store
    that exists already stays in use. What a site deletes from its scratch file system can be made again from the
    lockfile.

    Args:
        environ: the user's environment.
        cache: hpcenv's folder of files that it can compute again.
    """
    usual, scratch = cache / "store", environ.get("SCRATCH", "")
    if usual.is_dir():
        return usual, "it exists already"
    if scratch.startswith("/") and os.path.isdir(scratch) and os.access(scratch, os.W_OK | os.X_OK):
        return Path(scratch, "hpcenv", "store"), "SCRATCH is set; homes are small on most clusters"
    why = f"SCRATCH is {scratch!r}, which is no folder that you can write to" if scratch else "SCRATCH is not set"
    return usual, why
