"""Level full: what the files really hold."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from probe_world import Venv, b64, make_fifo, package


def test_one_changed_byte_is_found_at_level_full_and_named(env: Venv) -> None:
    before = env.probe("full")
    path = env.site / "demo/data.bin"
    data = bytearray(path.read_bytes())
    data[20000] ^= 1
    path.write_bytes(data)
    after = env.probe("full")
    assert before["values"]["packages.env-digest"] == after["values"]["packages.env-digest"]
    assert after["values"]["packages.env-digest"] != after["values"]["packages.content-digest"]
    demo = package(after, "demo")
    assert demo["record-sha256"] != demo["content-sha256"]
    assert demo["modified-count"] == 1
    original = bytes(range(256)) * 99
    assert demo["modified"] == [{"path": "demo/data.bin", "locked": b64(original), "found": b64(bytes(data))}]


def test_level_record_does_not_claim_to_have_looked_at_files(env: Venv) -> None:
    demo = package(env.probe("record"), "demo")
    assert demo["content-sha256"] is None and demo["modified-count"] is None and demo["modified"] == []
    assert package(env.probe("full"), "demo")["modified-count"] == 0


def test_a_missing_file_is_modified(env: Venv) -> None:
    (env.site / "demo/__init__.py").unlink()
    demo = package(env.probe("full"), "demo")
    assert demo["modified"] == [{"path": "demo/__init__.py", "locked": b64(b"X = 1\n"), "found": "missing"}]


def test_many_modified_files_are_counted_and_the_list_is_cut(env: Venv) -> None:
    env.install("many", {f"many/{i:03}.py": b"1" for i in range(50)})
    for path in (env.site / "many").iterdir():
        path.write_bytes(b"2")
    many = package(env.probe("full"), "many")
    assert many["modified-count"] == 50 and len(many["modified"]) == 20


def test_a_changed_program_has_a_digest_of_its_own(env: Venv) -> None:
    env.install("tool", {"../../../bin/tool": b"#!/x\nrun()\n"})
    before = package(env.probe("full"), "tool")
    assert before["record-sha256"] == before["content-sha256"] and before["programs"]["modified"] == []
    (env.path / "bin/tool").write_bytes(b"#!/x\nevil()\n")
    changed = package(env.probe("full"), "tool")
    assert changed["content-sha256"] == before["content-sha256"]
    assert changed["programs"]["sha256"] != before["programs"]["sha256"]
    assert changed["programs"]["modified"] == ["tool"]


@pytest.mark.parametrize(
    "claim",
    [
        b64(b"1", "sha512"),
        b64(b"1", "md5"),
        "sha256=" + hashlib.sha256(b"1").hexdigest(),
        "sha256=" + base64.b64encode(hashlib.sha256(b"1").digest()).decode(),
        b64(b"1", "sha384"),
    ],
)
def test_other_ways_to_write_a_hash(env: Venv, claim: str) -> None:
    env.install("old", {}, rows=[["old.py", claim, "1"]])
    (env.site / "old.py").write_bytes(b"1")
    old = package(env.probe("full"), "old")
    assert old["content-sha256"] == old["record-sha256"] and old["modified"] == []
    (env.site / "old.py").write_bytes(b"2")
    [change] = package(env.probe("full"), "old")["modified"]
    assert change == {"path": "old.py", "locked": claim, "found": b64(b"2", claim.split("=")[0])}


@pytest.mark.parametrize("claim", ["crc32=abcd", "shake_128=abcd", "=abcd", "nonsense"])
def test_a_hash_that_cannot_be_checked_is_unknown_not_fine(env: Venv, claim: str) -> None:
    env.install("odd", {}, rows=[["odd.py", claim, "1"]])
    (env.site / "odd.py").write_bytes(b"1")
    found = env.probe("full")
    odd = package(found, "odd")
    assert odd["record-sha256"] is not None and odd["content-sha256"] is None
    assert odd["reason"].startswith("content unknown: odd.py: hash algorithm")
    assert found["unknown"]["packages.content-digest"] == "not all files could be read of odd"


def test_a_listed_file_that_is_no_file_is_modified(env: Venv) -> None:
    kinds: dict[str, Callable[[Path], None]] = {
        "fifo": make_fifo,
        "folder": Path.mkdir,
        "loop": lambda path: path.symlink_to(path),
    }
    for name, make in kinds.items():
        env.install(name, {}, rows=[[f"{name}.py", b64(b"1"), "1"]])
        make(env.site / f"{name}.py")
    found = env.probe("full")
    words = {n: package(found, n)["modified"][0]["found"] for n in ("fifo", "folder", "loop")}
    assert words == {"fifo": "not-a-file", "folder": "not-a-file", "loop": "missing"}


@pytest.mark.ordinary_user
def test_a_file_that_may_not_be_read_is_unknown(env: Venv) -> None:
    (env.site / "demo/__init__.py").chmod(0)
    found = env.probe("full")
    assert package(found, "demo")["content-sha256"] is None
    assert "PermissionError" in package(found, "demo")["reason"]


def test_the_standard_library_has_one_digest_whoever_asks(env: Venv, tmp_path: Path) -> None:
    other = Venv(tmp_path / "other").probe("full")["values"]["python.stdlib-sha256"]
    assert re.fullmatch("[0-9a-f]{64}", other)
    assert env.probe("full")["values"]["python.stdlib-sha256"] == other
    assert "python.stdlib-sha256" not in env.probe("record")["values"]
