"""The step `task`: the training on this node.

Runs on: COMPUTE NODE.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcenv.node.launch import launch
from hpcenv.node.manifest import open_manifest
from hpcenv.node.steps.this_step import find_place, say
from hpcenv.records.run_folder import RunFolder


def task(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Launch the training of this run on this node; return its exit status."""
    manifest = open_manifest(run, environ)
    return launch.launch(manifest, find_place(run, manifest, environ), environ, say=say)
