"""The gate: what opens it, what closes it, and what it says. Unknown is never fine."""

import dataclasses
from dataclasses import replace

import pytest

from hpcenv.facts.facts import SKIPPED
from hpcenv.judge import decide
from hpcenv.project.severities import resolve
from hpcenv.records.facts import Difference
from hpcenv.records.manifest import Environment, Expectation, Setting
from hpcenv.records.outcome import NodeExit
from hpcenv.records.severities import Severities
from hpcenv.records.variables import WITHHELD
from hpcenv.records.verdict import Finding, NodeVerdict

BOTH = ("n1", "n2")


def judge(manifest, facts, *, nodes=BOTH, problems=None, attempt=0):
    verdict, _ = decide.judge(manifest, nodes, facts, problems or {}, attempt=attempt, job_id="77")
    return verdict


def rows(verdict):
    return [(f.node, f.field, f.locked, f.found, f.result) for f in verdict.findings]


def expect(field, value, severity="must", rule="equal", if_unknown=None):
    return Expectation(field=field, value=value, severity=severity, rule=rule, if_unknown=if_unknown)


@pytest.fixture
def judge_one(make_manifest, make_facts):
    """Judge one node that reports `values` against `expectations`."""

    def _judge(*expectations, values=None, **changes):
        manifest = make_manifest(nodes=1, expectations=expectations)
        return judge(manifest, {"n1": make_facts("n1", values=values, **changes)}, nodes=("n1",))

    return _judge


# -- match --------------------------------------------------------------------------------


def test_all_nodes_as_locked_is_a_match_with_rendezvous_and_settings(make_manifest, make_facts):
    verdict = judge(make_manifest(), {node: make_facts(node) for node in BOTH})
    assert verdict.result == "match"
    assert verdict.findings == ()
    assert verdict.nodes == tuple(NodeVerdict(node=node, result="match", compared=2) for node in BOTH)
    assert verdict.rendezvous.host == "10.0.0.1"
    assert sorted(verdict.settings) == ["n1", "n2"]


@pytest.mark.parametrize("value", ["a", "", 7, 0, 0.5, True, False, (), ("a", "b")])
def test_any_kind_of_value_matches_itself(judge_one, value):
    assert judge_one(expect("x", value), values={"x": value}).result == "match"


# -- mismatch -----------------------------------------------------------------------------


def test_one_different_field_on_one_node_closes_the_gate_for_all(make_manifest, make_facts):
    facts = {"n1": make_facts("n1"), "n2": make_facts("n2", values={"python.version": "3.11.8"})}
    verdict = judge(make_manifest(), facts)
    assert verdict.result == "mismatch"
    assert rows(verdict) == [("n2", "python.version", "3.11.7", "3.11.8", "mismatch")]
    assert [node.result for node in verdict.nodes] == ["match", "mismatch"]
    assert (verdict.rendezvous, verdict.settings) == (None, {})


@pytest.mark.parametrize(
    ("locked", "found", "note"),
    [
        ("8", 8, "locked as text, found as a number"),
        (8, "8", "locked as a number, found as text"),
        (1, True, ""),
        ("True", True, "locked as text, found as true or false"),
        (("a",), "a", "locked as a list, found as text"),
        ("a, b", ("a", "b"), "locked as text, found as a list"),
        (("a", "b"), ("b", "a"), "the same items in another order or number"),
        (("a", "b"), ("a", "c"), "added: c; gone: b"),
        (("a",), ("a", "a"), "the same items in another order or number"),
    ],
)
def test_values_of_another_kind_or_order_differ_and_it_is_said_how(judge_one, locked, found, note):
    verdict = judge_one(expect("x", locked), values={"x": found})
    assert verdict.result == "mismatch"
    assert verdict.findings[0].note == note


def test_a_script_that_this_node_sees_otherwise_is_a_mismatch(judge_one):
    verdict = judge_one(expect("python.version", "3.11.7"), values={"code.script-sha256": "f" * 64})
    assert [f.field for f in verdict.findings] == ["code.script-sha256"]
    assert verdict.result == "mismatch"


def test_a_mismatch_weighs_more_than_a_doubt(judge_one):
    verdict = judge_one(expect("python.version", "3.10"), expect("torch.version", "2"))
    assert verdict.result == "mismatch"
    assert [f.result for f in verdict.findings] == ["mismatch", "unknown"]


