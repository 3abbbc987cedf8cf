"""The child that starts CUDA in a stand-in for torch: what it reports, and that it has ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.stand_in_torch import GCC, write_driver, write_torch

PROGRAM = Path(__file__).resolve().parents[3] / "hpcenv" / "incontainer" / "gpu_start.py"
needs_gcc = pytest.mark.skipif(GCC is None, reason="NOT RUN: NO C COMPILER for a small libcuda")

# As the agent: torch is imported, and the module is loaded by its path.
AGENT = """
import json, os, runpy, sys, torch
answer = runpy.run_path(sys.argv[1])["read"](json.loads(sys.argv[2]))
try:
    os.waitpid(-1, os.WNOHANG)
    answer["left"] = True
except ChildProcessError:
    answer["left"] = False
print(json.dumps(dict(answer, made=torch.made)))
"""


def ask(folder: Path, *, seconds: float = 60, first: int = 0, step: int = 1, **environ: str) -> dict[str, Any]:
    if not (folder / "torch").exists():
        write_torch(folder)
    wanted = json.dumps({"seconds": seconds, "first": first, "step": step})
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONWARNINGS": "error", **environ}
    done = subprocess.run(
        [sys.executable, "-c", AGENT, str(PROGRAM), wanted], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    # Whatever the child did: it has ended, and the agent itself has used no GPU.
    assert (answer["left"], answer["made"]) == (False, [])
    return dict(answer)


def test_every_gpu_gets_a_context_and_is_named(tmp_path: Path) -> None:
    answer = ask(tmp_path, CUDA_VISIBLE_DEVICES="0,1")
    assert (answer["count"], answer["ended"], answer["hip"]) == (8, "", False)
    assert [gpu["index"] for gpu in answer["gpus"]] == list(range(8))
    assert answer["gpus"][3]["uuid"] == "GPU-00000003-0000-0000-0000-000000000000"
    assert answer["gpus"][3]["model"] == "NVIDIA H100 80GB HBM3"
    assert answer["variables"] == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert 0 <= answer["seconds"] < 30


def test_torch_is_asked_and_not_nvml(tmp_path: Path) -> None:
    assert ask(tmp_path, GPUS="7")["count"] == 7


def test_a_gpu_that_another_process_holds_is_named_and_the_others_are_tried(tmp_path: Path) -> None:
    answer = ask(tmp_path, FAULT="busy:3")
    problems = {gpu["index"]: gpu["problem"] for gpu in answer["gpus"] if "problem" in gpu}
    assert problems == {3: "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"}
    assert len(answer["gpus"]) == 8


def test_a_driver_that_is_too_old_is_told_in_the_words_of_torch(tmp_path: Path) -> None:
    answer = ask(tmp_path, FAULT="The NVIDIA driver on your system is too old")
    assert (answer["count"], answer["ended"]) == (0, "")
    assert answer["problem"] == "RuntimeError: The NVIDIA driver on your system is too old"
    assert "libcuda.so.1" in answer["missing"]


def test_a_child_that_crashes_or_hangs_is_told_and_ends(tmp_path: Path) -> None:
    crashed = ask(tmp_path, FAULT="crash")
    assert (crashed["ended"], crashed["at"]) == ("it was ended by SIGABRT", "the start of torch.cuda")
    hanging = ask(tmp_path, FAULT="hang", seconds=0.5)
    assert (hanging["ended"], hanging["at"]) == ("no answer within 0.5 s", "the start of torch.cuda")
    assert "count" not in hanging


def test_where_cuda_is_in_use_the_child_is_a_new_python(tmp_path: Path) -> None:
    answer = ask(tmp_path, FAULT="touched")
    assert (answer["count"], len(answer["gpus"]), answer["ended"]) == (8, 8, "")


@pytest.mark.parametrize(
    ("gpus", "tried"), [("8", [1, 3, 5, 7]), ("1", [0])], ids=["all are seen", "Slurm gave one to the task"]
)
def test_tasks_that_see_all_gpus_share_the_work(tmp_path: Path, gpus: str, tried: list[int]) -> None:
    answer = ask(tmp_path, first=1, step=2, GPUS=gpus)
    assert [gpu["index"] for gpu in answer["gpus"]] == tried


@needs_gcc
def test_the_driver_itself_tells_why_it_does_not_start_and_where_gpus_are(tmp_path: Path) -> None:
    good = ask(tmp_path, LD_LIBRARY_PATH=str(write_driver(tmp_path / "good")))
    assert (good["status"], good["gpus"][0]["bus"]) == (0, "0000:1b:00.0")
    bad = write_driver(tmp_path / "bad", status=804)
    answer = ask(tmp_path, FAULT="Unexpected error from cudaGetDeviceCount()", LD_LIBRARY_PATH=str(bad))
    assert (answer["status"], answer["library"]) == (804, f"{bad}/libcuda.so.1")
