"""The step `check`: what this node finds.

Runs on: COMPUTE NODE.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcenv.node.check import facts
from hpcenv.node.check.probe_source import probe_source
from hpcenv.node.container import proved_sif
from hpcenv.node.manifest import open_manifest
from hpcenv.node.steps.this_step import end_in_order, find_place
from hpcenv.records.files import save_record
from hpcenv.records.run_folder import RunFolder


def check(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Write this node's facts. Ends with 0 whatever was found: the decide step judges."""
    end_in_order()
    manifest = open_manifest(run, environ)
    place = find_place(run, manifest, environ)
    tasks: list[int | None] = [None]
    if manifest.launch.launcher == "srun":
        tasks = list(range(manifest.nproc_per_node))
    with proved_sif.telling([proved_sif.address_of(manifest.run, place, task) for task in tasks]) as tell:
        on_proved = tell if manifest.launch.beside_check else None
        found = facts.gather(manifest, place, environ, probe=probe_source(), on_proved=on_proved)
        save_record(found, run.facts_of(place.node))
    return 0
