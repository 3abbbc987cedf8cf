"""`hpcenv compare --explain-op`: which steps are traced, where traces come from, what the answer says."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcenv.records.run_folder import RunFolder
from hpcenv.records.trace import read_run_trace
from hpcenv.reproduction.causes import rank_causes
from hpcenv.reproduction.compare import Side, Steps, compare_runs, read_side
from hpcenv.reproduction.explain_op import (
    MOST_STEPS,
    TraceSource,
    begin_of,
    explain,
    has_steps,
    recorded_steps,
    steps_to_trace,
)
from hpcenv.reproduction.explain_op_text import render
from hpcenv.reproduction.repetition import TracedSteps
from tests import measured_runs, traces
from tests.hooked_rank import PYTHON, has_torch
from tests.traces import STEP, operation

LOSSES = (3.0, 2.5, 2.25, 2.125, 2.0, 1.5)
KERNEL = operation("aten.mm.default", {"self": "x", "mat2": "w"}, {"0": "H"}, module="Net.fc", **{"class": "Linear"})


def runs(tmp_path: Path, other: Sequence[float] = LOSSES) -> tuple[RunFolder, RunFolder]:
    first = measured_runs.make(tmp_path / "runs", "first", losses=LOSSES)
    return first, measured_runs.make(tmp_path / "runs", "second", losses=other)


def sides(tmp_path: Path) -> list[Side]:
    return [read_side(tmp_path, str(tmp_path / "runs" / name), None, Steps(), ()) for name in ("first", "second")]


def chosen(tmp_path: Path) -> TracedSteps:
    compared = compare_runs(tmp_path, str(tmp_path / "runs/first"), str(tmp_path / "runs/second"))
    return steps_to_trace(*sides(tmp_path), compared)


# -- which steps --------------------------------------------------------------------------


def test_the_step_after_the_last_equal_weights_is_traced(tmp_path):
    runs(tmp_path, (*LOSSES[:3], 2.0, 1.5, 1.0))
    assert chosen(tmp_path) == TracedSteps(first=4, last=4)


def test_without_equal_weights_the_training_is_traced_from_its_start_and_not_without_end(tmp_path):
    _, second = runs(tmp_path, (*LOSSES[:5], 1.0))
    for rank in (0, 1):
        measured_runs.record(second, rank, (*LOSSES[:5], 1.0), hashes={n: "ab" * 32 for n in range(1, 7)})
    assert chosen(tmp_path) == TracedSteps(first=1, last=1)
    for run in ("first", "second"):
        for path in (tmp_path / "runs" / run / "metrics").rglob("*.jsonl"):
            path.write_text("".join(line for line in path.read_text().splitlines(True) if '"parameters"' not in line))
    assert chosen(tmp_path) == TracedSteps(first=1, last=MOST_STEPS)


def test_the_newest_checkpoint_of_equal_weights_is_the_beginning(tmp_path):
    first, second = runs(tmp_path, (*LOSSES[:4], 1.0, 1.0))
    for run, steps in ((first, (1, 3, 4, 6)), (second, (1, 3, 6))):
        run.checkpoints.mkdir()
        for step in steps:
            (run.checkpoints / f"step-{step:08}.pt").touch()
    assert chosen(tmp_path) == TracedSteps(first=5, last=5, resumed=3, checkpoint="step-00000003.pt")
    # A trace that is there says with which checkpoint the other side has to begin.
    for rank in (0, 1):
        traces.write(first, rank, traces.lines(STEP, first=2, resumed=1))
    found = [read_run_trace(run) for run in (first, second)]
    assert recorded_steps(found) == (2,)
    assert begin_of(sides(tmp_path), found, 2, 2) == TracedSteps(
        first=2, last=2, resumed=1, checkpoint="step-00000001.pt"
    )


def test_a_trace_counts_only_with_all_ranks_and_steps(tmp_path):
    first, _ = runs(tmp_path)
    side = sides(tmp_path)[0]
    traces.write(first, 0, traces.lines(STEP, STEP))
    assert not has_steps(read_run_trace(first), side, TracedSteps(first=1, last=2))
    traces.write(first, 1, traces.lines(STEP))
    assert not has_steps(read_run_trace(first), side, TracedSteps(first=1, last=2))
    assert has_steps(read_run_trace(first), side, TracedSteps(first=1, last=1))


# -- the answer ---------------------------------------------------------------------------


def answer(tmp_path: Path, changed: dict, causes=()):
    first, second = runs(tmp_path)
    for rank in (0, 1):
        traces.write(first, rank, traces.lines(STEP))
        traces.write(second, rank, traces.lines([changed if rank else STEP[0], STEP[1]]))
    both = sides(tmp_path)
    sources = [TraceSource(run=one.name, folder=one.folder, how="recorded") for one in both]
    found = [read_run_trace(run) for run in (first, second)]
    return explain(both, found, TracedSteps(first=1, last=1), sources, causes)


def test_the_causes_that_can_explain_a_kernel_come_first(tmp_path):
    causes = rank_causes(
        (), {"OMP_NUM_THREADS": ("1", "2"), "seed": (1, 2), "NCCL_ALGO": (None, "ring"), "version.torch": ("1", "2")}
    )
    result = answer(tmp_path, KERNEL, causes)
    assert (result.verdict, result.first.rank, result.first.kind) == ("operation", 1, "kernel")
    assert [one.group for one in result.likely] == ["threads", "torch and its libraries"]
    assert [one.group for one in result.others] == ["seed", "communication"]
    text = render(result)
    assert text.startswith(
        "the first operation that differs: aten.mm.default, forward of Net.fc (Linear),\n  step 1, rank 1"
    )
    assert "can explain it, the most likely first:\n1. threads (changes results)" in text
    assert text.index("also different:\n3. seed") > text.index("1. threads")
    assert max(map(len, text.splitlines())) <= 80


MEANINGS = {
    "other weights": (operation("aten.mm.default", {"self": "x", "mat2": "W"}, {"0": "H"}), "loaded weights"),
    "another call": (operation("aten.bmm.default", {"self": "x", "mat2": "w"}, {"0": "H"}), "different operations"),
    "hostile text": (operation("aten.mm.default\x1b[31m", {}, {}), "different operations"),
}


@pytest.mark.parametrize(("changed", "words"), MEANINGS.values(), ids=MEANINGS)
def test_what_a_difference_means_is_said(changed, words, tmp_path):
    result = answer(tmp_path, changed)
    text = render(result)
    assert words in result.meaning and "nothing that is known to explain it" in text
    assert "\x1b" not in text


def test_the_lines_of_both_operations_are_shown(tmp_path):
    other = operation("aten.relu.default", {"self": "h"}, {"0": "y"}, at="source/train.py:9")
    first, second = runs(tmp_path)
    for rank in (0, 1):
        traces.write(first, rank, traces.lines(STEP))
        traces.write(second, rank, traces.lines([STEP[0], other]))
    both = sides(tmp_path)
    sources = [TraceSource(run=one.name, folder=one.folder, how="recorded") for one in both]
    found = [read_run_trace(run) for run in (first, second)]
    result = explain(both, found, TracedSteps(first=1, last=1), sources, ())
    text = render(result)
    assert "called at  source/train.py:3 in the reference\n             source/train.py:9 in the run" in text


def test_equal_traces_are_no_operation(tmp_path):
    result = answer(tmp_path, STEP[0])
    assert (result.verdict, result.first, result.likely) == ("equal", None, ())
    assert render(result).startswith("no operation differs in step 1: 4 are equal to the last bit")


# -- the command --------------------------------------------------------------------------


def test_recorded_traces_are_compared_without_a_job(tmp_path, hpcenv):
    answer(tmp_path, KERNEL)
    done = hpcenv("compare", "--explain-op", "runs/first", "runs/second", cwd=tmp_path)
    assert done.status == 41, done.stderr
    assert "recorded in it" in done.stdout and "aten.mm.default" in done.stdout
    page = hpcenv("compare", "--explain-op", "runs/first", "runs/second", "--json", cwd=tmp_path).envelope
    assert (page["ok"], page["data"]["first"]["module"], page["data"]["first"]["rank"]) == (False, "Net.fc", 1)


def test_a_missing_trace_is_named_with_the_command_that_makes_it(tmp_path, hpcenv):
    first, _ = runs(tmp_path, (3.0, 1.0, 1.0))
    for rank in (0, 1):
        traces.write(first, rank, traces.lines(STEP))
    done = hpcenv("compare", "--explain-op", "runs/first", "runs/second", cwd=tmp_path)
    assert done.status == 42
    said = " ".join(done.stderr.split())
    assert "no trace of the steps 1:1 of second" in said and "second cannot be repeated here" in said
    assert "hpcenv rerun second --trace-steps 1:1 --stop-after-steps 1 --name second-trace" in said
    assert "hpcenv compare --explain-op first second-trace" in said


def test_equal_runs_have_nothing_to_explain_and_other_shapes_cannot_be_explained(tmp_path, hpcenv):
    runs(tmp_path)
    done = hpcenv("compare", "--explain-op", "runs/first", "runs/second", cwd=tmp_path)
    assert done.status == 0 and "no operation has to be explained" in done.stderr
    measured_runs.make(tmp_path / "runs", "wide", ranks=4)
    done = hpcenv("compare", "--explain-op", "runs/first", "runs/wide", cwd=tmp_path)
    assert done.status == 42 and "different numbers of ranks" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--trace-steps", "1:2"), "needs `--explain-op`"),
        (("--explain-op", "--ulp", "3"), "accepts only two runs"),
        (("--explain-op", "--trace-steps", "2:1"), "is not a range of optimizer steps"),
    ],
)
def test_options_that_do_not_fit_are_refused(words, said, tmp_path, hpcenv):
    runs(tmp_path)
    done = hpcenv("compare", *words, "runs/first", "runs/second", cwd=tmp_path)
    assert done.status == 2 and said in done.stderr


# -- real runs on this machine ------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn
from hpcenv import training
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(800, 33), nn.SiLU(), nn.Linear(33, 5))
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(16, 3, 12, 12), torch.randint(5, (16,))
found = training.resume_path()
step = 0
if found:
    state = torch.load(found)
    model.load_state_dict(state["model"]); optimizer.load_state_dict(state["optimizer"]); step = state["step"]
while step < 6:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    step += 1
    if step == 2:
        training.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, step)
"""


