"""Ranks that fail on real nodes, under real torchrun: the status of the job, and what the report says first.

Two nodes with two ranks each; rank 3, on the second node, fails while the others wait for it in a collective.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import pytest

from .conftest import Cluster, Done, Project

pytestmark = pytest.mark.cluster

FAIL = """
import atexit, ctypes, os, sys, time
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

def fail(kind):
    # torch 2.13 may abort (SIGABRT) while Python is taken down with gloo's threads at work: end before that.
    atexit.register(os._exit, 7 if kind == "exit" else 1)
    if kind == "exit":
        sys.exit(7)
    if kind == "text":
        sys.exit("no data here")
    if kind == "segv":
        ctypes.string_at(0)
    if kind == "raise":
        raise RuntimeError("loss is \\x1b[31mnan")
    print("waiting for the end", os.getpid(), flush=True)
    time.sleep(300)

def main(kind):
    dist.init_process_group("gloo")
    one = torch.ones(1)
    dist.all_reduce(one)
    if dist.get_rank() == 3:
        fail(kind)
    dist.all_reduce(one)

if __name__ == "__main__":
    kind = sys.argv[1]
    record(main)("raise") if kind == "record" else main(kind)
"""

# kind -> how the run ends, and the first line of its report.
CASES = {
    "exit": (7, "first failure: node n2, rank 3, exit 7; "),
    "text": (1, "first failure: node n2, rank 3, exit 1; "),
    "segv": (139, "first failure: node n2, rank 3, SIGSEGV; "),
    "raise": (1, "first failure: node n2, rank 3, exit 1, RuntimeError: loss is \\x1b[31mnan; "),
    "record": (1, "first failure: node n2, rank 3, exit 1, RuntimeError: loss is \\x1b[31mnan; "),
    "killed": (137, "first failure: node n2, rank 3, SIGKILL; "),
}
IN_SIF = ("exit", "record", "killed")
SHAPE = ("--nodes", "2", "--gpus", "0", "--nproc", "2", "--cpus", "4", "--time", "10")


@dataclass(frozen=True)
class Runs:
    """All cases, submitted together: they share the two nodes. `waited` is what `submit --wait` said of one."""

    projects: dict[str, Project]
    waited: Done


@pytest.fixture(scope="module")
def runs(cluster: Cluster, sif_project: Project, host_project: Project) -> Runs:
    projects = {kind: sif_project if kind in IN_SIF else host_project for kind in CASES}
    for kind, project in projects.items():
        cluster.write(f"{project.folder}/fail.py", FAIL)
        if kind != "exit":
            project.must("submit", "fail.py", *SHAPE, "--name", f"fails-{kind}", "--", kind)
    words = (*SHAPE, "--name", "fails-exit", "--wait", "--", "exit")
    waited = projects["exit"].hpcenv("submit", "fail.py", *words, timeout=400)
    kill_rank(cluster, projects["killed"])
    return Runs(projects, waited)


def kill_rank(cluster: Cluster, project: Project) -> None:
    """Kill rank 3 from outside once it waits."""
    log = f"{project.folder}/runs/fails-killed/job.log"
    for _ in range(480):
        pid = cluster.run("sed", "-n", r"s/.*waiting for the end \([0-9]*\)$/\1/p", log).stdout.strip()
        if pid:
            cluster.must("kill", "-KILL", pid, node="n2")
            return
        time.sleep(0.5)
    raise AssertionError("rank 3 never waited:\n" + cluster.run("cat", log).text)


@pytest.mark.parametrize("kind", CASES)
def test_the_job_ends_as_its_first_failing_rank_and_the_report_begins_with_it(
    kind: str, runs: Runs, cluster: Cluster
) -> None:
    status, first = CASES[kind]
    run, project = f"fails-{kind}", runs.projects[kind]
    assert project.hpcenv("wait", run, timeout=400).status == status
    job = project.record(run, "submission.json")["job_id"]
    accounted = cluster.must("sacct", "-X", "-n", "-P", "-j", job, "--format=State,ExitCode").strip()
    # Of a status above 128 slurmdbd keeps the number of the signal alone, as a status (11:0, Slurm 24.11).
    assert accounted == f"FAILED|{status if status < 128 else status - 128}:0"

    text = project.hpcenv("report", run).stdout
    begins = " ".join(text.split("\n  ")[:2]).split("\n")[0]
    assert begins.startswith(first.rstrip()), text
    assert "others were cleaned up" in begins
    assert "\x1b" not in text
    told = project.json("report", run)["data"]["failure"]
    assert (told["node"], told["rank"], told["status"], told["others"]) == ("n2", 3, status, 3)
    if kind in ("raise", "record"):
        assert told["traceback"].splitlines()[0] == "Traceback (most recent call last):"
        assert 'raise RuntimeError("loss is' in told["traceback"]
    if kind == "text":
        assert "\n  its standard error ends with: no data here\n" in text
    record = project.record(run, "exits/n2.json")["ranks"][0]
    assert record["source"] == {"record": "error-file", "raise": "stderr", "text": "stderr"}.get(kind, record["source"])


def test_submit_wait_ends_with_the_status_of_the_rank_and_says_who_it_was(runs: Runs) -> None:
    assert runs.waited.status == 7, runs.waited.text
    assert "first failure: node n2, rank 3, exit 7; 3 others were cleaned up" in runs.waited.text
    assert "hpcenv: node n2: rank 3 ended with exit 7" in runs.waited.text


def test_no_process_is_left_on_any_node(runs: Runs, cluster: Cluster) -> None:
    for kind, project in runs.projects.items():
        project.hpcenv("wait", f"fails-{kind}", timeout=400)
    for node in ("n1", "n2"):
        left = [
            line
            for line in cluster.must("ps", "-u", "alice", "-o", "args=", node=node).splitlines()
            if "fails-" in line
        ]
        assert left == []


ODD = "a, 'b' \"c\" `id` $(id)\n\\ end"

# The container sees the processes of the node: what started it, up to the job's own step.
SHOW = """
import glob, json, os
names = ("ODD", "TOKEN", "OTHER", "HF_HOME", "WANDB_API_KEY", "SLURM_NTASKS", "HPCENV_ATTEMPT", "MASTER_ADDR")
seen = {name: os.environ.get(name) for name in names}
lines = []
for path in glob.glob("/proc/[0-9]*/cmdline"):
    try:
        lines.append(open(path, errors="replace").read())
    except OSError:
        pass
