"""Site profiles on real Slurm: what environment modules set for containers, and options and conditions of a profile.

The module files are like those of LUMI (`lumi-aif-singularity-bindings`), OLCF (`apptainer-enable-mpi`) and Isambard-AI
(`brics/nccl`). They are in Tcl, which Lmod reads as well.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import Cluster, Project

pytestmark = pytest.mark.cluster

SHAPE = ("--gpus", "0", "--nproc", "1", "--time", "5")

MODULES = {
    "lumi-aif-singularity-bindings": "setenv SINGULARITY_BIND @/pfs:/pfs",
    "apptainer-enable-mpi": "append-path -d , APPTAINER_BIND @/cray:/opt/cray:ro\n"
    "prepend-path APPTAINER_WRAPPER_LD_LIBRARY_PATH /opt/cray/lib64\n"
    "setenv APPTAINERENV_SITE_WORD {of the module}",
    "brics/nccl": "setenv NCCL_MIN_NCHANNELS 4\nsetenv FI_MR_CACHE_MONITOR userfaultfd\nsetenv NCCL_NET_PLUGIN @/libnet.so",
}
PROFILE = """
name = "here"
[[module]]
name = "lumi-aif-singularity-bindings"
use = "{folder}/modules"
reason = "file systems"
[[module]]
name = "apptainer-enable-mpi"
reason = "fabric"
[[module]]
name = "brics/nccl"
reason = "settings"
[env.LD_LIBRARY_PATH]
append = "/end"
reason = "of the site"
[env.CACHE]
value = "${{node-local}}/cache-${{jobid}}-${{user}}"
reason = "of the site"
[env.FI_MR_CACHE_MONITOR]
value = "kdreg2"
reason = "the site knows better"
"""
SEEN = """
import json, os, sys
names = ("LD_LIBRARY_PATH", "SITE_WORD", "NCCL_MIN_NCHANNELS", "FI_MR_CACHE_MONITOR", "CACHE", "NCCL_NET_PLUGIN")
found = {name: os.environ.get(name) for name in names}
for path in ("/pfs/data", "/opt/cray/lib64/libfabric.so"):
    found[path] = os.path.exists(path)
try:
    open("/opt/cray/new", "w")
    found["writable"] = True
except OSError:
    found["writable"] = False
