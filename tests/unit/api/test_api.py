"""The Python API: plain values in, frozen results out, on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

import hpcenv as api
from hpcenv.errors import RunNotFound, UsageError


def test_submit_wait_report_cancel(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    job = api.submit("train.py", ["a b", 1], nproc=1, cluster="local", name="a")
    assert job.wait(60).state == "completed"
    assert (job.name, job.done()) == ("a", True)
    assert job.report().ok
    assert "TRAINS ['a b', '1']" in job.log()
    assert job.cancel().state == "completed", "what has ended stays as it ended"
    assert api.open_job() == api.open_job("a") == api.open_job(job.folder) == job
    (project / "long.py").write_text("import time\ntime.sleep(100)\n")
    other = api.submit("long.py", nproc=1, cluster="local", name="b", runs_dir="elsewhere")
    assert other.folder == project / "elsewhere" / "b"
    assert api.cancel("b", runs_dir="elsewhere").state == "cancelled", "also before its process has set up anything"
    assert api.status("a").state == "completed"
    assert api.report("a", project=project).ok
    with pytest.raises(RunNotFound):
        api.status("b")


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


def test_a_misspelt_option_is_named(project: Path) -> None:
    with pytest.raises(UsageError) as caught:
        api.submit("train.py", project=project, nprocs=1)  # type: ignore[call-arg]
    assert caught.value.hint == "did you mean `nproc`?"
    with pytest.raises(UsageError) as caught:
        api.plan_job("train.py", "--lr 3", project=project, nproc=1)
    assert "['--lr', '3']" in str(caught.value.hint)
