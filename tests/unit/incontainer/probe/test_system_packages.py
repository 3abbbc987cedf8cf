"""Packages of the operating system."""

from __future__ import annotations

import hashlib
import sqlite3
import struct
from pathlib import Path
from typing import Any

import pytest
from probe_world import Venv, altered, listed, write

DPKG = """Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9
Description: text
 Package: not-one
 .

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1

Package: bash
Status: hold ok installed
Architecture: amd64
Version: 5.2
"""


APK = "C:Q1x=\nP:musl\nV:1.2.5-r0\nA:x86_64\nF:lib\nR:ld.so\n\nP:busybox\nV:1.37\nA:x86_64\n\n"


def system_packages(env: Venv, root: Path, level: str = "full") -> dict[str, Any]:
    return altered(env, {'SYSTEM_ROOT = "/"': f'SYSTEM_ROOT = "{root}/"'}, level)


def test_dpkgs_database(env: Venv, tmp_path: Path) -> None:
    write(tmp_path / "r/var/lib/dpkg/status", DPKG)
    found = system_packages(env, tmp_path / "r")
    assert listed(found) == [("bash", "5.2", "amd64"), ("libc6", "2.36-9", "amd64")]
    expected = hashlib.sha256(b"hpcenv-system-packages-v1\nbash\t5.2\tamd64\nlibc6\t2.36-9\tamd64").hexdigest()
    assert found["values"]["system.packages-digest"] == "sha256:" + expected
    assert (found["values"]["system.packages-manager"], found["values"]["system.packages-count"]) == ("dpkg", 2)
    assert "system-packages" not in system_packages(env, tmp_path / "r", "record")
    write(tmp_path / "r/var/lib/dpkg/status", "")
    write(tmp_path / "r/var/lib/dpkg/status.d/tzdata", "Package: tzdata\nVersion: 1\nArchitecture: all\n")
    assert listed(system_packages(env, tmp_path / "r")) == [("tzdata", "1", "all")]


def test_apks_database_and_no_database_at_all(env: Venv, tmp_path: Path) -> None:
    values = system_packages(env, tmp_path / "none")["values"]
    assert [values[f"system.packages-{f}"] for f in ("manager", "count", "digest")] == ["none", 0, "none"]
    write(tmp_path / "r/lib/apk/db/installed", APK)
    found = system_packages(env, tmp_path / "r")
    assert listed(found) == [("busybox", "1.37", "x86_64"), ("musl", "1.2.5-r0", "x86_64")]


def rpm_header(name: str, version: str, release: str, arch: str, epoch: int | None = None) -> bytes:
    data, entries = b"", []
    for tag, text in ((1000, name), (1001, version), (1002, release), (1022, arch)):
        entries.append((tag, 6, len(data), 1))
        data += text.encode() + b"\0"
    if epoch is not None:
        data += b"\0" * (-len(data) % 4)
        entries.append((1003, 4, len(data), 1))
        data += struct.pack(">I", epoch)
    index = b"".join(struct.pack(">IIiI", *entry) for entry in entries)
    return struct.pack(">II", len(entries), len(data)) + index + data


def rpm_database(path: Path, *blobs: bytes) -> None:
    path.parent.mkdir(parents=True)
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE Packages (hnum INTEGER PRIMARY KEY AUTOINCREMENT, blob BLOB NOT NULL)")
    database.executemany("INSERT INTO Packages (blob) VALUES (?)", [(blob,) for blob in blobs])
    database.commit()
    database.close()


def test_rpms_sqlite_database(env: Venv, tmp_path: Path) -> None:
    packages = [
        rpm_header("bash", "5.1.8", "9.el9", "x86_64"),
        rpm_header("vim", "8.2", "1", "x86_64", epoch=2),
        rpm_header("gpg-pubkey", "8483c65d", "1", ""),
    ]
    rpm_database(tmp_path / "r/var/lib/rpm/rpmdb.sqlite", *packages)
    found = system_packages(env, tmp_path / "r")
    assert listed(found) == [("bash", "5.1.8-9.el9", "x86_64"), ("vim", "2:8.2-1", "x86_64")]
    assert found["values"]["system.packages-manager"] == "rpm"
    rpm_database(tmp_path / "bad/usr/lib/sysimage/rpm/rpmdb.sqlite", b"\xff" * 40)
    bad = system_packages(env, tmp_path / "bad")
    assert "more than 100000 entries" in bad["unknown"]["system.packages-digest"]
    write(tmp_path / "garbage/var/lib/rpm/rpmdb.sqlite", "garbage" * 1000)
    assert "DatabaseError" in system_packages(env, tmp_path / "garbage")["unknown"]["system.packages-digest"]


def test_an_rpm_database_of_an_old_format_needs_rpm(env: Venv, tmp_path: Path) -> None:
    if Path("/usr/bin/rpm").exists():
        pytest.skip("NOT TESTED: there is rpm on this machine")
    write(tmp_path / "r/var/lib/rpm/Packages", "berkeley")
    unknown = system_packages(env, tmp_path / "r")["unknown"]
    assert unknown["system.packages-digest"].endswith(
        "the rpm database is not a sqlite file, and there is no rpm to read it"
    )
