"""Installed packages that do not fit together: as a note of `hpcenv lock`, and against pip's own check."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment

from hpcenv.locking.conflicts import find_conflicts

ENVIRONMENT = dict(default_environment())
VERSIONS = {"a": "1.0", "numpy": "2.1.0", "old": "not-a-version"}


@pytest.mark.parametrize(
    ("requirement", "said"),
    [
        ("numpy<2", "a 1.0 requires numpy<2: 2.1.0 is installed"),
        ("Numpy>=2", None),
        ("missing", "a 1.0 requires missing: it is not installed"),
        ("missing; sys_platform == 'win32'", None),
        ("missing; extra == 'dev'", None),
        ("missing; python_version > '2' and sys_platform != 'win32'", "a 1.0 requires missing: it is not installed"),
        ("numpy @ https://example.org/numpy.whl", None),
        ("old>=1", None),
        ("no requirement at all", None),
        ("missing; made_up == '1'", None),
    ],
)
def test_a_requirement_is_met_or_named(requirement: str, said: str | None) -> None:
    found = [str(conflict) for conflict in find_conflicts(VERSIONS, {"a": [requirement]}, ENVIRONMENT)]
    assert found == ([said] if said else [])


def _installed(folder: Path, name: str, version: str, *requires: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Requires-Dist: {text}" for text in requires]
    (info / "METADATA").write_text(
        "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines, "", "x"])
    )
    (info / "RECORD").write_text(f"{name}-{version}.dist-info/METADATA,,\n{name}-{version}.dist-info/RECORD,,\n")
    (info / "INSTALLER").write_text("pip\n")


def test_lock_names_what_pip_check_names(tmp_path: Path, hpcenv: Any) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    [site] = (tmp_path / "venv").glob("lib/python*/site-packages")
    _installed(site, "high", "3.0", "low<2", "absent-one; python_version > '3'", "absent-two; extra == 'dev'")
    _installed(site, "low", "2.5")
    pip = subprocess.run([str(tmp_path / "venv/bin/python"), "-m", "pip", "check"], capture_output=True, text=True)
    assert sorted(pip.stdout.splitlines()) == [
        "high 3.0 has requirement low<2, but you have low 2.5.",
        "high 3.0 requires absent-one, which is not installed.",
    ]
    (tmp_path / "hpcenv.toml").write_text(
        'image = "host"\npython = "venv/bin/python"\n[policy]\n"torch.version" = "info"\n'
    )
    done = hpcenv("lock", "--no-wheels", cwd=tmp_path)
    assert done.status == 0, done.stderr
    notes = [line for line in done.stderr.splitlines() if "do not fit together" in line]
    assert notes == [
        "note: packages do not fit together: high 3.0 requires low<2: 2.5 is installed",
        "note: packages do not fit together: high 3.0 requires absent-one: it is not installed",
    ]
