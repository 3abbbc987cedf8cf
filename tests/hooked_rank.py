"""A process with the start hook, as torchrun starts it: for tests on real torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hpcenv.records.determinism import RankDeterminism, read_determinism
from hpcenv.records.metrics import RankMetrics, read_metrics
from hpcenv.records.trace import RankTrace, read_trace
from hpcenv.submission import node_code

PYTHON = os.environ.get("HPCENV_TEST_TORCH_PYTHON", sys.executable)

OPTIONS = {
    "profile": "off",
    "seed": 7,
    "variables": {},
    "record": True,
    "hash_parameters_every": 0,
    "stop_after_steps": 0,
}

HEAD = """
import torch
from torch import nn
def made(**options):
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, **options)
def loss_of(model, n=1.0):
    return (model(torch.ones(2, 4)) * n).sum()
"""


class Rank:
    """A process with the hook, as torchrun starts it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hook = folder / "start-hook"
        node_code.copy_start_hook(self.hook)

    def start(
        self, script: str, *words: str, path: str = "", environ: dict[str, str] | None = None, **options: object
    ) -> subprocess.CompletedProcess[str]:
        file = self.folder / "script.py"
        file.write_text(textwrap.dedent(script))
        variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
            **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "HPCENV_ATTEMPT": "0", "OMP_NUM_THREADS": "1"},
            "HPCENV_RUN_FOLDER": str(self.folder / "run"),
            "HPCENV_START_HOOK": json.dumps({**OPTIONS, **options}),
            "PYTHONPATH": f"{self.hook}:{path}:{Path(node_code.package_folder()).parent}",
            **(environ or {}),
        }
        argv = [PYTHON, *(words or (str(file),))]
        return subprocess.run(argv, env=variables, text=True, capture_output=True, timeout=120, cwd=self.folder)

    def run(self, script: str, *words: str, **how: object) -> RankMetrics:
        done = self.start(HEAD + textwrap.dedent(script), *words, **how)  # type: ignore[arg-type]
        assert done.returncode == 0, done.stderr
        self.stdout, self.stderr = done.stdout, done.stderr
        return self.metrics()

    def metrics(self, attempt: int = 0) -> RankMetrics:
        found = read_metrics(self.folder / "run" / "metrics" / f"attempt-{attempt}" / "rank-0.jsonl", attempt, 0)
        assert found.problems == () and not found.cut
        return found

    def read_back(self, rank: int = 0) -> RankDeterminism:
        path = self.folder / "run" / "determinism" / "attempt-0" / f"rank-{rank}.json"
        return read_determinism(path, 0, rank)

    def switch(self, name: str):
        return next(switch for switch in self.read_back().switches if switch.name == name)

    def trace(self, rank: int = 0) -> RankTrace:
        return read_trace(self.folder / "run" / "trace" / "attempt-0" / f"rank-{rank}.jsonl", 0, rank)


def has_torch() -> bool:
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return subprocess.run([PYTHON, "-c", look], capture_output=True).returncode == 0


def made_in(folder: Path) -> Rank:
    """Return a rank in a folder; without torch the test is skipped."""
    if not has_torch():
        pytest.skip("NOT TESTED: no torch here; HPCENV_TEST_TORCH_PYTHON names a Python with torch")
    return Rank(folder)
