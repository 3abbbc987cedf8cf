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


# As they type or send it: line by line to Python's own prompt, and cell by cell inside a running event loop, as the
# kernel of a notebook does (ipykernel 7). Neither has a file.
REPL = (
    "import code, sys\nconsole = code.InteractiveConsole()\nfor line in open(sys.argv[1]): console.push(line.rstrip())"
)
NOTEBOOK = (
    "import asyncio, sys\n"
    "async def run(names):\n"
    "    for cell in open(sys.argv[1]).read().split('\\n\\n'):\n"
    "        exec(compile(cell, '<cell>', 'exec'), names)\n"
    "asyncio.run(run({'__name__': '__main__'}))\n"
)


@pytest.mark.parametrize("runner", [REPL, NOTEBOOK], ids=["repl", "notebook"])
def test_its_lines_work_in_a_repl_and_in_a_notebook(runner: str, project: Path, plugin_path: Path) -> None:
    (program,) = (program for program in PROGRAMS if "hpcenv.open_job(" in program)
    (project / "lines.txt").write_text(program)
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(project), "XDG_STATE_HOME": str(state_home(project))}
    done = subprocess.run(
        [sys.executable, "-c", runner, "lines.txt"],
        cwd=project,
        env={**environ, "PYTHONPATH": f"{plugin_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "Error" not in done.stderr, done.stderr
    printed = re.findall(r"print\(.*\)  # (.*)$", program, re.MULTILINE)
    # A prompt also shows what an expression returns.
    assert [line for line in done.stdout.splitlines() if line in printed] == printed
