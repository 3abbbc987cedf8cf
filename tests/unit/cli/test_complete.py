"""Completion in a real shell: commands, options, names of runs and lockfiles."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import run_folders as folders

TYPED = """\
eval "$(_HPCENV_COMPLETE=bash_source hpcenv)"
COMP_WORDS=(hpcenv "$@") COMP_CWORD=$#
_hpcenv_completion hpcenv
printf '%s\\n' "${COMPREPLY[@]}"
"""


def environ() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def completed(folder: Path, *words: str) -> list[str]:
    """Return what bash offers for the last word of a line that begins with `hpcenv`."""
    done = subprocess.run(
        ["bash", "-c", TYPED, "bash", *words], cwd=folder, env=environ(), capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "hpcenv.toml").write_text('image = "host"\n')
    for name in ("train-1", "train-2", "eval"):
        folders.make_run(tmp_path / "runs", name, "7")
    (tmp_path / "lockfiles").mkdir()
    (tmp_path / "lockfiles" / "paper.lock.toml").write_text("")
    return tmp_path


def test_bash_completes_commands_options_runs_and_lockfiles(project: Path) -> None:
    assert completed(project, "subm") == ["submit"]
    assert completed(project, "submit", "--reserv") == ["--reservation"]
    assert completed(project, "status", "train") == ["train-1", "train-2"]
    assert completed(project, "cancel", "eval", "train-1", "") == ["eval", "train-1", "train-2"]
    assert completed(project, "submit", "--lock", "") == ["paper"]
    assert completed(project, "verify", "--lock", "p") == ["paper"]


def test_without_a_project_nothing_is_offered_and_nothing_is_printed(tmp_path: Path) -> None:
    assert completed(tmp_path, "status", "") == []
    assert completed(tmp_path, "submit", "--lock", "") == []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_script_of_another_shell_is_valid(shell: str) -> None:
    done = subprocess.run(
        ["hpcenv"], env={**environ(), "_HPCENV_COMPLETE": f"{shell}_source"}, capture_output=True, text=True, check=True
    )
    assert "_HPCENV_COMPLETE" in done.stdout
    if shutil.which(shell) is None:
        pytest.skip(f"NOT RUN: {shell} is not installed; its completion script was not read by it")
    subprocess.run([shell, "-n"], input=done.stdout, text=True, check=True)
