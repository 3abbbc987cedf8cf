"""A shell or command in a running run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders

from hpcenv.errors import (
    RunNotRunning,
    UsageError,
)
from hpcenv.runs.attach import plan_attach


def test_a_shell_is_a_step_beside_the_training(tmp_path: Path, fake_slurm: Any) -> None:
    folder = folders.make_run(tmp_path / "runs", "a", "7", nodes=2)
    folders.start(folder, ["n1", "n2"])
    folder.script.write_text("#!/bin/bash\nset -u\npython='/a b/python'\n")
    fake_slurm.answers("squeue", "7|RUNNING|None|n[1-2]|0:01\n")
    where = {"environ": fake_slurm.environ | {"SLURM_JOB_ID": "1"}, "runs": "runs"}
    planned = plan_attach(tmp_path, "a", node="n2", command=("echo", "$(id)"), **where)
    assert shlex.join(planned.argv).endswith(
        f"srun --jobid=7 --overlap --nodelist=n2 --nodes=1 --ntasks=1 --cpu-bind=none '/a b/python' -I {folder.step} "
        f"attach {folder.path} without-secrets echo '$(id)'"
    )
    assert "SLURM_JOB_ID" not in planned.env
    shell = plan_attach(tmp_path, "a", tty=True, secrets=True, **where)
    assert shell.node == "n1"
    assert "--pty" in shell.argv
    assert shell.argv[-1] == "with-secrets"
    with pytest.raises(UsageError, match="a shell needs a terminal"):
        plan_attach(tmp_path, "a", **where)
    with pytest.raises(UsageError, match="`n3` does not train"):
        plan_attach(tmp_path, "a", node="n3", command=("x",), **where)


@pytest.mark.parametrize(
    ("word", "why"), [("PENDING", "its state is pending (Priority)"), ("COMPLETED", "its state is completed")]
)
def test_only_a_run_that_runs_can_be_entered(tmp_path: Path, fake_slurm: Any, word: str, why: str) -> None:
    folders.make_run(tmp_path / "runs", "a", "7")
    fake_slurm.answers("squeue", f"7|{word}|{'Priority' if word == 'PENDING' else 'None'}|n1|0:01\n")
    (tmp_path / "runs" / "a" / "job.log").write_text("")
    with pytest.raises(RunNotRunning) as caught:
        plan_attach(tmp_path, "a", environ=fake_slurm.environ, command=("x",), runs="runs")
    assert caught.value.why == why


def test_a_run_that_is_still_checked_cannot_be_entered(tmp_path: Path, fake_slurm: Any) -> None:
    folder = folders.make_run(tmp_path / "runs", "a", "7")
    folders.start(folder, ["n1"])
    folders.write(folder.started, attempt=1, nodes=["n1"], job_id="7")
    fake_slurm.answers("squeue", "7|RUNNING|None|n1|0:01\n")
    with pytest.raises(RunNotRunning, match="does not train yet"):
        plan_attach(tmp_path, "a", environ=fake_slurm.environ, command=("x",), runs="runs")
