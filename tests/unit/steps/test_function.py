"""`hpcenv.Executor` and the Python API, on this machine: what is sent, what comes back, and from whom it is taken."""

from __future__ import annotations

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

import hpcenv as api
from hpcenv import wire
from hpcenv.errors import HpcenvError, JobFailed, UsageError
from hpcenv.job import Flags
from hpcenv.steps import function
from hpcenv.steps.request import Asked
from hpcenv.wire import Manifest, RunFolder

ROOT = Path(__file__).resolve().parents[3]
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


def program(project: Path, text: str, *, timeout: float = 120) -> str:
    """Run a user's program in the project; return what it printed."""
    path = project / "mine.py"
    path.write_text(textwrap.dedent(text))
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(project), "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, path], cwd=project, env=environ, text=True, capture_output=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_functions_run_behind_the_gate_and_their_results_come_back(project: Path) -> None:
    (project / "beside.py").write_text("FACTOR = 3\n")
    said = program(
        project,
        """
        import os, hpcenv
        import beside

        OFFSET = 4

        class Odd(Exception):
            def __init__(self, one, two):
                super().__init__(f"{one} and {two}")

        def work(x, *, fail=None):
            if fail == "odd":
                raise Odd("a", "b")  # cannot be unpickled
            if fail == "exit":
                raise SystemExit(5)
            if fail:
                raise KeyError(fail)
            return x * beside.FACTOR + OFFSET, os.environ["RANK"]

        if __name__ == "__main__":
            executor = hpcenv.Executor(cluster="local", nproc=1)
            jobs = [executor.submit(work, 2), executor.submit(lambda: OFFSET), executor.submit(work, 1, fail="k"),
                    executor.submit(work, 1, fail="odd")]
            print(jobs[0].result(60), jobs[0].results(), jobs[1].result(60))
            print(repr(jobs[2].exception(60)), jobs[2].done(), jobs[2].state())
            print("remote:", "raise KeyError(fail)" in str(jobs[2].exception().__cause__))
            print(type(jobs[3].exception(60)).__name__, jobs[3].exception())
            print(hpcenv.open_job(jobs[0].run).folder == jobs[0].folder)
            print((jobs[0].folder / "verdict.json").exists(), jobs[0].run.startswith("work-"))
        """,
    )
    assert said.splitlines() == [
        "(10, '0') [(10, '0')] 4",
        "KeyError('k') True failed",
        "remote: True",
        "JobFailed rank 0: Odd: a and b",
        "True",
        "True True",
    ]


def test_a_function_behind_a_closed_gate_does_not_run(project: Path) -> None:
    said = program(
        project,
        """
        import hpcenv, pathlib
        import re

        def work():
            pathlib.Path("ran").touch()

        if __name__ == "__main__":
            lock = pathlib.Path("lockfiles/default.lock.toml")
            text = lock.read_text()
            found = re.search(r'record-sha256 = "([0-9a-f]{64})"', text)
            lock.write_text(text.replace(found[1], "0" * 64))
            try:
                hpcenv.Executor(cluster="local", frozen=True).submit(work).result(60)
            except hpcenv.HpcenvError as error:
                print(error.code, "rejected" in str(error))
            print(pathlib.Path("ran").exists())
        """,
    )
    assert said.splitlines() == ["job-failed True", "False"]


