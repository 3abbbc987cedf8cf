"""The results of the checks of a job, from the records of its run folder, as rows and as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcenv.project.severities import resolve
from hpcenv.records.checks import CheckOutcome, CheckReport, NodeChecks, PreflightSummary
from hpcenv.records.codec import SCHEMA
from hpcenv.records.facts import Facts, Network
from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import Manifest, PreflightOptions
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.smoke import SmokeResult
from hpcenv.records.verdict import Finding, NodeVerdict, Verdict
from hpcenv.survey.checked import CheckedMachines, of_job, render
from tests.run_folders import make_run

FILES = CheckOutcome(id="sys.nofile", state="fine", found="4096")
FULL = CheckOutcome(id="fs.full", state="failed", found="run folder /r: 0 MiB")


def _facts(node: str, *outcomes: CheckOutcome) -> Facts:
    checks = NodeChecks.of(outcomes, seconds=0.25)
    return Facts(
        schema=SCHEMA, run="r", node=node, attempt=0, network=Network(first_node="n1"), values={}, unknown={},
        checks=checks,
    )  # fmt: skip


def _verdict(*findings: Finding, **summary: tuple[str, ...]) -> Verdict:
    return Verdict(
        schema=SCHEMA, run="r", attempt=0, result="match", findings=findings, rendezvous=None, settings={},
        nodes=tuple(NodeVerdict(node=node, result="match", compared=1) for node in ("n1", "n2")),
        preflight=PreflightSummary(level="full", **summary),
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    options = PreflightOptions(level="full")
    return make_run(tmp_path, "r", preflight=options, severities=resolve({}, gpus=False), nodes=2)


def _checked(run: RunFolder, verdict: Verdict, *facts: Facts) -> CheckedMachines:
    return of_job(load_record(Manifest, run.manifest), verdict, facts)


def test_a_failure_comes_first_with_owner_and_remedy_and_equal_rows_stand_together(run: RunFolder) -> None:
    checked = _checked(run, _verdict(), _facts("n1", FILES), _facts("n2", FILES, FULL))
    assert checked.result == "mismatch"
    text = render(checked)
    lines = text.splitlines()
    assert lines[0] == "Preflight checks (full) of n[1-2], 0.25 s: 1 failed, 1 fine"
    assert lines[1].startswith("  FAILED  fs.full")
    assert "n2: run folder /r: 0 MiB; must be: at least 64 MiB" in " ".join(text.split())
    assert "must, [user] do:" in text
    assert [line for line in lines if "sys.nofile" in line] == ["  fine    sys.nofile           n[1-2]: 4096"]
    assert max(map(len, lines)) <= 80


def test_checks_after_the_verdict_are_those_of_this_attempt(run: RunFolder) -> None:
    shm = CheckOutcome(id="inside.shm", state="fine", found="64 MiB")
    for node, attempt in (("n1", 0), ("n2", 1)):
        path = run.checks_of("container", node)
        path.parent.mkdir(parents=True, exist_ok=True)
        checks = NodeChecks.of([shm], seconds=1.0)
        save_record(CheckReport(schema=SCHEMA, run="r", node=node, attempt=attempt, checks=checks), path)
    both = NodeChecks.of([CheckOutcome(id="smoke.init", state="fine", found="2 ranks")], seconds=1.0)
    result = SmokeResult(schema=SCHEMA, run="r", attempt=0, result="match", tested=1.0, checks={"n1": both, "n2": both})
    save_record(result, run.smoke_result)
    rows = _checked(run, _verdict(), _facts("n1"), _facts("n2")).rows
    assert [(row.node, row.id) for row in rows] == [("n1", "inside.shm"), ("n1", "smoke.init"), ("n2", "smoke.init")]


def test_a_node_that_reported_nothing_is_unknown_and_named(run: RunFolder) -> None:
    silent = Finding(node="n2", field="facts", locked="", found="no report", result="unknown", severity="must")
    checked = _checked(run, _verdict(silent), _facts("n1", FILES))
    assert checked.result == "unknown"
    assert "n2 reported nothing: no report" in render(checked)


def test_checks_over_the_nodes_come_from_the_verdict(run: RunFolder) -> None:
    checked = _checked(run, _verdict(fine=("time.nodes",)), _facts("n1"), _facts("n2"))
    assert [(row.node, row.id, row.state) for row in checked.rows] == [("n[1-2]", "time.nodes", "fine")]
    late = Finding(
        node="n2", field="time.nodes", locked="", found="40.0 s", result="mismatch", severity="must", owner="node"
    )
    checked = _checked(run, _verdict(late, failed=("time.nodes",)), _facts("n1"), _facts("n2"))
    assert [(row.node, row.state) for row in checked.rows] == [("n2", "failed")]
    assert checked.result == "mismatch"
