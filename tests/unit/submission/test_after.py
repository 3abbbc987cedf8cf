"""`submit --after RUN`: dependencies of jobs, and runs that did not complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders

from hpcenv.errors import HpcenvError, SubmitRejected, UsageError
from hpcenv.project.context import Context
from hpcenv.project.workspace import open_workspace
from hpcenv.runs.find import find_all
from hpcenv.runs.state import read_states
from hpcenv.submission.plan import Plan
from hpcenv.submission.plan_job import plan_job
from hpcenv.submission.request import SubmitOptions
from hpcenv.submission.submit import submit

Make = Callable[..., Plan]


def context(project: Path, environ: Mapping[str, str]) -> Context:
    return Context(
        environ=environ, cwd=project, now=time.localtime(0), token="beef", command=("hpcenv", "submit", "t.py")
    )


@pytest.fixture
def plan(project: Path, fake_slurm: Any) -> Make:
    def make(*after: str, **words: Any) -> Plan:
        values = {"nproc": 1, "assume_shared": True, "name": "next", "after": after, **words}
        return plan_job(
            open_workspace(project), SubmitOptions(script="train.py", **values), context(project, fake_slurm.environ)
        )

    return make


def directives(plan: Plan, name: str) -> list[str]:
    mark = f"#SBATCH --{name}="
    return [line.removeprefix(mark) for line in plan.script.splitlines() if line.startswith(mark)]


def test_a_job_waits_for_those_that_have_not_ended(plan: Make, project: Path, fake_slurm: Any) -> None:
    folders.make_run(project / "runs", "a", "7")
    folders.make_run(project / "runs", "b", "8", chain=("8", "9", "10"))
    fake_slurm.answers(
        "squeue",
        "7|RUNNING|None|n1|0:01\n8|PENDING|Priority||0:00\n9|PENDING|Dependency||0:00\n10|PENDING|Dependency||0:00\n",
    )
    made = plan("a", "b")
    assert directives(made, "dependency") == ["afterok:7:10"]
    assert directives(made, "kill-on-invalid-dep") == ["yes"]
    assert any("Slurm starts the job when these runs have completed" in note and "a, b" in note for note in made.notes)
    both = plan("7", dependency="singleton", sbatch={"kill-on-invalid-dep": "no"})
    assert directives(both, "dependency") == ["singleton,afterok:7"]
    assert directives(both, "kill-on-invalid-dep") == ["no"]


def test_a_job_that_can_never_start_is_cancelled_whatever_names_its_dependency(plan: Make) -> None:
    assert directives(plan(dependency="afterok:1234"), "kill-on-invalid-dep") == ["yes"]
    assert directives(plan(), "kill-on-invalid-dep") == []


def test_a_sweep_must_complete_as_a_whole(plan: Make, project: Path, fake_slurm: Any) -> None:
    folders.make_sweep(project / "runs", "s", ["34_0", "34_1"], values=[{"lr": "1"}, {"lr": "2"}])
    fake_slurm.answers("squeue", "34_0|RUNNING|None|n1|0:30\n34_1|PENDING|Priority||0:00\n")
    assert directives(plan("s"), "dependency") == ["afterok:34"]
    assert directives(plan("s/0001"), "dependency") == ["afterok:34_1"]


def test_a_run_that_has_completed_is_no_dependency(plan: Make, project: Path, fake_slurm: Any) -> None:
    run = folders.make_run(project / "runs", "a", "7")
    folders.write(run.finished, status=0, time=1.0)
    fake_slurm.replays("squeue", "squeue-nosuch")
    made = plan("a")
    assert directives(made, "dependency") == []
    assert "a has completed" in made.notes
    assert made.after.names == ("a",)


@pytest.mark.parametrize(("ended", "state"), [({"status": 3, "time": 1.0}, "failed"), (None, "unknown")])
def test_a_run_that_did_not_complete_is_refused_by_its_name(
    plan: Make, project: Path, fake_slurm: Any, ended: Any, state: str
) -> None:
    run = folders.make_run(project / "runs", "bad", "7")
    if ended is not None:
        folders.write(run.finished, **ended)
    fake_slurm.replays("squeue", "squeue-nosuch")
    with pytest.raises(SubmitRejected) as caught:
        plan("bad")
    assert caught.value.what == f"`bad` did not complete: {state}"
    assert "hpcenv report bad" in str(caught.value.hint)


def test_what_cannot_be_waited_for(plan: Make, project: Path, fake_slurm: Any) -> None:
    folders.make_run(project / "runs", "a", "7")
    fake_slurm.answers("squeue", "7|RUNNING|None|n1|0:01\n")
    with pytest.raises(UsageError, match="contradict"):
        plan("a", dependency="afterany:1?afterok:2")
    with pytest.raises(HpcenvError, match="no run `nosuch`"):
        plan("nosuch")


def test_a_checkpoint_of_a_run_that_goes_on_is_decided_when_the_job_starts(
    plan: Make, project: Path, fake_slurm: Any
) -> None:
    run = folders.make_run(project / "runs", "a", "7")
    fake_slurm.answers("squeue", "7|RUNNING|None|n1|0:01\n")
    made = plan("a", resume_from="a")
    assert made.manifest.resume_from == str(run.checkpoints)
    assert "--resume-from a: its newest checkpoint is compared when the ranks start" in made.notes
    with pytest.raises(HpcenvError, match="there is no checkpoint"):
        plan(resume_from="a")


def test_on_this_machine_submit_itself_waits(project: Path, hpcenv: Any) -> None:
    (project / "slow.py").write_text("import time\ntime.sleep(3)\nopen('../../../done', 'w').close()\n")
    (project / "bad.py").write_text("import time\ntime.sleep(2)\nraise SystemExit(3)\n")
    (project / "train.py").write_text("import os\nassert os.path.exists('../../../done')\nprint('AFTER')\n")
    start = ("submit", "--nproc", "1", "--name")
    assert hpcenv(*start, "slow", "slow.py", cwd=project).status == 0
    done = hpcenv(*start, "next", "train.py", "--after", "slow", "--wait", cwd=project)
    assert done.status == 0, done.stdout + done.stderr
    assert "`submit` itself waits until these runs have completed: slow" in done.stderr
    assert "AFTER" in (project / "runs" / "next" / "job.log").read_text()
    assert hpcenv(*start, "bad", "bad.py", cwd=project).status == 0
    done = hpcenv(*start, "never", "train.py", "--after", "bad", "--json", cwd=project)
    assert done.envelope["error"]["what"] == "`bad` did not complete: failed"
    assert not (project / "runs" / "never").exists()


def test_a_job_that_slurm_cancelled_says_what_it_waited_for(plan: Make, project: Path, fake_slurm: Any) -> None:
    folders.make_run(project / "runs", "a", "7")
    fake_slurm.answers("squeue", "7|RUNNING|None|n1|0:01\n")
    fake_slurm.answers("sbatch", "Submitted batch job 8\n")
    submit(plan("a"), context(project, fake_slurm.environ))
    fake_slurm.answers("squeue", "8|CANCELLED|DependencyNeverSatisfied||0:00\n")
    (state,) = read_states(find_all(project, ["next"]), fake_slurm.environ)
    assert state.state == "cancelled"
    assert "it waited for a" in state.detail
