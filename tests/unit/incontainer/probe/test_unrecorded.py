"""Distributions without a RECORD."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from probe_world import Venv, package, probe, unlisted


def test_files_that_setup_py_listed_have_a_walk_digest(env: Venv) -> None:
    egg = env.site / "legacy-2.0.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text("Name: legacy\nVersion: 2.0\n")
    (egg / "installed-files.txt").write_text(
        "PKG-INFO\n../legacy.py\n../__pycache__/legacy.cpython-311.pyc\n../../../../x\n"
    )
    (env.site / "legacy.py").write_bytes(b"1")
    before = env.probe("full")
    legacy = package(before, "legacy")
    pkg_info = hashlib.sha256((egg / "PKG-INFO").read_bytes()).hexdigest()
    lines = [f"legacy-2.0.egg-info/PKG-INFO\0{pkg_info}", f"legacy.py\0{hashlib.sha256(b'1').hexdigest()}"]
    expected = hashlib.sha256(b"hpcenv-walk-v1\n" + "\n".join(lines).encode()).hexdigest()
    assert legacy["record-sha256"] == legacy["content-sha256"] == expected
    assert (legacy["digest-kind"], legacy["source"], unlisted(before)) == ("walk", "sdist", [])
    (env.site / "legacy.py").write_bytes(b"2")
    after = env.probe()
    assert package(after, "legacy")["record-sha256"] != expected
    assert after["values"]["packages.env-digest"] != before["values"]["packages.env-digest"]


def test_debians_own_packages_have_a_digest() -> None:
    folder = Path("/usr/lib/python3/dist-packages")
    eggs = (
        [p for p in folder.glob("*-info") if not (p / "RECORD").exists()] if Path("/var/lib/dpkg/info").is_dir() else []
    )
    if not eggs or not Path("/usr/bin/python3").exists():
        pytest.skip("NOT TESTED: no Debian packages of Python modules on this machine")
    found = probe("/usr/bin/python3", "full")
    walked = [p for p in found["packages"] if p["source"] == "dpkg" and p.get("digest-kind") == "walk"]
    assert walked and all(p["record-sha256"] == p["content-sha256"] for p in walked)
    assert found["values"]["system.packages-manager"] == "dpkg"