@pytest.mark.parametrize("severity", ["warn", "info"])
def test_what_policy_made_lighter_is_told_but_does_not_block(judge_one, severity):
    verdict = judge_one(expect("python.version", "3.10", severity), expect("host.machine", "x86_64"))
    assert verdict.result == "match"
    assert rows(verdict) == [("n1", "python.version", "3.10", "3.11.7", "mismatch")]


# -- floors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("floor", "found", "result"),
    [
        ("580.65.06", "580.65.06", "match"),
        ("580.65.06", "580.105.8", "match"),
        ("580.65.06", "1000", "match"),
        ("580.65.06", "580", "mismatch"),
        ("580.0", "580", "match"),
        ("580.65.06", "570.211.01", "mismatch"),
        ("8", 8, "match"),
        (8, "16", "match"),
        ("8", 7, "mismatch"),
        ("8", "absent", "mismatch"),
        ("8", True, "unknown"),
        ("8", 8.0, "unknown"),
        ("8", ("8",), "unknown"),
        ("8", "", "unknown"),
        ("8", "8\n", "unknown"),
        ("8", "-9", "unknown"),
        ("8", "8rc1", "unknown"),
        ("new", "580", "unknown"),
        ("8", "\u0669", "unknown"),
    ],
)
def test_a_floor_compares_numbers_and_never_guesses(judge_one, floor, found, result):
    verdict = judge_one(expect("host.x", floor, rule="at-least"), values={"host.x": found})
    assert verdict.result == result


def test_a_floor_is_shown_as_one(judge_one):
    verdict = judge_one(expect("host.x", "12.4", rule="at-least"), values={"host.x": "12.2"})
    assert rows(verdict) == [("n1", "host.x", ">= 12.4", "12.2", "mismatch")]


@pytest.mark.parametrize(
    ("count", "names", "note"),
    [
        (2, ("a.py", "b.py"), "1 such file when it was locked, now 2: a.py, b.py"),
        (7, ("lib/x/dist-packages/a.py",), "1 such file when it was locked, now 7, the newest: dist-packages/a.py"),
        (0, (), "1 such file when it was locked, now 0"),
        (None, (), "1 such file when it was locked"),
    ],
)
def test_files_that_no_package_lists_are_named(judge_one, count, names, note):
    expected = Expectation(
        field="packages.unlisted-digest", value="a", severity="must", note="1 such file when it was locked"
    )
    values = {"packages.unlisted-digest": "b"} | ({} if count is None else {"packages.unlisted-count": count})
    [finding] = judge_one(expected, values=values, unlisted=names).findings
    assert finding.note == note


# -- unknown ------------------------------------------------------------------------------


def test_a_field_that_was_not_reported_is_unknown_and_blocks(judge_one):
    verdict = judge_one(expect("python.version", "3.11.7"), expect("torch.version", "2.9"))
    assert verdict.result == "unknown"
    assert rows(verdict) == [("n1", "torch.version", "2.9", "this node did not report it", "unknown")]
    assert verdict.nodes[0].compared == 2


def test_a_field_that_could_not_be_read_says_why(judge_one):
    verdict = judge_one(expect("libs.nccl.version", 22703), unknown={"libs.nccl.version": "no such library"})
    assert rows(verdict)[0] == ("n1", "libs.nccl.version", "22703", "no such library", "unknown")


def test_a_field_that_is_both_known_and_unknown_is_unknown(judge_one):
    verdict = judge_one(expect("x", "1"), values={"x": "1"}, unknown={"x": "two probes disagree"})
    assert verdict.result == "unknown"


def test_a_part_that_failed_gives_its_reason_to_its_fields(judge_one):
    verdict = judge_one(expect("host.gpu-count", "8", rule="at-least"), unknown={"host": "RuntimeError: NVML"})
    assert rows(verdict) == [("n1", "host.gpu-count", ">= 8", "RuntimeError: NVML", "unknown")]


def test_a_script_that_cannot_be_read_is_unknown(judge_one, make_facts):
    verdict = judge_one(
        expect("python.version", "3.11.7"),
        unknown={"code.script-sha256": "cannot read /job/train.py: Stale file handle"},
    )
    assert verdict.result == "unknown"
    assert verdict.findings[0].found == "cannot read /job/train.py: Stale file handle"


