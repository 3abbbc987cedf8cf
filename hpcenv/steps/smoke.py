"""The smoke test, before the training: the steps on all nodes.

Runs on: COMPUTE NODE.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

from hpcenv.container.manifest import open_manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.smoke import SmokeReport
from hpcenv.smoke import run as smoke
from hpcenv.steps.this_step import REQUESTS, find_place


def smoke_test(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Run the smoke test on this node. The exit status does not show the result: the judge step judges it."""
    return _status_of(_smoke(run, environ))


def smoke_pairs(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Test the pairs of nodes that this node belongs to."""
    return _status_of(_smoke(run, environ, pairs=True))


def _smoke(run: RunFolder, environ: Mapping[str, str], *, pairs: bool = False) -> SmokeReport:
    manifest = open_manifest(run, environ)
    return smoke.run(manifest, find_place(run, manifest, environ), environ, pairs=pairs)


def _status_of(report: SmokeReport) -> int:
    """Return the exit status of the step: 128 + the number of the signal that asked it to end, or 0."""
    if report.ended != "stopped":
        return 0
    number = next((n for n in REQUESTS if report.problem.endswith(n.name)), signal.SIGTERM)
    return 128 + number
