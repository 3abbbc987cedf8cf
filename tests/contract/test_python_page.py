"""The programs of docs/how-to/python.md run, and print what their comments say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import state_home

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "python.md"
PROGRAMS = re.findall(
    r"^```python\n# run: local\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)


def test_every_program_of_the_page_is_run() -> None:
    assert len(PROGRAMS) == PAGE.read_text(encoding="utf-8").count("```python")
    assert len(PROGRAMS) >= 4


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_prints_what_the_page_says(number: int, project: Path, plugin_path: Path) -> None:
    (project / "program.py").write_text(PROGRAMS[number])
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(project), "XDG_STATE_HOME": str(state_home(project))}
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=project,
        env={**environ, "PYTHONPATH": f"{plugin_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    expected = re.findall(r"print\(.*\)  # (.*)$", PROGRAMS[number], re.MULTILINE)
    assert expected
    assert done.stdout.splitlines() == expected
