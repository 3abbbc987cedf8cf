"""The smoke test on the batch node: plan the test before its ranks start, and judge their reports.

Runs on: COMPUTE NODE (the batch node).
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from hpcenv.container.manifest import open_manifest
from hpcenv.judge import verdict_table
from hpcenv.records.facts import Facts
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import Verdict
from hpcenv.smoke import conclude
from hpcenv.steps.this_step import SECONDS_FOR_FILES, exit_status, find_place


def plan(
    manifest: Manifest, run: RunFolder, verdict: Verdict, reported: Mapping[str, Facts], *, job_id: str
) -> Verdict:
    """Plan the smoke test unless an earlier result for these nodes is still valid; return the current verdict."""
    planned = conclude.prepare(manifest, run, verdict, reported, job_id=job_id, now=time.time())
    return _say_concluded(planned, manifest)


def smoke_judge(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Combine the reports of all nodes on the smoke test; a failure changes the verdict.

    Returns 0 if the training may start, or if pairs must be tested first; 90 or 91 if it must not start.
    """
    manifest = open_manifest(run, environ)
    place = find_place(run, manifest, environ)
    concluded = conclude.conclude(manifest, place, wait=SECONDS_FOR_FILES, now=time.time())
    return exit_status(_say_concluded(concluded, manifest))


def _say_concluded(concluded: conclude.Concluded, manifest: Manifest) -> Verdict:
    """Print the result of the smoke test; return the current verdict."""
    for line in concluded.lines:
        print(line, flush=True)
    verdict = concluded.verdict or concluded.before
    if verdict.result != concluded.before.result:
        print(verdict_table.brief(verdict, lockfile=manifest.lockfile), flush=True)
    return verdict
