"""The step `task`: the training on this node.

Runs on: COMPUTE NODE.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcenv.container.manifest import open_manifest
from hpcenv.launch import launch
from hpcenv.records.run_folder import RunFolder
from hpcenv.steps.this_step import find_place, say


def task(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Launch the training of this run on this node; return its exit status."""
    manifest = open_manifest(run, environ)
    place = find_place(run, manifest, environ)
    if manifest.session is None:
        return launch.launch(manifest, place, environ, say=say)
    from hpcenv.sessions.door import beside_launch  # slow to load, and only a session needs it

    with beside_launch(manifest, run, place):
        return launch.launch(manifest, place, environ, say=say)
