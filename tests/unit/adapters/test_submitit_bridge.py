"""The bridge to submitit, through fake sbatch and srun; nothing is patched."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpcenv.adapters import submitit_bridge
from hpcenv.errors import SubmitRejected, SubmitUncertain, ToolFailed, ToolMissing
from hpcenv.node.task import LaunchTask


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "job.sbatch").write_text("#!/bin/bash\necho größe\n")
    return folder


def submit(
    run_folder: Path, environ: dict[str, str], *, task: type = LaunchTask, books: submitit_bridge.Books | None = None
) -> submitit_bridge.Submitted:
    return submitit_bridge.submit(
        task=task,
        folder=run_folder / "submitit",
        script=run_folder / "job.sbatch",
        run_folder=str(run_folder),
        nodes=2,
        minutes=None,
        environ=environ,
        books=books,
    )


def test_sbatch_reads_the_very_file_in_the_run_folder(fake_slurm: Any, run_folder: Path) -> None:
    submitted = submit(run_folder, fake_slurm.environ)
    assert submitted == submitit_bridge.Submitted(job_id="4242", warnings=())
    (call,) = fake_slurm.calls("sbatch")
    assert call.argv == (str(run_folder / "job.sbatch"),)
    assert call.script == "#!/bin/bash\necho größe\n"


def test_what_is_pickled_is_a_reference_and_a_path(fake_slurm: Any, run_folder: Path) -> None:
    submit(run_folder, fake_slurm.environ)
    stored = pickle.loads((run_folder / "submitit" / "4242_submitted.pkl").read_bytes())
    assert isinstance(stored.function, LaunchTask)
    assert stored.args == (str(run_folder),)
    assert stored.kwargs == {}


def test_submitits_own_tools_find_the_script(fake_slurm: Any, run_folder: Path) -> None:
    submit(run_folder, fake_slurm.environ)
    assert (run_folder / "submitit" / "4242_submission.sh").read_text() == (run_folder / "job.sbatch").read_text()
    assert not list(run_folder.glob("**/.*")), "no hidden files are left"


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
    with pytest.raises(SubmitUncertain):
        submit(run_folder, fake_slurm.environ)


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


# A task that submitit's process cannot import.
Unknown = type("Unknown", (), {"__module__": "nosuch"})


def test_what_submitit_does_not_take_is_told_with_its_reason(fake_slurm: Any, run_folder: Path) -> None:
    with pytest.raises(ToolFailed, match="submitit did not take the job") as caught:
        submit(run_folder, fake_slurm.environ, task=Unknown)
    assert "ModuleNotFoundError" in str(caught.value.why)


def test_one_submitit_keeps_the_books_of_several_jobs(fake_slurm: Any, run_folder: Path) -> None:
    with submitit_bridge.Books(fake_slurm.environ) as books:
        for number in ("7", "8"):
            fake_slurm.answers("sbatch", f"Submitted batch job {number}\n")
            submit(run_folder, fake_slurm.environ, books=books)
    names = sorted(path.name for path in (run_folder / "submitit").iterdir())
    assert names == ["7_submission.sh", "7_submitted.pkl", "8_submission.sh", "8_submitted.pkl"]
