"""Jobs whose run folder is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcenv.errors import RunNotFound, ToolFailed
from hpcenv.runs import lost


def answer(fake_slurm: Any, script: str, state: str = "RUNNING") -> None:
    fake_slurm.answers("squeue", f"7|{state}|n[1-2]|first|{script}\n")


def test_a_job_whose_folder_is_gone_is_found_by_its_id(tmp_path: Path, fake_slurm: Any) -> None:
    answer(fake_slurm, f"{tmp_path}/runs/first/job.sbatch")
    found = lost.find_lost("7", fake_slurm.environ)
    assert found is not None
    assert (found.job_id, found.state, found.run, found.run_folder) == (
        "7",
        "running",
        "first",
        tmp_path / "runs/first",
    )
    assert "--me" in fake_slurm.calls("squeue")[0].argv


@pytest.mark.parametrize("word", [None, "7,8", "--me", "7 8", "a,b"])
def test_what_is_no_job_id_asks_nobody(fake_slurm: Any, word: str | None) -> None:
    assert lost.find_lost(word, fake_slurm.environ) is None
    assert fake_slurm.calls("squeue") == []


def test_a_job_that_is_not_hpcenvs_or_has_its_folder_is_left_alone(tmp_path: Path, fake_slurm: Any) -> None:
    answer(fake_slurm, "/home/alice/other.sh")
    assert lost.find_lost("7", fake_slurm.environ) is None
    (tmp_path / "manifest.json").write_text("{}")
    answer(fake_slurm, f"{tmp_path}/job.sbatch")
    assert lost.find_lost("7", fake_slurm.environ) is None
    fake_slurm.answers("squeue", err="slurm_load_jobs error: Invalid job id specified", status=1)
    assert lost.find_lost("7", fake_slurm.environ) is None


def test_a_job_whose_folder_is_gone_is_found_by_the_name_of_its_run(tmp_path: Path, fake_slurm: Any) -> None:
    answer(fake_slurm, f"{tmp_path}/runs/first/job.sbatch", "PENDING")
    found = lost.find_lost("first", fake_slurm.environ)
    assert found is not None
    assert (found.job_id, found.state, found.run) == ("7", "pending", "first")
    assert "--name=first" in fake_slurm.calls("squeue")[0].argv


def test_cancel_ends_it_and_waits(tmp_path: Path, fake_slurm: Any) -> None:
    answer(fake_slurm, f"{tmp_path}/runs/first/job.sbatch")
    found = lost.find_lost("7", fake_slurm.environ)
    assert found is not None

    def end(_seconds: float) -> None:
        answer(fake_slurm, f"{tmp_path}/runs/first/job.sbatch", "CANCELLED")

    assert lost.cancel_lost(found, fake_slurm.environ, end).state == "cancelled"
    assert [call.argv[-1] for call in fake_slurm.calls("scancel")] == ["7"]


def test_one_that_does_not_end_is_an_error(tmp_path: Path, fake_slurm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost, "_SECONDS_TO_END", 0.0)
    answer(fake_slurm, f"{tmp_path}/runs/first/job.sbatch")
    found = lost.find_lost("7", fake_slurm.environ)
    assert found is not None
    with pytest.raises(ToolFailed, match="has not ended"):
        lost.cancel_lost(found, fake_slurm.environ, lambda _seconds: None)


@pytest.mark.parametrize("command", ["report", "wait", "logs", "attach", "clean"])
def test_other_commands_say_that_the_folder_is_gone(tmp_path: Path, fake_slurm: Any, hpcenv: Any, command: str) -> None:
    (tmp_path / "runs").mkdir()
    answer(fake_slurm, f"{tmp_path}/runs/first/job.sbatch")
    done = hpcenv(command, "7", "--runs-dir", "runs", cwd=tmp_path, environ=fake_slurm.environ)
    assert done.status == RunNotFound.exit_status
    assert done.stderr.startswith("error[run-not-found]: the folder of run `first` is gone\n"), done.stderr
    assert "its job 7 is running" in done.stderr
    assert "hint: `hpcenv status 7` shows the job; `hpcenv cancel 7` cancels it" in done.stderr