def test_a_manifest_that_expects_nothing_is_unknown(judge_one):
    verdict = judge_one()
    assert verdict.result == "unknown"
    assert rows(verdict) == [
        ("n1", "lockfile", "fields to compare", "nothing that the lockfile names could be compared", "unknown")
    ]


def test_light_expectations_of_which_none_could_be_compared_are_unknown(judge_one):
    assert judge_one(expect("torch.version", "2", "warn")).result == "unknown"


def test_what_could_not_be_read_may_weigh_less_than_what_differs(judge_one):
    amd = expect("host.gpu-count", "8", rule="at-least", if_unknown="warn")
    unread = judge_one(
        amd, expect("torch.version", "2"), values={"torch.version": "2"}, unknown={"host.gpu-count": "AMD"}
    )
    assert (unread.result, [(f.severity, f.result) for f in unread.findings]) == ("match", [("warn", "unknown")])
    assert judge_one(amd, values={"host.gpu-count": 7}).result == "mismatch"


def test_a_probe_that_failed_is_one_row_and_not_one_for_each_field(judge_one):
    verdict = judge_one(
        expect("torch.version", "2"),
        expect("packages.env-digest", "sha256:0"),
        unknown={"probe": "`python` did not answer within 300 s"},
    )
    assert verdict.result == "unknown"
    assert rows(verdict) == [("n1", "environment", "readable", "`python` did not answer within 300 s", "unknown")]


def test_many_fields_with_one_reason_are_one_row(judge_one):
    names = [f"{chapter}.x{number}.version" for chapter in ("libs", "packages") for number in range(10)]
    verdict = judge_one(*(expect(name, "1") for name in names), unknown=dict.fromkeys(names, "MemoryError"))
    assert rows(verdict) == [("n1", "environment", "readable", "MemoryError", "unknown")]
    assert "20 fields could not be read, among them libs.x0.version" in verdict.findings[0].note
    packages = names[10:]
    verdict = judge_one(*(expect(name, "1") for name in packages), unknown=dict.fromkeys(packages, "ImportError"))
    assert rows(verdict) == [("n1", "environment", "readable", "ImportError", "unknown")]
    light = judge_one(
        expect("torch.version", "2"), *(expect(name, "1", "warn") for name in names),
        values={"torch.version": "2"}, unknown=dict.fromkeys(names, "MemoryError"),
    )  # fmt: skip
    assert (light.result, [f.severity for f in light.findings]) == ("match", ["warn"])


def test_a_start_that_is_refused_after_the_verdict_changes_the_verdict(make_manifest, make_facts):
    manifest = make_manifest()
    verdict = judge(manifest, {node: make_facts(node) for node in ("n1", "n2")})
    assert verdict.result == "match"
    ended = NodeExit(
        schema=1, run=verdict.run, node="n2", attempt=0, status=90, signal="", started=1, ended=2,
        detail="the SIF changed", refused=True,
    )  # fmt: skip
    after = decide.after_launch(verdict, [ended], Severities(manifest.severities))
    assert (after.result, after.launched, after.rendezvous) == ("mismatch", (), None)
    assert [(node.node, node.result) for node in after.nodes] == [("n1", "match"), ("n2", "mismatch")]
    assert rows(after)[0][:2] == ("n2", "container.sif.sha256")
    assert (
        decide.after_launch(verdict, [replace(ended, status=91)], Severities(manifest.severities)).result == "unknown"
    )


# -- nodes that are missing or are not what they say --------------------------------------


def test_a_silent_node_is_unknown_and_named(make_manifest, make_facts):
    verdict = judge(make_manifest(), {"n1": make_facts("n1")})
    assert verdict.result == "unknown"
    assert rows(verdict) == [("n2", "facts", "reported", "this node reported no facts", "unknown")]
    assert verdict.nodes[1] == NodeVerdict(node="n2", result="unknown", compared=0)


def test_a_node_whose_facts_are_damaged_says_how(make_manifest, make_facts):
    verdict = judge(make_manifest(), {"n1": make_facts("n1")}, problems={"n2": "`n2.json` is not JSON"})
    assert rows(verdict) == [("n2", "facts", "reported", "`n2.json` is not JSON", "unknown")]


