"""`hpcenv.Executor` on this machine: what is sent, what comes back, and from whom a result is taken."""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from submitit.core.utils import DelayedSubmission, FailedJobError

import hpcenv as api
from hpcenv.errors import HpcenvError, JobFailed, UsageError
from hpcenv.identity import code
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.submission import function
from tests.conftest import state_home

ROOT = Path(__file__).resolve().parents[3]
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


def test_a_parameter_that_does_not_exist_is_refused_at_once(tmp_path):
    with pytest.raises(UsageError, match="no parameter `node`") as raised:
        api.Executor(tmp_path / "jobs", node=2)
    assert "`nodes`" in str(raised.value.hint)


@pytest.mark.parametrize("raised", [UsageError, ValueError, NameError, TypeError], ids=lambda kind: str(kind.__name__))
def test_its_error_is_also_what_submitit_raises(tmp_path: Path, raised: type[Exception]) -> None:
    with pytest.raises(raised):
        api.Executor(tmp_path / "jobs", node=2)


def program(project: Path, text: str, *, timeout: float = 180) -> str:
    """Run a user's program in the project; return what it printed."""
    path = project / "mine.py"
    path.write_text(textwrap.dedent(text))
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(project), "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT)}
    environ["XDG_STATE_HOME"] = str(state_home(project))
    done = subprocess.run(
        [sys.executable, path], cwd=project, env=environ, text=True, capture_output=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_functions_run_after_the_check_and_their_results_come_back(project: Path) -> None:
    (project / "beside.py").write_text("FACTOR = 3\n")
    printed = program(
        project,
        """
        import os, sys, time, hpcenv, submitit
        import beside

        OFFSET = 4

        def work(x, *, fail=None):
            env = submitit.JobEnvironment()
            if fail == env.global_rank:
                raise KeyError("on purpose")
            print("out of", env.global_rank)
            print("err of", env.global_rank, file=sys.stderr)
            return x * beside.FACTOR + OFFSET, env.global_rank, env.num_tasks, env.cluster, os.environ.get("RANK")

        if __name__ == "__main__":
            executor = hpcenv.Executor("jobs", cluster="local", tasks_per_node=2)
            job = executor.submit(work, 2)
            print(job.results())
            print(job.task(1).stdout().splitlines()[-3], "|", job.task(0).stderr().strip())
            print(job.paths.result_pickle.name == f"{job.job_id}_0_result.pkl", job.num_tasks, job.run.wait(60).state)
            while job.state == "RUNNING":
                time.sleep(0.2)
            print(job.state, job.run.folder.name.startswith("work-"), (job.run.folder / "verdict.json").exists())
            failure = executor.submit(work, 1, fail=1).exception()
            print(type(failure).__name__, "raise KeyError" in str(failure))
            executor.update_parameters(ntasks_per_node=1, stderr_to_stdout=True)
            job = executor.submit(lambda: print("err", file=sys.stderr) or OFFSET)
            print(job.result(), "err" in job.stdout(), job.stderr())
            again = hpcenv.Job("jobs", job.job_id)
            print(again.result(), again.run == job.run)
        """,
    )
    assert printed.splitlines() == [
        "[(10, 0, 2, 'hpcenv', None), (10, 1, 2, 'hpcenv', None)]",
        "out of 1 | err of 0",
        "True 2 completed",
        "COMPLETED True True",
        "FailedJobError True",
        "4 True None",
        "4 True",
    ]


def test_a_list_may_mix_jobs_of_scripts_and_of_functions(project: Path) -> None:
    printed = program(
        project,
        """
        import os, time, hpcenv, submitit.helpers

        def work(x):
            return x + 1

        def die(status):
            print("the last words", flush=True)
            os._exit(status)

        if __name__ == "__main__":
            executor = hpcenv.Executor("jobs", cluster="local")
            jobs = [hpcenv.submit("train.py", nproc=1, cluster="local"), executor.submit(work, 1), executor.submit(die, 3)]
            submitit.helpers.monitor_jobs(jobs, poll_frequency=1, test_mode=True)
            print(len(list(submitit.helpers.as_completed(jobs, timeout=60))))
            # A function is done when its result is there; its state follows.
            while "RUNNING" in [job.state for job in jobs]:
                time.sleep(0.2)
            print([job.state for job in jobs])
            died = jobs[2].exception()
            print(jobs[0].results()[0].exit_status, jobs[1].results(), type(died).__name__)
            print("failed, exit status 3" in str(died), "the last words" in str(died))
        """,
    )
    assert "All jobs finished, jobs with indices [" in printed
    ended = "['COMPLETED', 'COMPLETED', 'FAILED']"
    assert printed.splitlines()[-4:] == ["3", ended, "0 [2] NoResult", "True True"]


def test_a_function_can_be_called_in_each_rank_of_torchrun(project: Path) -> None:
    printed = program(
        project,
        """
        import os, hpcenv, submitit

        def work():
            return os.environ["RANK"], submitit.JobEnvironment().num_tasks

        if __name__ == "__main__":
            print(hpcenv.Executor("jobs", cluster="local", call="rank").submit(work).results())
        """,
    )
    assert printed == "[('0', 1)]\n"


def test_a_function_that_the_check_stops_does_not_run(project: Path) -> None:
    printed = program(
        project,
        """
        import hpcenv, pathlib, re, time
        from submitit.core.utils import UncompletedJobError

        def work():
            pathlib.Path("ran").touch()

        if __name__ == "__main__":
            lock = pathlib.Path("lockfiles/default.lock.toml")
            text = lock.read_text()
            found = re.search(r'stdlib-sha256 = "([0-9a-f]{64})"', text)
            lock.write_text(text.replace(found[1], "0" * 64))
            job = hpcenv.Executor("jobs", cluster="local", frozen=True).submit(work)
            try:
                job.result()
            except hpcenv.HpcenvError as error:
                print(error.code, "rejected, exit status 90" in str(error), isinstance(error, UncompletedJobError))
            while job.state == "RUNNING":
                time.sleep(0.2)
            print(job.state, job.exception() is not None, pathlib.Path("ran").exists())
        """,
    )
    assert printed.splitlines() == ["job-failed True True", "FAILED True False"]


@pytest.fixture
def project(project: Path) -> Path:
    """The tiny project; tests run in /tmp, which hpcenv knows not to be shared."""
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write("[submit]\nassume-shared = true\n")
    return project


@pytest.fixture
def slurm(fake_slurm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("PATH", "FAKE_SLURM"):
        monkeypatch.setenv(name, fake_slurm.environ[name])
    return fake_slurm


def call_as_rank(folder: Path, rank: int = 0, count: int = 1) -> subprocess.CompletedProcess[str]:
    """Do on this machine what the launch step does on a node."""
    manifest = load_record(Manifest, RunFolder(folder).manifest)
    assert manifest.source is not None
    code.make_own_copy(manifest.source, RunFolder(folder))
    submitted = json.loads((folder / "submission.json").read_text())["job_id"]
    (folder / "started.json").write_text(json.dumps({"submitted_as": submitted}))
    environ = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    environ |= {"GROUP_RANK": "0", "HPCENV_RUN_FOLDER": str(folder), "PYTHONPATH": str(folder / "inside")}
    done = subprocess.run(
        [sys.executable, manifest.script], cwd=manifest.workdir, env=environ, capture_output=True, text=True
    )
    (folder / "finished.json").write_text(json.dumps({"schema": 1, "status": done.returncode, "time": 1.0}))
    return done


@pytest.mark.parametrize("batch", [False, True], ids=["map_array", "batch"])
def test_an_array_is_of_our_class_and_every_call_has_a_run(project: Path, slurm: Any, batch: bool) -> None:
    executor = api.Executor(project / "jobs", project=project, array_parallelism=2, name="m")
    if batch:
        jobs = []
        with executor.batch():
            jobs = [executor.submit(divmod, *pair) for pair in ((7, 2), (8, 3), (9, 0))]
    else:
        jobs = executor.map_array(divmod, (7, 8, 9), (2, 3, 0))
    (call,) = slurm.calls("sbatch")
    assert "#SBATCH --array=0-2%2" in call.script
    assert {job.paths.submission_file.read_text() for job in jobs} == {call.script}, "what sbatch read"
    assert [job.job_id for job in jobs] == ["4242_0", "4242_1", "4242_2"]
    assert [job.run.folder.name for job in jobs] == ["0000", "0001", "0002"]
    assert all(type(job) is api.Job for job in jobs) or batch
    folder = jobs[0].run.folder.parent
    assert folder.name.startswith("m-")
    assert os.path.samefile(folder / "function" / "packages", jobs[2].run.folder / "function" / "packages"), "once"
    # The steps of Slurm and the check are tried in tests/cluster; here what a task does.
    for number, job in enumerate(jobs):
        done = call_as_rank(job.run.folder)
        assert (done.returncode != 0) == (number == 2), done.stderr
    assert [job.result() for job in jobs[:2]] == [(3, 1), (2, 2)]
    assert "ZeroDivisionError" in str(jobs[2].exception())


def test_a_refused_array_leaves_nothing(project: Path, slurm: Any) -> None:
    slurm.answers("sbatch", err="sbatch: error: Invalid job array specification\n", status=1)
    executor = api.Executor(project / "jobs", project=project)
    with pytest.raises(HpcenvError, match="Slurm refused the job"):
        executor.map_array(divmod, (1, 2), (1, 1))
    assert list((project / "runs").iterdir()) == []
    assert list((project / "jobs").iterdir()) == []
    with pytest.raises(UsageError, match="more than 1000"):
        executor.map_array(abs, range(1001))
    with pytest.raises(UsageError, match="`--chain` is for one run"):
        api.Executor(project / "jobs", project=project, chain=2).map_array(abs, range(2))


def test_the_batch_script_is_that_of_a_script_with_the_same_options(project: Path, slurm: Any) -> None:
    executor = api.Executor(
        project / "jobs", project=project, nodes=2, tasks_per_node=4, cpus_per_task=3,
        timeout_min=7, mem_gb=2, partition="batch", setup=["ulimit -c 0"],
    )  # fmt: skip
    plan = executor.plan(divmod, 7, 2)
    assert "\n. \"$run/code/setup.sh\" \\\n  'ulimit -c 0'\n" in plan.script
    for line in ("--nodes=2", "--cpus-per-task=12", "--time=7", "--mem=2GB", "--partition=batch"):
        assert f"\n#SBATCH {line}\n" in plan.script
    assert (plan.manifest.launch.launcher, plan.manifest.nproc_per_node) == ("tasks", 4)
    assert "\nrun_step check srun " in plan.script
    job = executor.submit(divmod, 7, 2)
    assert job.num_tasks == 8
    assert job.paths.submission_file.read_text() == slurm.calls("sbatch")[-1].script
    with pytest.raises(UsageError, match="without its check"):
        executor._make_submission_file_text("echo", "0")


def test_a_function_of_any_name_has_a_run(project: Path, slurm: Any) -> None:
    def _train() -> None:
        pass

    class _Net:
        def __call__(self) -> None:
            pass

    executor = api.Executor(project / "jobs", project=project, allow_dirty=True)
    for number, target in enumerate([_train, functools.partial(_train), _Net(), _Net.__call__, _Net, int.__add__]):
        slurm.answers("sbatch", out=f"Submitted batch job {4300 + number}\n")
        assert re.match("[A-Za-z0-9]", executor.submit(target).run.name), target


def test_a_job_that_was_submitted_again_finds_its_function(project: Path, slurm: Any) -> None:
    job = api.Executor(project / "jobs", project=project).submit(divmod, 7, 2)
    folder = job.run.folder
    record = json.loads((folder / "submission.json").read_text())
    (folder / "submission.json").write_text(json.dumps({**record, "job_id": "4300"}))
    assert call_as_rank(folder).returncode == 0
    assert job.result() == (3, 1)


def test_an_id_that_comes_again_has_its_state_at_once(project: Path, slurm: Any) -> None:
    slurm.answers("squeue", out="4242|RUNNING|None|n1|1:00\n")
    for folder in ("jobs", "others"):
        assert api.Executor(project / folder, project=project).submit(divmod, 7, 2).state == "RUNNING", folder


def test_between_different_pythons_only_a_function_with_a_name_goes(tmp_path: Path) -> None:
    def call(target: Any) -> Any:
        return function.make_call(target, folder=tmp_path, submitit_folder="f", python="3.99.1", per="task")

    assert {"how": "name", "module": "textwrap", "qualname": "dedent"}.items() <= call(textwrap.dedent).spec.items()
    assert call(functools.partial(textwrap.indent, prefix=" ")).spec["qualname"] == "indent"
    with pytest.raises(UsageError) as caught:
        call(lambda: 1)
    assert "3.99.1" in str(caught.value.why)
    with pytest.raises(UsageError):
        function.dump(DelayedSubmission(len, lambda: 1), tmp_path / "x.pkl", python="3.99.1")
    assert not (tmp_path / "x.pkl").exists()


@pytest.fixture
def by_name(project: Path, fake_slurm: Any) -> Any:
    """Submit the function `work` of a program to another Python, and call it as a rank does, here."""
    lock = project / "lockfiles" / "default.lock.toml"
    lock.write_text(re.sub(r'(?m)^version = "3\.[0-9.]+"', 'version = "3.99.1"', lock.read_text()))

    def call(text: str) -> tuple[Path, subprocess.CompletedProcess[str]]:
        (project / "mine.py").write_text(textwrap.dedent(text))
        submitted = subprocess.run(
            [sys.executable, "mine.py"], cwd=project, text=True, capture_output=True,
            env={**fake_slurm.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert (project / "runs").is_dir(), submitted.stderr
        (folder,) = (project / "runs").glob("[!.]*")
        assert json.loads((folder / "function" / "call.json").read_text())["how"] == "name", submitted.stderr
        return folder, call_as_rank(folder)

    return call


_SUBMITS = 'hpcenv.Executor("jobs", frozen=True).submit(work, 4)'


def test_each_task_imports_the_file_where_a_function_is_sent_by_name(by_name: Any, project: Path) -> None:
    _, done = by_name(
        f"""
        import hpcenv

        class Result:
            def __init__(self, x):
                self.x = x

        def work(x):
            return Result(x + 1)

        if __name__ == "__main__":
            {_SUBMITS}
        """
    )
    assert done.returncode == 0, done.stderr
    assert b"__main__\nResult" in (project / "jobs" / "4242_0_result.pkl").read_bytes().replace(b"\x94\x8c\x06", b"\n")


def test_a_file_that_submits_when_it_is_imported_says_what_to_change(by_name: Any, fake_slurm: Any) -> None:
    _, done = by_name(f"import hpcenv\ndef work(x): pass\nif __name__:\n    {_SUBMITS}\n")
    assert done.returncode != 0
    assert "mine.py` cannot be imported: " in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr
    assert "hpcenv.Executor is for the program that submits, and not for a rank of a run" in done.stderr, done.stderr
    assert len(fake_slurm.calls("sbatch")) == 1, "none submits again"


def test_a_file_that_would_submit_again_on_each_rank_is_refused_before_the_queue(
    project: Path, fake_slurm: Any
) -> None:
    lock = project / "lockfiles" / "default.lock.toml"
    lock.write_text(re.sub(r'(?m)^version = "3\.[0-9.]+"', 'version = "3.99.1"', lock.read_text()))
    (project / "mine.py").write_text(f"import hpcenv\ndef work(x): pass\n{_SUBMITS}\n")
    environ = {**fake_slurm.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "mine.py"], cwd=project, text=True, capture_output=True, env=environ)
    assert done.returncode != 0
    assert "mine.py, line 3, submits at the top level of the file" in done.stderr
    assert 'put the lines that submit under `if __name__ == "__main__":`' in done.stderr
    assert fake_slurm.calls("sbatch") == []


def test_what_cannot_be_sent_is_named(project: Path, slurm: Any) -> None:
    executor = api.Executor(project / "jobs", project=project)
    with pytest.raises(UsageError) as caught:
        executor.submit(len, (threading.Lock(),))
    assert "cannot be sent to the nodes" in caught.value.what
    with pytest.raises(UsageError, match="cannot be called"):
        executor.submit(3)  # type: ignore[arg-type]
    executor.max_pickle_size_gb = 1e-9
    with pytest.raises(UsageError, match="are too much"):
        executor.submit(len, "x" * 1000)
    assert list((project / "jobs").iterdir()) == []


def test_a_result_is_read_from_ones_own_file_only(tmp_path: Path) -> None:
    path = tmp_path / "1_0_result.pkl"
    with pytest.raises(FileNotFoundError):
        function.read_result(path)
    path.write_bytes(pickle.dumps(("success", 5)))
    assert function.read_result(path) == ("success", 5)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(JobFailed):
        function.read_result(tmp_path / "link")


@pytest.mark.parametrize("content", [b"", b"nonsense", pickle.dumps(3)])
def test_a_damaged_result_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "r").write_bytes(content)
    with pytest.raises(JobFailed, match="cannot be read"):
        function.read_result(tmp_path / "r")


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: only root can give a file away")
def test_somebody_elses_file_is_never_loaded(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    path = tmp_path / "r"
    path.write_bytes(pickle.dumps(Evil()))
    os.chown(path, 65534, 65534)
    with pytest.raises(JobFailed) as caught:
        function.read_result(path)
    assert "not a file of yours" in str(caught.value.why)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("more", [{"exclude": "n9999"}, {"additional_parameters": {"exclude": "n9999"}}])
def test_what_the_cluster_does_not_have_is_refused_with_the_keyword(
    project: Path, slurm: Any, more: dict[str, Any]
) -> None:
    executor = api.Executor(project / "jobs", project=project)
    executor.update_parameters(time=5, **more)
    with pytest.raises(FailedJobError, match="there is no node `n9999`") as caught:
        executor.submit(divmod, 7, 2)
    assert str(caught.value.hint).endswith("; in Python `--exclude` is `exclude=`")
    assert slurm.calls("sbatch") == []


def test_a_usage_error_names_the_keywords(project: Path) -> None:
    """The hint had options of the command line only."""
    (project / "t.py").write_text("")
    for call in (api.submit, api.plan_job):
        with pytest.raises(UsageError) as caught:
            call("t.py", project=project)
        assert "--gpus" in str(caught.value.hint)
        assert "`--gpus` is `gpus=`" in str(caught.value.hint)
        assert str(caught.value.hint).count("in Python") == 1
