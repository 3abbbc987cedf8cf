"""Following a run on a real cluster: list, logs of a rank, a shell inside, cancel, wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .conftest import Cluster, Project

pytestmark = pytest.mark.cluster

SCRIPT = """
import os, sys, time
rank = os.environ["RANK"]
print("rank", rank, "on", os.environ["SLURMD_NODENAME"], flush=True)
print("complaint of", rank, file=sys.stderr, flush=True)
open("/tmp/of-this-run", "w").write(rank)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def running(host_project: Project) -> Iterator[Project]:
    """A run called `watched` whose four ranks on two nodes wait."""
    host_project.cluster.write(f"{host_project.folder}/sleeper.py", SCRIPT)
    shape = ("--nodes", "2", "--gpus", "0", "--nproc", "2", "--time", "10")
    host_project.must("submit", "sleeper.py", *shape, "--name", "watched", "--env", "MARK=a b")
    for _ in range(120):
        if host_project.hpcenv("logs", "watched").stdout.count("complaint of") == 4:
            break
        time.sleep(0.5)
    else:
        raise AssertionError(host_project.hpcenv("logs", "watched").text)
    yield host_project
    host_project.hpcenv("cancel", "watched")


def test_the_list_and_the_status(running: Project) -> None:
    line = next(line for line in running.must("list").splitlines() if line.startswith("watched"))
    assert line.split()[2:5] == ["running", "2", "0"]
    assert len(line) <= 80
    listed = running.json("list", "--state", "running")["data"]["runs"]
    assert [one["run"] for one in listed if one["run"] == "watched"] == ["watched"]
    assert running.must("status", "watched").startswith("watched: running\n")


def test_the_log_of_ranks_and_nodes(running: Project) -> None:
    def lines(*words: str) -> list[str]:
        return sorted(running.must("logs", "watched", *words).splitlines())

    assert lines("--rank", "2") == ["[2] complaint of 2", "[2] rank 2 on n2"]
    assert lines("--node", "n1", "--err") == ["[0] complaint of 0", "[1] complaint of 1"]
    assert lines("--node", "n2") == [
        "[2] complaint of 2", "[2] rank 2 on n2", "[3] complaint of 3", "[3] rank 3 on n2",
    ]  # fmt: skip
    assert running.hpcenv("logs", "watched", "--rank", "4").status == 2


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_command_in_the_running_job(running: Project, node: str) -> None:
    script = 'echo "$SLURMD_NODENAME|$MARK|$PWD|$HPCENV_RUN_FOLDER|$RANK"; cat; exit 7'
    done = running.cluster.run(
        "hpcenv", "attach", "watched", "--node", node, "--", "sh", "-c", script, cwd=running.folder, stdin="typed"
    )
    assert done.status == 7, done.text
    assert done.stdout == f"{node}|a b|{running.folder}/runs/watched/source|{running.folder}/runs/watched|\ntyped"


def test_a_shell_on_a_terminal(running: Project) -> None:
    words = "hpcenv attach watched --node n2"
    done = running.cluster.run(
        "script", "-qec", words, "/dev/null", cwd=running.folder, stdin="echo on $((40 + 2)) $SLURMD_NODENAME\nexit 3\n"
    )
    assert "on 42 n2" in done.stdout
    assert done.status == 3


def test_who_may_not_enter(running: Project) -> None:
    done = running.hpcenv("attach", "watched", "--node", "n7", "--", "true")
    assert (done.status, "why: its nodes: n1, n2" in done.stderr) == (2, True), done.text
    assert running.hpcenv("attach", "watched").status == 2, "a shell without a terminal"


def test_cancelling_waits_and_what_was_cancelled_cannot_be_entered(running: Project, cluster: Cluster) -> None:
    waiting: Any = running.hpcenv("wait", "watched", "--timeout", "1s")
    assert waiting.status == 124
    job = running.record("watched", "submission.json")["job_id"]
    assert running.json("cancel", "watched")["data"]["state"] == "cancelled"
    assert cluster.must("squeue", "-h", "-j", job, "--states=running,completing", "-o", "%T") == ""
    ended = running.hpcenv("wait", "watched")
    assert ended.stdout.startswith("first failure: the job was cancelled")
    assert ended.status == running.json("status", "watched")["data"]["exit_status"] == 143
    assert running.json("attach", "watched")["error"]["code"] == "run-not-running"


def test_the_run_again_and_then_its_folder_goes(running: Project) -> None:
    running.must("cancel", "watched")
    told = running.hpcenv("rerun", "watched", "--nodes", "1", "--dry-run")
    assert "  - --nodes 2\n  + --nodes 1\n" in told.stderr, told.text
    assert running.json("clean", "watched", "--yes")["data"]["done"]["removed"][0]["name"] == "watched"
    assert running.must("status", "watched").startswith("watched: cancelled (its run folder is gone)\n")


NEVER = """
import sys
import hpcenv


def add(a, b):
    return a + b


if __name__ == "__main__":
    executor = hpcenv.AutoExecutor("jobs")
    executor.update_parameters(timeout_min=5, slurm_dependency=sys.argv[1])
    try:
        executor.submit(add, 1, 2).result()
    except hpcenv.HpcenvError as error:
        print("ENDED", error.why)
"""


def test_a_job_that_can_never_start_ends_the_wait(host_project: Project, all_nodes_busy: Any) -> None:
    """The job that it depends on fails: Slurm itself would keep it in the queue for ever."""
    folder, cluster = host_project.folder, host_project.cluster
    cluster.write(f"{folder}/fails.py", "raise SystemExit(3)\n")
    cluster.write(f"{folder}/never.py", NEVER)
    shape = ("--gpus", "0", "--nproc", "1", "--time", "5")
    host_project.must("submit", "fails.py", *shape, "--name", "fails")
    failing = f"afterok:{host_project.record('fails', 'submission.json')['job_id']}"
    commands = {
        "waited": ("wait", "waited"), "followed": ("logs", "-f", "followed"),
        "at-once": ("submit", "fails.py", *shape, "--name", "at-once", "--dependency", failing, "--wait"),
    }  # fmt: skip
    for name in ("waited", "followed"):
        host_project.must("submit", "fails.py", *shape, "--name", name, "--dependency", failing)
    with ThreadPoolExecutor() as pool:
        ends = {name: pool.submit(host_project.hpcenv, *words) for name, words in commands.items()}
        until = time.monotonic() + 60
        while "at-once: pending" not in host_project.hpcenv("status", "at-once").text:
            assert time.monotonic() < until, host_project.hpcenv("status", "at-once").text
            time.sleep(1)
        all_nodes_busy()
    for name, end in ends.items():
        done = end.result()
        assert done.status == 25, done.text
        assert f"{name}: pending" in done.stderr and "it waits for the end of another job" in done.stderr
        assert f"{name}: cancelled (before it started (hpcenv cancel, scancel, or a dependency that can" in done.stderr
        assert f"exit status 25: run {name} was cancelled" in done.stderr

    program = cluster.run("/shared/hpcenv/venv/bin/python", "never.py", failing, cwd=folder)
    assert "ENDED cancelled" in program.stdout, program.text
