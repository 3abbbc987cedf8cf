"""The one list of fields: nothing that is locked or reported is missing from it."""

from __future__ import annotations

import typing
from dataclasses import replace
from pathlib import Path

import pytest

from hpcenv import wire
from hpcenv.incontainer import probe
from hpcenv.model import diff, document, fields
from hpcenv.model.fields import FIELDS, LEVELS, REPAIRS
from hpcenv.model.lockfile import NOT_LOCKED, ContainerTable, Lockfile, LockTable, SifTable
from hpcenv.steps.workspace import read_lockfile
from hpcenv.wire import Facts, Severity

FUZZ = Path(__file__).resolve().parents[2] / "fuzz" / "seeds"


def real_lockfile() -> Lockfile:
    return read_lockfile(FUZZ / "lockfile" / "host.lock.toml")


def test_every_name_stands_once() -> None:
    assert len({field.name for field in FIELDS}) == len(FIELDS)


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_field_says_everything_in_one_line_each(field: fields.Field) -> None:
    for text in (field.what, field.source, field.why, field.remedy):
        assert text
        assert "\n" not in text
        assert not text.endswith(".")
    assert field.repair in REPAIRS
    assert field.level in LEVELS
    assert {field.default, field.bitwise} <= {*typing.get_args(Severity), None}


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_the_bitwise_profile_is_never_looser(field: fields.Field) -> None:
    order = [None, "info", "warn", "must"]
    assert order.index(field.bitwise) >= order.index(field.default)


# -- nothing is missing -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["host.lock.toml", "run.lock.toml", "sif.lock.toml"])
def test_every_field_of_a_lockfile_is_known(name: str) -> None:
    locked = read_lockfile(FUZZ / "lockfile" / name)
    assert [field for field in diff.of_lockfile(locked) if fields.find(field) is None] == []


def test_a_policy_may_name_what_the_probe_reads() -> None:
    """Before any environment was read, and nothing else of these tables."""
    read = {name for _, names, *_ in probe.PROBES for name in names if name.split(".")[0] in ("system", "torch")}
    assert {*fields.MEMBERS} <= read
    assert fields.policy_problems(read) == ()
    assert fields.policy_problems(["libs.nccl.version", "loaded.libcudart", "packages.env-digest"]) == ()
    for name in ("system.glib", "libs.nccl.versoin", "nonsense.x", "packages.*", ""):
        assert len(fields.policy_problems([name])) == 1


def test_every_fact_of_a_node_is_known() -> None:
    for path in (FUZZ / "facts").iterdir():
        found = wire.read(Facts, path)
        names = set(found.values) - set(NOT_LOCKED)
        assert [name for name in sorted(names) if fields.find(name) is None] == []


def keys_of(table: type[LockTable]) -> set[str]:
    return set(document.keys(table))


def test_every_key_of_container_is_known() -> None:
    names = {f"container.{key}" for key in keys_of(ContainerTable) - {"sif", "layers", "nvidia"}}
    names |= {f"container.sif.{key}" for key in keys_of(SifTable)} | {"container.nvidia.NVIDIA_REQUIRE_CUDA"}
    assert [name for name in sorted(names) if fields.find(name) is None] == []


def test_every_field_that_the_gate_names_is_known() -> None:
    """Rows of a verdict are looked up by their name."""
    source = Path(fields.__file__).parents[1] / "node"
    text = "".join((source / name).read_text() for name in ("decide.py", "facts.py", "host.py", "network.py"))
    import re

    named = set(re.findall(r'"((?:host|container|code|network|job|packages|torch|python)\.[a-z0-9.-]+[a-z0-9])"', text))
    assert len(named) > 10
    assert [name for name in sorted(named) if fields.find(name) is None] == []


# -- finding ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("torch.version", "torch.version"),
        ("torch.cxx11-abi", "torch.*"),
        ("libs.nccl.version", "libs.nccl.version"),
        ("libs.nvrtc.version", "libs.*.version"),
        ("libs.nccl.build-id", "libs.*.build-id"),
        ("libs.ld-preload", "libs.ld-preload"),
        ("packages.count", "packages.count"),
        ("packages.numpy", "packages.*"),
        ("packages.numpy.content-sha256", "packages.*.content-sha256"),
        ("container.sif.sha256", "container.sif.sha256"),
        ("container.sif.size", "container.sif.*"),
        ("host.gpu", "host.gpu"),
        ("host.gpu-models", "host.gpu-models"),
        ("host.cpus", "host.*"),
        ("env.NCCL_ALGO", "env.*"),
        ("libs.*.version", "libs.*.version"),
    ],
)
def test_the_narrowest_field_is_found(name: str, found: str) -> None:
    field = fields.find(name)
    assert field is not None
    assert field.name == found


@pytest.mark.parametrize(
    "name", ["", "torch", "libs.nccl", "nosuch.field", "packages.a.b.c", "libs.nccl.nosuch", "torch."]
)
def test_what_is_no_field_is_not_found(name: str) -> None:
    assert fields.find(name) is None
    assert fields.severity(name) is None


@pytest.mark.parametrize(
    ("name", "default", "bitwise"),
    [
        ("container.rootfs-chain-id", "must", "must"),
        ("container.manifest-digest", "warn", "warn"),
        ("container.index-digest", "info", "info"),
        ("torch.git-version", "must", "must"),
        ("torch.cpu-capability", "info", "warn"),
        ("libs.nccl.build-id", "warn", "must"),
        ("libs.nccl.sha256", "warn", "must"),
        ("packages.env-digest", "must", "must"),
        ("system.packages-digest", "info", "must"),
        ("host.gpu-sm-counts", "warn", "must"),
        ("host.kernel", "info", "info"),
        ("env.NCCL_ALGO", "warn", "must"),
        ("run.nodes", "warn", "must"),
        ("container.sif.builder", None, None),
    ],
)
def test_severities_are_those_of_the_reference_table(name: str, default: Severity, bitwise: Severity) -> None:
    """reference/lockfiles.md, section 2."""
    assert (fields.severity(name), fields.severity(name, "bitwise")) == (default, bitwise)


def test_the_profile_decides_what_nodes_are_compared_with() -> None:
    from hpcenv.model import lockfile

    locked = real_lockfile()
    strict = replace(locked, determinism=lockfile.DeterminismTable(profile="bitwise"))
    severities = [
        {e.field: e.severity for e in lockfile.expectations(one, level="full", origin="o")} for one in (locked, strict)
    ]
    assert [s["libs.libtorch.build-id"] for s in severities] == ["warn", "must"]
    assert [s["system.packages-digest"] for s in severities] == ["info", "must"]


def test_levels_say_how_deep_a_node_must_look() -> None:
    from hpcenv.model import lockfile

    names = [{e.field for e in lockfile.expectations(real_lockfile(), level=level, origin="o")} for level in LEVELS]
    record, full, deep = names
    assert record < full < deep
    assert {"packages.content-digest", "python.stdlib-sha256", "libs.libtorch.sha256"} <= full - record
    assert {"torch.config-digest", "loaded.libtorch"} <= deep - full
