"""The package cuda-compat of an image: its version, its folder, and whether the loader takes it already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from probe_world import Venv, altered
from torch_world import build_library


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder in place of /usr/local of an image."""
    (tmp_path / "local").mkdir()
    return tmp_path / "local"


def package(image: Path, version: str, below: str = "compat") -> Path:
    folder = image / f"cuda-{version}" / below
    build_library(folder / "libcuda.so.1")
    return folder


def look(env: Venv, image: Path) -> dict[str, Any] | None:
    found: dict[str, Any] | None = altered(env, {'TOOLKITS = "/usr/local"': f'TOOLKITS = "{image}"'}).get("cuda-compat")
    return found


def test_an_image_without_it_reports_nothing(env: Venv, image: Path) -> None:
    (image / "cuda-12.9" / "lib64").mkdir(parents=True)
    assert look(env, image) is None


@pytest.mark.parametrize("below", ["compat", "compat/lib", "compat/lib.real"])
def test_version_and_folder(env: Venv, image: Path, below: str) -> None:
    folder = package(image, "13.0", below)
    (image / "cuda").symlink_to("cuda-13.0")
    found = look(env, image)
    assert found is not None
    assert (found["version"], found["folder"], found["first"]) == ("13.0", str(folder), False)


def test_the_newest_of_several_counts(env: Venv, image: Path) -> None:
    package(image, "12.9")
    folder = package(image, "13.0")
    found = look(env, image)
    assert found is not None and found["folder"] == str(folder)


def test_a_package_that_the_loader_takes_first(env: Venv, image: Path) -> None:
    folder = package(image, "13.0")
    (image / "cuda").symlink_to("cuda-13.0")
    for path in (str(folder), f"{image}/cuda/compat"):
        found = altered(env, {'TOOLKITS = "/usr/local"': f'TOOLKITS = "{image}"'}, variables={"LD_LIBRARY_PATH": path})[
            "cuda-compat"
        ]
        assert (found["first"], found["library-path"]) == (True, path)