def test_no_facts_at_all_is_unknown(make_manifest):
    verdict = judge(make_manifest(), {})
    assert verdict.result == "unknown"
    assert [f.node for f in verdict.findings] == ["n1", "n2"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run": "r0"}, "its facts belong to run r0, attempt 0, node n2"),
        ({"attempt": 1}, "its facts belong to run r1, attempt 1, node n2"),
        ({"node": "n1"}, "its facts belong to run r1, attempt 0, node n1"),
    ],
)
def test_facts_of_another_run_attempt_or_node_do_not_count(make_manifest, make_facts, changes, reason):
    stale = dataclasses.replace(make_facts("n2"), **changes)
    verdict = judge(make_manifest(), {"n1": make_facts("n1"), "n2": stale})
    assert verdict.result == "unknown"
    assert rows(verdict) == [("n2", "facts", "reported", reason, "unknown")]


def test_facts_of_the_first_attempt_do_not_count_for_the_second(make_manifest, make_facts):
    assert judge(make_manifest(), {node: make_facts(node) for node in BOTH}, attempt=1).result == "unknown"


def test_facts_of_a_node_that_is_not_in_the_job_are_ignored(make_manifest, make_facts):
    facts = {node: make_facts(node) for node in BOTH} | {"n3": make_facts("n3", values={"python.version": "2"})}
    verdict = judge(make_manifest(), facts)
    assert verdict.result == "match"
    assert [node.node for node in verdict.nodes] == ["n1", "n2"]


def test_a_job_of_another_size_than_planned_is_a_mismatch(make_manifest, make_facts):
    verdict = judge(make_manifest(nodes=2), {"n1": make_facts("n1")}, nodes=("n1",))
    assert rows(verdict) == [("n1", "job.nodes", "2", "1", "mismatch")]


def test_a_network_that_cannot_be_told_closes_the_gate(make_manifest, make_facts):
    lost = make_facts("n2")
    lost = dataclasses.replace(lost, network=dataclasses.replace(lost.network, routes=(), problem="no route to n1"))
    verdict = judge(make_manifest(), {"n1": make_facts("n1"), "n2": lost})
    assert verdict.result == "unknown"
    assert rows(verdict) == [("n2", "network.route", "a route to n1", "no route to n1", "unknown")]


# -- the SIF ------------------------------------------------------------------------------

SIF = "container.sif.sha256"


def sif_run(make_manifest, *expectations):
    environment = Environment(kind="sif", python="python3", sif="/x.sif", apptainer="/usr/bin/apptainer")
    return make_manifest(nodes=1, environment=environment, expectations=expectations, probe_level="record")


def test_another_sif_is_one_row_not_one_for_each_field_inside(make_manifest, make_facts):
    manifest = sif_run(make_manifest, expect(SIF, "a"), expect("torch.version", "2"), expect("packages.count", 5))
    verdict = judge(manifest, {"n1": make_facts("n1", values={SIF: "b"}, unknown={"probe": SKIPPED})}, nodes=("n1",))
    assert rows(verdict) == [("n1", SIF, "a", "b", "mismatch")]


def test_a_skipped_look_inside_without_a_sif_that_differs_is_unknown(make_manifest, make_facts):
    manifest = sif_run(make_manifest, expect(SIF, "a"), expect("torch.version", "2"))
    verdict = judge(manifest, {"n1": make_facts("n1", values={SIF: "a"}, unknown={"probe": SKIPPED})}, nodes=("n1",))
    assert verdict.result == "unknown"
    assert rows(verdict) == [("n1", "environment", "readable", SKIPPED, "unknown")]


def test_a_sif_that_only_warns_does_not_hide_that_nothing_inside_was_read(make_manifest, make_facts):
    manifest = sif_run(make_manifest, expect(SIF, "a", "warn"), expect("torch.version", "2"))
    verdict = judge(manifest, {"n1": make_facts("n1", values={SIF: "b"}, unknown={"probe": SKIPPED})}, nodes=("n1",))
    assert verdict.result == "unknown"


def test_a_manifest_without_a_sif_digest_does_not_make_a_skip_fine(make_manifest, make_facts):
    manifest = sif_run(make_manifest, expect("torch.version", "2"))
    facts = make_facts("n1", values={SIF: "b"}, unknown={"probe": SKIPPED})
    assert judge(manifest, {"n1": facts}, nodes=("n1",)).result == "unknown"


