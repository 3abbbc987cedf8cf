"""The one list of fields: nothing that is locked or reported is missing from it."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest

from hpcenv.incontainer.probe.run import PROBES
from hpcenv.locking import difference
from hpcenv.project import document, fields
from hpcenv.project.fields import FIELDS, LEVELS, REPAIRS
from hpcenv.project.lockfile import NOT_LOCKED, ContainerTable, Lockfile, LockTable, OverlayTable, SifTable
from hpcenv.project.workspace import read_lockfile
from hpcenv.records.facts import Facts
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Severity

FUZZ = Path(__file__).resolve().parents[2] / "fuzz" / "seeds"


def real_lockfile() -> Lockfile:
    return read_lockfile(FUZZ / "lockfile" / "host.lock.toml")


def test_every_name_stands_once() -> None:
    assert len({field.name for field in FIELDS}) == len(FIELDS)


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_field_says_everything_in_one_line_each(field: fields.Field) -> None:
    for text in (field.what, field.source, field.why, field.hint):
        assert text
        assert "\n" not in text
        assert not text.endswith(".")
    assert field.repair in REPAIRS
    assert field.level in LEVELS
    assert {field.default, field.severity("bitwise")} <= {*typing.get_args(Severity)}
    assert not field.fixed.endswith(".")


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_what_a_field_names_are_fields(field: fields.Field) -> None:
    assert not field.follows or fields.has_row(field.follows)
    assert all(field.fits(member) for member in field.members)


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_the_bitwise_profile_is_never_looser(field: fields.Field) -> None:
    order = ["info", "warn", "must"]
    assert order.index(field.severity("bitwise")) >= order.index(field.default)


# -- nothing is missing -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["host.lock.toml", "run.lock.toml", "sif.lock.toml"])
def test_every_field_of_a_lockfile_is_known(name: str) -> None:
    locked = read_lockfile(FUZZ / "lockfile" / name)
    assert [field for field in difference.of_lockfile(locked) if fields.find(field) is None] == []


def test_members_of_families_are_what_the_probe_reads() -> None:
    read = {name for probe in PROBES for name in probe.fields if name.split(".")[0] in ("system", "torch")}
    members = {name for field in FIELDS if field.name in ("system.*", "torch.*") for name in field.members}
    assert members
    assert members <= read


def test_every_fact_of_a_node_is_known() -> None:
    for path in (FUZZ / "facts").iterdir():
        found = load_record(Facts, path)
        names = set(found.values) - set(NOT_LOCKED)
        assert [name for name in sorted(names) if fields.find(name) is None] == []


def keys_of(table: type[LockTable]) -> set[str]:
    return set(document.keys(table))


def test_every_key_of_container_is_known() -> None:
    names = {f"container.{key}" for key in keys_of(ContainerTable) - {"sif", "overlay", "layers", "nvidia"}}
    names |= {f"container.sif.{key}" for key in keys_of(SifTable)} | {"container.nvidia.NVIDIA_REQUIRE_CUDA"}
    names |= {f"container.overlay.{key}" for key in keys_of(OverlayTable)}
    assert [name for name in sorted(names) if fields.find(name) is None] == []


def test_every_field_that_the_gate_names_is_known() -> None:
    """Rows of a verdict are looked up by their name."""
    source = Path(fields.__file__).parents[1]
    text = "".join(path.read_text() for room in ("judge", "facts") for path in (source / room).glob("*.py"))
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
        ("host.numa", "host.*"),
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
        ("run.nodes", "must", "must"),
        ("container.sif.builder", "info", "info"),
    ],
)
def test_severities_are_those_of_the_reference_table(name: str, default: Severity, bitwise: Severity) -> None:
    """reference/lockfiles.md, section 2."""
    field = fields.find(name)
    assert field is not None
    assert (field.severity("off"), field.severity("bitwise")) == (default, bitwise)


def test_the_profile_decides_what_nodes_are_compared_with() -> None:
    from hpcenv.project import lockfile

    locked = real_lockfile()
    strict = locked.model_copy(update={"determinism": lockfile.LockedDeterminismTable(profile="bitwise")})
    severities = [
        {e.field: e.severity for e in lockfile.expectations(one, level="full", origin="o")} for one in (locked, strict)
    ]
    assert [s["libs.libtorch.build-id"] for s in severities] == ["warn", "must"]
    assert [s["system.packages-digest"] for s in severities] == ["info", "must"]


def test_levels_say_how_deep_a_node_must_look() -> None:
    from hpcenv.project import lockfile

    names = [{e.field for e in lockfile.expectations(real_lockfile(), level=level, origin="o")} for level in LEVELS]
    record, full, deep = names
    assert record < full < deep
    assert {"packages.content-digest", "python.stdlib-sha256", "libs.libtorch.sha256"} <= full - record
    assert {"torch.config-digest", "loaded.libtorch"} <= deep - full
