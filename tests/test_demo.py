"""scripts/demo.sh, whole, as a newcomer runs it: in a fresh checkout, with the torch that pip brings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What git knows of this tree, as a repository: `demo/` lies in it and is ignored, which once mattered."""
    folder = tmp_path / "checkout"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    return folder


@pytest.mark.timeout(600)
def test_the_demo_trains_and_then_shows_a_refused_run(checkout: Path, tmp_path: Path) -> None:
    # pip as it is configured here, and no cache; nothing of the environment that these tests run in.
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ |= {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHON": sys.executable, "XDG_CACHE_HOME": str(tmp_path)}
    # A user gets what the index has; these tests get the locked versions, of all but torch. pip 26 has another variable
    # for what a build needs than the older ones.
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("".join(f"{line}\n" for line in locked_versions()))
    environ |= {"PIP_CONSTRAINT": str(constraints), "PIP_BUILD_CONSTRAINT": str(constraints)}
    done = subprocess.run(
        ["./scripts/demo.sh"], cwd=checkout, env=environ, capture_output=True, text=True, timeout=580, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "hpcenv verdict: match" in done.stdout
    assert "2 nodes" in done.stdout
    first, last = _losses(done.stdout)
    assert last < first
    refused = done.stdout.partition("== see it refuse")[2]
    assert "hpcenv verdict: MISMATCH" in refused
    assert "packages.numpy.content-sha256  MISMATCH" in refused
    assert "step  1" not in refused
    assert "\nnext: hpcenv doctor\n" in refused
    assert "# edited" not in next(checkout.glob("demo/venv/lib/python*/site-packages/numpy/version.py")).read_text()


def locked_versions() -> list[str]:
    folder = Path(os.environ.get("HPCENV_TEST_PACKAGES") or ROOT / "tests" / "packages")
    text = (folder / f"python{sys.version_info.major}.{sys.version_info.minor}.txt").read_text()
    return re.findall(r"^[a-z0-9-]+==[^ \\]+", text, re.MULTILINE)


def _losses(said: str) -> tuple[float, float]:
    """The first and the final loss, as examples/train.py prints them at its end."""
    found = re.search(r"final loss ([\d.]+) \(first ([\d.]+)\)", said)
    assert found is not None, said
    return float(found[2]), float(found[1])
