"""The digest of what a bind shows."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from hpcenv.identity.bind_content import content_digest


def test_a_file_has_the_digest_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert content_digest(str(tmp_path / "a")) == "sha256:" + hashlib.sha256(b"abc").hexdigest()


def test_a_folder_has_the_digest_of_names_content_and_links(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/a.py").write_text("A = 1\n")
    (folder / "link").symlink_to("sub/a.py")
    seen = {content_digest(str(folder))}
    os.utime(folder / "sub/a.py", (0, 0))
    (folder / "sub/a.py").chmod(0o600)
    assert content_digest(str(folder)) in seen, "times and modes do not count"
    for change in (
        lambda: (folder / "sub/a.py").write_text("A = 2\n"),
        lambda: (folder / "sub/b.py").write_text(""),
        lambda: (folder / "empty").mkdir(),
        lambda: (folder / "sub/b.py").rename(folder / "b.py"),
        lambda: ((folder / "link").unlink(), (folder / "link").symlink_to("sub")),
    ):
        change()
        digest = content_digest(str(folder))
        assert digest not in seen
        seen.add(digest)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="neither"):
        content_digest(str(tmp_path / "fifo"))
    with pytest.raises(OSError, match="No such file"):
        content_digest(str(tmp_path / "gone"))


def test_what_is_too_large_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "big", "wb") as file:
        file.truncate(3 << 30)
    with pytest.raises(ValueError, match="more than"):
        content_digest(str(tmp_path / "big"))
