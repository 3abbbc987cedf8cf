"""What is mounted over an image: recognised by its bytes, and what changes in a folder is named."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from hpcenv.errors import ImageMismatch
from hpcenv.node.check import bind_content, overlay_check, sif_check


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    top = tmp_path / "extra"
    (top / "pkg" / "__pycache__").mkdir(parents=True)
    (top / "pkg" / "__init__.py").write_text("X = 1\n")
    (top / "pkg" / "__pycache__" / "x.pyc").write_bytes(b"compiled")
    (top / "start.pth").write_text("import pkg\n")
    (top / "link").symlink_to("pkg")
    return top


def digest(folder: Path) -> str:
    return overlay_check.folder_digest(str(folder))[0]


def test_a_folder_has_the_digest_of_a_bind_whatever_number_of_threads_reads_it(folder: Path) -> None:
    assert digest(folder) == bind_content.content_digest(str(folder))


@pytest.mark.parametrize(
    "change",
    [
        lambda top: (top / "pkg" / "__init__.py").write_text("X = 2\n"),
        lambda top: (top / "pkg" / "__pycache__" / "x.pyc").write_bytes(b"Compiled"),
        lambda top: (top / "other.pth").write_text("import os\n"),
        lambda top: (top / "start.pth").unlink(),
        lambda top: (top / "pkg" / "__init__.py").rename(top / "pkg" / "new.py"),
        lambda top: ((top / "link").unlink(), (top / "link").symlink_to("elsewhere")),
    ],
    ids=["source", "compiled", "added", "removed", "renamed", "link"],
)
def test_every_change_of_a_folder_gives_another_digest(folder: Path, change) -> None:
    before = digest(folder)
    change(folder)
    assert digest(folder) != before


def test_a_copy_of_a_folder_at_another_place_and_time_has_its_digest(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    folder.rename(moved)
    os.utime(moved / "start.pth", (1, 1))
    assert digest(moved) == overlay_check.folder_digest(str(moved))[0]
    before = digest(moved)
    moved.rename(folder)
    assert digest(folder) == before


def test_what_changed_while_a_run_worked_is_named(folder: Path) -> None:
    look = overlay_check.folder_digest(str(folder))[1]
    assert overlay_check.changed_since(str(folder), look) == ()
    (folder / "pkg" / "__init__.py").write_text("X = 3\n")
    assert overlay_check.changed_since(str(folder), look) == (f"{folder}/pkg/__init__.py",)


def test_a_file_that_is_gone_counts_as_a_change(folder: Path) -> None:
    look = overlay_check.folder_digest(str(folder))[1]
    (folder / "pkg" / "__pycache__" / "x.pyc").unlink()
    assert overlay_check.changed_since(str(folder), look)


def test_a_folder_that_is_not_there_is_an_error_not_an_empty_digest(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere is not a folder"):
        overlay_check.folder_digest(str(tmp_path / "nowhere"))


def opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY)


def test_a_squashfs_is_recognised_without_reading_it_and_a_changed_byte_is_not(tmp_path: Path) -> None:
    path = tmp_path / "x.sqsh"
    content = b"hsqs" + bytes(4092)
    path.write_bytes(content)
    file = sif_check.identity_of(descriptor := opened(path))
    known = sif_check.known_as(file, "its hash", sif_check.superblock_of(descriptor))
    seen = overlay_check.check_file(descriptor, path=str(path), known=known, records=None)
    os.close(descriptor)
    if seen.checked == "identity":  # not on every file system
        assert seen.sha256 == "its hash"
    path.write_bytes(content[:-1] + b"X")
    descriptor = opened(path)
    seen = overlay_check.check_file(descriptor, path=str(path), known=known, records=None)
    os.close(descriptor)
    assert (seen.checked, seen.sha256) == ("full", hashlib.sha256(content[:-1] + b"X").hexdigest())


def test_another_kind_of_file_is_no_squashfs(tmp_path: Path) -> None:
    path = tmp_path / "x.sqsh"
    path.write_bytes(bytes(4096))
    descriptor = opened(path)
    with pytest.raises(ImageMismatch, match="is not a squashfs"):
        overlay_check.identify(descriptor, None)
    os.close(descriptor)