def test_a_sif_that_cannot_be_opened_says_so_in_its_own_row(make_manifest, make_facts):
    manifest = sif_run(make_manifest, expect(SIF, "a"), expect("torch.version", "2"))
    unknown = {SIF: "cannot open /x.sif: Permission denied", "probe": "not read: the SIF could not be read"}
    verdict = judge(manifest, {"n1": make_facts("n1", unknown=unknown)}, nodes=("n1",))
    assert ("n1", SIF, "a", "cannot open /x.sif: Permission denied", "unknown") in rows(verdict)
    assert verdict.result == "unknown"


# -- packages -----------------------------------------------------------------------------

NUMPY = Difference(field="packages.numpy", locked="2.0", found="2.1")


def test_packages_that_differ_block_even_where_the_digests_agree(judge_one):
    verdict = judge_one(
        expect("packages.env-digest", "sha256:0"), values={"packages.env-digest": "sha256:0"}, differences=(NUMPY,)
    )
    assert rows(verdict) == [("n1", "packages.numpy", "2.0", "2.1", "mismatch")]
    assert verdict.result == "mismatch"


def test_packages_block_where_no_digest_is_expected(judge_one):
    assert judge_one(expect("python.version", "3.11.7"), differences=(NUMPY,)).result == "mismatch"


DIGESTS = {"packages.env-digest": "0", "packages.content-digest": "0"}


@pytest.mark.parametrize(
    ("policy", "package", "digest"),
    [
        ({}, "must", "must"),
        ({"packages.env-digest": "warn"}, "warn", "warn"),
        ({"packages.numpy": "info"}, "info", "info"),
        ({"packages.*": "warn"}, "warn", "warn"),
        ({"packages.env-digest": "info", "packages.numpy": "must"}, "must", "info"),
        ({"packages.content-digest": "info"}, "must", "must"),
    ],
)
def test_a_package_weighs_as_much_as_the_digest_and_explains_it(make_manifest, make_facts, policy, package, digest):
    severities = resolve(policy)
    expected = tuple(expect(name, "1", Severities(severities).of(name)) for name in DIGESTS)
    manifest = make_manifest(nodes=1, severities=severities, expectations=expected)
    facts = {"n1": make_facts("n1", values=DIGESTS, differences=(NUMPY,))}
    found = {f.field: f.severity for f in judge(manifest, facts, nodes=("n1",)).findings}
    assert (found["packages.numpy"], found["packages.env-digest"]) == (package, digest)


def test_a_package_that_could_not_be_read_is_unknown_not_different(judge_one):
    unread = dataclasses.replace(NUMPY, found="Permission denied", unknown=True)
    assert judge_one(expect("python.version", "3.11.7"), differences=(unread,)).result == "unknown"


def test_the_package_comes_before_the_digest_that_it_explains(judge_one):
    verdict = judge_one(expect("packages.env-digest", "a"), values={"packages.env-digest": "b"}, differences=(NUMPY,))
    assert [f.field for f in verdict.findings] == ["packages.numpy", "packages.env-digest"]


# -- nodes with each other ----------------------------------------------------------------


def with_driver(make_facts, *drivers):
    names = ("n1", "n2", "n3")
    return {n: make_facts(n, values={"host.driver-version": d}) for n, d in zip(names, drivers, strict=False)}


def test_the_node_that_differs_from_the_majority_is_named(make_manifest, make_facts):
    facts = with_driver(make_facts, "570.1", "580.1", "580.1")
    verdict = judge(make_manifest(nodes=3, gpus_per_node=8), facts, nodes=("n1", "n2", "n3"))
    assert verdict.findings == (
        Finding(
            node="n1",
            field="host.driver-version",
            locked="580.1",
            found="570.1",
            result="mismatch",
            severity="must",
            note="differs between the nodes of this job",
        ),
    )


def test_without_gpus_another_driver_is_told_but_does_not_block(make_manifest, make_facts):
    verdict = judge(make_manifest(gpus_per_node=0), with_driver(make_facts, "570.1", "580.1"))
    assert (verdict.result, verdict.findings[0].severity) == ("match", "info")


def test_one_node_that_cannot_tell_its_driver_closes_the_gate(make_manifest, make_facts):
    facts = {
        "n1": make_facts("n1", values={"host.driver-version": "580.1"}),
        "n2": make_facts("n2", unknown={"host.driver-version": "NVML: Driver/library version mismatch"}),
    }
    verdict = judge(make_manifest(gpus_per_node=8), facts)
    assert verdict.result == "unknown"
    assert rows(verdict) == [("n2", "host.driver-version", "580.1", "NVML: Driver/library version mismatch", "unknown")]


