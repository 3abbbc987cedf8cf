"""Completion in a real shell: commands, options, names of runs and lockfiles."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import run_folders as folders

TYPED = """\
eval "$(hpcenv completion bash)"
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


# What a line in the start file of the shell does, and then the tab key.
OFFERED = {
    "fish": 'hpcenv completion fish | source; complete -C "hpcenv status train"',
    # compadd outside of the line editor is an error: a function takes its place and prints what it gets.
    "zsh": """\
compadd() { print -l -- ${(P)@[-1]} }
compdef() { : }
_describe() { print -l -- ${(P)@[-1]} }
eval "$(hpcenv completion zsh)"
words=(hpcenv status train) CURRENT=3
_hpcenv_completion
""",
}


@pytest.mark.parametrize("shell", OFFERED)
def test_another_shell_completes_the_names_of_runs(project: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"NOT RUN: {shell} is not installed")
    done = subprocess.run(
        [shell, "-c", OFFERED[shell]], cwd=project, env=environ(), capture_output=True, text=True, check=True
    )
    assert (done.stdout.split(), done.stderr) == (["train-1", "train-2"], "")


def test_the_script_is_also_json(tmp_path: Path) -> None:
    line = ["hpcenv", "completion", "zsh"]
    plain, as_json = (
        subprocess.run([*line, *more], cwd=tmp_path, env=environ(), capture_output=True, text=True, check=True).stdout
        for more in ([], ["--json"])
    )
    assert plain.startswith("#compdef hpcenv\n")
    assert json.loads(as_json)["data"] == {"shell": "zsh", "script": plain}
