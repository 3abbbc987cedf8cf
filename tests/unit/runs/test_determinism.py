"""What the report says of seeds and switches."""

from __future__ import annotations

import dataclasses
from typing import Any

from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import DeterminismOptions, Manifest
from hpcenv.runs import determinism
from tests import measured_runs


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
