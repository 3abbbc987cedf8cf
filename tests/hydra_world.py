"""Hydra from the index, for the tests of `hydra/launcher=hpcenv`: the Python that submits, and environments of jobs.

Hydra brings a plug-in for pytest, so it is in a separate environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import accept, hpcenv, make_python, state_home

ROOT = Path(__file__).resolve().parents[1]
PYTHON = os.environ.get("HPCENV_TEST_HYDRA_PYTHON", "")
# What a job needs of the environment; all but PyYAML is plain Python, and PyYAML works without its part in C.
_PACKAGES = ("_yaml", "antlr4", "hydra", "omegaconf", "packaging", "pyyaml", "yaml")


@cache
def packages() -> tuple[Path, ...]:
    """Return the folders of Hydra, and of what it needs."""
    words = [PYTHON or "false", "-c", "import hydra, optuna; print(hydra.__path__[0])"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("NOT RUN: no Hydra or no Optuna (HPCENV_TEST_HYDRA_PYTHON names a Python that has both)")
    entries = sorted(Path(done.stdout.strip()).parent.iterdir())
    return tuple(path for path in entries if path.name.lower().startswith(_PACKAGES))


def make_locked(folder: Path, venv: Path, files: Mapping[str, str], installed: Mapping[str, str]) -> None:
    """Make a locked project of `files`, whose environment has Hydra and what is given as `installed`."""
    python = make_python(venv, installed)
    (site,) = venv.glob("lib/python*/site-packages")
    for path in packages():
        shutil.copytree(path, site / path.name)
    toml = f'image = "host"\npython = "{python}"\n[submit]\nassume-shared = true\n[policy]\n"torch.version" = "info"\n'
    for name, text in {**files, "hpcenv.toml": toml}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    # No index is asked for the hashes of the wheels: nothing here is about them.
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PIP_NO_INDEX": "1"}
    locked = hpcenv("lock", cwd=folder, environ=environ, timeout=200)
    assert locked.status == 0, locked.stderr


def variables(project: Path, plugin_path: Path) -> dict[str, str]:
    """Return those of a shell in which the project was accepted, and that finds this checkout's plug-ins."""
    accept(project, {"XDG_STATE_HOME": str(state_home(project))})
    paths = (plugin_path, ROOT, ROOT / "hpcenv" / "plugins")
    return {
        "PATH": f"{Path(PYTHON).parent}:/usr/bin:/bin",
        "HOME": str(project),
        "LANG": "C.UTF-8",
        "PYTHONPATH": ":".join(map(str, paths)),
        "XDG_STATE_HOME": str(state_home(project)),
    }
