"""Options that are passed on to sbatch and srun, and one that is nothing but a row of the table, on real Slurm."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from .conftest import Cluster, Project

pytestmark = pytest.mark.cluster

SHAPE = ("--nodes", "2", "--gpus", "0", "--nproc", "1", "--time", "5")
SHOWS = """\
import json, os
print("SEEN " + json.dumps([os.environ.get("SLURM_CPU_BIND"), sorted(os.sched_getaffinity(0))]))
"""


def job_of(project: Project, run: str) -> str:
    job: str = project.record(run, "submission.json")["job_id"]
    return job


def allocated_cpus(cluster: Cluster, job: str) -> int:
    """Return how many CPUs the job has on its nodes; they all have as many."""
    total = cluster.must("sacct", "-n", "-P", "-X", "-j", job, "-o", "alloccpus").strip()
    return int(total) // 2


@pytest.fixture(scope="module")
def passed_on(host_project: Project, cluster: Cluster) -> Any:
    """One run with options for sbatch and srun."""
    cluster.write(f"{host_project.folder}/shows.py", SHOWS)
    return host_project.hpcenv(
        "submit", "shows.py", *SHAPE, "--name", "passed", "--sbatch", "mail-user=a@b", "--sbatch", "mail-type=END",
        "--comment", "a b", "--srun", "cpu-bind=none", "--pass-env", "SLURM_CPU_BIND", "--wait", timeout=300,
    )  # fmt: skip


def test_sbatch_gets_the_options_that_are_passed_on(host_project: Project, cluster: Cluster, passed_on: Any) -> None:
    assert passed_on.status == 0, passed_on.text
    job = cluster.must("scontrol", "show", "job", job_of(host_project, "passed"))
    assert "MailUser=a@b MailType=END" in job


def test_slurm_knows_the_lockfile_of_a_job(host_project: Project, cluster: Cluster, passed_on: Any) -> None:
    assert passed_on.status == 0, passed_on.text
    job = job_of(host_project, "passed")
    fingerprint = host_project.json("report", "passed")["data"]["fingerprint"]
    comment = f"a b hpcenv:{fingerprint}"
    shown = cluster.must("scontrol", "show", "job", job).splitlines()
    assert f"Comment={comment}" in [line.strip() for line in shown]
    assert cluster.must("sacct", "-n", "-P", "-X", "-j", job, "-o", "jobid,comment").strip() == f"{job}|{comment}"
    found = host_project.json("list", "--fingerprint", f"hpcenv:{fingerprint}")
    assert "passed" in [run["run"] for run in found["data"]["runs"]]
    assert host_project.json("list", "--fingerprint", "hpc1-000000000000")["data"]["total"] == 0


def test_the_launch_step_gets_the_options_of_srun_and_the_check_does_not(
    host_project: Project, cluster: Cluster, passed_on: Any
) -> None:
    assert passed_on.status == 0, passed_on.text
    job = job_of(host_project, "passed")
    lines = cluster.must("sacct", "-n", "-P", "-j", job, "-o", "jobname,submitline").splitlines()
    steps = dict(line.split("|", 1) for line in lines)
    assert "--cpu-bind=none" in steps["launch"]
    assert "cpu-bind" not in steps["check"]
    seen = [json.loads(line.partition("SEEN ")[2]) for line in passed_on.stdout.splitlines() if "SEEN " in line]
    assert len(seen) == 2
    if json.loads(cluster.testbed("status", "--json").stdout)["task"] != "affinity":
        assert [bind for bind, _ in seen] == ["quiet,none"] * 2
        return
    # task/affinity limits the tasks of a job that does not have the whole node to the CPUs of the job there, whatever
    # the binding ("Otherwise limit job step to the allocated CPUs", lllp_distribution() in dist_tasks.c; seen with Slurm
    # 24.11), and tells it as a mask. So `none` is a mask of all of them. (A job with 2 CPUs has the whole node where
    # the machine has 2: slurmd counts those that exist, and leaves `none`.)
    for bind, cpus in seen:
        found = re.fullmatch(r"quiet,mask_cpu:0x([0-9A-F]+)", bind)
        assert found, seen
        mask = {number for number in range(64) if int(found[1], 16) >> number & 1}
        assert len(mask) == allocated_cpus(cluster, job) == 1
        assert set(cpus) <= mask


def test_an_option_that_srun_does_not_know_is_refused_before_the_queue(host_project: Project) -> None:
    done = host_project.hpcenv("submit", "shows.py", *SHAPE, "--srun", "cpu-bnid=none")
    assert done.status == 2
    assert "why: srun: unrecognized option '--cpu-bnid=none'" in done.stderr


def test_an_option_that_hpcenv_sets_is_refused_with_the_reason(host_project: Project) -> None:
    done = host_project.hpcenv("submit", "shows.py", *SHAPE, "--sbatch", "output=x", "--srun", "kill-on-bad-exit=0")
    assert done.status == 2
    assert "`output`: the log of a run is job.log in its folder" in done.stderr
    assert "`kill-on-bad-exit`: hpcenv ends all nodes when one has failed" in done.stderr


@pytest.mark.parametrize("place", ["command line", "hpcenv.toml", "site profile", "Python"])
def test_an_option_of_the_table_reaches_slurm_from_all_four_places(
    host_project: Project, cluster: Cluster, place: str
) -> None:
    """The testbed has no reservations: Slurm's refusal says that it got the option."""
    folder, spec = host_project.folder, cluster.must("cat", f"{host_project.folder}/hpcenv.toml")
    table = '[submit]\nreservation = "nosuch"\n'
    cluster.write(f"{folder}/shows.py", SHOWS)
    cluster.write(f"{folder}/sites/here.toml", 'name = "here"\n' + (table if place == "site profile" else ""))
    cluster.must("chmod", "go-w", f"{folder}/sites", f"{folder}/sites/here.toml")
    cluster.write(f"{folder}/hpcenv.toml", spec + (table if place == "hpcenv.toml" else ""))
    words = ("--reservation", "nosuch") if place == "command line" else ()
    try:
        if place == "Python":
            program = (
                "import hpcenv\n"
                "hpcenv.submit('shows.py', nodes=1, nproc=1, gpus=0, time=5, site='here', reservation='nosuch')\n"
            )
            done = cluster.run("/shared/hpcenv/venv/bin/python", "-c", program, cwd=folder)
        else:
            done = host_project.hpcenv("submit", "shows.py", *SHAPE, "--site", "here", *words)
    finally:
        cluster.write(f"{folder}/hpcenv.toml", spec)
    assert done.status != 0
    assert "Requested reservation is invalid" in done.stderr
    assert "reservation = nosuch" in done.stderr


