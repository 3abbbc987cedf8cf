"""munge down on the login node: Slurm's commands then say nothing for a minute."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hpcenv.cluster import munge, slurm


@pytest.fixture
def with_munge(tmp_path: Path, fake_slurm: Any) -> Any:
    """Put a munge that ends with a status beside the fakes of Slurm; return the environment."""

    def make(status: int) -> dict[str, str]:
        program = tmp_path / "bin" / "munge"
        program.parent.mkdir()
        program.write_text(
            f'#!/bin/sh\n[ "$1" = --no-input ] || exit 9\necho "munge: Error: no socket" >&2\nexit {status}\n'
        )
        program.chmod(0o755)
        return {**fake_slurm.environ, "PATH": f"{program.parent}:{fake_slurm.environ['PATH']}"}

    return make


def test_it_is_named_in_seconds_and_sacct_is_not_waited_for(with_munge: Any, fake_slurm: Any) -> None:
    fake_slurm.hangs("squeue")
    began = time.monotonic()
    job = slurm.job_state("7", with_munge(6))
    assert time.monotonic() - began < 10
    assert (job.state, job.gone) == ("unknown", False)
    assert job.reason == f"{munge.DOWN}: munge: Error: no socket"
    assert fake_slurm.calls("sacct") == []


def test_a_slow_slurm_is_waited_for_where_munge_works(with_munge: Any, fake_slurm: Any) -> None:
    assert munge.explain(with_munge(0)) is None
    assert munge.explain(fake_slurm.environ | {"PATH": "/nonexistent"}) is None
