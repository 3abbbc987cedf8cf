"""Read a run's manifest, and refuse one that this run folder cannot be run by.

Runs on: COMPUTE NODE. Every step begins here.
"""

from __future__ import annotations

import os

from hpcenv import wire
from hpcenv.errors import RecordInvalid
from hpcenv.wire import Manifest, RunFolder


def open_manifest(run: RunFolder) -> Manifest:
    """Return the manifest of `run`.

    Raises:
        RecordInvalid: unreadable, of a folder that was copied or moved, or without a node.
    """
    manifest = wire.read(Manifest, run.manifest)
    if not _is_same(manifest.run_folder, str(run.path)):
        # Steps would read one folder's verdict and another one's settings.
        raise RecordInvalid(
            f"`{run.manifest}` is the manifest of another run folder",
            why=f"it was made for {manifest.run_folder}",
            hint="do not copy or move run folders that shall still run; submit again",
        )
    for name in ("nodes", "nproc_per_node"):
        if getattr(manifest, name) < 1:
            raise RecordInvalid(f"`{run.manifest}`: `Manifest.{name}` is {getattr(manifest, name)}, expected 1 or more")
    return manifest


def _is_same(one: str, other: str) -> bool:
    """Whether two paths lead to one folder; a site may know it by two names."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
