"""What the report says of seeds and switches."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import DeterminismOptions, LaunchOptions, Manifest, PackageExpectation
from hpcenv.runs import determinism
from tests import measured_runs, run_folders


def test_a_seed_without_a_profile_is_not_called_deterministic(make: Any) -> None:
    run = make("a")
    asked = DeterminismOptions(profile="off", seed=42, seeds=True)
    manifest = dataclasses.replace(
        load_record(Manifest, run.manifest), determinism=asked, start_hook_sha256="aa", nodes=1, nproc_per_node=2
    )
    save_record(manifest, run.manifest)
    measured_runs.read_back(run, 0, {}, profile="off", seed=42)
    report = determinism.report_determinism(run, manifest)
    assert report is not None
    assert list(determinism.lines(report)) == [
        "  switches  seeded, kernels not deterministic: applied by 1 of 2 ranks",
        "            not applied, as far as is known: rank 1",
    ]


@pytest.mark.parametrize(("apart", "said"), [((True, True), True), ((True, False), False), ((True,), False)])
def test_ranks_that_all_trained_by_themselves_are_named(make: Any, apart: tuple[bool, ...], said: bool) -> None:
    run = make("a")
    manifest = dataclasses.replace(load_record(Manifest, run.manifest), start_hook_sha256="aa", nodes=1)
    save_record(manifest, run.manifest)
    for rank, alone in enumerate(apart):
        measured_runs.read_back(run, rank, {}, profile="off", apart=alone)
    report = determinism.report_determinism(run, dataclasses.replace(manifest, nproc_per_node=2))
    assert report is not None
    found = [line for line in determinism.lines(report) if "no collective operation of torch.distributed ran" in line]
    assert [line.startswith("  ranks     the 2 ranks trained") for line in found] == ([True] if said else [])


@pytest.mark.parametrize(
    ("package", "launcher", "nodes", "status", "ranks", "said"),
    [
        ("torch", "none", 2, 0, 0, True),
        ("jax", "none", 2, 0, 0, False),
        ("torch", "none", 2, 0, 1, False),
        ("torch", "none", 2, 1, 0, False),
        ("torch", "none", 2, None, 0, False),
        ("torch", "none", 1, 0, 0, False),  # torch.multiprocessing.spawn gives the rank as an argument
        ("torch", "torchrun", 2, 0, 0, False),
    ],
)
def test_programs_of_nodes_of_which_none_was_a_rank_are_unknown(
    package: str, launcher: Any, nodes: int, status: int | None, ranks: int, said: bool, make: Any
) -> None:
    """`accelerate launch` with MULTI_CPU starts one process on each node, without RANK: each trains its own model."""
    run = make("a")
    manifest = dataclasses.replace(
        load_record(Manifest, run.manifest),
        start_hook_sha256="aa",
        nodes=nodes,
        launch=LaunchOptions(launcher=launcher),
        packages=(PackageExpectation(name=package, version="2.9.1"),),
    )
    for rank in range(ranks):
        measured_runs.read_back(run, rank, {}, profile="off")
    if status is not None:
        run_folders.write(run.finished, status=status, time=9.0)
    lines = determinism.apart_lines(determinism.report_determinism(run, manifest))
    assert [line.startswith("no program had the variable RANK") for line in lines] == ([True] if said else [])
