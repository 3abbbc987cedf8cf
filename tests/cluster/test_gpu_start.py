"""A start with GPUs that NVML lists: torch is asked before the first rank, and a job whose torch sees no GPU ends.

The torch is that of /shared/hostenv, which has no CUDA, in a copy that says it was built for CUDA 13. What its GPUs do is in
a file for each node; without the file it is what torch itself does then.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from .conftest import Cluster, Done, Project, copy_examples

pytestmark = pytest.mark.cluster

# Appended to torch/__init__.py, in names that are not torch's: it has its own `int` and `min`. The file has the number of GPUs, or a fault.
STAND_IN = """

def _stand_in():
    import os, sys, time, types
    import torch
    def word():
        try:
            with open(os.path.join(sys.prefix, "..", "gpus-of-" + os.environ.get("HPCENV_NODE", ""))) as file:
                return file.read().strip()
        except OSError:
            return ""
    if not word() or "RANK" in os.environ:
        return  # a rank trains on the CPU
    def init():
        if word() == "crash":
            os.abort()
        if word() == "hang":
            time.sleep(1000)
        if word() == "slow":
            time.sleep(2)
    def count():
        named = len(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(","))
        return min(named, int(word())) if word().isdigit() else named
    def properties(index):
        uuid = "0000000%d-0000-0000-0000-000000000000" % index
        return types.SimpleNamespace(name="NVIDIA H100 80GB HBM3", uuid=uuid, pci_domain_id=0, pci_bus_id=index + 1, pci_device_id=0)
    zeros = torch.zeros
    torch.zeros = lambda *words, device=None, **more: zeros(*words, device=None if "cuda" in str(device) else device, **more)
    torch.cuda.init, torch._C._cuda_getDeviceCount = init, count
    torch.cuda.synchronize, torch.cuda.get_device_properties = lambda index=None: None, properties

_stand_in()
"""
# Copies the environment, and changes two files and their lines in RECORD. By root: the files are root's.
MAKE = """
import base64, hashlib, os, shutil, subprocess, sys
venv, appended = sys.argv[1], sys.stdin.read()
subprocess.run(["cp", "-a", "/shared/hostenv", venv], check=True)
site = venv + "/lib/python3.11/site-packages"
config = open("/shared/hostenv/pyvenv.cfg").read()
changed = {"torch/__init__.py": lambda text: text + appended,
           "torch/version.py": lambda text: text.replace("cuda: Optional[str] = None", "cuda: Optional[str] = '13.0'")}
record = next(site + "/" + name + "/RECORD" for name in os.listdir(site) if name.startswith("torch-") and "dist-info" in name)
rows = open(record).read().splitlines()
for name, change in changed.items():
    text = open(site + "/" + name).read()
    new = change(text).encode()
    assert new != text.encode(), name
    os.unlink(site + "/" + name)
    open(site + "/" + name, "wb").write(new)
    digest = base64.urlsafe_b64encode(hashlib.sha256(new).digest()).decode().rstrip("=")
    rows = ["%s,sha256=%s,%d" % (name, digest, len(new)) if row.split(",")[0] == name else row for row in rows]
