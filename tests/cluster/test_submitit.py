"""Programs written for submitit on real Slurm: one changed word, and every node is checked before the function runs.

hpcenv is installed there with another minor version of Python than the locked one, so functions go by their names.
"""

from __future__ import annotations

import textwrap
import uuid

import pytest

from .conftest import Cluster, Done, Project

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PYTHON = "/shared/hpcenv/venv/bin/python"

PROGRAM = """
import os
import socket
import sys
import time

import submitit
from submitit.helpers import Checkpointable


def add(a, b):
    env = submitit.JobEnvironment()
    print("task", env.global_rank, "of", env.num_tasks, "on", env.hostname, flush=True)
    return a + b + env.global_rank


def where():
    env = submitit.JobEnvironment()
    return env.job_id, env.node, env.num_nodes, env.local_rank, os.environ.get("RANK"), len(env.hostnames)


def fail(on):
    rank = submitit.JobEnvironment().global_rank
    if rank == on:
        raise ValueError(f"rank {rank} fails on purpose")
    time.sleep(300)


def slow(seconds):
    env = submitit.JobEnvironment()
    # The second node works longer; nothing of torch makes the first one wait.
    time.sleep(seconds if env.node == 1 else 0)
    return env.node


class Count(Checkpointable):
    def __init__(self):
        self.done = 0
        self.starts = 0

    def __call__(self, goal):
        self.starts += 1
        while self.done < goal:
            self.done += 1
            print("step", self.done, flush=True)
            time.sleep(0.5)
        return self.done, self.starts, submitit.JobEnvironment().job_id


def ended(job):
    while job.state in ("RUNNING", "COMPLETING"):
        time.sleep(0.5)
    return job.state


def main():
    executor = EXECUTOR
    executor.update_parameters(PARAMETERS)
    step = sys.argv[1]
    if step == "submit":
        job = executor.submit(add, 1, b=2)
        print(job.results(), ended(job), job.stdout().count("task"), sep="|")
        print(*(row[1:] for row in executor.submit(where).results()), sep="|")
    if step == "arrays":
        jobs = executor.map_array(add, [10, 20], [1, 2])
        with executor.batch():
            more = [executor.submit(add, number, 0) for number in (30, 40)]
        print([job.results() for job in [*jobs, *more]], jobs[1].job_id == jobs[0].job_id[:-1] + "1", sep="|")
    if step == "fail":
        job = executor.submit(fail, 1)
        try:
            job.result() if job.num_tasks == 1 else job.results()
        except submitit.core.utils.FailedJobError as error:
            print("FAILED", "rank 1 fails on purpose" in str(error), ended(job), sep="|")
    if step == "slow":
        job = executor.submit(slow, 75)
        print(job.results(), ended(job), sep="|")
    if step == "checkpoint":
        job = executor.submit(Count(), 30)
        while "step 4" not in (job.task(0).stdout() or ""):
            time.sleep(0.3)
        job._interrupt(timeout=True) if len(sys.argv) == 2 else os.system("scontrol requeue " + job.job_id)
        done, starts, job_id = job.results()[0]
        print(done, starts, job_id == job.job_id, sep="|")
    if step == "gate":
        job = executor.submit(add, 1, b=2)
        error = job.exception()
        print(type(error).__name__, "exit status 90" in str(error), job.state, sep="|")
        print(error)


if __name__ == "__main__":
    main()
"""

GENERIC = "nodes=2, tasks_per_node=2, timeout_min=5, cpus_per_task=1"
SLURM = "nodes=2, slurm_ntasks_per_node=2, slurm_time=5, slurm_cpus_per_task=1, slurm_partition='PARTITION'"
KINDS = {
    "generic": ('submitit.AutoExecutor(folder="jobs", cluster="hpcenv")', GENERIC),
    "slurm": ('hpcenv.AutoExecutor(folder="jobs")', SLURM),
}


