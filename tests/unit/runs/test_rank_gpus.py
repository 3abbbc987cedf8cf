"""Each rank's GPU in the report, and a line about ranks that trained on the CPU in a job with GPUs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hpcenv.records.files import load_record, save_record, write_text
from hpcenv.records.gpu_start import GpuStart, StartedGpu
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.runs import rank_gpus
from hpcenv.runs.rank_gpus import GpuReport, report_gpus

GPUS = tuple(StartedGpu(index=n, model="NVIDIA H100", uuid=f"GPU-{n}", bus=f"0000:1{n}:00.0") for n in range(2))


@pytest.fixture
def run(make: Any) -> RunFolder:
    folder: RunFolder = make("a")
    save_record(dataclasses.replace(load_record(Manifest, folder.manifest), gpus_per_node=2), folder.manifest)
    return folder


def started(folder: RunFolder, node: str, seconds: float, gpus: Any = GPUS, local_rank: int | None = None) -> None:
    record = GpuStart(
        schema=1, run="a", node=node, attempt=0, expected=2, seen=2, seconds=seconds, gpus=gpus, local_rank=local_rank
    )
    folder.gpus_of(node, local_rank).parent.mkdir(parents=True, exist_ok=True)
    save_record(record, folder.gpus_of(node, local_rank))


def rank(folder: RunFolder, number: int, node: str, *, attempt: int = 0, **found: str) -> None:
    record = {"schema": 1, "attempt": attempt, "rank": number, "local_rank": number % 2, "world_size": 4, "restart": 0}
    text = json.dumps({**record, "pid": 1, "profile": "off", "node": node, **found})
    write_text(text, folder.determinism_of(attempt, number))


def report(folder: RunFolder) -> GpuReport:
    found = report_gpus(folder, load_record(Manifest, folder.manifest))
    assert found is not None
    return found


def test_each_rank_has_its_gpu_with_model_uuid_and_address(run: RunFolder) -> None:
    started(run, "n1", 2.3)
    started(run, "n2", 2.9)
    for number, node in enumerate(("n1", "n1", "n2", "n2")):
        index = number % 2
        rank(run, number, node, device=f"cuda:{index}", gpu_model="NVIDIA H100", gpu_uuid=f"GPU-{index}")
    found = report(run)
    assert [one.bus for one in found.ranks] == ["0000:10:00.0", "0000:11:00.0"] * 2
    text = list(rank_gpus.lines(found))
    assert text[0] == "  GPUs      tried before the ranks started: 2.9 s on n2"
    assert text[1] == "            rank 0, n1: NVIDIA H100, GPU-0, 0000:10:00.0"
    assert rank_gpus.cpu_lines(found) == ()


def test_ranks_whose_first_backward_pass_ran_on_the_cpu_are_a_line(run: RunFolder) -> None:
    for number in range(3):
        rank(run, number, "n1", device="cpu")
    rank(run, 3, "n1", device="cuda:1")
    found = report(run)
    assert found.on_cpu == (0, 1, 2)
    line = rank_gpus.cpu_lines(found)[0]
    assert line.startswith("the first backward pass of ranks 0-2 ran on the CPU, although the job has GPUs")
    assert f"  GPUs      {line}" in list(rank_gpus.lines(found))
    assert "            rank 3, n1: model unknown, UUID unknown, PCI address unknown" in list(rank_gpus.lines(found))


def test_without_a_backward_pass_the_local_rank_says_which_gpu_it_is(run: RunFolder) -> None:
    started(run, "n1", 1.0)
    started(run, "n2", 1.0, (GPUS[0],), local_rank=1)
    rank(run, 1, "n1")
    rank(run, 3, "n2")
    text = list(rank_gpus.lines(report(run)))
    assert text[1].startswith("            rank 1, n1: NVIDIA H100, GPU-1, 0000:11:00.0 (by its local rank")
    assert text[2].startswith("            rank 3, n2: NVIDIA H100, GPU-0, 0000:10:00.0")


def test_only_the_newest_attempt_counts_and_many_ranks_are_cut(run: RunFolder) -> None:
    rank(run, 0, "n1", device="cpu")
    for number in range(20):
        rank(run, number, "n1", attempt=1, device="cuda:0")
    found = report(run)
    assert (found.on_cpu, len(found.ranks)) == ((), 20)
    assert list(rank_gpus.lines(found))[-1] == "            and 4 more ranks"


def test_a_run_without_gpus_and_one_without_records_have_no_such_report(run: RunFolder, make: Any) -> None:
    assert report_gpus(run, load_record(Manifest, run.manifest)) is None
    other = make("b")
    rank(other, 0, "n1", device="cpu")
    assert report_gpus(other, load_record(Manifest, other.manifest)) is None


def test_a_damaged_record_says_nothing(run: RunFolder) -> None:
    started(run, "n1", 1.0)
    Path(run.gpus_of("n1", None)).write_text("{")
    assert report_gpus(run, load_record(Manifest, run.manifest)) is None
