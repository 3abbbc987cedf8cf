"""What scripts/test.sh leaves out, and what it installs: the lists say what is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomlkit
from left_out import listed
from packaging.requirements import Requirement

from tests.conftest import ROOT

PACKAGES = ROOT / "tests" / "packages"
PYTHONS = sorted(PACKAGES.glob("python3.*.txt"))


def test_each_row_names_tests_that_there_are() -> None:
    files = sorted({row.tests.partition("::")[0] for row in listed()})
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", *files]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    there = done.stdout.splitlines()
    assert [row.tests for row in listed() if not any(test.startswith(row.tests) for test in there)] == []


def test_no_test_is_given_more_time_than_its_process() -> None:
    """A process that ends takes all the tests behind the long one with it."""
    options = tomlkit.parse((ROOT / "pyproject.toml").read_text()).unwrap()["tool"]["pytest"]["ini_options"]
    texts = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    given = [int(seconds) for text in texts for seconds in re.findall(r"mark\.timeout\((\d+)", text)]
    assert max(given) < options["faulthandler_timeout"]


@pytest.mark.parametrize("lock", PYTHONS, ids=lambda path: path.stem)
def test_the_lock_has_all_that_pyproject_requires(lock: Path) -> None:
    versions = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", lock.read_text(), re.M))
    project = tomlkit.parse((ROOT / "pyproject.toml").read_text()).unwrap()["project"]
    lacking = []
    for text in (*project["dependencies"], *project["optional-dependencies"]["dev"]):
        need = Requirement(text)
        name = re.sub(r"[-_.]+", "-", need.name).lower()
        if not need.specifier.contains(versions.get(name, "0"), prereleases=True):
            lacking.append(f"{text}: {versions.get(name, 'is not locked')}")
    assert lacking == [], "run scripts/lock-test-packages"


@pytest.mark.parametrize("lock", sorted(PACKAGES.glob("*.txt")), ids=lambda path: path.stem)
def test_a_lock_has_hashes_and_no_index(lock: Path) -> None:
    text = lock.read_text()
    assert "://" not in text and "--index" not in text and "--find-links" not in text
    pinned = re.findall(r"^[a-z0-9-]+==", text, re.M)
    assert len(re.findall(r"^[a-z0-9-]+==\S+ \\\n    --hash=sha256:[0-9a-f]{64}", text, re.M)) == len(pinned)
