"""`hpcenv doctor` on a real cluster, submits that use its profile, and what is refused before the queue."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from .conftest import Cluster, Done, Project

pytestmark = pytest.mark.cluster

SCRIPT = "import os\nprint('site says', os.environ.get('SITE_SAID'), flush=True)\n"


@pytest.fixture(scope="module")
def config(cluster: Cluster) -> str:
    """A configuration folder of this test's own: a profile in alice's would be used by other tests."""
    return f"/home/alice/hpcenv-tests/config-{uuid.uuid4().hex[:6]}"


@pytest.fixture(scope="module")
def profile(cluster: Cluster, config: str) -> str:
    done = cluster.run("env", f"XDG_CONFIG_HOME={config}", "hpcenv", "doctor", "--write", cwd="/home/alice")
    assert done.status == 0, done.text
    path = f"{config}/hpcenv/sites/testbed.toml"
    assert f"wrote {path}" in done.stdout
    return path


def submit(project: Project, config: str, *words: str) -> Done:
    project.cluster.write(f"{project.folder}/say.py", SCRIPT)
    where = ("env", f"XDG_CONFIG_HOME={config}", "hpcenv", "submit", "say.py")
    return project.cluster.run(*where, *words, cwd=project.folder)


def test_doctor_says_what_slurm_says(cluster: Cluster) -> None:
    found: dict[str, Any] = json.loads(cluster.must("hpcenv", "doctor", "--json", cwd="/home/alice"))["data"]
    facts = {fact["name"]: fact["value"] for fact in found["facts"]}
    said = cluster.must("scontrol", "show", "config")
    assert facts["cluster"] == "testbed"
    assert f"ProctrackType           = {facts['process tracking']}" in said
    assert f"SLURM_VERSION           = {facts['version']}" in said
    assert facts["home"] == "taken as shared: /home/alice"
    assert facts["user namespaces"] == "yes"
    part = next(part for part in found["partitions"] if part["name"] == "low")
    assert (part["nodes"], part["gpus"], part["preempt_mode"], part["grace_time"]) == (2, "8", "REQUEUE", 10)


def test_the_written_profile_is_used_by_its_cluster_name(
    host_project: Project, config: str, profile: str, cluster: Cluster
) -> None:
    plan = json.loads(submit(host_project, config, "--gpus", "2", "--allow-cpu-torch", "--dry-run", "--json").stdout)[
        "data"
    ]
    assert f"site profile testbed ({profile})" in plan["notes"]
    assert "#SBATCH --gpus-per-node=2\n" in plan["script"]
    cluster.must("sed", "-i", 's/gpu-request = .*/gpu-request = "gres"\\ncpus = 6/', profile)
    plan = json.loads(submit(host_project, config, "--gpus", "2", "--allow-cpu-torch", "--dry-run", "--json").stdout)[
        "data"
    ]
    assert "#SBATCH --gres=gpu:2\n" in plan["script"]
    assert "#SBATCH --cpus-per-task=6\n" in plan["script"]
    env = '\n[env.SITE_SAID]\nvalue = "so it is"\nreason = "a test"\n'
    cluster.must("sh", "-c", 'cat >> "$1"', "sh", profile, stdin=env)
    done = submit(host_project, config, "--nproc", "1", "--wait")
    assert done.status == 0, done.text
    assert "site says so it is" in done.stdout


def test_a_profile_that_others_could_change_is_refused(
    host_project: Project, config: str, profile: str, cluster: Cluster
) -> None:
    cluster.must("chmod", "o+w", profile)
    try:
        done = submit(host_project, config, "--nproc", "1", "--dry-run")
    finally:
        cluster.must("chmod", "o-w", profile)
    assert done.status == 19
    assert "other users can change it" in done.stderr
    assert f"hint: chmod o-w {profile}" in done.stderr


@pytest.mark.parametrize(
    ("words", "what", "why"),
    [
        (("--nodes", "9"), "partition `batch` has 2 nodes, 9 are requested", None),
        (("--nodes", "2", "--spare", "1"), "2 and 1 spare (--spare) are requested", None),
        (("--gpus", "9", "--allow-cpu-torch"), "has no nodes with 9 GPUs", "9 GPUs comes from --gpus; its nodes have 16 CPUs, 8000 MiB, 8 GPUs"),
        (("--mem", "900G"), "has no nodes with 900G of memory", "--mem"),
        (("--time", "9-0"), "ends jobs after 1-00:00:00, 9-0 is requested", "--time"),
        (("--partition", "btach"), "there is no partition `btach`", "--partition"),
        (("--exclude", "n1", "--nodes", "2"), "has 1 node without those of --exclude", None),
        (("--nodelist", "n7"), "there is no node `n7`", "--nodelist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_what_no_node_can_give_is_refused_before_the_queue(
    host_project: Project, words: tuple[str, ...], what: str, why: str
) -> None:
    asked = words if "--gpus" in words else (*words, "--nproc", "1")
    envelope = json.loads(submit(host_project, "/nonexistent", *asked, "--dry-run", "--json").stdout)
    assert envelope["error"]["code"] == "submit-rejected"
    assert what in envelope["error"]["what"]
    # None: the error names the option, and it was typed.
    assert envelope["error"]["why"] is None if why is None else why in envelope["error"]["why"]
    assert envelope["error"]["hint"]


def test_when_a_job_would_start_is_slurms_own_estimate(host_project: Project, cluster: Cluster) -> None:
    words = ("--nproc", "1", "--nodes", "2", "--name", "estimated", "--test-only")
    found = json.loads(submit(host_project, "/nonexistent", *words, "--json").stdout)["data"]["estimate"]
    assert found["nodes"] == "n[1-2]"
    assert found["start"].startswith("20")
    done = submit(host_project, "/nonexistent", *words)
    assert "2 nodes x no GPU, 1 rank each = 2 ranks: would start at 20" in done.stdout
    assert cluster.run("test", "-e", f"{host_project.folder}/runs/estimated").status == 1
    assert cluster.must("squeue", "--noheader", "--name=estimated") == ""


def test_a_module_that_is_missing_ends_the_job_before_anything_runs(host_project: Project, config: str) -> None:
    site = f"{config}/modules.toml"
    host_project.cluster.write(site, 'name = "modules"\nmodules = ["nosuch/1.0"]\n')
    done = submit(host_project, config, "--nproc", "1", "--site", site, "--wait")
    assert done.status == 91, done.text
    kind = json.loads(host_project.cluster.testbed("status", "--json").stdout)["modules"]
    why = "has no command `module`" if kind == "none" else "cannot load the module nosuch/1.0"
    assert why in done.text


def test_checks_of_a_named_node_run_in_the_sif_and_tell_a_limit_that_slurm_passed_on(sif_project: Project) -> None:
    words = "ulimit -Sn 512; exec hpcenv doctor --nodelist n1 --preflight full --skip-check smoke.init --json"
    done = sif_project.cluster.run("bash", "-c", words, cwd=sif_project.folder)
    assert done.status == 0, done.text
    data = json.loads(done.stdout)["data"]
    assert data["checks"]["nodes"] == ["n1"]
    rows = {row["id"]: row for row in data["checks"]["rows"]}
    files = rows["sys.nofile"]
    assert (files["state"], files["found"], files["severity"], files["owner"]) == ("failed", "512", "warn", "user")
    inside = {name: row["state"] for name, row in rows.items() if name.startswith("inside.")}
    print("inside the SIF:", {name: rows[name]["found"] for name in inside})
    assert rows["dist.gloo"]["state"] == "fine"
    assert inside.pop("inside.affinity") == "fine"
    # There is no GPU and no RDMA on these nodes.
    assert set(inside.values()) == {"not-run"}
