"""The options of the start hook of every rank, as one environment variable.

Runs on: COMPUTE NODE. Standard library only. incontainer/start_hook/session.py reads this variable.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder

_VARIABLE = "HPCENV_START_HOOK"


# Folder for the error files of ranks that the user's program starts. This folder is in the folder of the node's ranks.
ERRORS = "errors"


def is_needed(manifest: Manifest) -> bool:
    """Return whether the ranks of a run have something to apply, record or count."""
    recording = manifest.recording
    records = recording.metrics or recording.stop_after_steps > 0 or recording.trace_last > 0
    watches = records or manifest.gpus_per_node > 0 or manifest.watch is not None
    strict = manifest.determinism
    return watches or strict.profile != "off" or strict.seeds or manifest.launch.launcher == "none"


def variables(manifest: Manifest, *, node: str, cpus: Sequence[str] = (), watch: str = "") -> dict[str, str]:
    """Return the variable with the options of the start hook; empty if the ranks run without the hook. Pure.

    Args:
        manifest: manifest of the run.
        node: name of the node.
        cpus: for each local rank, the CPUs to which the rank is bound; empty text for a rank that is not bound.
        watch: path at which the ranks see the folder for their pulses; empty if the ranks are not watched.
    """
    if manifest.launch.launcher == "ray":
        return {}  # each worker process of Ray would get the variable, but no worker is a rank when it starts
    if not manifest.start_hook_sha256 or not (is_needed(manifest) or any(cpus)):
        return {}
    options: dict[str, object] = {
        "profile": manifest.determinism.profile,
        "seed": manifest.determinism.seed,
        "seeds": manifest.determinism.seeds,
        "variables": manifest.determinism.variables,
        "record": manifest.recording.metrics,
        "hash_parameters_every": manifest.recording.hash_parameters_every,
        "stop_after_steps": manifest.recording.stop_after_steps,
    }
    if manifest.recording.trace_last:
        options["trace_steps"] = [manifest.recording.trace_first, manifest.recording.trace_last]
    if manifest.gpus_per_node:
        options["gpus"] = True
    if any(cpus):
        options["cpus"] = list(cpus)
    if watch:
        options["watch"] = watch
    if manifest.launch.launcher == "none":
        options["errors"] = str(RunFolder(Path(manifest.run_folder)).ranks / node / ERRORS)
    return {_VARIABLE: json.dumps(options, sort_keys=True)}
