"""The step `check`: collect the facts of this node.

Runs on: COMPUTE NODE.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcenv.container.manifest import open_manifest
from hpcenv.container.probe_source import probe_source
from hpcenv.facts import facts
from hpcenv.records.files import save_record
from hpcenv.records.run_folder import RunFolder
from hpcenv.steps.this_step import end_in_order, find_place


def check(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Write this node's facts. The exit status is 0 even if problems were found: the decide step judges them."""
    end_in_order()
    manifest = open_manifest(run, environ)
    place = find_place(run, manifest, environ)
    save_record(facts.gather(manifest, place, environ, probe=probe_source()), run.facts_of(place.node))
    return 0
