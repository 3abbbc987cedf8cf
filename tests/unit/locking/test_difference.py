"""What differs: hardest to repair first, each with a reason and a remedy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcenv.locking import difference
from hpcenv.locking.difference import Change
from hpcenv.project import fields
from hpcenv.project.lockfile import DirectUrlTable, DistTable, Lockfile, WheelTable
from hpcenv.project.severities import severities
from hpcenv.project.workspace import read_lockfile
from hpcenv.records.manifest import DeterminismProfile, Severity, Value

SEEDS = Path(__file__).resolve().parents[2] / "fuzz" / "seeds" / "lockfile"


def lock(name: str = "sif.lock.toml") -> Lockfile:
    return read_lockfile(SEEDS / name)


def compare(
    left: Mapping[str, Value], right: Mapping[str, Value], profile: DeterminismProfile = "off", **policy: Severity
) -> tuple[Change, ...]:
    return difference.compare(left, right, severities=[severities({}), severities(policy, profile)])


def names(changes: tuple[Change, ...]) -> list[str]:
    return [change.field for change in changes]


def test_the_same_differs_in_nothing() -> None:
    assert compare(difference.of_lockfile(lock()), difference.of_lockfile(lock())) == ()


def test_the_hardest_to_repair_comes_first_then_the_gravest_then_the_name() -> None:
    left: dict[str, Value] = {
        "host.gpu-models": "A", "host.gpu-uuids": "1", "host.driver-version": "1", "container.config-digest": "1",
        "container.manifest-digest": "1", "python.version": "1", "torch.cuda": "1", "torch.version": "1",
        "libs.nccl.build-id": "1", "libs.nccl.version": "1", "packages.numpy": "1", "packages.unlisted-digest": "1",
        "env.NCCL_ALGO": "1", "system.packages-digest": "1",
    }  # fmt: skip
    right: dict[str, Value] = dict.fromkeys(left, "2")
    assert names(compare(left, right)) == [
        "host.gpu-models", "host.driver-version", "container.config-digest", "container.manifest-digest",
        "system.packages-digest", "python.version", "torch.cuda", "torch.version", "libs.nccl.version",
        "libs.nccl.build-id", "packages.numpy", "packages.unlisted-digest", "env.NCCL_ALGO", "host.gpu-uuids",
    ]  # fmt: skip


def test_a_change_brings_what_why_and_remedy_from_the_list_of_fields() -> None:
    (change,) = compare({"torch.version": "2.13.0"}, {"torch.version": "2.14.0"})
    known = fields.find("torch.version")
    assert known is not None
    assert (change.what, change.why, change.remedy) == (known.what, known.why, known.hint)
    assert (change.left, change.right, change.severity, change.repair) == ("2.13.0", "2.14.0", "must", "torch")


def test_what_one_side_lacks_is_absent() -> None:
    (change,) = compare({}, {"packages.numpy": "2.3"})
    assert (change.left, change.right) == ("absent", "2.3")


def test_a_field_that_is_not_in_the_table_must_match() -> None:
    """A strange name must not pass for a harmless one."""
    (change,) = compare({"future.field": ("a", "b")}, {})
    assert (change.left, change.severity, change.repair) == ("a, b", "must", "note")


def test_the_stricter_side_counts() -> None:
    left, right = {"torch.version": "1", "system.glibc": "1"}, {"torch.version": "2", "system.glibc": "2"}
    loose = severities({"torch.version": "info"})
    strict = severities({"torch.version": "warn", "system.glibc": "must"})
    found = difference.compare(left, right, severities=[loose, strict])
    assert {change.field: change.severity for change in found} == {"torch.version": "warn", "system.glibc": "must"}


def test_a_number_and_its_text_differ() -> None:
    assert names(compare({"a.b": "1"}, {"a.b": 1})) == ["a.b"]


def test_the_profile_gives_the_severities() -> None:
    left, right = {"libs.nccl.build-id": "1"}, {"libs.nccl.build-id": "2"}
    assert [c.severity for c in compare(left, right)] == ["warn"]
    assert [c.severity for c in compare(left, right, profile="bitwise")] == ["must"]


def test_a_package_explains_the_digests_over_all_packages() -> None:
    before = {"packages.env-digest": "1", "packages.count": 1, "packages.content-digest": "1"}
    after = {"packages.env-digest": "2", "packages.count": 2, "packages.content-digest": "2"}
    assert names(compare(before, {**after, "packages.numpy": "2.3"})) == ["packages.numpy"]
    assert "packages.env-digest" in names(compare(before, after))


# -- what of a lockfile is compared -------------------------------------------------------


def other(**changes: Any) -> Lockfile:
    return lock().model_copy(update=changes)


def changed(right: Lockfile) -> list[str]:
    return names(compare(difference.of_lockfile(lock()), difference.of_lockfile(right)))


def test_another_image() -> None:
    container = lock().container
    assert container is not None
    sif = container.sif.model_copy(update={"sha256": "0" * 64})
    image = container.model_copy(
        update={"config_digest": "sha256:0", "nvidia": {"NVIDIA_REQUIRE_CUDA": "cuda>=13.0"}, "sif": sif}
    )
    assert changed(other(container=image)) == [
        "container.nvidia.NVIDIA_REQUIRE_CUDA", "container.config-digest", "container.sif.sha256",
    ]  # fmt: skip


def test_another_profile_policy_and_gpu() -> None:
    host = lock().host.model_copy(update={"gpu": "h100", "nvidia_require": {"NVIDIA_REQUIRE_CUDA": "cuda>=13.0"}})
    profile = lock().determinism.model_copy(update={"profile": "bitwise"})
    found = changed(other(host=host, determinism=profile, policy={"torch.version": "info"}))
    assert found == ["host.gpu", "host.nvidia-require.NVIDIA_REQUIRE_CUDA", "determinism.profile", "policy"]


def with_dist(**parts: Any) -> Lockfile:
    dist = DistTable(name="torch", version="2.13.0+cpu", **parts)
    return other(packages=lock().packages.model_copy(update={"dist": (dist,)}))


def test_another_build_of_the_same_version() -> None:
    assert changed(with_dist(record_sha256="0" * 64)) == ["packages.torch.record-sha256"]


def test_another_commit_of_an_editable_install() -> None:
    old, new = (
        with_dist(
            source="editable", direct_url=DirectUrlTable(url="file:x", commit_id=commit, editable=True, dirty=dirty)
        )
        for commit, dirty in (("a" * 40, False), ("b" * 40, True))
    )
    assert names(compare(difference.of_lockfile(old), difference.of_lockfile(new))) == [
        "packages.torch.commit-id", "packages.torch.dirty",
    ]  # fmt: skip


def test_another_proof_of_the_same_wheel_does_not_block() -> None:
    wheel = WheelTable(filename="f.whl", sha256="0" * 64, index="pypi", proof="record")
    new = with_dist(record_sha256="2" * 64, wheel=wheel)
    (change,) = compare(difference.of_lockfile(lock()), difference.of_lockfile(new))
    assert (change.field, change.severity) == ("packages.torch.wheel-sha256", "info")


def test_host_and_image_differ_in_what_blocks() -> None:
    found = compare(difference.of_lockfile(lock("host.lock.toml")), difference.of_lockfile(lock()))
    assert "container.sif.sha256" in [change.field for change in found if change.severity == "must"]


def test_the_reason_of_a_setting_is_true_of_any_library() -> None:
    (change,) = compare({"env.OMP_NUM_THREADS": "1"}, {"env.OMP_NUM_THREADS": "2"})
    assert "NCCL" not in change.why
    assert "threads" in change.why


def test_a_sif_that_was_tampered_with_is_not_one_that_was_made_again() -> None:
    """Both lockfiles have the chain id of one image: only what was proved of the file makes it harmless."""
    sides = [{"container.rootfs-chain-id": "sha256:1", "container.sif.sha256": value} for value in ("a", "b")]
    table = [severities({})]
    made_again = difference.compare(*sides, severities=table)
    tampered = difference.compare(*sides, severities=table, sifs_fit=False)
    assert [[c.severity for c in changes] for changes in (made_again, tampered)] == [["info"], ["must"]]


@pytest.mark.parametrize(("policy", "severity"), [({}, "info"), ({"container.overlay.made-again": "must"}, "must")])
def test_an_overlay_that_was_packed_again_is_the_same_tree(policy: dict[str, Severity], severity: str) -> None:
    sides = [{"container.overlay.tree-sha256": "sha256:1", "container.overlay.sha256": value} for value in ("a", "b")]
    (change,) = difference.compare(*sides, severities=[severities(policy)] * 2)
    assert (change.field, change.severity) == ("container.overlay.sha256", severity)
    sides[1]["container.overlay.tree-sha256"] = "sha256:2"
    found = difference.compare(*sides, severities=[severities(policy)] * 2)
    assert next(one.severity for one in found if one.field == "container.overlay.sha256") == "must"