@pytest.fixture
def project(tmp_path: Path, hpcenv):
    if not has_torch():
        pytest.skip("NOT TESTED: no torch here; HPCENV_TEST_TORCH_PYTHON names a Python with torch")
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "hpcenv.toml").write_text(f'image = "host"\npython = "{environment_without_hpcenv(tmp_path)}"\n')
    (folder / "train.py").write_text(SCRIPT)

    def go(*words: str):
        return hpcenv(*words, cwd=folder, timeout=300)

    locked = go("lock")
    assert locked.status == 0, locked.stderr
    return go


def environment_without_hpcenv(folder: Path) -> Path:
    """Return a Python with torch whose lock does not hold the state of this checkout."""
    site = subprocess.run(
        [PYTHON, "-c", "import torch, os; print(os.path.dirname(os.path.dirname(torch.__file__)))"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    python = folder / "environment/bin/python"
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", str(folder / "environment")], check=True)
    own = next((folder / "environment/lib").glob("python3*/site-packages"))
    for entry in os.scandir(site):
        if "hpcenv" not in entry.name:
            os.symlink(entry.path, own / entry.name)
    return python


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.timeout(900)
def test_each_side_repeats_a_step_in_its_own_environment_and_the_changed_kernel_is_named(project, tmp_path):
    shape = ("--cluster", "local", "--nodes", "1", "--gpus", "0", "--nproc", "1", "--determinism", "seeded", "--wait")
    for name, more in (("one", ()), ("two", ("--env", "MKL_CBWR=COMPATIBLE"))):
        done = project("submit", "train.py", *shape, "--env", "OMP_NUM_THREADS=1", *more, "--name", name)
        assert done.status == 0, done.stdout + done.stderr
    done = project("compare", "--explain-op", "one", "two")
    assert done.status == 41, done.stdout + done.stderr
    assert re.search(r"aten\.(addmm|mm)\.default, (forward|backward)\s+of\s+Sequential\.[24]\s+\(Linear\)", done.stdout)
    assert done.stdout.count("it repeats the run") == 2
    assert "1. CPU kernels (changes results)" in done.stdout and "MKL_CBWR" in done.stdout
    # The same with the thread count of one side, from a checkpoint of equal weights, one trace recorded before.
    assert project("submit", "train.py", *shape, "--env", "OMP_NUM_THREADS=1", "--name", "three").status == 0
    # Both records name a checkpoint, which is asked for: one `--accept`, which the user of the tests gives, is for both.
    done = project("compare", "--explain-op", "one", "three", "--trace-steps", "3:3", "--json")
    page = json.loads(done.stdout)["data"]
    assert (done.status, page["verdict"], page["resumed"], page["steps"]) == (0, "equal", 2, [3]), done.stderr
    assert all(source["how"] == "repeated" and "it repeats" in source["repeats"] for source in page["sources"])
    # As the first comparison did: in which step the kernels differ first depends on the processor.
    recording = json.loads((tmp_path / "project/runs/one-trace/manifest.json").read_text())["recording"]
    steps = ("--trace-steps", f"{recording['trace_first']}:{recording['trace_last']}")
    more = ("--stop-after-steps", str(recording["stop_after_steps"]), "--name", "two-t", "--wait")
    traced = project("rerun", "two", *steps, *more)
    assert traced.status == 0, traced.stderr
    # Another place, where the code has changed: the trace that is there is used.
    (tmp_path / "project/train.py").write_text(SCRIPT + "# changed\n")
    done = project("compare", "--explain-op", "one", "two-t", "--json")
    page = json.loads(done.stdout)["data"]
    assert (done.status, [one["how"] for one in page["sources"]]) == (41, ["repeated", "recorded"])
    assert page["sources"][0]["folder"].endswith("/one-trace") and not (tmp_path / "project/one-code").exists()
