"""The executor that hands a batch script to Slurm, with fake sbatch and srun; nothing is patched."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from submitit.core import utils

from hpcenv.errors import SubmitRejected, SubmitUncertain, ToolMissing
from hpcenv.submission.submitit_executor import QueuedJob, queue_script


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "job.sbatch").write_text("#!/bin/bash\necho größe\n")
    return folder


def submit(run_folder: Path, environ: dict[str, str]) -> QueuedJob:
    return queue_script(run_folder / "job.sbatch", environ=environ)


def test_sbatch_reads_the_very_file_in_the_run_folder(fake_slurm: Any, run_folder: Path) -> None:
    submitted = submit(run_folder, fake_slurm.environ)
    assert submitted == QueuedJob(job_id="4242", warnings=())
    (call,) = fake_slurm.calls("sbatch")
    assert call.argv == (str(run_folder / "job.sbatch"),)
    assert call.script == "#!/bin/bash\necho größe\n"


def test_options_stand_before_the_script_and_nothing_else_is_written(fake_slurm: Any, run_folder: Path) -> None:
    queue_script(run_folder / "job.sbatch", environ=fake_slurm.environ, options=("--dependency=afterany:7",))
    (call,) = fake_slurm.calls("sbatch")
    assert call.argv == ("--dependency=afterany:7", str(run_folder / "job.sbatch"))
    assert [path.name for path in run_folder.iterdir()] == ["job.sbatch"]


def test_the_job_does_not_inherit_an_outer_one(fake_slurm: Any, run_folder: Path) -> None:
    submit(
        run_folder, {**fake_slurm.environ, "SLURM_JOB_ID": "1", "SBATCH_PARTITION": "x", "RANK": "3", "KEPT": "a\nb"}
    )
    (call,) = fake_slurm.calls("sbatch")
    assert not [name for name in call.env if name.startswith(("SLURM_", "SBATCH_")) or name == "RANK"]
    assert call.env["KEPT"] == "a\nb"


@pytest.mark.parametrize(
    "said",
    [
        "Your job 12 hours of budget remain\nSubmitted batch job 77\nHave a nice day, job 5 of 9\n",
        "Submitted batch job 77 on cluster big\n",
    ],
)
def test_a_sites_banner_is_not_taken_for_the_job_id(fake_slurm: Any, run_folder: Path, said: str) -> None:
    fake_slurm.answers("sbatch", said, err="sbatch: warning: you asked for much\n")
    submitted = submit(run_folder, fake_slurm.environ)
    assert submitted.job_id == "77"
    assert submitted.warnings == ("you asked for much",)


@pytest.mark.parametrize("name", ["nosuch-partition", "nosuch-account", "impossible-nodes"])
def test_a_refusal_is_told_in_slurms_words(fake_slurm: Any, run_folder: Path, name: str) -> None:
    fake_slurm.replays("sbatch", f"sbatch-{name}")
    with pytest.raises(SubmitRejected, match="Slurm refused the job") as caught:
        submit(run_folder, fake_slurm.environ)
    assert not isinstance(caught.value, SubmitUncertain)
    assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("out", "err", "status"),
    [
        ("", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n", 1),
        ("queued!\n", "", 0),
    ],
)
def test_no_clear_answer_is_uncertain(fake_slurm: Any, run_folder: Path, out: str, err: str, status: int) -> None:
    fake_slurm.answers("sbatch", out, err=err, status=status)
    with pytest.raises(SubmitUncertain) as caught:
        submit(run_folder, fake_slurm.environ)
    assert isinstance(caught.value, utils.FailedSubmissionError) == (status == 0), "submitit's class for no job id"


@pytest.mark.parametrize(("missing", "what_for"), [("sbatch", "submit a job"), ("srun", "start the steps of a job")])
def test_missing_commands_are_named(
    fake_slurm: Any, run_folder: Path, tmp_path: Path, missing: str, what_for: str
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in {"sbatch", "srun"} - {missing}:
        (tools / tool).symlink_to(shutil.which("true") or "")
    with pytest.raises(ToolMissing) as caught:
        submit(run_folder, {**fake_slurm.environ, "PATH": str(tools)})
    assert caught.value.what == f"`{missing}` is not on PATH"
    assert caught.value.why == f"it is needed to {what_for}"
