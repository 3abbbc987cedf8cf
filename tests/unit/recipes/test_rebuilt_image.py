"""An image that is made again for a reproduction: compared with the lockfile, locked for itself, used again."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path

import pytest

from hpcenv.errors import HpcenvError, RebuildDiffers
from hpcenv.project.workspace import open_workspace, read_lockfile
from hpcenv.recipes.rebuilt_image import FOLDER, RebuiltImage, make_image_again
from tests.unit.locking.test_lock_kinds import folder, lock_here, spec, write_layout  # noqa: F401  (a fixture)


@pytest.fixture
def lost(folder: Path) -> Path:  # noqa: F811
    """The lockfile of a run whose image is gone; the SIF that was made from it is `made.sif`."""
    write_layout(folder / "lay")
    spec(folder, "oci:lay:1")
    made = lock_here(folder)
    assert made.sif is not None
    shutil.copyfile(made.sif, folder.parent / "made.sif")
    shutil.rmtree(folder / "lay")
    kept = folder.parent / "lock.toml"
    shutil.copyfile(made.path, kept)
    return kept


def place_of(lost: Path, project: Path) -> Path:
    return project / FOLDER / hashlib.sha256(lost.read_bytes()).hexdigest()[:16]


def again(lost: Path, project: Path) -> RebuiltImage:
    return make_image_again(open_workspace(project), lost, environ=dict(os.environ), on_line=lambda line: None)


def put_sif(lost: Path, project: Path) -> Path:
    place = place_of(lost, project)
    place.mkdir(parents=True)
    shutil.copyfile(lost.with_name("made.sif"), place / "mine.sif")
    return place


def test_a_sif_that_is_there_is_compared_and_locked_and_used_again(lost: Path, folder: Path) -> None:  # noqa: F811
    place = put_sif(lost, folder)
    before = {path: path.read_bytes() for path in (folder / "hpcenv.toml", folder / "lockfiles" / "default.lock.toml")}

    made = again(lost, folder)

    assert made.lockfile.parent == place
    assert (made.same, made.same > 8) == (made.compared, True)
    assert made.how == f"made again from the hashes of its packages: {made.same} of {made.same} fields are as locked"
    locked = read_lockfile(made.lockfile)
    assert locked.container is not None
    assert locked.container.sif.sha256 == hashlib.sha256((place / "mine.sif").read_bytes()).hexdigest()
    assert {path: path.read_bytes() for path in before} == before
    assert again(lost, folder) == RebuiltImage(lockfile=made.lockfile)


def test_a_field_that_must_be_as_locked_refuses_the_image(lost: Path, folder: Path) -> None:  # noqa: F811
    before, torch = lost.read_text().split("\n[torch]\n")
    lost.write_text(before + "\n[torch]\n" + re.sub(r'(?m)^version = ".*"', 'version = "1.0.0"', torch, count=1))
    place = put_sif(lost, folder)
    with pytest.raises(RebuildDiffers, match="must be as locked") as caught:
        again(lost, folder)
    assert "torch.version: locked 1.0.0" in (caught.value.why or "")
    assert [path.name for path in place.iterdir()] == ["mine.sif"]


def test_what_cannot_be_built_names_the_command_with_more_options(lost: Path, folder: Path) -> None:  # noqa: F811
    text = lost.read_text()
    (release,) = {line for line in text.splitlines() if line.startswith("os-release = ")}
    lost.write_text(text.replace(release, 'os-release = "rocky 9.5"'))
    with pytest.raises(HpcenvError, match="no recipe for the distribution `rocky 9.5`") as caught:
        again(lost, folder)
    said = caught.value.hint or ""
    assert "--os takes one of" in said
    assert f"hpcenv image rebuild --lock {lost} --build --output {place_of(lost, folder)}" in said
