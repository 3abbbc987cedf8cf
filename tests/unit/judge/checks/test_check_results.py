"""What the results of the checks mean for the verdict."""

import json

import pytest

from hpcenv.judge import decide, verdict_table
from hpcenv.judge.checks import check_results
from hpcenv.judge.checks.check_table import BY_ID, CHECKS, active
from hpcenv.project.severities import resolve
from hpcenv.records.checks import CheckOutcome, CheckReport, NodeChecks
from hpcenv.records.codec import encode_record
from hpcenv.records.manifest import PreflightOptions

BOTH = ("n1", "n2")
QUICK = PreflightOptions(level="quick")
# A check that blocks, and one that does not.
BLOCKING = {"sys.nofile": "must"}


def checks(*results):
    return NodeChecks.of(results, seconds=0.1, clock=0.0)


def failed(name="sys.nofile", state="failed"):
    return CheckOutcome(id=name, state=state, found="256", limit=">= 1024")


def verdict_of(manifest, facts):
    verdict, _ = decide.judge(manifest, BOTH, facts, {}, attempt=0, job_id="7")
    return verdict


@pytest.fixture
def judged(make_manifest, make_facts):
    def _judged(result, *, policy=None, preflight=QUICK):
        manifest = make_manifest(preflight=preflight, severities=resolve(policy or {}, gpus=False))
        facts = {"n1": make_facts("n1", checks=checks()), "n2": make_facts("n2", checks=checks(result))}
        return verdict_of(manifest, facts)

    return _judged


def test_checks_that_may_be_unknown_are_checks():
    assert set(BY_ID) >= check_results.INFO_IF_UNKNOWN


@pytest.mark.parametrize(
    ("state", "policy", "result"),
    [
        ("failed", {}, "match"),
        ("failed", BLOCKING, "mismatch"),
        ("unknown", BLOCKING, "unknown"),
        ("not-run", BLOCKING, "match"),
        ("fine", BLOCKING, "match"),
    ],
)
def test_only_a_must_blocks_and_unknown_never_passes_a_must(judged, state, policy, result):
    assert judged(failed(state=state), policy=policy).result == result


def test_a_failure_names_node_owner_and_remedy_in_the_table_and_in_the_record(judged):
    verdict = judged(failed(), policy=BLOCKING)
    text = verdict_table.render(verdict, lockfile="default.lock.toml")
    assert "checks failed on 1 of 2 nodes" in text
    assert "[user] do:" in text and "ulimit -n" in text
    finding = json.loads(encode_record(verdict))["findings"][0]
    assert (finding["node"], finding["field"], finding["owner"]) == ("n2", "sys.nofile", "user")
    assert finding["remedy"] == BY_ID["sys.nofile"].hint


def test_the_verdict_says_what_was_skipped_and_what_did_not_run(judged):
    options = PreflightOptions(level="quick", skipped=("sys.affinity",))
    verdict = judged(CheckOutcome(id="sys.nofile", state="not-run", found="no such limit"), preflight=options)
    text = " ".join(verdict_table.render(verdict, lockfile="default.lock.toml").split())
    assert "1 not run (no such limit)" in text
    assert "skipped (--skip-check): sys.affinity" in text
    assert verdict.preflight.fine == ("time.nodes",)


def test_a_skipped_check_is_not_made(make_manifest):
    manifest = make_manifest(preflight=PreflightOptions(level="full", skipped=("sys.nofile",)))
    assert "sys.nofile" not in [check.id for check in active(manifest)]
    assert [check.id for check in active(make_manifest())] == []


def test_a_recorded_run_of_the_level_deep_had_the_checks_of_full(make_manifest):
    old, full = (active(make_manifest(preflight=PreflightOptions(level=level))) for level in ("deep", "full"))
    assert old == full


def test_every_check_has_a_row_of_its_own(make_manifest):
    assert len({check.id for check in CHECKS}) == len(CHECKS)


# -- checks after the verdict ---------------------------------------------------------------


def report(node, *results, run="r1", attempt=0):
    return CheckReport(schema=1, run=run, node=node, attempt=attempt, checks=checks(*results))


@pytest.fixture
def after(make_manifest, make_facts):
    def _after(*reports, policy=None):
        manifest = make_manifest(preflight=QUICK, severities=resolve(policy or {}, gpus=False))
        verdict = verdict_of(manifest, {node: make_facts(node, checks=checks()) for node in BOTH})
        assert verdict.result == "match"
        return check_results.add_reports(verdict, manifest, BOTH, {"container": reports})

    return _after


def test_reports_that_are_fine_leave_the_verdict_as_it_is(after):
    verdict = after(report("n1", failed(state="fine")), report("n2", failed(state="fine")))
    assert (verdict.result, verdict.findings) == ("match", ())
    assert verdict.rendezvous is not None
    assert verdict.preflight.fine == ("time.nodes", "sys.nofile")


def test_a_failure_after_the_verdict_closes_the_gate(after):
    verdict = after(report("n1", failed(state="fine")), report("n2", failed()), policy=BLOCKING)
    assert verdict.result == "mismatch"
    assert [node.result for node in verdict.nodes] == ["match", "mismatch"]
    assert (verdict.rendezvous, verdict.settings, verdict.launched) == (None, {}, ())


@pytest.mark.parametrize("other", [{"run": "r0"}, {"attempt": 1}])
def test_a_node_without_a_report_of_this_attempt_is_unknown(after, other):
    verdict = after(report("n1", failed(state="fine")), report("n2", failed(state="fine"), **other))
    assert verdict.result == "unknown"
    assert [(f.node, f.result) for f in verdict.findings] == [("n2", "unknown")]
