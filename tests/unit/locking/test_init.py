"""`hpcenv init`: what `hpcenv lock` would refuse is not written, and nothing is replaced without --force."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcenv.errors import HpcenvError, SpecError, UsageError, WouldOverwrite
from hpcenv.locking.init import init
from hpcenv.project.workspace import open_workspace

IMAGE = "docker://registry.example/team/train:1"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ({"image": "pytorch/pytorch:latest"}, "does not name an image"),
        ({"image": "docker://pytorch/pytorch:latest"}, "has the tag `latest`"),
        ({"image": "docker://pytorch/pytorch"}, "has no tag"),
        ({"image": "oras://registry.example/team/train"}, "has no tag"),
        ({"image": "ubuntu"}, "does not name an image"),
        ({"image": "/nosuch.sif"}, "there is no `/nosuch.sif`"),
        ({"image": "nosuch.def"}, "there is no"),
        ({"image": "oci:nosuch"}, "there is no"),
        ({"python": "/nosuch"}, "is not an executable Python"),
        ({"python": "/etc"}, "is not an executable Python .the program in the environment"),
        ({"python": "/etc/passwd"}, "is not an executable Python"),
        ({"image": IMAGE, "plain_http": ("http://registry:5000",)}, "no host of a registry"),
    ],
)
def test_what_lock_would_refuse_is_not_written(words: dict[str, str], what: str, home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    with pytest.raises(HpcenvError, match=what):
        init(folder, environ={"HOME": str(home)}, **words)  # type: ignore[arg-type]
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("image", [IMAGE, "docker://team/train@sha256:" + 64 * "0", "mine.sif", "host"])
def test_what_lock_can_look_at_is_written(image: str, home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "mine.sif").touch()
    init(folder, environ={"HOME": str(home)}, image=image)
    assert open_workspace(folder).project.image == image


def test_in_an_image_the_interpreter_is_a_name_there(home: Path, tmp_path: Path) -> None:
    init(tmp_path / "project", environ={"HOME": str(home)}, image=IMAGE, python="/opt/env/bin/python")


def test_a_file_is_replaced_with_force_only_and_never_by_a_refusal(home: Path, tmp_path: Path) -> None:
    init(tmp_path / "project", environ={"HOME": str(home)}, image=IMAGE)
    spec = tmp_path / "project" / "hpcenv.toml"
    spec.write_text(spec.read_text() + "# mine\n")
    edited = spec.read_text()
    with pytest.raises(WouldOverwrite) as caught:
        init(tmp_path / "project", environ={"HOME": str(home)})
    assert "--force" in caught.value.hint
    with pytest.raises(SpecError):
        init(tmp_path / "project", environ={"HOME": str(home)}, image="ubuntu", force=True)
    assert spec.read_text() == edited
    init(tmp_path / "project", environ={"HOME": str(home)}, image="host", force=True)
    assert open_workspace(tmp_path / "project").project.image == "host"


def test_the_home_folder_becomes_no_project_by_a_mistake(home: Path) -> None:
    """The copy of a run would be made of all text files below it."""
    os.symlink(home, home.parent / "link")
    for name in ("home", "link"):
        with pytest.raises(UsageError, match="your home folder"):
            init(home.parent / name, environ={"HOME": str(home)})
    assert list(home.iterdir()) == []
    init(home, environ={"HOME": str(home)}, force=True)
    assert (home / "hpcenv.toml").is_file()


def test_a_python_that_does_not_exist_has_a_hint(home: Path, tmp_path: Path) -> None:
    with pytest.raises(HpcenvError) as caught:
        init(tmp_path / "project", environ={"HOME": str(home)}, python="/nosuch")
    assert caught.value.hint == "the Python in your environment, for example .venv/bin/python"
