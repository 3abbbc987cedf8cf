"""The manifest on a node: what modules set, and the values of the site that only a node knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcenv.container.site_values import complete
from hpcenv.records.manifest import Bind, Environment, Expectation, Setting
from hpcenv.records.modules import ModuleEffects

SITE = "site profile jura"
SIF = Environment(kind="sif", python="python3", sif="/i.sif", apptainer="/a")
PATH_FIELD = "libs.ld-library-path"


def setting(name: str, value: str, origin: str = SITE) -> Setting:
    return Setting(name=name, value=value, origin=origin, expands="${" in value)


def values(manifest: Any) -> dict[str, str]:
    return {one.name: one.value for one in manifest.settings}


def test_the_site_and_the_user_win_over_modules(make_manifest: Any) -> None:
    effects = ModuleEffects(
        schema=1,
        settings=(setting("A", "m", "module x"), setting("B", "m", "module x"), setting("C", "m", "module x")),
        notes=("module x: a note",),
    )
    manifest = make_manifest(settings=(setting("A", "flag", "--env"),), unset=("C",), environment=SIF)
    found = complete(manifest, effects, {})
    assert values(found) == {"A": "flag", "B": "m"}
    assert found.imported == ("module x: A is replaced by --env", "module x: a note")


def test_values_are_expanded_on_the_node(make_manifest: Any) -> None:
    path = Expectation(field=PATH_FIELD, value=("/image", "/.singularity.d/libs"), severity="must")
    manifest = make_manifest(
        settings=(
            setting("CACHE", "${node-local}/miopen-${jobid}"),
            setting("LD_LIBRARY_PATH", "/site:${value}"),
            setting("EMPTY", "${value}:/end"),
            setting("MINE", "literal"),
        ),
        environment=SIF,
        expectations=(path,),
    )
    found = complete(manifest, None, {"SLURM_JOB_ID": "7", "EMPTY": "of the job"})
    assert values(found) == {
        "CACHE": "/tmp/miopen-7",
        "LD_LIBRARY_PATH": "/site:/image",
        "EMPTY": "/end",
        "MINE": "literal",
    }
    # The path may differ from the locked one; which libraries are found is compared all the same.
    (lighter,) = found.expectations
    assert (lighter.severity, lighter.value) == ("warn", path.value)
    assert "site profile jura sets LD_LIBRARY_PATH" in lighter.note
    of_module = ModuleEffects(schema=1, settings=(setting("LD_LIBRARY_PATH", "/fabric", "module x"),))
    extended = next(s for s in complete(manifest, of_module, {}).settings if s.name == "LD_LIBRARY_PATH")
    assert (extended.value, extended.origin) == ("/site:/fabric", SITE)
    assert extended.reason.endswith("it extends /fabric (module x)")
    on_host = make_manifest(settings=(setting("EMPTY", "${value}:/end"),))
    assert values(complete(on_host, None, {"EMPTY": "of the job"})) == {"EMPTY": "of the job:/end"}


@pytest.mark.parametrize("name", ["LD_LIBRARY_PATH", "PREPEND_LD_LIBRARY_PATH", "APPEND_LD_LIBRARY_PATH"])
def test_a_library_path_of_the_site_may_differ_and_says_so(make_manifest: Any, name: str) -> None:
    """The last two are Apptainer 1.5's."""
    path = Expectation(field=PATH_FIELD, value=(), severity="must")
    (found,) = complete(
        make_manifest(settings=(setting(name, "/site"), setting("A", "${jobid}")), expectations=(path,)), None, {}
    ).expectations
    assert (found.severity, found.note.split(";")[0]) == ("warn", f"{SITE} sets {name}")


def test_the_users_own_library_path_is_compared_as_before(make_manifest: Any) -> None:
    path = Expectation(field=PATH_FIELD, value=(), severity="must")
    manifest = make_manifest(
        settings=(setting("LD_LIBRARY_PATH", "/mine", "--env"), setting("A", "${jobid}")), expectations=(path,)
    )
    assert complete(manifest, None, {}).expectations == (path,)


def test_binds_of_the_site_and_of_modules(make_manifest: Any, tmp_path: Path) -> None:
    for name in ("libcxi.so", "libcxi.so.1", "other"):
        (tmp_path / name).touch()
    binds = (
        Bind(source="/mine", target="/mine"),
        Bind(source=f"{tmp_path}/libcxi.so*", target="/host/", read_only=True, origin=SITE),
        Bind(source=f"{tmp_path}/none", target="/none", optional=True, origin=SITE),
    )
    of_module = (
        Bind(source=f"{tmp_path}/other", target="/other", origin="module x"),
        Bind(source=f"{tmp_path}/gone", target="/gone", origin="module x"),
        Bind(source="/theirs", target="/mine", origin="module x"),
    )
    manifest = make_manifest(
        environment=Environment(kind="sif", python="p", sif="/i.sif", apptainer="/a", binds=binds),
        unlocked_binds=("/host", "/none", "/of-the-project"),
    )
    found = complete(manifest, ModuleEffects(schema=1, binds=of_module), {})
    assert [(b.source, b.target) for b in found.environment.binds] == [
        ("/mine", "/mine"),
        (f"{tmp_path}/libcxi.so", "/host/libcxi.so"),
        (f"{tmp_path}/libcxi.so.1", "/host/libcxi.so.1"),
        (f"{tmp_path}/other", "/other"),
    ]
    assert found.unlocked_binds == ("/host/libcxi.so", "/host/libcxi.so.1", "/of-the-project", "/other")
    assert found.imported == (
        f"module x: {tmp_path}/other is bound at /other",
        f"{SITE}: nothing is bound at /none: this node does not have {tmp_path}/none",
        f"module x: {tmp_path}/gone is not bound: this node does not have it",
        "module x: /theirs is not bound: something else is bound at /mine",
    )


def test_without_anything_to_complete_the_manifest_is_the_same(make_manifest: Any) -> None:
    manifest = make_manifest(settings=(setting("A", "1"),))
    assert complete(manifest, None, {}) is manifest
