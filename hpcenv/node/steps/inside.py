"""The steps `inside` and `inside-judge`: checks inside the environment, after the verdict (`--preflight full`).

Runs on: COMPUTE NODE.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcenv.node.check import verdict_table
from hpcenv.node.manifest import open_manifest
from hpcenv.node.preflight import inside
from hpcenv.node.preflight import judge as preflight
from hpcenv.node.steps.this_step import SECONDS_FOR_FILES, end_in_order, exit_status, find_place
from hpcenv.records.files import load_record, save_record
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import Verdict


def check_inside(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Run the checks inside the environment of this node. Ends with 0 whatever was found: the judge step judges."""
    end_in_order()
    manifest = open_manifest(run, environ)
    place = find_place(run, manifest, environ)
    path = run.checks_of(inside.FAMILY, place.node)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_record(inside.run(manifest, place, environ), path)
    return 0


def judge_inside(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Add what the checks inside the environments found to the verdict.

    Returns 0 when training may start, 90 when a check failed, 91 when it could not be told.
    """
    manifest = open_manifest(run, environ)
    place = find_place(run, manifest, environ)
    before = load_record(Verdict, run.verdict)
    nodes = before.launched or place.nodes
    found = inside.reports(manifest, nodes, wait=SECONDS_FOR_FILES)
    verdict = preflight.add_reports(before, manifest, nodes, {inside.FAMILY: found})
    save_record(verdict, run.verdict)
    print(verdict_table.render(verdict, lockfile=manifest.lockfile, settings=False), flush=True)
    return exit_status(verdict)
