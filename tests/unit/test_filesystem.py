"""Whether compute nodes can be expected to see a path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcenv import filesystem


@pytest.mark.parametrize("place", ["/tmp/project", "/var/tmp/x/y", "/dev/shm/x", "/proc/x", "/run/x"])
def test_places_of_one_machine_are_not_shared(place: str) -> None:
    seen = filesystem.visibility(Path(place), home=Path("/nonexistent"))
    assert seen.shared is False
    assert "local to" in seen.reason


def test_a_link_does_not_hide_where_a_path_lies(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/shm")
    assert filesystem.visibility(tmp_path / "link" / "runs", home=Path("/nonexistent")).shared is False


def test_a_loop_of_links_is_no_crash(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert filesystem.visibility(tmp_path / "a" / "runs", home=Path("/nonexistent")).shared is False


def test_what_lies_with_the_home_folder_is_taken_as_shared() -> None:
    place = Path("/usr/share")
    seen = filesystem.visibility(place, home=Path("/usr/lib"))
    # On an overlay root (a container) nothing is: its upper layer is this machine's own.
    assert (seen.shared and seen.assumed) or "overlay" in seen.reason


def test_blanks_in_mount_points_are_understood() -> None:
    assert filesystem._unescape(r"/mnt/my\040disk\134") == "/mnt/my disk\\"


def test_every_path_of_this_machine_has_an_answer() -> None:
    for place in ("/", "/etc/passwd", "/no/such/folder", os.path.expanduser("~")):
        assert filesystem.visibility(Path(place), home=Path("/root")).reason


def test_the_most_similar_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "affinity.py").touch()
    assert filesystem.most_similar(tmp_path / "sorce" / "affinty.py") == tmp_path / "source" / "affinity.py"
    assert filesystem.most_similar(tmp_path / "source" / "train.py") is None
    assert filesystem.most_similar(tmp_path / "absent" / "affinity.py") is None
