"""`hpcenv diagnose` as it is typed: exit status, JSON, the ticket, and what `report` and `wait` say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import run_folders as folders

from hpcenv.records.outcome import RankExit

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a local run whose rank 0 had no GPU memory, and one that completed."""
    for name, status in (("bad", 1), ("good", 0)):
        folder = folders.make_run(tmp_path / "runs", name, f"local-{name}", cluster="local")
        folders.start(folder, ["n1"], job_id=f"local-{name}")
        rank = RankExit(rank=0, local_rank=0, pid=5, status=1, ended=1.5, message=OOM, source="stderr")
        folders.end(folder, "n1", status, ranks=(rank,) if status else ())
        folders.write(folder.finished, status=status, time=3.0)
        folder.log.write_text(f"[0] \x1b]0;x\x07{OOM}\n" if status else "[0] step 1\n")
    return tmp_path


def test_a_cause_that_is_found_ends_with_0(project: Path, hpcenv: Any) -> None:
    done = hpcenv("diagnose", "bad", "--runs-dir", "runs", cwd=project)
    assert (done.status, done.stderr) == (0, "")
    assert done.stdout.startswith("cause: A rank needs more GPU memory than the GPU has free.\n")
    assert "\x1b" not in done.stdout
    assert "where     job.log:1, node n1, rank 0" in done.stdout


def test_without_a_cause_it_ends_with_30(project: Path, hpcenv: Any) -> None:
    done = hpcenv("diagnose", "good", "--runs-dir", "runs", cwd=project)
    assert (done.status, done.stdout) == (30, "good: the run completed, and no failure is recorded\n")
    (project / "x.log").write_text("nothing\n")
    done = hpcenv("diagnose", "x.log", "--json", cwd=project)
    assert done.status == 30
    assert (done.envelope["ok"], done.envelope["error"]) == (False, None)
    assert done.envelope["data"]["diagnoses"][0]["outcome"] == "no-known-pattern"


def test_runs_that_went_well_are_left_out_beside_one_that_failed(project: Path, hpcenv: Any) -> None:
    done = hpcenv("diagnose", "good", "bad", "--runs-dir", "runs", "--json", cwd=project)
    assert [one["subject"] for one in done.envelope["data"]["diagnoses"]] == ["bad"]


def test_a_ticket_is_written_to_a_new_file(project: Path, hpcenv: Any) -> None:
    words = ("diagnose", "bad", "--runs-dir", "runs", "--ticket", "-o", "t.txt")
    done = hpcenv(*words, cwd=project)
    assert (done.status, done.stdout) == (0, "")
    text = (project / "t.txt").read_text()
    assert text.startswith("# bad: ticket for the support desk")
    assert str(project) not in text
    assert "\x1b" not in text
    assert hpcenv(*words, cwd=project).status == 17
    assert hpcenv("diagnose", "bad", "-o", "t.txt", cwd=project).status == 2


def test_report_and_wait_say_cause_fix_and_command(project: Path, hpcenv: Any) -> None:
    lines = (
        "cause: A rank needs more GPU memory than the GPU has free. [user:\n  gpu-out-of-memory]\n"
        "fix: Use a smaller batch, gradient checkpointing or sharding. If another process\n"
        "  holds the memory, see `nvidia-smi` on the node.\n"
        "next: hpcenv diagnose bad\n"
    )
    for verb in ("report", "wait"):
        assert lines in hpcenv(verb, "bad", "--runs-dir", "runs", cwd=project).stdout, verb