def test_gpu_models_that_no_node_can_tell_are_not_the_same(make_manifest, make_facts):
    facts = {node: make_facts(node, unknown={"host.gpu-models": "pynvml is not installed"}) for node in BOTH}
    assert judge(make_manifest(gpus_per_node=8), facts).result == "unknown"
    assert judge(make_manifest(gpus_per_node=0), facts).result == "match"


def test_nodes_without_any_gpu_driver_have_nothing_to_compare(make_manifest, make_facts):
    assert judge(make_manifest(gpus_per_node=8), with_driver(make_facts, "absent", "absent")).result == "match"


def test_nodes_of_two_architectures_do_not_train_together(make_manifest, make_facts):
    facts = {"n1": make_facts("n1"), "n2": make_facts("n2", values={"host.machine": "aarch64"})}
    assert judge(make_manifest(), facts).result == "mismatch"


def test_another_kernel_is_worth_a_line_and_no_more(make_manifest, make_facts):
    facts = {n: make_facts(n, values={"host.kernel": k}) for n, k in (("n1", "6.1"), ("n2", "6.2"))}
    verdict = judge(make_manifest(), facts)
    assert (verdict.result, rows(verdict)[0][1:4]) == ("match", ("host.kernel", "6.1", "6.2"))


def test_a_thousand_nodes_are_judged_within_a_second(make_manifest, make_facts):
    import time

    nodes = tuple(f"x{number}" for number in range(1024))
    expectations = tuple(expect(f"f{number}", "v") for number in range(60))
    fields = {f"f{number}": "v" for number in range(60)}
    facts = {node: make_facts(node, values=fields) for node in nodes}
    started = time.process_time()
    verdict = judge(make_manifest(nodes=1024, cluster="local", expectations=expectations), facts, nodes=nodes)
    assert time.process_time() - started < 1.0
    assert verdict.result == "match"


# -- spare nodes --------------------------------------------------------------------------

THREE = ("n1", "n2", "n3")
OTHER_PYTHON = {"python.version": "3.11.8"}


def reaching(make_facts, node, *targets, values=None):
    """Facts of a node that reaches these nodes."""
    found = make_facts(node, values=values)
    routes = tuple(dataclasses.replace(found.network.routes[0], target=f"10.0.0.{t[1:]}") for t in targets)
    return dataclasses.replace(found, network=dataclasses.replace(found.network, routes=routes))


def judge_spare(make_manifest, facts, *, nodes=THREE, asked=2, spare=1):
    return judge(make_manifest(nodes=asked, spare=spare), facts, nodes=nodes)


def test_a_spare_node_that_is_not_needed_stays_idle(make_manifest, make_facts):
    verdict = judge_spare(make_manifest, {node: reaching(make_facts, node, "n1", "n2") for node in THREE})
    assert (verdict.result, verdict.launched) == ("match", ("n1", "n2"))
    assert sorted(verdict.settings) == ["n1", "n2"]


@pytest.mark.parametrize(
    ("bad", "launched", "host"),
    [("n1", ("n2", "n3"), "10.0.0.2"), ("n2", ("n1", "n3"), "10.0.0.1"), ("n3", ("n1", "n2"), "10.0.0.1")],
)
def test_a_node_that_differs_is_left_out(make_manifest, make_facts, bad, launched, host):
    facts = {n: reaching(make_facts, n, "n1", "n2", values=OTHER_PYTHON if n == bad else None) for n in THREE}
    verdict = judge_spare(make_manifest, facts)
    assert (verdict.result, verdict.launched, verdict.rendezvous.host) == ("match", launched, host)
    assert {node.node: node.result for node in verdict.nodes} == {n: "mismatch" if n == bad else "match" for n in THREE}
    assert [f.node for f in verdict.findings] == [bad]


def test_a_silent_node_is_left_out(make_manifest, make_facts):
    facts = {node: reaching(make_facts, node, "n1", "n2") for node in ("n1", "n3")}
    verdict = judge_spare(make_manifest, facts)
    assert (verdict.result, verdict.launched) == ("match", ("n1", "n3"))


