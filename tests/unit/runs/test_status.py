"""What `hpcenv status` knows of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import run_folders as folders

from hpcenv.runs.status import status


def test_the_first_failure_is_told(tmp_path: Path, fake_slurm: Any) -> None:
    from hpcenv.records.outcome import RankExit

    run = folders.make_run(tmp_path / "runs", "a", "7", nodes=2)
    folders.start(run, ["n1", "n2"])
    rank = RankExit(rank=1, local_rank=0, pid=5, status=7, ended=1.5, message="ValueError: no", source="error-file")
    folders.end(run, "n2", 7, ranks=(rank,))
    folders.end(run, "n1", 143, asked_to_end="SIGTERM", asked_at=1.6)
    fake_slurm.answers("squeue", "7|FAILED|NonZeroExitCode|n[1-2]|0:01\n")
    found = status(tmp_path, "a", environ=fake_slurm.environ, runs="runs")
    assert found.failure is not None
    assert found.failure.headline.startswith("node n2, rank 1, exit 7, ValueError: no")
