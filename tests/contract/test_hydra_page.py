"""docs/how-to/hydra.md as it is written: its files, its commands, and its study, which is stopped and resumed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import hydra_world

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "hydra.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
FILES = {text.splitlines()[0].removeprefix("# "): text for kind, text in BLOCKS if kind in ("python", "yaml")}
COMMANDS = [text for kind, text in BLOCKS if kind == "sh"]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files in a locked project."""
    folder = tmp_path_factory.mktemp("locked") / "project"
    hydra_world.make_locked(folder, tmp_path_factory.mktemp("with-hydra") / "venv", FILES, {})
    return folder


@pytest.fixture
def environ(locked: Path, tmp_path: Path, plugin_path: Path) -> dict[str, str]:
    return hydra_world.variables(shutil.copytree(locked, tmp_path / "project"), plugin_path)


def test_the_page_has_what_this_file_runs() -> None:
    assert sorted(FILES) == ["conf/config.yaml", "study.py", "train.py"]
    assert len(COMMANDS) == 3
    assert len(BLOCKS) == 6


def test_its_sweeps(environ: dict[str, str]) -> None:
    project = Path(environ["HOME"])
    for number, command in enumerate(COMMANDS[:2]):
        typed, *shown = command.splitlines()
        done = subprocess.run(typed, shell=True, cwd=project, env=environ, capture_output=True, text=True, timeout=280)
        assert (done.returncode != 0) == ("# fails" in typed), done.stdout + done.stderr
        for line in shown:
            assert line.removeprefix("# ") in done.stdout + done.stderr
        assert len(list(project.glob("multirun/*/*/[01]/.hydra/config.yaml"))) == 2 * number + 2


def test_its_study_is_stopped_and_resumed(environ: dict[str, str]) -> None:
    project = Path(environ["HOME"])
    assert COMMANDS[2].startswith("python study.py ")
    command = ["python", "study.py"]
    with subprocess.Popen(command, cwd=project, env=environ, start_new_session=True) as program:
        end = time.monotonic() + 120
        while (project / "study.log").exists() is False or (project / "study.log").read_text().count('"job"') < 3:
            assert time.monotonic() < end and program.poll() is None
            time.sleep(0.02)
        os.kill(program.pid, signal.SIGKILL)
    done = subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("6 trials, best: {'lr': "), done.stdout
    assert len(list(project.glob("runs/*/submission.json"))) == 6, "no trial ran twice"


def test_its_study_ends_when_no_trial_completes(environ: dict[str, str]) -> None:
    project = Path(environ["HOME"])
    text = (project / "study.py").read_text()
    (project / "study.py").write_text(
        text.replace("    return (lr - 0.03)", "    raise ValueError(lr)\n    return (lr - 0.03)")
    )
    command = ["python", "study.py"]
    done = subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "none of these trials completed" in done.stderr
    assert len(list(project.glob("runs/*/submission.json"))) == 3
