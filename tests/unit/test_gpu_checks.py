"""`scripts/gpu-checks` on a machine without a GPU: what runs runs, the rest is not run, and the status says so."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from _gpu_checks.checkout import look  # noqa: E402
from _gpu_checks.part import Deadline, NotRunError, Part, PartError, run_part  # noqa: E402
from _gpu_checks.parts import Workshop, all_parts  # noqa: E402


def run_checks(*words: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(ROOT / "scripts" / "gpu-checks"), *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=timeout)


def result_of(run: object, *, seconds: float = 20, needs_gpu: bool = False, left: float = 60) -> tuple[str, str]:
    part = Part(name="x", what="y", seconds=seconds, run=run, needs_gpu=needs_gpu)  # type: ignore[arg-type]
    result = run_part(part, gpus=0, left=left)
    return result.state, "; ".join(result.seen)


def test_a_part_passes_fails_or_is_not_run_each_with_what_was_seen() -> None:
    def fails(_: Deadline) -> list[str]:
        raise PartError("wrong product")

    def cannot(_: Deadline) -> list[str]:
        raise NotRunError("packages are missing")

    def broken(_: Deadline) -> list[str]:
        raise KeyError("seen")

    assert result_of(lambda _: ["3 TFLOP/s"]) == ("passed", "3 TFLOP/s")
    assert result_of(fails) == ("failed", "wrong product")
    assert result_of(cannot) == ("not run", "packages are missing")
    assert result_of(broken) == ("failed", "KeyError: 'seen'")
    assert result_of(lambda _: ["never"], needs_gpu=True) == ("not run", "no GPU")
    assert result_of(lambda _: ["never"], left=0) == ("not run", "no time is left: the parts before took it")


def test_a_part_ends_at_its_limit_with_all_that_it_started() -> None:
    mark = "gpu-checks-test-sleep"
    argv = ["sh", "-c", f"echo {mark}; sleep 300 & sleep 300"]
    began = time.monotonic()
    state, seen = result_of(lambda deadline: [deadline.command(argv).end], seconds=0.5)
    assert (state, seen) == ("failed", f"it took longer than 0.5 s: {mark}")
    assert time.monotonic() - began < 15


def test_a_command_that_fails_shows_its_last_lines() -> None:
    argv = [sys.executable, "-c", "print('first'); raise SystemExit('torch sees no GPU')"]
    assert result_of(lambda deadline: [str(deadline.json(argv))]) == (
        "failed",
        "exit status 1: first | torch sees no GPU",
    )


def test_help_names_the_exit_statuses() -> None:
    done = run_checks("--help")
    assert done.returncode == 0
    assert "3  no part failed, and some were not run" in done.stdout
    assert run_checks("--nonsense").returncode == 2
    assert run_checks("--python", "/nonexistent/python").returncode == 2


def test_what_it_asks_hpcenv_about_the_gpus_is_answered_also_without_one(tmp_path: Path) -> None:
    machine = look(sys.executable, tmp_path / "site")
    facts, *_ = all_parts(Workshop(machine=replace(machine, cuda="13.0"), folder=tmp_path, gpus=0))
    result = run_part(facts, gpus=0, left=60)
    assert result.state == "passed", result.seen
    assert result.seen[-1].startswith("network profile ")


@pytest.mark.long
def test_without_a_gpu_all_else_runs_to_the_end_and_the_status_says_so() -> None:
    torch = pytest.importorskip("torch", reason="NOT RUN: no torch here")
    if torch.cuda.is_available():
        pytest.skip("NOT RUN: this machine has a GPU; run scripts/gpu-checks itself")
    done = run_checks("--json")
    assert done.returncode == 3, done.stderr
    found = json.loads(done.stdout)
    states = {part["name"]: part["state"] for part in found["parts"]}
    on_gpu = ("CUDA start", "matmul", "AMP", "NCCL", "driver floor", "GPUs at the start", "price")
    assert {name for name, state in states.items() if state == "not run"} == set(on_gpu), done.stderr
    assert {name for name, state in states.items() if state == "passed"} == {"facts", "gate", "local run", "repeat"}
    assert "/tmp/" not in done.stdout
