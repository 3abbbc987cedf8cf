"""The steps `inside` and `inside-judge`: checks inside the environment, after the verdict (`--preflight full`).

This module also has the steps `gpus` and `gpus-judge`, which `verify --nodes` uses for the GPU check, because that
command starts no training.

Runs on: COMPUTE NODE.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcenv.container.manifest import open_manifest
from hpcenv.judge import verdict_table
from hpcenv.judge.checks import check_results
from hpcenv.launch import launch
from hpcenv.records.checks import CheckReport, NodeChecks
from hpcenv.records.codec import SCHEMA
from hpcenv.records.files import load_record, save_record
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import Verdict
from hpcenv.smoke import inside
from hpcenv.steps.this_step import SECONDS_FOR_FILES, end_in_order, exit_status, find_place, say

_GPUS = "gpus"


def check_inside(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Run the checks inside this node's environment.

    The status is always 0, because the judge step judges the results.
    """
    end_in_order()
    manifest = open_manifest(run, environ)
    place = find_place(run, manifest, environ)
    _save(run, inside.FAMILY, inside.run(manifest, place, environ))
    return 0


def try_gpus(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Let torch start CUDA or HIP on this node. The status is always 0, because the judge step judges the result."""
    manifest = open_manifest(run, environ)
    place = find_place(run, manifest, environ)
    outcome = launch.try_gpus(manifest, place, environ, say=say)
    checks = NodeChecks.of([outcome], seconds=outcome.seconds)
    report = CheckReport(schema=SCHEMA, run=manifest.run, node=place.node, attempt=place.attempt, checks=checks)
    _save(run, _GPUS, report)
    return 0


def _save(run: RunFolder, family: str, report: CheckReport) -> None:
    path = run.checks_of(family, report.node)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_record(report, path)


def judge_gpus(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Add to the verdict what torch saw on the nodes; return the same values as `judge_inside`."""
    return _judge(run, environ, _GPUS)


def judge_inside(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Add to the verdict what the checks inside the environments found.

    Returns 0 if the training may start, 90 if a check failed, 91 if a result is unknown.
    """
    return _judge(run, environ, inside.FAMILY)


def _judge(run: RunFolder, environ: Mapping[str, str], family: str) -> int:
    manifest = open_manifest(run, environ)
    place = find_place(run, manifest, environ)
    before = load_record(Verdict, run.verdict)
    nodes = before.launched or place.nodes
    found = inside.reports(manifest, nodes, family, wait=SECONDS_FOR_FILES)
    verdict = check_results.add_reports(before, manifest, nodes, {family: found})
    save_record(verdict, run.verdict)
    print(verdict_table.render(verdict, lockfile=manifest.lockfile, settings=False), flush=True)
    return exit_status(verdict)
