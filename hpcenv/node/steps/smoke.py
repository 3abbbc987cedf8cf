"""The smoke test, before the training: the steps on all nodes, and those on the batch node that judge.

Runs on: COMPUTE NODE.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping

from hpcenv.node.check import verdict_table
from hpcenv.node.manifest import open_manifest
from hpcenv.node.smoke import conclude
from hpcenv.node.smoke import run as smoke
from hpcenv.node.steps.this_step import REQUESTS, SECONDS_FOR_FILES, exit_status, find_place
from hpcenv.records.facts import Facts
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.smoke import SmokeReport
from hpcenv.records.verdict import Verdict


def plan(
    manifest: Manifest, run: RunFolder, verdict: Verdict, reported: Mapping[str, Facts], *, job_id: str
) -> Verdict:
    """Plan the smoke test where none on these nodes holds still; return the verdict that holds now."""
    planned = conclude.prepare(manifest, run, verdict, reported, job_id=job_id, now=time.time())
    return _say_concluded(planned, manifest)


def smoke_test(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Run the smoke test on this node. Ends with 0 whatever was found: the judge step judges."""
    return _status_of(_smoke(run, environ))


def smoke_pairs(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Test pairs of nodes, with this node in some of them."""
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


def smoke_judge(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Join what all nodes saw in the smoke test; a failure changes the verdict.

    Returns 0 when training may start, or when pairs have to be tested first; 90 or 91 when it may not.
    """
    manifest = open_manifest(run, environ)
    place = find_place(run, manifest, environ)
    concluded = conclude.conclude(manifest, place, wait=SECONDS_FOR_FILES, now=time.time())
    return exit_status(_say_concluded(concluded, manifest))


def _say_concluded(concluded: conclude.Concluded, manifest: Manifest) -> Verdict:
    """Print what the smoke test gave; return the verdict that holds now."""
    for line in concluded.lines:
        print(line, flush=True)
    verdict = concluded.verdict or concluded.before
    if verdict.result != concluded.before.result:
        print(verdict_table.render(verdict, lockfile=manifest.lockfile), flush=True)
    return verdict
