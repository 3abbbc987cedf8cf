"""The smoke test on the batch node: make its plan, and decide from the reports of all nodes.

Runs on: COMPUTE NODE (the batch node). Standard library only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpcenv.errors import RecordInvalid
from hpcenv.judge.checks.check_results import add_reports
from hpcenv.judge.smoke import smoke_text
from hpcenv.judge.smoke.judge import judge, needs_pairs
from hpcenv.judge.smoke.plan import make_plan
from hpcenv.machine.this_node import ThisNode
from hpcenv.records.checks import CheckOutcome, CheckReport, NodeChecks
from hpcenv.records.codec import SCHEMA
from hpcenv.records.facts import Facts
from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.smoke import SmokePlan, SmokeReport, SmokeResult
from hpcenv.records.verdict import NodeSettings, Verdict


@dataclass(frozen=True, kw_only=True)
class Concluded:
    """The conclusion from the reports.

    Attributes:
        before: the verdict before the test.
        verdict: the verdict with the findings of the test; None if there are no findings to add yet.
        lines: lines for the job's log.
    """

    before: Verdict
    verdict: Verdict | None
    lines: tuple[str, ...]


def prepare(
    manifest: Manifest,
    run: RunFolder,
    verdict: Verdict,
    facts: Mapping[str, Facts],
    *,
    job_id: str,
    now: float,
) -> Concluded:
    """Write the plan of the test, or its result if the test cannot run.

    Args:
        manifest: manifest of the run, which requests a smoke test.
        run: folder of the run, which has the settings of the nodes.
        verdict: verdict of this attempt; it allows the training to start.
        facts: node -> its facts.
        job_id: id of this job.
        now: the time, in seconds since the epoch.

    Raises:
        RecordInvalid: the settings of a node cannot be read.
        OSError: the plan cannot be written.
    """
    assert manifest.smoke is not None
    settings = {name: load_record(NodeSettings, run.env_of(name)) for name in verdict.launched}
    plan = make_plan(manifest, manifest.smoke, verdict, settings, facts, job_id=job_id)
    if plan is not None:
        save_record(plan, run.smoke_plan)
        return Concluded(before=verdict, verdict=None, lines=())
    changed, result = _judged(manifest, verdict, _without_port(verdict, now))
    save_record(result, run.smoke_result)
    save_record(changed, run.verdict)
    return Concluded(before=verdict, verdict=changed, lines=(smoke_text.render(result),))


def _without_port(verdict: Verdict, now: float) -> SmokeResult:
    missing = CheckOutcome(
        id="smoke.init", state="unknown", found="the first node found no free TCP port for the test's rendezvous"
    )
    nothing = NodeChecks()
    first = NodeChecks.of([missing], seconds=0.0)
    return SmokeResult(
        schema=SCHEMA,
        run=verdict.run,
        attempt=verdict.attempt,
        result="unknown",
        tested=now,
        checks=dict.fromkeys(verdict.launched, nothing) | {verdict.launched[0]: first},
    )


def conclude(manifest: Manifest, this_node: ThisNode, *, wait: float, now: float) -> Concluded:
    """Combine the reports of all nodes; write the result and, if there are findings, a new verdict.

    If pairs of nodes must be tested first, only the folder for the pairs is made. The batch script tests pairs if this
    folder exists.

    Args:
        manifest: of the run.
        this_node: the batch node and this attempt.
        wait: seconds to wait for a missing file, because a network file system may show a new file late.
        now: the time, in seconds since the epoch.

    Raises:
        RecordInvalid: there is no plan or verdict.
        OSError: the result cannot be written.
    """
    run = RunFolder(Path(manifest.run_folder))
    plan = load_record(SmokePlan, run.smoke_plan)
    verdict = load_record(Verdict, run.verdict)
    reports = _reports(run, plan, this_node, pairs=False, wait=wait)
    tested_pairs = run.smoke_pairs.exists()
    if not tested_pairs and needs_pairs(plan, reports):
        run.smoke_pairs.mkdir()
        line = "hpcenv smoke test: it failed; pairs of nodes are tested to find out where"
        return Concluded(before=verdict, verdict=None, lines=(line,))
    pairs = _reports(run, plan, this_node, pairs=True, wait=0.0) if tested_pairs else {}
    result = judge(plan, reports, pairs, now=now)
    changed, result = _judged(manifest, verdict, result)
    save_record(result, run.smoke_result)
    save_record(changed, run.verdict)
    return Concluded(before=verdict, verdict=changed, lines=(smoke_text.render(result),))


def _reports(
    run: RunFolder, plan: SmokePlan, this_node: ThisNode, *, pairs: bool, wait: float
) -> dict[str, SmokeReport]:
    """Return the reports of this attempt that can be read."""
    found: dict[str, SmokeReport] = {}
    deadline = time.monotonic() + wait
    for node in plan.nodes:
        while node.name not in found:
            try:
                report = load_record(SmokeReport, run.smoke_of(node.name, pairs=pairs))
            except RecordInvalid as error:
                if not isinstance(error.__cause__, FileNotFoundError) or time.monotonic() > deadline:
                    break
                time.sleep(0.2)
                continue
            if (report.run, report.node, report.attempt) != (plan.run, node.name, this_node.attempt):
                break
            found[node.name] = report
    return found


def _judged(manifest: Manifest, verdict: Verdict, result: SmokeResult) -> tuple[Verdict, SmokeResult]:
    """Return the verdict and the result after the checks; if a check failed, the run does not start. Pure."""
    reports = [
        CheckReport(schema=SCHEMA, run=verdict.run, node=name, attempt=verdict.attempt, checks=checks)
        for name, checks in result.checks.items()
    ]
    judged = add_reports(verdict, manifest, verdict.launched, {"smoke": reports})
    result = replace(result, result=judged.result)
    note = f"smoke test: {smoke_text.headline(result)}"
    return replace(judged, notes=(*judged.notes, note)), result
