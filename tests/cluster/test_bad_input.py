"""Bad input gets a clear error with its own exit status; nothing is queued, nothing is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import OTHER_IMAGE, Cluster, Project

pytestmark = pytest.mark.cluster

SHAPE = ("--nodes", "2", "--gpus", "0", "--nproc", "2")


def refused(project: Project, *words: str) -> dict[str, Any]:
    """Run a command that must be refused; return its error. Nothing may be queued or left."""
    before = project.cluster.must("sh", "-c", f"ls {project.folder}/runs 2>/dev/null; squeue -h -u alice -o %i; true")
    done = project.hpcenv(*words, "--json")
    error = json.loads(done.stdout)["error"]
    assert done.status == error["exit_status"] != 0
    assert "Traceback" not in done.text
    after = project.cluster.must("sh", "-c", f"ls {project.folder}/runs 2>/dev/null; squeue -h -u alice -o %i; true")
    assert after == before
    return dict(error)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--partition", "nosuch"), "submit-rejected", "partition"),
        (("--account", "nosuch"), "submit-rejected", "account"),
        (("--nodes", "99"), "submit-rejected", ""),
        (("--gpus", "9", "--allow-cpu-torch"), "submit-rejected", ""),
        (("--gpus", "8"), "submit-rejected", "would stay idle"),
        (("--time", "99-00"), "submit-rejected", "time"),
    ],
)
def test_what_slurm_refuses_is_said_in_slurms_words(
    sif_project: Project, words: tuple[str, ...], code: str, says: str
) -> None:
    error = refused(sif_project, "submit", "examples/train.py", *SHAPE, *words)
    assert error["code"] == code
    assert says in (error["why"] or "").lower()
    assert error["hint"]


def test_a_run_folder_that_nodes_cannot_see_is_refused(sif_project: Project) -> None:
    error = refused(sif_project, "submit", "examples/train.py", *SHAPE, "--runs-dir", "/tmp/runs")
    assert error["code"] == "run-folder-not-shared"
    assert "tmpfs" in error["why"]


IN_TMP = """
import hpcenv
import submitit


def add(a, b):
    return a + b


if __name__ == "__main__":
    for executor in (
        submitit.AutoExecutor(folder="/tmp/x", cluster="hpcenv"),
        hpcenv.AutoExecutor(folder="/tmp/x"),
        hpcenv.Executor(folder="/tmp/x"),
    ):
        for call, given in ((executor.submit, (1, 2)), (executor.map_array, ([1, 2], [3, 4]))):
            try:
                print("SUBMITTED", call(add, *given))
            except hpcenv.HpcenvError as error:
                print(error.code, str(error).splitlines()[:2])