def test_a_node_without_a_way_to_the_others_is_left_out(make_manifest, make_facts):
    facts = {node: reaching(make_facts, node, *(() if node == "n2" else ("n1", "n2"))) for node in THREE}
    verdict = judge_spare(make_manifest, facts)
    assert (verdict.result, verdict.launched) == ("match", ("n1", "n3"))


def test_too_few_nodes_that_match_are_a_rejection(make_manifest, make_facts):
    facts = {n: reaching(make_facts, n, "n1", "n2", values=None if n == "n3" else OTHER_PYTHON) for n in THREE}
    verdict = judge_spare(make_manifest, facts)
    assert (verdict.result, verdict.launched, verdict.rendezvous) == ("mismatch", (), None)


def test_without_spare_nodes_all_have_to_match(make_manifest, make_facts):
    facts = {node: make_facts(node) for node in BOTH}
    assert judge(make_manifest(), facts).launched == BOTH
    facts["n2"] = make_facts("n2", values=OTHER_PYTHON)
    assert judge(make_manifest(), facts).launched == ()


def test_a_job_of_another_size_is_refused_with_spare_nodes_too(make_manifest, make_facts):
    facts = {node: reaching(make_facts, node, "n1", "n2") for node in BOTH}
    verdict = judge_spare(make_manifest, facts, nodes=BOTH)
    assert ("n1", "job.nodes", "3", "2", "mismatch") in rows(verdict)
    assert verdict.result == "mismatch"


def test_a_verdict_shows_inherited_variables_that_can_change_results_and_no_credential(make_manifest, make_facts):
    manifest = make_manifest(settings=(Setting(name="HF_TOKEN", value="abc", origin="--env"),))
    found = tuple(
        Setting(name=name, value=value, origin="environment of the job")
        for name, value in (("HOME", "/h"), ("MKL_CBWR", "AVX2"), ("SLURM_JOB_ID", "7"), ("NCCL_DEBUG", "INFO"))
    )
    verdict = judge(manifest, {node: make_facts(node, variables=found) for node in BOTH})
    assert [s.name for s in verdict.inherited["n1"]] == ["MKL_CBWR"], "NCCL_DEBUG is a setting"
    assert {s.value for s in verdict.settings["n1"] if s.name == "HF_TOKEN"} == {WITHHELD}


def test_a_variable_of_one_node_is_absent_on_the_other(make_manifest, make_facts):
    facts = {"n1": make_facts("n1"), "n2": make_facts("n2", values={"env.MKL_CBWR": "AVX2"})}
    verdict = judge(make_manifest(), facts)
    assert rows(verdict) == [("n2", "env.MKL_CBWR", "absent", "AVX2", "mismatch")]
    assert verdict.result == "match", "a warning"


def test_modules_that_an_earlier_attempt_left_changed_are_a_warning_and_do_not_stop_the_run(judge_one):
    locked = expect("python.version", "3.11.7")
    found = judge_one(locked, values={"code.changed": ("helper.py",)})
    assert (found.result, rows(found)) == ("match", [("n1", "code.changed", "none", "helper.py", "mismatch")])
    assert (found.findings[0].severity, found.findings[0].note) == (
        "warn", "changed since the submission, while an earlier attempt ran"
    )  # fmt: skip
    assert judge_one(locked, values={"code.changed": ()}).findings == ()


def test_a_variable_that_a_wrapper_sets_on_one_node_is_named_there_and_one_on_all_nodes_is_not(
    make_manifest, make_facts
):
    origin = "seen in the environment; hpcenv did not set it"
    seen = tuple(Setting(name=name, value="default", origin=origin) for name in ("ATEN_CPU_CAPABILITY", "SITE_X"))
    facts = {
        "n1": make_facts("n1", values={"env.SITE_X": "default"}, variables=seen[1:]),
        "n2": make_facts("n2", values={"env.SITE_X": "default", "env.ATEN_CPU_CAPABILITY": "default"}, variables=seen),
    }
    verdict = judge(make_manifest(), facts)
    assert (verdict.result, rows(verdict)) == (
        "match",
        [("n2", "env.ATEN_CPU_CAPABILITY", "absent", "default", "mismatch")],
    )
    assert verdict.inherited == {"n1": seen[1:], "n2": seen}
    strict = judge(make_manifest(severities=resolve({}, "bitwise", gpus=False)), facts)
    assert strict.result == "mismatch"
