"""Run folders with what ranks record: losses, hashes of parameters, read-back of switches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcenv.records.run_folder import RunFolder
from tests import run_folders


def make(
    parent: Path, name: str, *, ranks: int = 2, losses: Sequence[float] = (3.0, 2.5, 2.25), **manifest: Any
) -> RunFolder:
    """Write a run of one node with so many ranks, each with these losses; its weights follow from them."""
    run = run_folders.make_run(parent, name, nproc_per_node=ranks, **manifest)
    run_folders.start(run, ["n1"], nproc=ranks)
    run_folders.write(run.finished, status=0, time=90.0)
    run_folders.end(run, "n1", 0)
    for rank in range(ranks):
        record(run, rank, losses)
    return run


def record(
    run: RunFolder, rank: int, losses: Sequence[float], *, attempt: int = 0, first: int = 1, world: int = 2,
    hashes: Mapping[int, str] | None = None, dtype: str = "float32", more: Sequence[Mapping[str, Any]] = (),
) -> None:  # fmt: skip
    """Write what one rank recorded in one attempt, in the words of `hpcenv.records.metrics`."""
    lines: list[Mapping[str, Any]] = [
        {"kind": "start", "schema": 1, "restart": 0, "pid": 1, "time": 1.0, "world_size": world},
        {"kind": "count", "before": first - 1, "from": "start"},
    ]
    for step, value in enumerate(losses, start=first):
        lines.append(
            {
                "kind": "loss",
                "step": step,
                "index": 0,
                "name": "loss",
                "value": value.hex(),
                "dtype": dtype,
                "used": True,
            }
        )
        weights = (hashes or {}).get(step) or hashlib.sha256(value.hex().encode()).hexdigest()
        lines.append(
            {
                "kind": "parameters",
                "step": step,
                "name": "parameters",
                "value": weights,
                "dtype": "sha256",
                "at": "interval",
            }
        )
    lines += more
    path = run.metrics_of(attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_back(run: RunFolder, rank: int, switches: Mapping[str, str], *, attempt: int = 0, **more: Any) -> None:
    """Write what one rank read back from its switches."""
    rows = [{"name": name, "asked": value, "at_start": value, "at_end": value} for name, value in switches.items()]
    data = {
        "schema": 1, "attempt": attempt, "rank": rank, "local_rank": rank, "world_size": 2, "restart": 0, "pid": 1,
        "profile": "bitwise", "applied_by": "start-hook", "seed": 0, "rank_seed": rank, "switches": rows, **more,
    }  # fmt: skip
    path = run.determinism_of(attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
