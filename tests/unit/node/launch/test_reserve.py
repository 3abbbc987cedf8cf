"""The end of a run is recorded on a full disk, and the disk is named."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcenv.node.launch import reserve
from hpcenv.records.run_folder import RunFolder


@pytest.fixture(params=["size=400k", "size=4m,nr_inodes=12"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunFolder]:
    """A run folder on a small disk of its own: few bytes, or few inodes."""
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

    def record() -> None:
        target.write_bytes(os.urandom(50_000))

    with pytest.raises(OSError, match="No space"):
        record()
    target.unlink(missing_ok=True)
    reserve.write(small, "n2", record)
    assert target.stat().st_size == 50_000
    reserve.remove(small)
    assert not small.reserved.exists()


def test_other_errors_free_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    reserve.make(run, ["n1"])

    def fail() -> None:
        raise PermissionError(errno.EACCES, "no")

    with pytest.raises(PermissionError):
        reserve.write(run, "n1", fail)
    assert (run.reserved / "n1").stat().st_size == 65536
