"""`hpcenv image refresh`: what changed since, built anew and locked; with a small registry, pip, and a stand-in Apptainer."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from hpcenv.errors import SpecError, ToolFailed, WouldOverwrite
from hpcenv.project.workspace import open_workspace, read_lockfile
from hpcenv.recipes.init import prepare, write
from hpcenv.recipes.recipe_record import RecipeRequest
from hpcenv.recipes.refresh import changed_versions, plan_refresh, refresh, system_packages
from tests.lock_world import context, lock_project
from tests.unit.locking.test_lock_image import Registry, project, registry, with_store  # noqa: F401  (fixtures)
from tests.unit.recipes.test_init import write_wheel

WHEELS = ("torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", "numpy-2.4.6-cp311-cp311-manylinux_2_17_x86_64.whl")


@pytest.fixture
def folder(project: Path, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """The folder of a recipe whose base is a tag, in a project that is locked."""
    registry.image()
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    for wheel in (*WHEELS, "tiny_llm-1.0-py3-none-any.whl", "kept-1.0-py3-none-any.whl"):
        write_wheel(shelf, wheel)
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(shelf)), ("CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(f"PIP_{name}", value)
    request = RecipeRequest(
        torch="2.13.0", cuda="cpu", base=f"{registry.host}/lab/img:1", packages=("tiny-llm", "kept==1.0")
    )
    write(prepare(request, environ=os.environ, plain_http=(registry.host,)), project / "image")
    spec = (project / "hpcenv.toml").read_text()
    (project / "hpcenv.toml").write_text(spec.replace(f"docker://{registry.host}/lab/img:1", "image/image.def"))
    distribution(tmp_path, "libc6 2.36-9+deb12u9 amd64\nlibgl1 1.6.0-1 amd64\n")
    lock_project(project, dict(os.environ))
    return project / "image"


def distribution(tmp_path: Path, text: str) -> None:
    """Say which packages of the distribution the next build installs."""
    place = tmp_path / "tools" / "salt-files" / "usr" / "share" / "hpcenv"
    place.mkdir(parents=True, exist_ok=True)
    (place / "dpkg-packages.txt").write_text(text)


def plan(folder: Path, *, force: bool = False):
    return plan_refresh(open_workspace(folder), folder, environ=os.environ, force=force)


def refreshed(folder: Path, *, force: bool = False):
    made = plan(folder, force=force)
    return refresh(open_workspace(folder), made, context(dict(os.environ)), lambda _: None, force=force)


def builds(tmp_path: Path) -> int:
    return len((tmp_path / "tools" / "builds").read_text().splitlines())


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fail_builds(tmp_path: Path) -> str:
    """Make each build of the stand-in for apptainer fail; return its former text."""
    program = tmp_path / "tools" / "apptainer"
    works = program.read_text()
    program.write_text(works.replace('elif words[0] == "build":', 'elif words[0] == "build" and sys.exit("no space"):'))
    return works


def test_what_changed_is_said_built_and_locked(folder: Path, registry: Registry, tmp_path: Path) -> None:  # noqa: F811
    assert plan(folder).changes == ()
    before, old = read_lockfile(folder.parent / "lockfiles" / "default.lock.toml"), (folder / "image.def").read_text()
    registry.image(env=("NEWER=1",))
    for wheel in ("tiny_llm-1.2-py3-none-any.whl", "kept-2.0-py3-none-any.whl"):
        write_wheel(tmp_path / "shelf", wheel)
    distribution(tmp_path, "libc6 2.36-9+deb12u13 amd64\nlibglvnd0 1.6.0-1 amd64\n")

    found = plan(folder).changes
    assert found[0].startswith(f"base {registry.host}/lab/img:1@sha256:")
    assert found[1:] == ("tiny-llm 1.0 -> 1.2",)
    assert (folder / "image.def").read_text() == old

    result = refreshed(folder)
    assert result.recipe == found
    assert result.system == (
        "libc6 2.36-9+deb12u9 -> 2.36-9+deb12u13",
        "libgl1 1.6.0-1 -> absent",
        "libglvnd0 absent -> 1.6.0-1",
    )
    after = read_lockfile(result.path)
    assert result.lock[0] == f"image {before.container.digest} -> {after.container.digest}"
    assert "tiny-llm==1.2 " in (folder / "requirements.lock").read_text()
    assert plan(folder).changes == ()


def test_the_same_recipe_is_built_anew_for_the_packages_of_the_distribution(folder: Path, tmp_path: Path) -> None:
    distribution(tmp_path, "libc6 2.36-9+deb12u13 amd64\nlibgl1 1.6.0-1 amd64\n")
    before = builds(tmp_path)
    result = refreshed(folder)
    assert (result.recipe, result.system) == ((), ("libc6 2.36-9+deb12u9 -> 2.36-9+deb12u13",))
    assert builds(tmp_path) == before + 1
    assert system_packages(result.sif)["libc6"] == "2.36-9+deb12u13"


def test_of_two_builds_in_one_second_the_later_one_is_locked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (record,) = (open_workspace(folder).store / "images").glob("*.json")
    created = json.loads(record.read_text())["made"]["created"]
    monkeypatch.setattr("hpcenv.locking.definition_build.utc_now", lambda: created)
    distribution(tmp_path, "libc6 2.36-9+deb12u13 amd64\nlibgl1 1.6.0-1 amd64\n")
    assert refreshed(folder).system == ("libc6 2.36-9+deb12u9 -> 2.36-9+deb12u13",)


def test_after_a_build_that_failed_the_changes_are_still_listed(folder: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path / "shelf", "tiny_llm-1.2-py3-none-any.whl")
    before, works = contents(folder), fail_builds(tmp_path)
    with pytest.raises(ToolFailed):
        refreshed(folder)
    assert contents(folder) == before
    (tmp_path / "tools" / "apptainer").write_text(works)
    assert plan(folder).changes == ("tiny-llm 1.0 -> 1.2",)
    assert refreshed(folder).recipe == ("tiny-llm 1.0 -> 1.2",)


def test_after_a_build_that_failed_an_edited_recipe_has_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    (folder / "image.def").write_bytes((folder / "image.def").read_bytes().replace(b"\n", b"\r\n") + b"# \xe9\r\n")
    before = contents(folder)
    fail_builds(tmp_path)
    with pytest.raises(ToolFailed):
        refreshed(folder, force=True)
    assert contents(folder) == before


def test_without_the_image_before_the_packages_are_not_known(folder: Path) -> None:
    for sif in (open_workspace(folder).store / "images").glob("*.sif"):
        sif.unlink()
    assert refreshed(folder).system is None


def test_an_edited_recipe_is_kept(folder: Path, tmp_path: Path) -> None:
    (folder / "image.def").write_text((folder / "image.def").read_text() + "# mine\n")
    before = builds(tmp_path)
    with pytest.raises(WouldOverwrite, match="was edited"):
        plan(folder)
    assert builds(tmp_path) == before
    refreshed(folder, force=True)
    assert "# mine" not in (folder / "image.def").read_text()


def test_what_has_no_recipe_or_another_image_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"has no recipe\.json"):
        plan(folder.parent)
    spec = folder.parent / "hpcenv.toml"
    spec.write_text(spec.read_text().replace("image/image.def", "other.sif"))
    with pytest.raises(SpecError, match="is not made from"):
        plan(folder)


def test_the_command_lists_what_changed(folder: Path, tmp_path: Path, hpcenv) -> None:
    environ = with_store(folder.parent)
    write_wheel(tmp_path / "shelf", "tiny_llm-1.2-py3-none-any.whl")
    asked = hpcenv("image", "refresh", "--dry-run", cwd=folder.parent, environ=environ)
    assert asked.status == 0, asked.stderr
    assert asked.stdout == "base and Python packages: changed\n  tiny-llm 1.0 -> 1.2\n"
    assert "note: pip resolved the packages now" in asked.stderr
    done = hpcenv("image", "refresh", cwd=folder.parent, environ=environ)
    assert done.status == 0, done.stderr
    assert "packages of the distribution: no change\n" in done.stdout
    assert "lockfiles/default.lock.toml: " in done.stdout
    assert "`hpcenv export cyclonedx -o bom.cdx.json`, then: grype sbom:bom.cdx.json" in done.stderr
    scanned = re.search(r"^of the distribution, too: grype singularity:(\S+)$", done.stderr, re.M)
    assert Path(scanned[1]).is_file()
    again = hpcenv("image", "refresh", "--dry-run", "--json", cwd=folder.parent, environ=environ)
    assert again.envelope["data"]["recipe"] == []


def test_versions_that_came_and_went() -> None:
    assert changed_versions({"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "d": "1"}) == (
        "b 1 -> 2",
        "c 1 -> absent",
        "d absent -> 1",
    )