def test_a_map_is_one_array_and_every_call_has_a_run_of_its_own(
    project: Path, fake_slurm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PATH", "FAKE_SLURM"):
        monkeypatch.setenv(name, fake_slurm.environ[name])
    executor = api.Executor(project=project, max_parallel=2, assume_shared=True, run="m", env={"A": "1"})
    jobs = executor.map_array(divmod, (7, 8, 9), (2, 3, 0))
    (call,) = fake_slurm.calls("sbatch")
    assert "#SBATCH --array=0-2%2" in call.script
    assert [job.job_id for job in jobs] == ["4242_0", "4242_1", "4242_2"]
    assert [job.run for job in jobs] == ["m/0000", "m/0001", "m/0002"]
    parent = jobs[0].folder.parent
    assert os.path.samefile(parent / "function" / "packages", jobs[2].folder / "function" / "packages"), "there once"
    assert not (parent / "function" / "call.pkl").exists(), "nobody's own"
    # Slurm's part and the gate's are tried on the cluster; here the rank's.
    for number, job in enumerate(jobs):
        manifest = wire.read(Manifest, RunFolder(job.folder).manifest)
        assert manifest.script == f"{job.folder}/function/call.py"
        done = subprocess.run([sys.executable, manifest.script], cwd=project, env={"RANK": "0"}, capture_output=True)
        assert (done.returncode != 0) == (number == 2), done.stderr
        state = {"schema": 1, "status": done.returncode, "time": 1.0}
        (job.folder / "finished.json").write_text(json.dumps(state))
    assert [job.result() for job in jobs[:2]] == [(3, 1), (2, 2)]
    assert isinstance(jobs[2].exception(), ZeroDivisionError)
    fake_slurm.answers("sbatch", err="sbatch: error: Invalid job array specification\n", status=1)
    with pytest.raises(HpcenvError, match="Slurm refused the job"):
        api.Executor(project=project, assume_shared=True, run="n").map_array(divmod, (1,), (1,))
    assert not (parent.parent / "n").exists()


def test_what_makes_no_map(project: Path, fake_slurm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = api.Executor(project=project, cluster="local", max_parallel=2)
    assert executor.map_array(divmod, (), ()) == []
    with pytest.raises(ValueError, match="shorter"):
        executor.map_array(divmod, (1, 2), (1,))
    with pytest.raises(UsageError, match="needs Slurm"):
        executor.map_array(divmod, (1, 2), (1, 1))
    for name in ("PATH", "FAKE_SLURM"):
        monkeypatch.setenv(name, fake_slurm.environ[name])
    with pytest.raises(UsageError, match="more than 1000"):
        api.Executor(project=project, assume_shared=True).map_array(abs, range(1001))
    with pytest.raises(UsageError, match="`--chain` is for one run"):
        api.Executor(project=project, assume_shared=True, chain=2).map_array(abs, range(2))
    assert not (project / "runs").exists()


def test_submit_wait_report_cancel(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    job = api.submit("train.py", ["a b", 1], nproc=1, cluster="local", run="a")
    assert job.wait(60).state == "completed"
    assert job.run == "a"
    assert job.report().ok
    assert "TRAINS ['a b', '1']" in job.log()
    assert job.cancel().state == "completed", "what has ended stays as it ended"
    assert api.open_job().folder == job.folder
    (project / "long.py").write_text("import time\ntime.sleep(100)\n")
    job = api.submit("long.py", nproc=1, cluster="local", run="b")
    assert job.cancel().state in ("failed", "cancelled")
    plan = api.plan_job("train.py", nproc=2, nodes=2, cluster="local", env={"A": "1"}, project=project)
    assert (plan.manifest.nodes, plan.manifest.nproc_per_node) == (2, 2)
    assert plan.command[:3] == ("hpcenv", "submit", "train.py")
    assert "--env" in plan.command


def test_a_misspelt_flag_is_told(project: Path) -> None:
    with pytest.raises(UsageError) as caught:
        api.submit("train.py", project=project, nprocs=1)  # type: ignore[call-arg]
    assert caught.value.hint == "did you mean `nproc`?"
    with pytest.raises(UsageError) as caught:
        api.plan_job("train.py", "--lr 3", project=project, nproc=1)
    assert "['--lr', '3']" in str(caught.value.hint)


def test_every_flag_of_the_command_line_is_a_keyword() -> None:
    from hpcenv.cli.submit import command

    own = {"script", "args", "as_json", "dry_run", "test_only", "wait", "sweep", "array", "max_parallel"}
    names = {"time_limit": "time", "lock_name": "lock", "run_name": "run"}
    flags = {names.get(str(p.name), str(p.name)) for p in command.params} - own
    assert flags == set(Flags.__annotations__)
    known = set(Asked.__dataclass_fields__)
    assert {"secrets" if flag == "secret" else flag for flag in flags} <= known


def test_between_different_pythons_only_a_function_with_a_name_goes() -> None:
    call = function.make_call(textwrap.dedent, ("x",), {}, python="3.99.1")
    assert call.spec == {"how": "name", "module": "textwrap", "qualname": "dedent"}
    for odd in (lambda: 1, [].append, Path("x").exists):
        with pytest.raises(UsageError) as caught:
            function.make_call(odd, (), {}, python="3.99.1")
        assert "3.99.1" in str(caught.value.why)


@pytest.fixture
def by_name(project: Path, fake_slurm: Any) -> Any:
    """Submit the function `work` of a program to another Python, and call it as a rank does, here."""
    lock = project / "lockfiles" / "default.lock.toml"
    lock.write_text(re.sub(r'(?m)^version = "3\.[0-9.]+"', 'version = "3.99.1"', lock.read_text()))

    def call(text: str, *, inside: bool = True) -> tuple[Path, subprocess.CompletedProcess[str]]:
        (project / "mine.py").write_text(textwrap.dedent(text))
        said = subprocess.run(
            [sys.executable, "mine.py"], cwd=project, text=True, capture_output=True,
            env={**fake_slurm.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        (folder,) = (project / "runs").iterdir()
        assert json.loads((folder / "function" / "call.json").read_text())["how"] == "name", said.stderr
        path = {"PYTHONPATH": str(folder / "inside" if inside else ROOT)}
        return folder, subprocess.run(
            [sys.executable, folder / "function" / "call.py"], cwd=project, text=True, capture_output=True,
            env={**fake_slurm.environ, **path, "RANK": "0"},
        )  # fmt: skip

    return call


_SUBMITS = "hpcenv.Executor(frozen=True, assume_shared=True).submit(work, 4)"


def test_each_rank_imports_the_file_where_a_function_is_sent_by_name(by_name: Any) -> None:
    folder, done = by_name(
        f"""
        import hpcenv

        def work(x):
            return x + 1

        if __name__ == "__main__":
            {_SUBMITS}
        """
    )
    assert done.returncode == 0, done.stderr
    assert function.value_of(function.read_outcomes(RunFolder(folder), 1)[0]) == 5


@pytest.mark.parametrize("inside", [True, False], ids=["hpcenv as ranks have it", "hpcenv whole"])
def test_a_file_that_submits_when_it_is_imported_says_what_to_change(
    by_name: Any, fake_slurm: Any, inside: bool
) -> None:
    folder, done = by_name(f"import hpcenv\ndef work(x): pass\n{_SUBMITS}\n", inside=inside)
    assert done.returncode != 0
    (outcome,) = function.read_outcomes(RunFolder(folder), 1).values()
    assert "mine.py` cannot be imported: " in outcome.message
    assert 'if __name__ == "__main__":' in outcome.message
    assert ("hpcenv.Executor is not there on the compute nodes" in outcome.message) is inside
    assert ("a rank does not submit while it imports" in outcome.message) is not inside
    assert len(fake_slurm.calls("sbatch")) == 1, "none submits again"


def test_what_cannot_be_sent_is_said() -> None:
    with pytest.raises(UsageError) as caught:
        function.make_call(len, (threading.Lock(),), {}, python=HERE)
    assert "cannot be sent to the nodes" in caught.value.what
    with pytest.raises(UsageError):
        function.make_call(3, (), {}, python=HERE)  # type: ignore[arg-type]


def write(run: RunFolder, rank: int, content: bytes) -> Path:
    place = run.path / "function" / "results" / f"{rank}.pkl"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content)
    return place


def test_a_result_is_taken_from_ones_own_file_only(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    good = pickle.dumps({"ok": True, "value": pickle.dumps(5), "time": 1.0})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(good)
    write(run, 1, good)
    assert function.value_of(function.read_outcomes(run, 2)[1]) == 5
    (tmp_path / "function" / "results" / "0.pkl").symlink_to(elsewhere)
    with pytest.raises(JobFailed):
        function.read_outcomes(run, 2)


@pytest.mark.parametrize("content", [b"", b"nonsense", pickle.dumps(3), pickle.dumps({"ok": False, "x": 1})])
def test_a_damaged_result_is_said(tmp_path: Path, content: bytes) -> None:
    run = RunFolder(tmp_path)
    write(run, 0, content)
    with pytest.raises(JobFailed) as caught:
        function.read_outcomes(run, 1)
    assert "damaged" in caught.value.what


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: only root can give a file away")
def test_somebody_elses_file_is_never_loaded(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    os.chown(write(run, 0, pickle.dumps(Evil())), 65534, 65534)
    with pytest.raises(JobFailed) as caught:
        function.read_outcomes(run, 1)
    assert "not a file of yours" in str(caught.value.why)
    assert not (tmp_path / "ran").exists()
