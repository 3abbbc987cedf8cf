"""store_config: where images are kept if nothing names a folder."""

from pathlib import Path

import pytest

from hpcenv.project.store_config import default_store, site_store


def test_scratch_comes_before_the_home_and_an_existing_store_before_both(tmp_path: Path) -> None:
    scratch, cache = tmp_path / "scratch", tmp_path / "home" / ".cache" / "hpcenv"
    scratch.mkdir()
    environ = {"SCRATCH": str(scratch)}
    place, why = default_store(environ, cache)
    assert (place, "SCRATCH is set" in why) == (scratch / "hpcenv" / "store", True)
    assert default_store({}, cache) == (cache / "store", "SCRATCH is not set")
    (cache / "store").mkdir(parents=True)
    assert default_store(environ, cache) == (cache / "store", "it exists already")


@pytest.mark.parametrize("named", ["relative", "/nonexistent/scratch", ""])
def test_a_scratch_that_is_no_folder_is_not_used(tmp_path: Path, named: str) -> None:
    place, why = default_store({"SCRATCH": named}, tmp_path / "cache")
    assert place == tmp_path / "cache" / "store"
    assert ("no folder that you can write to" in why) is bool(named)


@pytest.mark.ordinary_user
def test_a_scratch_without_write_permission_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "write to" in default_store({"SCRATCH": str(tmp_path)}, tmp_path / "cache")[1]


def test_the_place_of_a_site_is_made_of_the_users_variables(tmp_path: Path) -> None:
    folder = "${SCRATCHDIR}/${user}/images"
    assert site_store(folder, {"SCRATCHDIR": str(tmp_path)}, "ann") == (tmp_path / "ann" / "images", "")
    assert site_store(folder, {}, "ann") == (None, "SCRATCHDIR is not set")
    assert site_store("${A}/${B}", {"A": ""}, "ann") == (None, "A and B are not set")
    # A value of a variable is text: nothing in it is replaced once more.
    assert site_store("/${A}", {"A": "${user}", "user": "x"}, "ann")[0] == Path("/${user}")


@pytest.mark.parametrize(("value", "why"), [("scratch", "is no absolute path"), ("/a\nb", "is no absolute path")])
def test_a_variable_of_a_site_that_holds_no_place(value: str, why: str) -> None:
    place, said = site_store("${SCRATCHDIR}/images", {"SCRATCHDIR": value}, "ann")
    assert (place, why in said) == (None, True)


def test_a_place_of_a_site_that_is_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert site_store(f"{tmp_path}/file/images", {}, "ann") == (None, f"{tmp_path}/file is no folder")


@pytest.mark.ordinary_user
def test_a_place_of_a_site_that_cannot_be_made_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    place, said = site_store(f"{tmp_path}/images", {}, "ann")
    assert (place, "you cannot write to" in said) == (None, True)
