"""The step `check`: what this node finds.

Runs on: COMPUTE NODE.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcenv.node.check import facts
from hpcenv.node.check.probe_source import probe_source
from hpcenv.node.manifest import open_manifest
from hpcenv.node.steps.this_step import end_in_order, find_place
from hpcenv.records.files import save_record
from hpcenv.records.run_folder import RunFolder


def check(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Write this node's facts. Ends with 0 whatever was found: the decide step judges."""
    end_in_order()
    manifest = open_manifest(run, environ)
    place = find_place(run, manifest, environ)
    save_record(facts.gather(manifest, place, environ, probe=probe_source()), run.facts_of(place.node))
    return 0