print("SEEN " + json.dumps(found))
"""


@pytest.fixture(scope="module")
def with_modules(sif_project: Project, cluster: Cluster) -> Project:
    if not cluster.run("bash", "-lc", "type module", node="n1").status == 0:
        pytest.skip("NOT RUN: this testbed has no environment modules; scripts/testbed up --modules lmod")
    folder = sif_project.folder
    for name, text in MODULES.items():
        cluster.write(f"{folder}/modules/{name}", "#%Module1.0\n" + text.replace("@", folder) + "\n")
    cluster.write(f"{folder}/pfs/data", "")
    cluster.write(f"{folder}/cray/lib64/libfabric.so", "")
    cluster.write(f"{folder}/seen.py", SEEN)
    cluster.write(f"{folder}/profiles/here.toml", PROFILE.format(folder=folder))
    cluster.must("chmod", "-R", "go-w", f"{folder}/profiles")
    return sif_project


def seen(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.partition("SEEN ")[2]) for line in text.splitlines() if "SEEN " in line]


def test_what_modules_set_reaches_the_ranks_and_the_verdict_names_them(with_modules: Project) -> None:
    done = with_modules.hpcenv(
        "submit", "seen.py", "--nodes", "2", *SHAPE, "--site", "profiles/here.toml", "--name", "modules",
        "--env", "NCCL_MIN_NCHANNELS=9", "--wait", "--verbose", timeout=300,
    )  # fmt: skip
    assert done.status == 0, done.text
    job = with_modules.record("modules", "submission.json")["job_id"]
    assert len(seen(done.stdout)) == 2
    for found in seen(done.stdout):
        # Apptainer adds its own folder of libraries.
        assert found.pop("LD_LIBRARY_PATH").startswith("/opt/cray/lib64:/end")
        assert found == {
            "SITE_WORD": "of the module",
            "NCCL_MIN_NCHANNELS": "9",
            "FI_MR_CACHE_MONITOR": "kdreg2",
            "CACHE": f"/tmp/cache-{job}-alice",
            "NCCL_NET_PLUGIN": None,
            "/pfs/data": True,
            "/opt/cray/lib64/libfabric.so": True,
            "writable": False,
        }
    verdict = " ".join(done.text.split())
    for part in (
        "SITE_WORD = of the module (module apptainer-enable-mpi",
        "it extends /opt/cray/lib64 (module apptainer-enable-mpi)",
        "NCCL_MIN_NCHANNELS = 9 (--env)",
        "FI_MR_CACHE_MONITOR = kdreg2 (site profile here",
        "module brics/nccl: NCCL_MIN_NCHANNELS is replaced by --env",
        f"module lumi-aif-singularity-bindings: {with_modules.folder}/pfs is bound at /pfs",
        "is bound at /opt/cray, read-only",
        "NCCL_NET_PLUGIN is not set",
        "libs.ld-library-path",
    ):
        assert part in verdict
    effects = with_modules.record("modules", "modules.json")
    assert {one["origin"] for one in effects["binds"]} == {
        "module lumi-aif-singularity-bindings",
        "module apptainer-enable-mpi",
    }


def test_without_the_profile_nothing_of_the_modules_is_there(with_modules: Project) -> None:
    done = with_modules.hpcenv("submit", "seen.py", "--nodes", "1", *SHAPE, "--site", "none", "--wait", timeout=300)
    assert done.status == 0, done.text
    (found,) = seen(done.stdout)
    assert (found["SITE_WORD"], found["NCCL_MIN_NCHANNELS"], found["/pfs/data"]) == (None, None, False)
    assert "module " not in done.stdout


def test_a_command_in_an_allocation_has_what_the_modules_set(with_modules: Project, cluster: Cluster) -> None:
    run = ("hpcenv", "run", "--site", "profiles/here.toml", "--", "python3", "seen.py")
    done = cluster.run("salloc", "--nodes=2", "--time=5", *run, cwd=with_modules.folder)
    assert done.status == 0, done.text
    assert [(one["SITE_WORD"], one["NCCL_MIN_NCHANNELS"], one["/pfs/data"]) for one in seen(done.stdout)] == [
        ("of the module", "4", True)
    ] * 2
    assert "2 nodes match the lockfile" in done.text


OPTIONS = """
name = "slurm-options"
[[option]]
program = "srun"
name = "network"
value = "disable_rdzv_get"
reason = "r"
[[option]]
program = "srun"
name = "mpi"
value = "pmi2"
reason = "r"
[[option]]
program = "srun"
name = "cpu-bind"
value = "map_cpu:0"
reason = "r"
[[env.SHAPE]]
value = "one node"
reason = "r"
when = {nodes = "1"}
[[env.SHAPE]]
value = "several nodes"
reason = "r"
when = {nodes = ">=2"}
[env.HERE]
value = "yes"
reason = "r"
when = {partition = "@"}
[env.ELSEWHERE]
value = "yes"
reason = "r"
when = {partition = "nowhere"}
"""
OF_SLURM = """
import json, os, subprocess
step = subprocess.run(["scontrol", "show", "step", os.environ["SLURM_JOB_ID"]], capture_output=True, text=True).stdout
names = ("SLURM_MPI_TYPE", "SLURM_CPU_BIND", "SHAPE", "HERE", "ELSEWHERE")
found = {name: os.environ.get(name) for name in names}
found["cpus"] = sorted(os.sched_getaffinity(0))
found["step"] = [line for line in step.splitlines() if "Network=" in line]
print("SEEN " + json.dumps(found))
"""


def test_options_and_conditions_of_a_profile(host_project: Project, cluster: Cluster) -> None:
    folder = host_project.folder
    partition = cluster.must("sinfo", "-h", "-o", "%R").split()[0]
    cluster.write(f"{folder}/of_slurm.py", OF_SLURM)
    cluster.write(f"{folder}/profiles/options.toml", OPTIONS.replace("@", partition))
    cluster.must("chmod", "-R", "go-w", f"{folder}/profiles")
    words = ("submit", "of_slurm.py", *SHAPE, "--partition", partition, "--site", "profiles/options.toml")
    done = host_project.hpcenv(
        *words, "--nodes", "2", "--name", "options", "--pass-env", "SLURM_CPU_BIND", "--pass-env", "SLURM_MPI_TYPE",
        "--wait", timeout=300,
    )  # fmt: skip
    assert done.status == 0, done.text
    assert len(seen(done.stdout)) == 2
    for found in seen(done.stdout):
        assert found["SLURM_MPI_TYPE"] == "pmi2"
        assert "map_cpu" in found["SLURM_CPU_BIND"]
        assert (found["SHAPE"], found["HERE"], found["ELSEWHERE"]) == ("several nodes", "yes", None)
        assert any("Network=disable_rdzv_get" in line for line in found["step"])
        if json.loads(cluster.testbed("status", "--json").stdout)["task"] == "affinity":
            assert found["cpus"] == [0]
    one = host_project.json(*words, "--nodes", "1", "--dry-run")["data"]["manifest"]["settings"]
    assert {s["name"]: s["value"] for s in one} == {"SHAPE": "one node", "HERE": "yes"}
    job = host_project.record("options", "submission.json")["job_id"]
    lines = cluster.must("sacct", "-n", "-P", "-j", job, "-o", "jobname,submitline").splitlines()
    launch = dict(line.split("|", 1) for line in lines)["launch"]
    for option in ("--network=disable_rdzv_get", "--mpi=pmi2", "--cpu-bind=map_cpu:0"):
        assert option in launch
