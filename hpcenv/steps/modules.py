"""The step `modules`: record what the environment modules of the job set for its ranks.

Runs on: COMPUTE NODE (the batch node). steps/modules.sh loads the modules and calls this step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from hpcenv.container import modules
from hpcenv.container.manifest import open_manifest
from hpcenv.errors import NodesUnknown
from hpcenv.records.files import save_record
from hpcenv.records.run_folder import RunFolder


def keep_effects(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Read from standard input what steps/modules.sh has recorded, and keep the part that concerns the ranks.

    The environment itself is never written to a file, because it may contain credentials.

    Raises:
        NodesUnknown: a module was not loaded.
    """
    manifest = open_manifest(run, environ)
    loaded = modules.read_report(sys.stdin.read())
    failed = next((module.name for module in loaded if module.has_failed), "")
    if failed:
        raise NodesUnknown(
            f"node {environ.get('SLURMD_NODENAME') or os.uname().nodename} cannot load the module {failed}",
            why="`module load` changed nothing",
            hint="look at `modules` in the site profile; --site none submits without it",
        )
    in_container = manifest.environment.kind == "sif"
    save_record(modules.effects_of(loaded, in_container=in_container), run.modules)
    return 0
