"""The steps `stage-look`, `stage-send` and `stage-keep`: copies on the nodes' own disks.

Runs on: COMPUTE NODE.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcenv.container.manifest import open_manifest
from hpcenv.identity.stage import stage
from hpcenv.records.files import save_record
from hpcenv.records.run_folder import RunFolder
from hpcenv.steps.this_step import end_in_order, find_place


def look(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Record which files this node already has on its disk, and for which files the disk has space."""
    end_in_order()

    manifest = open_manifest(run, environ)
    place = find_place(run, manifest, environ)
    save_record(stage.look(manifest, place, environ), run.looked_of(place.node))
    return 0


def send(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Send the files that most nodes lack. Ends with 1 if no keep step is needed, because every node has all copies."""
    manifest = open_manifest(run, environ)
    return 0 if stage.send(manifest, run, find_place(run, manifest, environ), environ) else 1


def keep(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Check the copies that arrived on this node, and record them."""
    end_in_order()

    manifest = open_manifest(run, environ)
    place = find_place(run, manifest, environ)
    save_record(stage.keep(manifest, run, place), run.staged_of(place.node))
    return 0