"""


def test_a_folder_of_an_executor_that_nodes_cannot_see_is_refused(host_project: Project, cluster: Cluster) -> None:
    cluster.write(f"{host_project.folder}/in_tmp.py", IN_TMP)
    done = cluster.run("/shared/hpcenv/venv/bin/python", "in_tmp.py", cwd=host_project.folder)
    why = "'compute nodes cannot see the folder of the executor `/tmp/x`', 'why: /tmp is a tmpfs file system"
    lines = done.stdout.splitlines()
    assert len(lines) == 6, done.text
    for line in lines:
        assert line.startswith(f"run-folder-not-shared [{why}"), line
    assert cluster.must("squeue", "-h", "-u", "alice") == ""


def test_a_script_outside_the_shared_file_system_is_refused(sif_project: Project, cluster: Cluster) -> None:
    cluster.write("/tmp/elsewhere/train.py", "print('hello')\n")
    assert refused(sif_project, "submit", "/tmp/elsewhere/train.py", *SHAPE)["code"] == "run-folder-not-shared"


def test_an_unreadable_script_is_refused(sif_project: Project, cluster: Cluster) -> None:
    cluster.write(f"{sif_project.folder}/secret.py", "print(1)\n")
    cluster.must("chmod", "000", f"{sif_project.folder}/secret.py")
    assert refused(sif_project, "submit", "secret.py", *SHAPE)["code"] == "script-unusable"


def test_a_stopped_slurmctld_is_named(sif_project: Project, cluster: Cluster) -> None:
    assert cluster.testbed("fault", "kill", "slurmctld").status == 0
    try:
        done = sif_project.hpcenv("submit", "examples/train.py", *SHAPE, "--json", timeout=280)
    finally:
        assert cluster.testbed("fault", "heal", "slurmctld").status == 0
    error = json.loads(done.stdout)["error"]
    assert error["code"] in ("submit-rejected", "tool-failed")
    assert "slurm" in (error["why"] + error["hint"]).lower()


def test_a_registry_that_is_down_is_named(cluster: Cluster, sif_project: Project) -> None:
    lockfile = f"{sif_project.folder}/lockfiles/default.lock.toml"
    before = cluster.must("cat", lockfile)
    assert cluster.testbed("fault", "kill", "registry").status == 0
    try:
        words = ("--plain-http", "registry:5000", "--store", f"{sif_project.folder}/empty-store")
        error = refused(sif_project, "image", "pull", OTHER_IMAGE, *words)
        # What is locked is in the store: no registry has to be asked.
        sif_project.must("lock")
    finally:
        assert cluster.testbed("fault", "heal", "registry").status == 0
    assert error["code"] == "image-unavailable"
    assert cluster.must("cat", lockfile) == before, "the lockfile stays as it was"


def test_a_missing_apptainer_or_sbatch_is_named(sif_project: Project, cluster: Cluster) -> None:
    """The tools are found on PATH; a PATH without them stands for a login node without them."""
    link = "mkdir -p ~/bin-without && ln -s /usr/bin/* ~/bin-without/ && cd ~/bin-without && rm"
    for tool, names in (("apptainer", ("apptainer", "singularity")), ("sbatch", ("sbatch",))):
        cluster.must("sh", "-c", f"rm -rf ~/bin-without; {link} {' '.join(names)}")
        done = cluster.run(
            "env", "PATH=/home/alice/bin-without", "/shared/hpcenv/venv/bin/hpcenv", "submit", "examples/train.py",
            *SHAPE, "--cluster", "slurm", "--json", cwd=sif_project.folder,
        )  # fmt: skip
        error = json.loads(done.stdout)["error"]
        assert error["code"] == "tool-missing"
        assert f"`{tool}`" in error["what"]
    cluster.must("rm", "-rf", "/home/alice/bin-without")


def test_a_node_that_dies_during_the_check_is_not_taken_for_a_match(host_project: Project, cluster: Cluster) -> None:
    """A node that cannot report is unknown: 91, its name in the table, nothing trained."""
    cluster.must("sh", "-c", "mount -t tmpfs none /home", node="n2", user="root")
    try:
        done = host_project.hpcenv("submit", "examples/train.py", *SHAPE, "--nproc", "1", "--wait", "--name", "blind")
    finally:
        cluster.must("umount", "/home", node="n2", user="root")
    assert done.status == 91, done.text
    assert "world_size" not in done.stdout
    verdict = host_project.record("blind", "verdict.json")
    assert verdict["result"] == "unknown"
    assert {node["node"]: node["result"] for node in verdict["nodes"]} == {"n1": "match", "n2": "unknown"}
    assert "n2" in done.stdout


def test_variables_of_an_outer_job_do_not_reach_the_inner_one(host_project: Project, cluster: Cluster) -> None:
    cluster.write(
        f"{host_project.folder}/outer.sh",
        "#!/bin/bash\nexport RANK=7 MASTER_ADDR=nowhere WORLD_SIZE=99\n"
        f"cd {host_project.folder}\n"
        "hpcenv submit examples/train.py --nodes 1 --gpus 0 --nproc 1 --name inner -- --steps 2\n",
    )
    cluster.must(
        "sbatch", "--wait", "--nodes=1", "--cpus-per-task=3", "--output=/dev/null", f"{host_project.folder}/outer.sh"
    )
    waited = host_project.must("logs", "-f", "inner", timeout=200)
    assert "world_size 1" in waited
    assert host_project.json("status", "inner")["data"]["exit_status"] == 0
