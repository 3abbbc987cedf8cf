"""Reading files that another user may have written."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from probe_world import SITE, Venv, make_fifo, package


@pytest.mark.parametrize(
    "make",
    [
        make_fifo,
        Path.mkdir,
        lambda p: p.symlink_to("RECORD"),
        lambda p: p.symlink_to("/dev/zero"),
        lambda p: p.symlink_to("/nonexistent/by-hpcenv"),
    ],
    ids=["fifo", "folder", "loop", "device", "dangling"],
)
@pytest.mark.parametrize("name", ["RECORD", "METADATA", "INSTALLER", "direct_url.json"])
def test_a_metadata_file_that_is_no_file_neither_hangs_nor_crashes(env: Venv, make: Any, name: str) -> None:
    path = env.site / "demo-1.0.dist-info" / name
    path.unlink(missing_ok=True)
    make(path)
    demo = package(env.probe("full"), "demo")
    assert demo["version"] == "1.0"
    part = {"RECORD": "record: ", "METADATA": "identity: ", "direct_url.json": "origin: "}.get(name)
    dangling_url = name == "direct_url.json" and os.path.islink(path) and os.readlink(path) == "/nonexistent/by-hpcenv"
    if part is None or dangling_url:  # as good as not there
        assert demo["content-sha256"] == demo["record-sha256"] is not None
    else:
        assert demo["record-sha256"] is None and demo["content-sha256"] is None
        assert demo["reason"].startswith(part)


def test_links_out_of_the_environment_are_followed_only_with_a_word(env: Venv, tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_bytes(b"X = 1\n")
    (env.site / "demo/__init__.py").unlink()
    (env.site / "demo/__init__.py").symlink_to(tmp_path / "outside.py")
    (env.site / "evil.py").symlink_to(tmp_path / "outside.py")
    found = env.probe("full")
    demo = package(found, "demo")
    assert demo["linked-outside"] == 1 and demo["content-sha256"] == demo["record-sha256"]
    digest = hashlib.sha256(b"X = 1\n").hexdigest()
    assert found["unlisted"] == [{"path": f"{SITE}/evil.py", "sha256": digest, "link": str(tmp_path / "outside.py")}]
