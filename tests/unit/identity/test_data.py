"""The state of data: what each way of comparing sees, and what it does not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcenv.identity.data import read_state
from hpcenv.records.manifest import DataCompare

WAYS: tuple[DataCompare, ...] = ("sha256", "size-and-time", "list")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"123")
    (folder / "deep" / "b.bin").write_bytes(b"45")
    return folder


def in_place(path: Path, content: bytes) -> None:
    """Write other bytes of the same length, and bring the time back."""
    times = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda d: (d / "a.bin").write_bytes(b"1234"), WAYS),
        (lambda d: (d / "deep" / "c.bin").write_bytes(b""), WAYS),
        (lambda d: (d / "deep" / "b.bin").unlink(), WAYS),
        (lambda d: (d / "a.bin").rename(d / "c.bin"), WAYS),
        (lambda d: os.utime(d / "a.bin", (1, 1)), ("size-and-time",)),
        (lambda d: in_place(d / "a.bin", b"321"), ("sha256",)),
    ],
)
def test_what_each_way_sees(data: Path, change: Callable[[Path], object], seen: tuple[str, ...]) -> None:
    before = {way: read_state(str(data), way) for way in WAYS}
    assert {(state.files, state.size) for state in before.values()} == {(2, 5)}
    change(data)
    assert tuple(way for way in WAYS if read_state(str(data), way) != before[way]) == seen


@pytest.mark.parametrize("way", WAYS)
def test_an_empty_folder_counts_by_its_name_where_folders_count(data: Path, way: DataCompare) -> None:
    plain, before = read_state(str(data), way), read_state(str(data), way, folders=True)
    assert before == plain, "no folder is empty"
    (data / "deep" / "birds").mkdir()
    added = read_state(str(data), way, folders=True)
    assert (added.files, added.size, added.digest == before.digest) == (2, 5, False)
    assert read_state(str(data), way) == plain
    (data / "deep" / "birds").rename(data / "deep" / "dogs")
    assert read_state(str(data), way, folders=True) != added


def test_a_file_links_and_loops(data: Path, tmp_path: Path) -> None:
    assert read_state(str(data / "a.bin"), "sha256").files == 1
    (tmp_path / "link").symlink_to(data)
    assert read_state(str(tmp_path / "link"), "sha256") == read_state(str(data), "sha256")
    (data / "deep" / "loop").symlink_to(data)
    (data / "beside").symlink_to(tmp_path / "one")
    (tmp_path / "one").write_bytes(b"6")
    assert read_state(str(data), "list").files == 3


@pytest.mark.parametrize("way", WAYS)
def test_what_cannot_be_read_is_an_error(data: Path, way: DataCompare) -> None:
    (data / "gone").symlink_to("/nowhere")
    with pytest.raises(OSError):
        read_state(str(data), way)
    with pytest.raises(OSError):
        read_state(str(data / "missing"), way)
