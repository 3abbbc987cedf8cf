"""Whether steps start beside each other is read from runs: nothing else tells it."""

from __future__ import annotations

from pathlib import Path

from hpcenv.doctor.step_overlap import STARTED_LATE, read_overlap
from hpcenv.records.manifest import LaunchOptions
from hpcenv.records.run_folder import RunFolder
from tests.run_folders import make_run

ROOT = Path(__file__).resolve().parents[3]


def _run(runs: Path, name: str, *, at: float, log: str = "", waited: bool = False, beside: bool = True) -> RunFolder:
    folder = make_run(runs, name, submitted=at, launch=LaunchOptions(beside_check=beside))
    folder.log.write_text(log)
    if waited:
        folder.env.mkdir()
        folder.launch_waits.touch()
    return folder


def test_the_newest_run_that_tried_it_counts(tmp_path: Path) -> None:
    _run(tmp_path, "old", at=1.0, log=f"hpcenv: {STARTED_LATE}; it starts now\n")
    assert read_overlap(tmp_path, "24.11.5").value == "no"
    assert "run old" in read_overlap(tmp_path, "24.11.5").how
    _run(tmp_path, "new", at=2.0, waited=True)
    _run(tmp_path, "other", at=3.0, beside=False)
    _run(tmp_path, "queued", at=4.0)
    found = read_overlap(tmp_path, "24.11.5")
    assert (found.value, found.how) == ("yes", "run new: its launch step waited beside its check")


def test_without_a_run_that_tried_it_is_unknown(tmp_path: Path) -> None:
    assert read_overlap(None, "24.11.5").value == ""
    assert read_overlap(tmp_path / "none", "24.11.5").value == ""
    _run(tmp_path, "other", at=3.0, beside=False)
    assert read_overlap(tmp_path, "24.11.5").value == ""


def test_a_release_without_the_option_cannot(tmp_path: Path) -> None:
    assert read_overlap(tmp_path, "20.02.7").value == "no"


def test_the_batch_script_prints_the_line_that_is_looked_for() -> None:
    assert STARTED_LATE in (ROOT / "sbatch_templates" / "job.sbatch").read_text()