SETUP = """\
name = "prepared"
[submit]
setup = [
    'test -z "$(ls facts 2>/dev/null)" && echo "SETUP on $SLURMD_NODENAME"',
    'export SHARED="a b" HIDDEN=1',
    "ulimit -c 0",
    %s
]
"""
LOOKS = """\
import os, resource
print("LOOKED", os.environ.get("SHARED"), os.environ.get("HIDDEN"), resource.getrlimit(resource.RLIMIT_CORE)[0])
"""


def test_the_lines_of_setup_run_once_before_the_check_and_reach_the_ranks_by_pass_env(
    sif_project: Project, cluster: Cluster
) -> None:
    cluster.write(f"{sif_project.folder}/looks.py", LOOKS)
    cluster.write(f"{sif_project.folder}/prepared.toml", SETUP % "")
    words = ("--site", "prepared.toml", "--pass-env", "SHARED", "--wait")
    done = sif_project.hpcenv("submit", "looks.py", *SHAPE, "--name", "prepared", *words)
    assert done.status == 0, done.text
    assert done.stdout.count("SETUP on n1\n") == done.stdout.count("SETUP on ") == 1
    assert done.stdout.count("LOOKED a b None 0\n") == 2
    assert sif_project.record("prepared", "manifest.json")["setup"][2] == "ulimit -c 0"


def test_a_line_of_setup_that_fails_ends_the_job_with_94_and_its_reason(sif_project: Project, cluster: Cluster) -> None:
    cluster.write(f"{sif_project.folder}/looks.py", LOOKS)
    cluster.write(f"{sif_project.folder}/broken.toml", SETUP % "'module load nosuch || exit 5',")
    done = sif_project.hpcenv("submit", "looks.py", *SHAPE, "--name", "broken", "--site", "broken.toml", "--wait")
    assert done.status == 94, done.text
    why = "error[setup-failed]: node n1: a line of `setup` ended with status 5: module load nosuch || exit 5"
    assert f"{why}\n" in done.stdout
    assert "LOOKED" not in done.stdout
    status = sif_project.json("status", "broken")["data"]
    assert (status["state"], status["detail"]) == ("failed", why)
