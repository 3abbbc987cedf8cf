"""Read the manifest of a run, and refuse a manifest that does not belong to the run folder.

Runs on: COMPUTE NODE. Every step of a job reads the manifest first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpcenv.container import site_values
from hpcenv.errors import RecordInvalid
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.modules import ModuleEffects
from hpcenv.records.run_folder import RunFolder


def open_manifest(run: RunFolder, environ: Mapping[str, str]) -> Manifest:
    """Return the manifest of `run`, and add the values that only this node knows.

    Args:
        environ: environment variables of this step.

    Raises:
        RecordInvalid: the manifest cannot be read or has no node, or its folder was copied or moved.
    """
    manifest = load_record(Manifest, run.manifest)
    if not _is_same(manifest.run_folder, str(run.path)):
        # Without this check, a step could read the verdict from one folder and the settings from another folder.
        raise RecordInvalid(
            f"`{run.manifest}` is the manifest of another run folder",
            why=f"it was made for {manifest.run_folder}",
            hint="do not copy or move the folder of a run that has not ended; submit again",
        )
    for name in ("nodes", "nproc_per_node"):
        if getattr(manifest, name) < 1:
            raise RecordInvalid(f"`{run.manifest}`: `Manifest.{name}` is {getattr(manifest, name)}, expected 1 or more")
    return _completed(manifest, run, environ)


def _completed(manifest: Manifest, run: RunFolder, environ: Mapping[str, str]) -> Manifest:
    of_site = any(bind.origin for bind in manifest.environment.binds)
    if not manifest.modules and not of_site and not any(setting.expands for setting in manifest.settings):
        return manifest
    effects = load_record(ModuleEffects, run.modules) if manifest.modules and os.path.exists(run.modules) else None
    return site_values.complete(manifest, effects, environ)


def _is_same(first: str, second: str) -> bool:
    """Return whether two paths lead to the same folder; a site may have two names for one folder."""
    try:
        return os.path.samefile(first, second)
    except OSError:
        return False
