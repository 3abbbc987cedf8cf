"""The squashfs over an image is recognised by its bytes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from hpcenv.errors import ImageMismatch
from hpcenv.identity import overlay_check, sif_check


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
