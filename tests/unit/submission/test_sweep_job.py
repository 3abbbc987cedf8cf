"""A sweep on the fake cluster: what lies in its folders, what Slurm is asked for, and what is queued again."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcenv.errors import HpcenvError
from hpcenv.project.context import Context
from hpcenv.project.workspace import open_workspace
from hpcenv.records.codec import encode_record
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.submission import Submission
from hpcenv.records.sweep import SweepRecord
from hpcenv.runs.entries import Sweep
from hpcenv.runs.find import find, find_run
from hpcenv.submission.request import SubmitOptions
from hpcenv.submission.sweep_job import SweepPlan, element_plan, plan_sweep, read_sweep, rerun_failed, submit_sweep


@pytest.fixture
def context(project: Path, fake_slurm: Any) -> Context:
    command = ("hpcenv", "submit", "train.py", "--nproc", "1", "--sweep", "seed=0..1")
    return Context(environ=fake_slurm.environ, cwd=project, now=time.localtime(0), token="beef", command=command)


@pytest.fixture
def plan(project: Path, context: Context) -> Callable[..., SweepPlan]:
    def make(**words: Any) -> SweepPlan:
        options = SubmitOptions(script="train.py", **{"nproc": 1, "assume_shared": True, "name": "s", **words})
        return plan_sweep(open_workspace(project), options, context)

    return make


def finish(folder: Path, status: int) -> None:
    (folder / "started.json").write_text('{"schema": 1, "attempt": 0, "nodes": ["n1"]}')
    (folder / "finished.json").write_text(json.dumps({"schema": 1, "status": status, "time": 1.0}))


def refused(make: Callable[[], object], code: str) -> HpcenvError:
    with pytest.raises(HpcenvError) as caught:
        make()
    assert caught.value.code == code, caught.value
    return caught.value


def test_one_array_and_a_run_folder_for_every_element(plan: Any, context: Context, fake_slurm: Any) -> None:
    planned = plan(sweep=("lr=1e-3,3e-4", "seed=0..1"), args=("--x", "{lr}"), max_parallel=2)
    result = submit_sweep(planned, context)

    (call,) = fake_slurm.calls("sbatch")
    assert call.argv == (f"{result.run_folder}/job.sbatch",)
    assert call.script == planned.script
    lines = [line for line in call.script.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --array=0-3%2" in lines
    assert f"#SBATCH --output={result.run_folder}/%4a/job.log" in lines
    assert len([line for line in lines if "--output" in line]) == 1
    record = load_record(SweepRecord, result.run_folder / "sweep.json")
    assert [element.values for element in record.elements] == [
        {"lr": "1e-3", "seed": "0"}, {"lr": "1e-3", "seed": "1"},
        {"lr": "3e-4", "seed": "0"}, {"lr": "3e-4", "seed": "1"},
    ]  # fmt: skip
    for number, element in enumerate(record.elements):
        own = RunFolder(result.run_folder / element.folder)
        manifest = load_record(Manifest, own.manifest)
        assert manifest.run == f"s/000{number}"
        assert manifest.run_folder == str(own.path)
        assert manifest.args == ("--x", element.values["lr"], f"--seed={element.values['seed']}")
        assert manifest.element == element.values
        assert {s.name: s.value for s in manifest.settings}["HPCENV_ELEMENT"] == str(number)
        assert encode_record(manifest) == encode_record(element_plan(planned, element).manifest), "as a plan says it"
        assert f"run={own.path}\n" in own.script.read_text()
        assert load_record(Submission, own.submission).job_id == f"4242_{number}"
        assert own.step.is_file()
        assert own.lockfile.is_file()
        assert os.path.samefile(own.code, result.run_folder / "code"), "the code is there once"
    assert not (result.run_folder / "manifest.json").exists(), "the sweep itself is no run"


def test_the_manifest_of_each_element_is_on_the_disk_before_slurm_has_the_array(
    plan: Any, context: Context, fake_slurm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk: list[str] = []
    fsync = os.fsync

    def wait(descriptor: int) -> None:
        if not fake_slurm.calls("sbatch"):
            on_disk.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", wait)
    result = submit_sweep(plan(sweep=("seed=0..2",)), context)
    own = [RunFolder(result.run_folder / element.folder) for element in result.elements]
    assert len(own) == 3
    needed = {path for run in own for path in (run.path, run.manifest, run.script)}
    assert {str(path) for path in needed} <= set(on_disk)


def test_an_array_says_which_element_it_is(plan: Any, context: Context) -> None:
    result = submit_sweep(plan(array="3,7", args=("--shard={element}",)), context)
    manifest = load_record(Manifest, result.run_folder / "0007" / "manifest.json")
    assert manifest.args == ("--shard=7",)
    assert {s.name: s.value for s in manifest.settings}["HPCENV_ELEMENT"] == "7"
    assert manifest.element == {}


def test_a_thousand_elements_are_written_in_seconds(plan: Any, context: Context) -> None:
    started = time.process_time()
    result = submit_sweep(plan(sweep=("a=1..1000",)), context)
    assert len(list(result.run_folder.glob("*/manifest.json"))) == 1000
    assert time.process_time() - started < 20


@pytest.mark.parametrize(
    "words",
    [
        {"sweep": ("a=1,2",), "array": "0-3"},
        {"sweep": ("a=1,2",), "chain": 3},
        {"sweep": ("a=1,2",), "cluster": "local"},
        {"sweep": ("seed=1,2",), "args": ("--s={sed}",)},
    ],
)
def test_what_cannot_be_together(plan: Any, words: dict[str, Any]) -> None:
    refused(lambda: plan(**words), "usage")


def test_a_refused_sweep_leaves_nothing(plan: Any, context: Context, fake_slurm: Any) -> None:
    fake_slurm.answers("sbatch", err="sbatch: error: Invalid job array specification\n", status=1)
    planned = plan(sweep=("a=1,2",))
    refused(lambda: submit_sweep(planned, context), "submit-rejected")
    assert not Path(planned.record.run_folder).exists()


def test_a_sweep_that_got_queued_without_an_answer_is_cancelled_as_a_whole(
    plan: Any, context: Context, fake_slurm: Any
) -> None:
    planned = plan(sweep=("a=1..3",))
    folder = planned.record.run_folder
    fake_slurm.answers("sbatch", err="sbatch: error: Socket timed out on send/recv operation\n", status=1)
    fake_slurm.answers("squeue", f"77|PENDING|{folder}\n77|RUNNING|{folder}\n78|RUNNING|/elsewhere/s\n")
    refused(lambda: submit_sweep(planned, context), "submit-uncertain")
    assert [call.argv for call in fake_slurm.calls("scancel")] == [("77",)]
    assert not Path(folder).exists()


def test_elements_that_got_queued_again_without_an_answer_are_taken_back(
    plan: Any, context: Context, fake_slurm: Any
) -> None:
    folder = submit_sweep(plan(sweep=("seed=0..3",)), context).run_folder
    fake_slurm.answers("squeue", "4242_3|RUNNING|None|n1|0:10\n")
    fake_slurm.answers("squeue---name=s", f"4242|RUNNING|{folder}\n5000|PENDING|{folder}\n")
    fake_slurm.answers("sacct", "")
    for number, status in ((0, 0), (1, 7), (2, 90)):
        finish(folder / f"000{number}", status)
    fake_slurm.answers("sbatch", err="sbatch: error: Socket timed out on send/recv operation\n", status=1)
    refused(lambda: rerun_failed(folder, context), "submit-uncertain")
    assert [call.argv for call in fake_slurm.calls("scancel")] == [("5000",)]
    ids = [load_record(Submission, folder / f"000{n}" / "submission.json").job_id for n in range(4)]
    assert ids == [f"4242_{n}" for n in range(4)]
    fake_slurm.answers("squeue---name=s", err="Unable to contact slurm controller\n", status=1)
    error = refused(lambda: rerun_failed(folder, context), "submit-uncertain")
    assert "`squeue --name=s` lists the array if it is queued" in str(error.hint)


def test_failed_elements_are_queued_again_and_no_others(
    plan: Any, context: Context, fake_slurm: Any, hpcenv: Any
) -> None:
    folder = submit_sweep(plan(sweep=("seed=0..3",), max_parallel=3), context).run_folder
    fake_slurm.answers("squeue", "4242_3|RUNNING|None|n1|0:10\n")
    fake_slurm.answers("sacct", "")
    for number, status in ((0, 0), (1, 7), (2, 90)):
        finish(folder / f"000{number}", status)
    status = read_sweep(folder, context.environ)
    assert [element.element for element in status.failed] == ["0001", "0002"]
    assert status.exit_status == 7
    assert not status.quiet

    fake_slurm.answers("sbatch", "Submitted batch job 5000\n")
    done = hpcenv("rerun", str(folder), "--failed", cwd=context.cwd, environ=context.environ)
    assert done.stdout == "submitted s again: 2 of 4 runs, job array 5000\n", done.stderr
    assert done.stderr == (
        f"element  seed\n0001     1\n0002     2\nrun folder {folder}\n\nnext: hpcenv report s    hpcenv cancel s\n"
    )
    assert fake_slurm.calls("sbatch")[-1].argv == ("--array=1-2%3", f"{folder}/job.sbatch")
    ids = [load_record(Submission, folder / f"000{n}" / "submission.json").job_id for n in range(4)]
    assert ids == ["4242_0", "5000_1", "5000_2", "4242_3"]


@pytest.fixture
def ended(plan: Any, context: Context, fake_slurm: Any) -> Path:
    """A sweep that has ended: 0000 well, 0001 with status 7."""
    folder = submit_sweep(plan(sweep=("seed=0..1",)), context).run_folder
    fake_slurm.answers("squeue", "")
    fake_slurm.answers("sacct", "")
    finish(folder / "0000", 0)
    finish(folder / "0001", 7)
    fake_slurm.answers("sbatch", "Submitted batch job 5000\n")
    return folder


def test_failed_elements_are_followed_to_their_end(ended: Path, context: Context, fake_slurm: Any, hpcenv: Any) -> None:
    fake_slurm.answers("sacct", "5000_1|FAILED|9:0|n1|0:10\n")
    (ended / "0001" / "finished.json").unlink()
    done = hpcenv("rerun", "s", "--failed", "--wait", "--json", cwd=context.cwd, environ=context.environ)
    assert done.status == 9, done.stdout
    data = done.envelope["data"]
    assert (done.envelope["command"], data["submitted"]["job_id"], data["status"]["exit_status"]) == (
        "rerun",
        "5000",
        9,
    )


def test_following_a_sweep_ends_in_time(ended: Path, context: Context, fake_slurm: Any, hpcenv: Any) -> None:
    fake_slurm.answers("sacct", "5000_1|RUNNING|0:0|n1|0:10\n")
    (ended / "0001" / "finished.json").unlink()
    words = ("rerun", "s", "--failed", "--wait", "--timeout", "1")
    done = hpcenv(*words, cwd=context.cwd, environ=context.environ)
    assert done.status == 124, done.stderr
    assert "error[wait-timeout]: the sweep `s` has not ended in time" in done.stderr


def test_following_a_sweep_ends_where_an_element_cannot_be_read(
    ended: Path, context: Context, fake_slurm: Any, hpcenv: Any
) -> None:
    (ended / "0000" / "submission.json").write_text("{")
    fake_slurm.answers("sacct", "5000_1|COMPLETED|0:0|n1|0:10\n")
    (ended / "0001" / "finished.json").unlink()
    done = hpcenv("rerun", "s", "--failed", "--wait", cwd=context.cwd, environ=context.environ)
    assert done.status == 25, done.stderr
    assert done.stderr.endswith("\nhint: hpcenv report s\nexit status 25: from run s\n"), done.stderr


@pytest.mark.parametrize(
    "words",
    [("--nodes", "2"), ("--lock", "default"), ("--workdir", "live"), ("--without", "nproc"), ("--allow-changed",),
     ("--", "--lr", "1 2")],
)  # fmt: skip
def test_what_would_change_failed_elements_is_refused(
    ended: Path, context: Context, fake_slurm: Any, hpcenv: Any, words: tuple[str, ...]
) -> None:
    done = hpcenv("rerun", "s", "--failed", *words, cwd=context.cwd, environ=context.environ)
    assert done.status == 2, done.stderr
    assert len(fake_slurm.calls("sbatch")) == 1
    assert f"hint: `hpcenv rerun s/0000 {words[0]}" in done.stderr


def test_an_element_that_was_queued_again_can_be_submitted_anew(ended: Path, context: Context, hpcenv: Any) -> None:
    made = load_record(Submission, ended / "0001" / "submission.json")
    rerun_failed(ended, dataclasses.replace(context, command=("hpcenv", "rerun", "s", "--failed")))
    again = load_record(Submission, ended / "0001" / "submission.json")
    assert again == dataclasses.replace(made, job_id="5000_1", submitted=again.submitted), "how it was made stays"
    one, whole = (
        hpcenv("rerun", name, "--nodes", "2", "--dry-run", "--json", cwd=context.cwd, environ=context.environ)
        for name in ("s/0001", "s")
    )
    assert one.envelope["ok"], one.stdout
    assert one.envelope["data"]["manifest"]["run"] == "s-0001", one.stdout
    assert len(whole.envelope["data"]["sweep"]["elements"]) == 2, whole.stdout


def test_a_sweep_that_ended_well_is_not_queued_again(plan: Any, context: Context, fake_slurm: Any) -> None:
    folder = submit_sweep(plan(sweep=("seed=0..1",)), context).run_folder
    fake_slurm.answers("squeue", "")
    fake_slurm.answers("sacct", "")
    for name in ("0000", "0001"):
        finish(folder / name, 0)
    assert read_sweep(folder, context.environ).exit_status == 0
    assert "nothing in `s` failed" in refused(lambda: rerun_failed(folder, context), "usage").what


def test_a_record_that_leads_elsewhere_is_damaged(plan: Any, context: Context) -> None:
    folder = submit_sweep(plan(sweep=("seed=0..1",)), context).run_folder
    text = (folder / "sweep.json").read_text()
    (folder / "sweep.json").write_text(text.replace('"0001"', '"../../x"'))
    refused(lambda: read_sweep(folder, context.environ), "record-invalid")


def test_a_sweep_and_its_elements_are_found_by_name(plan: Any, context: Context, project: Path) -> None:
    submit_sweep(plan(sweep=("seed=0..1",)), context)
    assert isinstance(find(project, "s"), Sweep)
    assert find_run(project, "s/0001").manifest.run == "s/0001"


def test_a_chain_is_one_run_and_several_jobs(project: Path, context: Context, fake_slurm: Any) -> None:
    from hpcenv.submission.plan_job import plan_job
    from hpcenv.submission.submit import submit

    options = SubmitOptions(script="train.py", nproc=1, assume_shared=True, name="c", chain=3)
    result = submit(plan_job(open_workspace(project), options, context), context)
    calls = fake_slurm.calls("sbatch")
    script = f"{result.run_folder}/job.sbatch"
    assert [call.argv for call in calls] == [
        (script,), ("--dependency=afterany:4242", script), ("--dependency=afterany:4242", script),
    ]  # fmt: skip
    submission = load_record(Submission, result.run_folder / "submission.json")
    assert submission.chain == ("4242", "4242", "4242")
    assert load_record(Manifest, result.run_folder / "manifest.json").chain == 3
