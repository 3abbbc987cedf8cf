"""The SIF of a bundle: only the locked bytes are used, and never under a name that other projects trust."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import pytest

from hpcenv.errors import ImageMismatch, UsageError
from hpcenv.locking.image_source import locked_sif
from hpcenv.project.lockfile import ContainerTable
from hpcenv.project.workspace import Workspace, open_workspace, read_lockfile
from hpcenv.reproduction.bundle.image import find_bundled, use_bundled
from hpcenv.reproduction.bundle.make import IMAGE

ROOT = Path(__file__).resolve().parents[4]
BYTES = b"SIF" * 1000


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "hpcenv.toml").write_text('image = "docker://registry/torch:1"\n')
    return open_workspace(tmp_path / "project")


@pytest.fixture
def sif(tmp_path: Path) -> Path:
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper" / IMAGE).write_bytes(BYTES)
    return tmp_path / "paper" / IMAGE


@pytest.fixture
def container() -> ContainerTable:
    locked = read_lockfile(ROOT / "lockfiles" / "default.lock.toml").container
    assert locked is not None
    return locked.model_copy(
        update={"sif": locked.sif.model_copy(update={"sha256": hashlib.sha256(BYTES).hexdigest(), "size": len(BYTES)})}
    )


def test_it_is_used_from_a_folder_of_this_project_alone(
    workspace: Workspace, sif: Path, container: ContainerTable
) -> None:
    counted: list[int] = []
    for _ in range(2):
        used = use_bundled(workspace, container, sif, on_bytes=counted.append)
    place = locked_sif(used, container)
    assert place.read_bytes() == BYTES and not stat.S_IMODE(place.stat().st_mode) & 0o222
    assert place.is_relative_to(workspace.root / ".hpcenv" / "bundled")
    assert sum(counted) == 2 * len(BYTES)
    # The store of the project has nothing under the image's digest.
    assert not locked_sif(workspace, container).exists() and not workspace.store.exists()


def test_other_bytes_are_refused_and_put_nowhere(workspace: Workspace, sif: Path, container: ContainerTable) -> None:
    sif.write_bytes(BYTES + b"x")
    with pytest.raises(ImageMismatch, match="is not the locked SIF"):
        use_bundled(workspace, container, sif)
    assert not (workspace.root / ".hpcenv").exists()


def test_a_sif_file_of_the_project_is_put_where_the_lockfile_names_it(
    workspace: Workspace, sif: Path, container: ContainerTable
) -> None:
    inside = container.model_copy(update={"reference": "images/mine.sif"})
    use_bundled(workspace, inside, sif)
    assert (workspace.root / "images/mine.sif").read_bytes() == BYTES


def test_a_lockfile_does_not_choose_a_place_outside_of_the_project(
    workspace: Workspace, sif: Path, container: ContainerTable, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (workspace.root / "link").symlink_to(tmp_path / "elsewhere")
    for reference in ("../out.sif", str(tmp_path / "out.sif"), "link/out.sif"):
        with pytest.raises(UsageError, match="not in the project"):
            use_bundled(workspace, container.model_copy(update={"reference": reference}), sif)
    assert not (tmp_path / "out.sif").exists() and not os.listdir(tmp_path / "elsewhere")


def test_only_a_file_counts_as_the_image_of_a_bundle(sif: Path, tmp_path: Path) -> None:
    assert find_bundled(sif.parent) == sif
    assert find_bundled(tmp_path) is None
    (tmp_path / IMAGE).symlink_to(sif)
    assert find_bundled(tmp_path) is None
