"""The Python API: plain values in, frozen results out, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import submitit
from submitit.core import utils

import hpcenv as api
from hpcenv.errors import NotComparable, RunNotFound, UsageError


def test_submit_wait_report_cancel(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    job = api.submit("train.py", ["a b", 1], nproc=1, cluster="local", name="a")
    assert job.run.wait(60).state == "completed"
    assert (job.run.name, job.run.job_id, job.done()) == ("a", job.job_id, True)
    assert job.run.report().ok
    assert "TRAINS ['a b', '1']" in job.run.log()
    assert job.run.cancel().state == "completed", "what has ended stays as it ended"
    again = [api.open_job(), api.open_job("a"), api.open_job(job.run.folder), api.Job(job.run.folder, job.job_id)]
    assert {one.run for one in again} == {job.run}
    (project / "long.py").write_text("import time\ntime.sleep(100)\n")
    other = api.submit("long.py", nproc=1, cluster="local", name="b", runs_dir="elsewhere")
    assert other.run.folder == project / "elsewhere" / "b"
    assert api.cancel("b", runs_dir="elsewhere").state == "cancelled", "also before its process has set up anything"
    assert api.status("a").state == "completed"
    assert api.report("a", project=project).ok
    with pytest.raises(RunNotFound):
        api.status("b")


def test_the_job_of_a_script_is_submitits(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    (project / "fails.py").write_text("raise SystemExit('the loss is nan')\n")
    good = api.submit("train.py", nproc=1, cluster="local", name="good")
    bad = api.submit("fails.py", nproc=1, cluster="local", name="bad")
    assert all(type(job) is api.Job and isinstance(job, submitit.SlurmJob) for job in (good, bad))
    assert {job.job_id for job in submitit.helpers.as_completed([good, bad], timeout=60)} == {good.job_id, bad.job_id}
    [status] = good.results()
    assert (status.run, status.exit_status, good.exception(), good.state) == ("good", 0, None, "COMPLETED")
    assert good.paths.stdout == good.run.folder / "job.log"
    assert good.paths.submission_file.parent == good.run.folder
    assert "TRAINS" in str(good.stdout())
    assert not list(good.run.folder.glob("*.pkl")), "nothing is pickled for a script"
    with pytest.raises(utils.UncompletedJobError, match="the loss is nan") as caught:
        bad.result()
    assert "failed, exit status 1" in str(caught.value)
    assert bad.get_info()["State"] == bad.state == "FAILED"


def test_a_run_that_was_cancelled_has_no_result(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    (project / "long.py").write_text("import time\ntime.sleep(100)\n")
    job = api.submit("long.py", nproc=1, cluster="local")
    job.cancel()
    assert isinstance(job.exception(), utils.UncompletedJobError)
    assert "cancelled" in str(job.exception())


def test_what_slurm_refuses_is_an_error_of_submitit_too(
    project: Path, fake_slurm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PATH", "FAKE_SLURM"):
        monkeypatch.setenv(name, fake_slurm.environ[name])
    with (project / "hpcenv.toml").open("a") as spec:
        spec.write("[submit]\nassume-shared = true\n")
    options = {"cluster": "slurm", "partition": "nope", "nproc": 1, "time": "5"}
    with pytest.raises(utils.FailedJobError, match="no partition `nope`"):
        api.submit("train.py", project=project, **options)  # type: ignore[arg-type]
    assert not list(project.glob("runs/*"))


def test_a_plan_writes_nothing(project: Path) -> None:
    plan = api.plan_job("train.py", nproc=2, nodes=2, cluster="local", env={"A": "1"}, project=project)
    assert (plan.manifest.nodes, plan.manifest.nproc_per_node) == (2, 2)
    assert plan.command[:3] == ("hpcenv", "submit", "train.py")
    assert "--env" in plan.command
    assert not (project / "runs").exists()


def test_init_lock_and_check_lock(project: Path, tmp_path: Path) -> None:
    assert api.check_lock(project).fresh
    spec = project / "hpcenv.toml"
    spec.write_text(spec.read_text() + "\n# a comment\n")
    assert api.lock(project, wheels=False).path == project / "lockfiles" / "default.lock.toml"
    assert api.check_lock(project, lock="default").fresh
    assert api.init(tmp_path / "new", python="/usr/bin/python3").path == tmp_path / "new" / "hpcenv.toml"


def test_a_run_is_reproduced_and_its_bundle_is_asked_about(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project.parent)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    api.submit("train.py", nproc=1, cluster="local", name="a", project=project).result()
    planned = api.reproduce("a", rung=3, dry_run=True, nproc=1, cluster="local", project=project)
    assert (planned.verdict, planned.run, planned.cost.nodes) == ("planned", "", 1)
    page = api.reproduce("a", ["again"], rung=3, nproc=1, cluster="local", project=project)
    assert (page.verdict, page.outcome) == ("not-comparable", "completed"), "it has no metrics"
    assert page.run_folder == project / "runs" / page.run
    with pytest.raises(NotComparable):
        api.compare("a", page.run_folder, project=project)
    assert {change.field for change in api.diff("a", page.run, project=project).changes} == {"run.arguments"}
    assert not api.diff("default", project / "lockfiles" / "default.lock.toml", project=project).changes
    bundle = api.bundle("a", project=project, with_log=True)
    assert bundle.path == project / "a.hpcenv.zip"
    assert api.reproduce(bundle.path, project=project).verdict == "proved"
    assert (project / "a").is_dir()
    (diagnosed,) = api.diagnose(project / "runs" / "a" / "job.log", project=project)
    assert diagnosed.diagnosis.outcome == "no-known-pattern"
    with pytest.raises(UsageError, match="--nodes"):
        api.verify(project, time="5")
    with pytest.raises(UsageError, match="not an option"):
        api.reproduce("a", rung=3, nprocs=1, project=project)  # type: ignore[call-arg]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("wrong", [{"time": "x"}, {"sbatch": {"output": "x"}}, {"srun": {"ntasks": "4"}}])
def test_a_wrong_value_has_a_hint_in_python(wrong: dict[str, Any], project: Path) -> None:
    with pytest.raises(UsageError) as caught:
        api.plan_job("train.py", project=project, **wrong)
    assert f"(from {next(iter(wrong))})" in str(caught.value.why)
    assert caught.value.hint == "docs/reference/options.md lists the keywords: `--gpu-type` is `gpu_type=`"


def test_a_misspelt_option_is_named(project: Path) -> None:
    with pytest.raises(UsageError) as caught:
        api.submit("train.py", project=project, nprocs=1)  # type: ignore[call-arg]
    assert caught.value.hint == "did you mean `nproc`?"
    with pytest.raises(UsageError) as caught:
        api.plan_job("train.py", "--lr 3", project=project, nproc=1)
    assert "['--lr', '3']" in str(caught.value.hint)