os.unlink(record)
open(record, "w").write("\\n".join(rows) + "\\n")
"""


@pytest.fixture(scope="module")
def project(cluster: Cluster) -> Iterator[Project]:
    made = Project(cluster, f"/home/alice/hpcenv-tests/gpus-{uuid.uuid4().hex[:6]}")
    copy_examples(cluster, made.folder)
    cluster.must("cp", "-r", "examples/train.py", "examples/data", ".", cwd=made.folder)
    cluster.must(
        "/shared/hostenv/bin/python",
        "-c",
        MAKE,
        f"{made.folder}/venv",
        stdin=f"\nexec({STAND_IN!r}, {{}})\n",
        user="root",
    )
    # Its libraries are still those without CUDA: for which GPUs they have kernels is not known.
    policy = '[policy]\n"host.gpu-compute-capabilities" = "info"\n"torch.arch-list" = "info"\n'
    cluster.write(f"{made.folder}/hpcenv.toml", f'image = "host"\npython = "venv/bin/python"\n{policy}')
    made.must("lock", timeout=600)
    yield made
    cluster.must("rm", "-rf", f"{made.folder}/venv", user="root")


Gpus = Callable[..., None]


@pytest.fixture
def gpus(project: Project) -> Iterator[Gpus]:
    """Say what the GPUs of the nodes do; afterwards torch has none again."""

    def say(**nodes: str) -> None:
        for node, word in nodes.items():
            project.cluster.write(f"{project.folder}/gpus-of-{node}", word)

    yield say
    project.cluster.must("sh", "-c", f"rm -f {project.folder}/gpus-of-*")


def submit(project: Project, *words: str) -> tuple[Done, str]:
    name = f"g-{uuid.uuid4().hex[:6]}"
    shape = ("train.py", "--nodes", "2", "--gpus", "8", "--time", "5", "--requeue", "never", "--wait", "--name", name)
    return project.hpcenv("submit", *shape, *words, timeout=500), name


@pytest.mark.parametrize("level", [(), ("--preflight", "off")], ids=["default", "off"])
def test_a_torch_without_gpus_ends_the_job_with_90_and_the_sentence(project: Project, level: tuple[str, ...]) -> None:
    line = "submit train.py --nodes 2 --gpus 8"
    done = project.hpcenv(*line.split(), "--wait", *level, timeout=500)
    assert done.status == 90, done.text
    assert "torch sees 0 of 8 GPUs on n" in done.text
    assert "the driver's library is not there (libcuda.so.1" in done.text
    assert "final loss" not in done.text
    report = project.hpcenv("report")
    assert "cuda.start" in report.stdout and "torch sees 0 of 8 GPUs on n" in report.stdout


def test_eight_of_eight_start_and_ranks_that_train_on_the_cpu_are_told(project: Project, gpus: Gpus) -> None:
    gpus(n1="8", n2="8")
    done, name = submit(project, "--nproc", "2", "--", "--steps", "2")
    assert done.status == 0, done.text
    assert "GPUs: the first backward pass of ranks 0-3 ran on the CPU, although the job has GPUs" in done.text
    starts = [project.record(name, f"ranks/{node}/gpus.json") for node in ("n1", "n2")]
    assert [(len(one["gpus"]), one["expected"]) for one in starts] == [(8, 8), (8, 8)]
    assert "GPUs: not tried" not in done.text
    assert "GPUs      tried before the ranks started" in project.must("report", name)


def test_seven_of_eight_on_one_node(project: Project, gpus: Gpus) -> None:
    gpus(n1="8", n2="7")
    done, name = submit(project)
    assert done.status == 90, done.text
    assert "torch sees 7 of 8 GPUs on n2" in done.text
    findings = project.record(name, "verdict.json")["findings"]
    assert [(row["node"], row["field"]) for row in findings if row["severity"] == "must"] == [("n2", "cuda.start")]


def test_a_crash_is_unknown_with_the_node(project: Project, gpus: Gpus) -> None:
    gpus(n1="crash", n2="8")
    done, _ = submit(project)
    assert done.status == 91, done.text
    assert "torch does not say which GPUs it can use on n1" in done.text
    assert "it was ended by SIGABRT, at the start of torch.cuda" in done.text


@pytest.mark.long
def test_no_answer_within_120_seconds_is_unknown_with_the_node(project: Project, gpus: Gpus) -> None:
    gpus(n1="8", n2="hang")
    done, _ = submit(project)
    assert done.status == 91, done.text
    assert "torch does not say which GPUs it can use on n2" in done.text
    assert "no answer within 120 s" in done.text


def test_one_task_for_each_gpu_sees_its_own(project: Project, gpus: Gpus) -> None:
    gpus(n1="8", n2="8")
    done, name = submit(project, "--launcher", "srun", "--srun", "gpu-bind=single:1", "--", "--steps", "1")
    assert done.status == 0, done.text
    start = project.record(name, "ranks/n2/gpus.7.json")
    assert (start["expected"], start["seen"], len(start["gpus"])) == (1, 1, 1)


def test_what_is_left_out_is_named_by_the_verdict(project: Project) -> None:
    done, _ = submit(project, "--nproc", "1", "--skip-check", "cuda.start", "--", "--steps", "1")
    assert done.status == 0, done.text
    assert "GPUs: not tried (--skip-check cuda.start)" in done.text


def test_verify_tries_the_gpus_in_a_step(project: Project, gpus: Gpus) -> None:
    words = ("verify", "--nodes", "2", "--gpus", "8", "--json")
    gpus(n1="8", n2="8")
    assert project.hpcenv(*words, timeout=500).status == 0
    gpus(n2="7")
    done = project.hpcenv(*words, timeout=500)
    assert done.status == 90, done.text
    rows = json.loads(done.stdout)["data"]["verdict"]["findings"]
    assert ("n2", "cuda.start", "torch sees 7 of 8 GPUs on n2") in [
        (r["node"], r["field"], r["found"][:30]) for r in rows
    ]


@pytest.mark.long
def test_a_driver_that_needs_two_seconds_costs_two_seconds(project: Project, gpus: Gpus) -> None:
    """Not a limit: the record says what the check took, and the time from start to end is printed."""
    took = {}
    for word in ("8", "slow"):
        gpus(n1=word, n2=word)
        begin = time.monotonic()
        done, name = submit(project, "--nproc", "1", "--", "--steps", "1")
        assert done.status == 0, done.text
        took[word] = project.record(name, "ranks/n1/gpus.json")["seconds"]
        print(f"{word}: check {took[word]:.2f} s, submit to end {time.monotonic() - begin:.1f} s")
    assert took["8"] < 2 <= took["slow"] < 5
