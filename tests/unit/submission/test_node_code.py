"""What the ranks can import of hpcenv."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hpcenv.records.run_folder import RunFolder
from hpcenv.submission.node_code import copy_node_code

PROGRAM = """
import hpcenv, submitit
executor = submitit.AutoExecutor("jobs", cluster="debug")
print(executor.submit(len, "four").result(), hpcenv.__file__)
try:
    hpcenv.Executor("jobs")
except RuntimeError as error:
    print(error)
"""


def test_submitit_finds_its_plug_in_in_the_ranks(tmp_path: Path, plugin_path: Path) -> None:
    """An environment that has hpcenv has its entry point, too: submitit printed a traceback of 18 lines in each rank."""
    run = RunFolder(tmp_path / "run")
    copy_node_code(run)
    environ = {**os.environ, "PYTHONPATH": f"{run.inside}:{plugin_path}"}
    argv = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(argv, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [
        f"4 {run.inside}/hpcenv/__init__.py",
        "hpcenv.Executor is for the program that submits, and not for a rank of a run",
    ]
    assert (done.returncode, done.stderr) == (0, "")
