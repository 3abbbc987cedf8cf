"""The value of an `env:NAME` secret on a real cluster: where it is while the job waits and runs, and when it is gone."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable

import pytest

from .conftest import Cluster, Project

pytestmark = pytest.mark.cluster

VALUE = f"hush-{uuid.uuid4().hex}"
WORDS = ("--nodes", "1", "--gpus", "0", "--nproc", "1", "--time", "5", "--secret", "TOKEN=env:MY_TOKEN")
# Runs until the file `go` is there; then it says whether it has the value, by its length.
WAITS = """
import os, pathlib, sys, time
print("GOT", len(os.environ.get("TOKEN", "")), flush=True)
here = pathlib.Path(os.environ["HPCENV_RUN_FOLDER"])
(here / "trains").write_text("")
while not (here / "go").exists():
    time.sleep(0.2)
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
"""


def submit(project: Project, name: str, *words: str, args: tuple[str, ...] = ()) -> None:
    argv = ("hpcenv", "submit", "waits.py", *WORDS, "--name", name, *words, *(("--", *args) if args else ()))
    done = project.cluster.run("env", f"MY_TOKEN={VALUE}", *argv, cwd=project.folder, timeout=400)
    assert done.status == 0, done.text


def until(what: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def kept(cluster: Cluster) -> str:
    return cluster.must("sh", "-c", "ls /home/alice/.local/state/hpcenv/secrets 2>/dev/null || true").strip()


def exists(cluster: Cluster, path: str) -> bool:
    return cluster.run("test", "-e", path).status == 0


@pytest.fixture
def project(host_project: Project) -> Project:
    host_project.cluster.write(f"{host_project.folder}/waits.py", WAITS)
    return host_project


def test_only_the_ranks_have_it_and_it_is_gone_after_the_end(cluster: Cluster, project: Project) -> None:
    run = f"{project.folder}/runs/hush-a"
    submit(project, "hush-a")
    until(lambda: exists(cluster, f"{run}/trains"))
    job = json.loads(cluster.must("cat", f"{run}/submission.json"))["job_id"]
    assert VALUE not in cluster.must("scontrol", "show", "job", "-dd", job)
    assert VALUE not in cluster.must("scontrol", "write", "batch_script", job, "-")
    assert cluster.run("grep", "-rl", VALUE, run).stdout == ""
    state = cluster.run("sh", "-c", f"grep -rl {VALUE} / --include=environment 2>/dev/null", node="ctl", user="root")
    assert state.stdout == "", state.stdout
    holders = cluster.run("sh", "-c", HOLDERS, "sh", VALUE, node="n1", user="root").stdout
    holders += cluster.run("sh", "-c", HOLDERS, "sh", VALUE, node="n2", user="root").stdout
    assert "waits.py" in holders
    assert "job.sbatch" not in holders, holders
    assert "step.py" not in holders, holders
    (file,) = kept(cluster).split()
    shown = cluster.must("stat", "-c", "%a", f"/home/alice/.local/state/hpcenv/secrets/{file}")
    assert shown.strip() == "600"
    cluster.must("touch", f"{run}/go")
    project.must("wait", "hush-a")
    assert kept(cluster) == ""
    assert f"GOT {len(VALUE)}" in cluster.must("cat", f"{run}/job.log")


# The command lines of all processes whose environment has the value.
HOLDERS = r"""
for p in /proc/[0-9]*; do
  tr '\0' '\n' < $p/environ 2>/dev/null | grep -q -- "$1" && tr '\0' ' ' < $p/cmdline && echo
done; true
"""


def test_it_is_gone_after_a_failure_and_after_a_cancel_in_the_queue(
    cluster: Cluster, project: Project, all_nodes_busy: Callable[[], None]
) -> None:
    submit(project, "hush-q")
    assert len(kept(cluster).split()) == 1
    project.must("cancel", "hush-q")
    assert kept(cluster) == ""
    submit(project, "hush-s")
    job = project.record("hush-s", "submission.json")["job_id"]
    cluster.must("scancel", job)
    time.sleep(2)
    project.hpcenv("status", "hush-s")
    assert kept(cluster) == ""
    all_nodes_busy()
    submit(project, "hush-f", args=("3",))
    until(lambda: exists(cluster, f"{project.folder}/runs/hush-f/trains"))
    cluster.must("touch", f"{project.folder}/runs/hush-f/go")
    assert project.hpcenv("wait", "hush-f").status == 3
    assert kept(cluster) == ""


def test_requeues_and_arrays_read_it_each_time(cluster: Cluster, project: Project) -> None:
    run = f"{project.folder}/runs/hush-r"
    submit(project, "hush-r")
    until(lambda: exists(cluster, f"{run}/trains"))
    job = project.record("hush-r", "submission.json")["job_id"]
    cluster.must("rm", f"{run}/trains")
    cluster.must("scontrol", "requeue", job)
    until(lambda: exists(cluster, f"{run}/trains"), 200)
    cluster.must("touch", f"{run}/go")
    project.must("wait", "hush-r")
    assert cluster.must("cat", f"{run}/job.log").count(f"GOT {len(VALUE)}") == 2
    assert kept(cluster) == ""

    submit(project, "hush-m", "--array", "0-2")
    for element in range(3):
        cluster.must("touch", f"{project.folder}/runs/hush-m/000{element}/go")
    project.must("wait", "hush-m")
    logs = cluster.must("sh", "-c", f"cat {project.folder}/runs/hush-m/*/job.log")
    assert logs.count(f"GOT {len(VALUE)}") == 3
    assert kept(cluster) == ""
    again = project.hpcenv("rerun", "hush-m")
    assert again.status == 2
    assert "MY_TOKEN is not set here" in again.text
