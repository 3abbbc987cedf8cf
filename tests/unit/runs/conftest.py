"""Run folders for the tests of what reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcenv.records.files import save_record
from hpcenv.records.manifest import Environment, Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.submission import Submission

Make = Callable[..., RunFolder]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Make a run folder as `submit` leaves it."""

    def run(name: str, job_id: str = "7", submitted: float = 1.0, cluster: Any = "slurm") -> RunFolder:
        folder = RunFolder(tmp_path / "runs" / name)
        manifest = Manifest(
            schema=1, run=name, run_folder=str(folder.path), cluster=cluster, nodes=1, nproc_per_node=1, gpus_per_node=0,
            cpus_per_task=0, backend="gloo", environment=Environment(kind="host", python="/p"), script="/s.py", script_sha256="0",
            args=(), workdir="/", settings=(), expectations=(), packages=(), probe_level="full", lockfile="l",
            lockfile_sha256="0", hpcenv_version="0",
        )  # fmt: skip
        save_record(manifest, folder.manifest)
        record = Submission(
            schema=1, run=name, cluster=cluster, job_id=job_id, submitted=submitted, command=("hpcenv",)
        )
        save_record(record, folder.submission)
        return folder

    return run
