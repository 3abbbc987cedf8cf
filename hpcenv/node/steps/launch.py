"""The steps `task` and `task-on-release`: the training on this node.

Runs on: COMPUTE NODE.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from hpcenv.node.launch import launch, starts
from hpcenv.node.manifest import open_manifest
from hpcenv.node.steps.this_step import find_place, say
from hpcenv.node.this_node import find_local_rank
from hpcenv.records.files import write_text
from hpcenv.records.run_folder import RunFolder


def task(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Launch the training of this run on this node; return its exit status."""
    manifest = open_manifest(run, environ)
    return launch.launch(manifest, find_place(run, manifest, environ), environ, say=say)


def task_on_release(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Launch the training of this run on this node when standard input says so; return its exit status."""
    manifest = open_manifest(run, environ)
    place = find_place(run, manifest, environ)
    first_task = not starts.starts_one_rank(manifest) or find_local_rank(environ, cluster=manifest.cluster) == 0
    if place.rank == 0 and first_task:
        # The batch script, on this node, sees by this file that the step has started.
        write_text(f"{place.node}\n", run.launch_waits, durable=False)
    return launch.launch(manifest, place, environ, say=say, release=sys.stdin.fileno())