# What differs between the kinds is read when a job is made. The long form (HPCENV_TEST_LONG=1) runs all with both.
ONE_KIND = {
    # Its program imports hpcenv, on the ranks too: from the folder that all elements of an array share by links.
    "test_map_array_and_batch": "slurm",
    "test_an_exception_on_one_rank_ends_the_job": "generic",
    "test_a_checkpointable_function_goes_on_after_the_preemption_signal": "slurm",
    "test_a_checkpointable_function_starts_again_after_scontrol_requeue": "generic",
    "test_a_node_that_differs_ends_the_job_with_90": "slurm",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "program" in metafunc.fixturenames:
        short = ONE_KIND.get(metafunc.function.__name__)
        kinds = [pytest.param(kind, marks=[pytest.mark.long] * (short not in (None, kind))) for kind in KINDS]
        metafunc.parametrize("program", kinds, indirect=True)


@pytest.fixture
def program(request: pytest.FixtureRequest, host_project: Project, cluster: Cluster) -> object:
    executor, parameters = KINDS[request.param]
    partition = cluster.must("sh", "-c", "sinfo -h -o %P | tr -d '*' | head -n1").strip()
    text = PROGRAM.replace("EXECUTOR", executor).replace("PARAMETERS", parameters.replace("PARTITION", partition))
    text = text.replace("import submitit\n", "import hpcenv\nimport submitit\n", 1) if "hpcenv." in executor else text
    name = f"program_{uuid.uuid4().hex[:6]}.py"
    cluster.write(f"{host_project.folder}/{name}", textwrap.dedent(text))

    def run(*words: str, timeout: float = 280) -> list[str]:
        done: Done = cluster.run(PYTHON, name, *words, cwd=host_project.folder, timeout=timeout)
        assert done.status == 0, done.text
        return done.stdout.splitlines()

    return run


def test_submit_and_result(program) -> None:
    lines = program("submit")
    assert lines[0] == "[3, 4, 5, 6]|COMPLETED|4"
    assert lines[1] == "(0, 2, 0, None, 2)|(0, 2, 1, None, 2)|(1, 2, 0, None, 2)|(1, 2, 1, None, 2)"


def test_map_array_and_batch(program) -> None:
    assert program("arrays") == ["[[11, 12, 13, 14], [22, 23, 24, 25], [30, 31, 32, 33], [40, 41, 42, 43]]|True"]


def test_an_exception_on_one_rank_ends_the_job(program) -> None:
    assert program("fail") == ["FAILED|True|FAILED"]


@pytest.mark.long
def test_a_node_that_works_a_minute_longer_than_the_others_is_not_ended(program) -> None:
    assert program("slow") == ["[0, 0, 1, 1]|COMPLETED"]


def test_a_checkpointable_function_goes_on_after_the_preemption_signal(program) -> None:
    done, starts, same = program("checkpoint")[0].split("|")
    assert (done, same) == ("30", "True")
    assert int(starts) == 2, "the second start has the state of the first"


def test_a_checkpointable_function_starts_again_after_scontrol_requeue(program) -> None:
    done, starts, same = program("checkpoint", "requeue")[0].split("|")
    assert (done, same) == ("30", "True")
    assert int(starts) == 1, "nothing was saved: the state is that of the submission"


def test_a_node_that_differs_ends_the_job_with_90(program, host_project: Project, cluster: Cluster) -> None:
    victim = "/shared/hostenv/lib/python3.11/site-packages/torch/nn/functional.py"
    patch = 'sed "0,/import/s//imqort/" "$1" > /run/patched && mount --bind /run/patched "$1"'
    cluster.must("sh", "-c", patch, "sh", victim, node="n2", user="root")
    try:
        lines = program("gate")
    finally:
        cluster.must("umount", victim, node="n2", user="root")
    assert lines[0] == "NoResult|True|FAILED"
    assert any(line.startswith("node n2  packages.content-digest  MISMATCH") for line in lines), lines


MIXED = """
import contextlib
import io

import submitit
import submitit.helpers

import hpcenv


def evaluate(step):
    return step * 2 + submitit.JobEnvironment().global_rank


if __name__ == "__main__":
    script = hpcenv.submit("NAME-train.py", nodes=2, nproc=1, gpus=0, cpus=1, time="5", name="NAME")
    function = hpcenv.Executor("jobs", nodes=2, tasks_per_node=1, cpus_per_task=1, time="5").submit(evaluate, 21)
    jobs = [script, function]
    print(*(type(job).__name__ for job in jobs), *(isinstance(job, submitit.SlurmJob) for job in jobs))
    for job in submitit.helpers.as_completed(jobs, timeout=240, poll_frequency=1):
        print("ended", "script" if job is script else "function")
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        submitit.helpers.monitor_jobs(jobs)
    print("All jobs finished, jobs with indices [] failed" in shown.getvalue())
    print(function.results(), [status.state for status in script.results()], script.paths.stdout.name)
"""


def test_one_list_of_a_script_and_a_function(host_project: Project, cluster: Cluster) -> None:
    name = f"mixed-{uuid.uuid4().hex[:6]}"
    trains = "import os\nprint('TRAINS', os.environ['RANK'], flush=True)\n"
    cluster.write(f"{host_project.folder}/{name}-train.py", trains)
    # The nodes import the function from this file, so what submits is below the guard.
    cluster.write(f"{host_project.folder}/{name}.py", textwrap.dedent(MIXED).replace("NAME", name))
    done = cluster.run(PYTHON, f"{name}.py", cwd=host_project.folder, timeout=280)
    assert done.status == 0, done.text
    lines = done.stdout.splitlines()
    assert lines[0] == "Job Job True True"
    assert sorted(lines[1:3]) == ["ended function", "ended script"]
    assert lines[3:] == ["True", "[42, 43] ['completed'] job.log"]
