"""The end of a run is recorded on a full disk, and the disk is named."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcenv.launch import reserve
from hpcenv.records.files import write_text
from hpcenv.records.run_folder import RunFolder


@pytest.fixture(params=["size=400k", "size=4m,nr_inodes=12"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunFolder]:
    """A run folder on a separate small disk: few bytes, or few inodes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", request.param, "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("NOT TESTED: this user cannot mount a tmpfs")
    yield RunFolder(folder)
    subprocess.run(["umount", folder], check=True)


def fill(folder: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        for number in range(1000):
            (folder / f"{os.urandom(4).hex()}-{number}").write_bytes(os.urandom(4096 * 8))


def test_a_record_is_written_on_a_full_disk(small: RunFolder) -> None:
    reserve.make(small, ["n1", "n2"])
    fill(small.path)
    assert "are free on the file system of" in reserve.why_full(small)
    target = small.path / "record.json"
    text = os.urandom(25_000).hex()
    with pytest.raises(OSError, match="No space"):
        write_text(text, target)
    inode = (small.reserved / "n2").stat().st_ino
    assert small.exits.is_dir()
    target = small.exits / "n2.json"
    reserve.write(small, "n2", text, target)
    assert target.read_text() == text
    # Nothing was free at any moment that somebody else could have taken.
    assert target.stat().st_ino == inode
    with pytest.raises(OSError, match="No space"):
        (small.path / "other").write_bytes(bytes(1 << 16))
    with pytest.raises(OSError, match="No space"):
        reserve.write(small, "not-reserved", text, small.path / "second.json")
    reserve.remove(small)
    assert not small.reserved.exists()


def test_other_errors_take_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    reserve.make(run, ["n1"])
    (tmp_path / "target").mkdir()
    with pytest.raises(IsADirectoryError):
        reserve.write(run, "n1", "text", tmp_path / "target")
    assert (run.reserved / "n1").stat().st_size == 65536
