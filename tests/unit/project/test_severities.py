"""[policy]: which key counts for a name, and which keys are refused."""

from __future__ import annotations

import pytest

from hpcenv.errors import RecordInvalid
from hpcenv.incontainer.probe.run import PROBES
from hpcenv.project import severities
from hpcenv.project.fields import FIELDS
from hpcenv.records.manifest import FieldSeverity, Severity
from hpcenv.records.severities import Severities, fits


@pytest.mark.parametrize(
    ("policy", "name", "severity"),
    [
        ({}, "libs.nccl.build-id", "warn"),
        ({"libs.nccl.build-id": "must"}, "libs.nccl.build-id", "must"),
        ({"libs.*.build-id": "must"}, "libs.nccl.build-id", "must"),
        ({"libs.*.build-id": "must", "libs.nccl.build-id": "info"}, "libs.nccl.build-id", "info"),
        ({"libs.*.*": "info", "libs.nccl.*": "must"}, "libs.nccl.version", "must"),
        ({"libs.*.*": "info", "libs.nccl.*": "must"}, "libs.cudnn.version", "info"),
        ({"libs.nccl.*": "warn"}, "libs.cudnn.version", "must"),
        ({"host.*": "must"}, "host.kernel", "must"),
        ({"host.*": "must"}, "host.hostname", "info"),
        ({"host.*": "must"}, "host.something-new", "must"),
        ({"packages.env-digest": "warn"}, "packages.numpy", "warn"),
        ({"packages.env-digest": "warn"}, "packages.numpy.record-sha256", "warn"),
        ({"packages.env-digest": "warn"}, "packages.numpy.content-sha256", "must"),
        ({"packages.env-digest": "warn", "packages.numpy": "must"}, "packages.numpy", "must"),
        ({"network.route": "info"}, "network.route", "must"),
        ({}, "a.name.that.is.in.no.table", "must"),
    ],
)
def test_the_narrowest_key_counts(policy: dict[str, Severity], name: str, severity: Severity) -> None:
    assert severities.severities(policy).of(name) == severity


def test_the_profile_gives_what_no_key_gives() -> None:
    resolved = severities.severities({"libs.nccl.sha256": "info"}, "bitwise")
    assert (resolved.of("libs.nccl.build-id"), resolved.of("libs.nccl.sha256")) == ("must", "info")


def test_nodes_are_compared_in_what_a_host_is_and_not_in_what_is_its_own() -> None:
    resolved = severities.severities({"host.*": "must"})
    assert [resolved.same_on_nodes(f"host.{name}") for name in ("kernel", "new", "hostname", "gpu-count")] == [
        True, True, False, False,
    ]  # fmt: skip


def test_rules_that_do_not_name_a_field_are_refused() -> None:
    """No severity is guessed."""
    with pytest.raises(RecordInvalid, match="the manifest gives no severities"):
        Severities(())
    with pytest.raises(RecordInvalid, match="the manifest gives no severity for `torch.version`"):
        Severities([FieldSeverity(field="python.*", severity="must")]).of("torch.version")


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [("a.*", "a.b", True), ("a.*", "a.", False), ("a.*", "a.b.c", False), ("a", "a", True), ("**", "x.y.z", True)],
)
def test_a_star_stands_for_one_part(pattern: str, name: str, expected: bool) -> None:
    assert fits(pattern, name) is expected


# -- keys that are refused ----------------------------------------------------------------


def test_a_policy_may_name_what_the_probe_reads() -> None:
    """Before any environment was read."""
    read = {name for probe in PROBES for name in probe.fields if name.split(".")[0] in ("system", "torch")}
    fixed = {field.name for field in FIELDS if field.fixed}
    assert severities.problems(read - fixed) == ()
    free = ["libs.nccl.version", "loaded.libcudart", "packages.numpy", "packages.*", "env.NCCL_ALGO", "run.nodes"]
    assert severities.problems(free) == ()


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("system.glib", 'unknown field `policy."system.glib"`, perhaps you meant `system.glibc`'),
        ("libs.nccl.versoin", 'unknown field `policy."libs.nccl.versoin"`, perhaps you meant `libs.nccl.version`'),
        ("nonsense.x", 'unknown field `policy."nonsense.x"`'),
        ("host.kernal", 'unknown field `policy."host.kernal"`, perhaps you meant `host.kernel`'),
        ("cuda.burn", '`policy."cuda.burn"`: this check is gone; `dcgmi diag -r 3` on a node puts a load on its GPUs'),
        (
            "load.clocks",
            '`policy."load.clocks"`: this check is gone; `dcgmi diag -r 3` on a node puts a load on its GPUs',
        ),
        ("nothing.*", 'unknown field `policy."nothing.*"`'),
        ("", 'unknown field `policy.""`'),
        ("network.route", '`policy."network.route"` cannot be changed: without it the job cannot start'),
        ("host.gpu-uuids", '`policy."host.gpu-uuids"` cannot be changed: every GPU has its own'),
        ("facts", '`policy."facts"` cannot be changed: nothing is known about a node that does not report'),
    ],
)
def test_a_key_that_cannot_act_is_refused(key: str, problem: str) -> None:
    assert severities.problems([key]) == (problem,)


def test_after_the_environment_was_read_only_its_own_fields_remain() -> None:
    assert severities.problems(["libs.nccl.version", "packages.nunpy"], ["packages.numpy", "torch.version"]) == (
        'unknown field `policy."packages.nunpy"`, perhaps you meant `packages.numpy`',
    )
