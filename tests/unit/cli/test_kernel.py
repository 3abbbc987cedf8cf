"""`hpcenv kernel install`: a Jupyter kernel that is checked at each start, and refused with the table if it differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcenv.submission.kernel import folder_name, kernel_json
from tests.conftest import state_home
from tests.kernel_client import START_KERNEL

PYTHON = os.environ.get("HPCENV_TEST_SESSIONS_PYTHON") or sys.executable


def test_the_name_of_a_kernel_is_one_that_jupyter_takes() -> None:
    assert folder_name("My Study (2)", "tools") == "hpcenv-my-study-2-tools"


@pytest.mark.parametrize("on_host", [True, False])
def test_the_kernel_is_hpcenv_run(on_host: bool, tmp_path: Path) -> None:
    """Here a shell script takes the place of hpcenv, and says what it was given."""
    project, says = tmp_path / "it's mine", tmp_path / "says"
    project.mkdir()
    says.write_text('#!/bin/sh\npwd; for word in "$@"; do echo "<$word>"; done\n')
    says.chmod(0o755)
    text = kernel_json(project=project, lock="tools", program=str(says), python="python3", on_host=on_host)
    spec = json.loads(text)
    argv = [word.replace("{connection_file}", "/run/me/kernel 1.json") for word in spec["argv"]]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    bind = [] if on_host else ["<--bind>", "</run/me>"]
    assert done.stdout.splitlines() == [
        str(project), "<run>", "<--nodes>", "<1>", "<--lock>", "<tools>", *bind, "<-->",
        "<python3>", "<-m>", "<ipykernel_launcher>", "<-f>", "</run/me/kernel 1.json>",
    ]  # fmt: skip
    assert spec["interrupt_mode"] == "message"


def test_an_environment_without_ipykernel_is_refused(hpcenv: Any, project: Path) -> None:
    done = hpcenv("kernel", "install", cwd=project)
    assert done.status != 0
    assert "lockfiles/default.lock.toml has no ipykernel" in done.stderr
    assert "python3 -m pip install jupyterlab ipykernel" in done.stderr


@pytest.mark.long
def test_a_kernel_starts_in_the_locked_environment_and_is_refused_with_the_table(hpcenv: Any, tmp_path: Path) -> None:
    find = "import importlib.util as u, sys; sys.exit(not (u.find_spec('jupyter_client') and u.find_spec('ipykernel')))"
    if subprocess.run([PYTHON, "-c", find]).returncode != 0:
        pytest.skip("NOT RUN: HPCENV_TEST_SESSIONS_PYTHON names no Python with jupyter_client and ipykernel")
    spec = f'image = "host"\npython = "{PYTHON}"\n[policy]\n"torch.version" = "info"\n[env]\nMINE = "1"\n'
    (tmp_path / "hpcenv.toml").write_text(spec)
    assert hpcenv("lock", "--no-wheels", cwd=tmp_path, timeout=200).status == 0
    done = hpcenv("kernel", "install", "--prefix", "hub", "--json", cwd=tmp_path)
    assert done.status == 0, done.stderr
    name = done.envelope["data"]["name"]
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_STATE_HOME": str(state_home(tmp_path))}
    words = [PYTHON, "-c", START_KERNEL, name]
    where: dict[str, Any] = {"env": {**environ, "JUPYTER_PATH": f"{tmp_path}/hub/share/jupyter"}, "cwd": tmp_path}
    done = subprocess.run(words, capture_output=True, text=True, timeout=250, **where)
    assert f"SAID {Path(PYTHON).parents[1]} run-" in done.stdout, done.stderr
    assert "this machine matches the lockfile" in done.stderr

    victim = next(Path(PYTHON).parents[1].rglob("site-packages/ipykernel/_version.py"))
    before = victim.read_text()
    try:
        victim.write_text(f"{before}\n# changed\n")
        done = subprocess.run(words, capture_output=True, text=True, timeout=250, **where)
    finally:
        victim.write_text(before)
    assert done.returncode != 0
    assert "SAID" not in done.stdout
    assert "error[node-rejected]" in done.stderr
    assert "packages.ipykernel" in done.stderr