seen["steps"] = sum("step.py" in line for line in lines) > 0
seen["told"] = [line for line in lines if "hush-" in line]
json.dump(seen, open(os.path.join(os.environ["HPCENV_RUN_FOLDER"], "seen"), "w"))
"""


@pytest.mark.parametrize("kind", ["sif", "host"])
def test_secrets_and_odd_values_reach_the_ranks_and_no_other_place(
    kind: str, cluster: Cluster, sif_project: Project, host_project: Project
) -> None:
    project = sif_project if kind == "sif" else host_project
    cluster.write(f"{project.folder}/show.py", SHOW)
    cluster.write(f"{project.folder}/token", "hush-file\n")
    words = ("--nodes", "1", "--gpus", "0", "--nproc", "1", "--time", "5", "--name", "seen", "--wait")
    environ = ("env", "MY_TOKEN=hush-env", "HF_HOME=/hf,a b", "WANDB_API_KEY=no", "SLURM_NTASKS=9")
    asked = (
        *("--secret", f"TOKEN=file:{project.folder}/token", "--secret", "OTHER=env:MY_TOKEN"),
        *("--env", f"ODD={ODD}", "--pass-env", "HF_*", "--torchrun-args", "--monitor-interval=0.1"),
    )
    done = cluster.run(*environ, "hpcenv", "submit", "show.py", *words, *asked, cwd=project.folder, timeout=400)
    assert done.status == 0, done.text
    seen = json.loads(cluster.must("cat", f"{project.folder}/runs/seen/seen"))
    assert seen.pop("MASTER_ADDR")
    assert seen == {
        "ODD": ODD, "TOKEN": "hush-file", "OTHER": "hush-env", "HF_HOME": "/hf,a b", "WANDB_API_KEY": None,
        "SLURM_NTASKS": None, "HPCENV_ATTEMPT": "0", "steps": True, "told": [],
    }  # fmt: skip
    found = cluster.run("grep", "-rlE", "hush-(file|env)", f"{project.folder}/runs/seen").stdout.split()
    assert found == [f"{project.folder}/runs/seen/seen"]
