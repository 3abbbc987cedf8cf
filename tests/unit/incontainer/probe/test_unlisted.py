"""Importable files that no RECORD lists."""

from __future__ import annotations

import hashlib
import os
import time

from probe_world import SITE, Venv, package, unlisted


def test_unlisted_files_are_seen(env: Venv) -> None:
    before = env.probe()
    assert before["values"]["packages.unlisted-count"] == 0
    dropped = [
        "evil.py",
        "evil.pth",
        "demo/evil.cpython-311-x86_64-linux-gnu.so",
        "demo/libnccl.so.2",
        "sitecustomize.py",
    ]
    for name in [*dropped, "demo/notes.txt"]:
        (env.site / name).write_text("")
    found = env.probe()
    assert unlisted(found) == sorted(f"{SITE}/{name}" for name in dropped)
    assert found["unlisted"][0]["sha256"] == hashlib.sha256(b"").hexdigest()
    assert found["values"]["packages.unlisted-count"] == len(dropped)
    assert found["values"]["packages.unlisted-digest"] != before["values"]["packages.unlisted-digest"]
    assert found["values"]["packages.env-digest"] == before["values"]["packages.env-digest"]


def test_compiled_files_are_ignored_unless_they_are_modules_of_their_own(env: Venv) -> None:
    cache = env.site / "demo/__pycache__"
    cache.mkdir()
    (cache / "__init__.cpython-311.pyc").write_bytes(b"x")
    (cache / "lone.py").write_bytes(b"x")
    (env.site / "demo/__init__.pyc").write_bytes(b"x")
    assert unlisted(env.probe()) == []
    (env.site / "demo/evil.pyc").write_bytes(b"x")
    assert unlisted(env.probe()) == [f"{SITE}/demo/evil.pyc"]


def test_linked_folders_cannot_send_the_scan_away_or_round_in_circles(env: Venv) -> None:
    (env.site / "root").symlink_to("/")
    (env.site / "demo/loop").symlink_to("..")
    (env.site / "alias").symlink_to("demo")
    (env.site / "self").symlink_to("self")
    found = env.probe()
    assert found["unlisted"][-1] == {**found["unlisted"][-1], "path": f"{SITE}/root", "link": "/"}
    assert unlisted(found) == [f"{SITE}/alias/__init__.py", f"{SITE}/alias/loop", f"{SITE}/demo/loop", f"{SITE}/root"]


def test_names_that_are_no_text_are_printed_as_escapes(env: Venv) -> None:
    with open(os.fsencode(env.site) + b"/caf\xe9.py", "wb"):
        pass
    info = env.site / "bad.dist-info"
    info.mkdir()
    (info / "METADATA").write_bytes(b"Name: b\xe9\x00d\nVersion: 1\x1b[31m\n")
    found = env.probe()
    assert unlisted(found) == [f"{SITE}/caf\\xe9.py"]
    assert package(found, "b\\xe9\\x00d")["version"] == "1\\x1b[31m"


def test_the_newest_unlisted_files_are_named(env: Venv) -> None:
    for number in range(5):
        (env.site / f"m{4 - number}.py").write_text("1")
        os.utime(env.site / f"m{4 - number}.py", (number, number))  # as a copy that keeps times has it
        time.sleep(0.02)
    newest = [f"{SITE}/m{number}.py" for number in range(3)]
    assert env.probe()["unlisted-newest"] == newest
