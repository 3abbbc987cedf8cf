"""`hpcenv compat` as a user types it, without Slurm and outside of a project."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_a_driver_that_is_too_old_is_said_with_source_and_remedy(hpcenv: Any, tmp_path: Path) -> None:
    done = hpcenv("compat", "--torch", "2.9", "--driver", "470.82.01", cwd=tmp_path)

    assert done.status == 43, done
    assert "needs >= 525.60.13" in " ".join(done.stdout.split())
    assert "source: NVIDIA CUDA Toolkit Release Notes" in done.stdout
    assert "it does not run" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_what_runs_is_listed_without_a_torch(hpcenv: Any, tmp_path: Path) -> None:
    done = hpcenv("compat", "--gpu", "A100", "--driver", "535.183", cwd=tmp_path)

    assert done.status == 0, done
    assert "yes 2.10.0   12.8*  3.10-3.14\n" in done.stdout
    assert "no  2.15.0   13.2*" in done.stdout


def test_what_the_table_does_not_have_is_not_fine(hpcenv: Any, tmp_path: Path) -> None:
    done = hpcenv("compat", "--torch", "2.99.0", "--gpu", "H100", "--json", cwd=tmp_path)

    assert done.status == 44, done
    envelope = done.envelope
    assert (envelope["ok"], envelope["data"]["result"]) == (False, "unknown")
    assert envelope["data"]["checks"][0]["what"].startswith("torch 2.99.0 is not in the table (dated 20")
    assert envelope["data"]["builds"] == []


def test_without_a_question_the_releases_are_listed_and_nothing_is_claimed(hpcenv: Any, tmp_path: Path) -> None:
    done = hpcenv("compat", cwd=tmp_path)

    assert done.status == 0, done
    assert done.stdout.startswith("    torch    CUDA ")
    assert "these releases are known, by the table of 20" in done.stdout
    assert "it runs" not in done.stdout


def test_a_torch_alone_is_compared_with_nothing_and_that_is_said(hpcenv: Any, tmp_path: Path) -> None:
    done = hpcenv("compat", "--torch", "2.7.0", cwd=tmp_path)
    assert done.status == 0, done
    assert "nothing was compared with torch 2.7.0" in done.stderr
    assert "this release is known" in done.stdout
    assert "it runs" not in done.stdout
    done = hpcenv("compat", "--torch", "2.7.0", "--python", "3.12", cwd=tmp_path)
    assert "nothing was compared" not in done.stderr
    assert "it runs" in done.stdout
