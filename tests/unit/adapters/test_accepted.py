"""What was valid is remembered, nothing else is, and only in a folder of one's own."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from hpcenv.adapters import accepted
from hpcenv.adapters.accepted import NOTHING, Accepted
from hpcenv.model.document import Document
from hpcenv.model.project import Project, SubmitTable

VALID = b'image = "host"'
DATA = {"image": "host"}


def names(records: Accepted) -> list[str]:
    assert records.folder is not None
    return sorted(os.listdir(records.folder)) if records.folder.exists() else []


@pytest.fixture
def records(tmp_path: Path) -> Accepted:
    return Accepted(folder=tmp_path / "cache" / "validated")


def test_what_passed_is_kept_under_its_hash_and_read_again(records: Accepted) -> None:
    first = records.parse(Project, DATA, VALID)
    (name,) = names(records)
    assert len(name) == 64
    assert records.folder is not None
    assert (records.folder / name).read_bytes() == b""
    assert records.folder.stat().st_mode & 0o777 == 0o700
    assert records.parse(Project, DATA, VALID) == first == NOTHING.parse(Project, DATA, VALID)


def test_a_record_is_of_these_bytes_and_this_kind_only(records: Accepted) -> None:
    records.parse(Project, DATA, VALID)
    records.parse(Project, DATA, VALID + b"\n")
    records.parse(SubmitTable, {"mem": "1G"}, VALID)
    assert len(names(records)) == 3


def test_what_is_invalid_is_never_kept(records: Accepted) -> None:
    for _ in range(2):
        made, problems = records.parse(Project, {"imge": "x"}, b'imge = "x"')
        assert made is None
        assert problems
    assert names(records) == []


def forged(records: Accepted, content: bytes) -> Path:
    """Make a record for what never passed, as somebody could who can write to the folder."""
    path = records._record(Project, content)
    assert path is not None
    path.parent.mkdir(parents=True, mode=0o700)
    path.touch(mode=0o600)
    return path


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o702])
def test_a_folder_that_others_can_write_to_counts_for_nothing(records: Accepted, mode: int) -> None:
    path = forged(records, b"image = 3")
    path.parent.chmod(mode)
    made, problems = records.parse(Project, {"image": 3}, b"image = 3")
    assert made is None
    assert problems == ("`image` = 3: Input should be a valid string",)
    records.parse(Project, DATA, VALID)
    assert names(records) == [path.name]


@pytest.mark.parametrize("kind", ["link", "folder", "writable"])
def test_neither_does_a_record_that_is_no_file_of_ones_own(records: Accepted, tmp_path: Path, kind: str) -> None:
    path = forged(records, b"image = 3")
    if kind == "writable":
        path.chmod(0o606)
    else:
        path.unlink()
        path.mkdir() if kind == "folder" else path.symlink_to(tmp_path)
    assert records.parse(Project, {"image": 3}, b"image = 3")[0] is None


def test_where_nothing_can_be_written_all_is_validated(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    made, problems = Accepted(folder=tmp_path / "file" / "validated").parse(Project, DATA, VALID)
    assert made is not None
    assert problems == ()


def test_old_records_go(records: Accepted) -> None:
    assert records.folder is not None
    records.folder.mkdir(parents=True, mode=0o700)
    for number in range(accepted._MOST_RECORDS):
        os.close(os.open(records.folder / f"{number:064x}", os.O_CREAT | os.O_WRONLY, 0o600))
        os.utime(records.folder / f"{number:064x}", (number, number))
    records.parse(Project, DATA, VALID)
    left = names(records)
    assert len(left) == accepted._MOST_RECORDS * 3 // 4
    assert f"{0:064x}" not in left
    records.parse(Project, DATA, VALID)
    assert names(records) == left


def test_many_at_once(records: Accepted) -> None:
    found: list[Any] = []
    jobs = [threading.Thread(target=lambda: found.append(records.parse(Project, DATA, VALID))) for _ in range(8)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert found == [found[0]] * 8
    assert len(names(records)) == 1


class Strange(Document):
    """A kind whose rules lie in no file of the model."""


def test_a_kind_whose_rules_cannot_be_read_is_not_kept(records: Accepted) -> None:
    assert records.parse(Strange, {}, b"")[1] == ()
    assert names(records) == []
