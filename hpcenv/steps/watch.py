"""The step `watch`: the process that watches this node while its ranks run; the launch step starts it.

Runs on: COMPUTE NODE.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from hpcenv.container.manifest import open_manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.steps.this_step import find_place, launched_nodes
from hpcenv.watch.main import watch_node
from hpcenv.watch.watched_node import WatchedNode


def watch(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Watch this node until standard input is closed; return 0."""
    manifest = open_manifest(run, environ)
    if manifest.watch is not None:
        place = find_place(run, manifest, environ)
        # Spare nodes that are not used, and nodes that spare nodes replace, send no answers and no samples.
        place = replace(place, nodes=launched_nodes(run, place))
        watch_node(WatchedNode(manifest=manifest, this_node=place, launch=os.getppid(), options=manifest.watch))
    return 0
