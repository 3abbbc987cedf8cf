"""store_config: where images are kept if nothing names a folder."""

import os
from pathlib import Path

import pytest

from hpcenv.project.store_config import default_store


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


@pytest.mark.skipif(os.geteuid() == 0, reason="NOT RUN: root may write everywhere")
def test_a_scratch_without_write_permission_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "write to" in default_store({"SCRATCH": str(tmp_path)}, tmp_path / "cache")[1]
