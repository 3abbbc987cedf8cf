"""Runs on GPUs of the stand-in for NVML with given curves: what is odd has its sentence in the report, and healthy runs have none.

Each run has its own file for the stand-in: its GPUs are as the script's curve says, and their processes are its ranks.
"""

from __future__ import annotations

import json
import re
import uuid

import pytest

from .conftest import HOST_PYTHON, Cluster, Project, _project

pytestmark = pytest.mark.cluster

# As many GPUs as the job has; the watching process and the ranks find the file by the same name.
SETUP = (
    """awk '/^.gpu.$/ {n++} n <= ENVIRON["SLURM_GPUS_ON_NODE"]' /etc/stub-nvml.conf > "$run/nvml.conf"; """
    'export STUB_NVML="$run/nvml.conf"'
)
SPEC = f"""\
image = "host"
python = "{HOST_PYTHON}"
[submit]
setup = [{json.dumps(SETUP)}]
[policy]
"host.gpu-compute-capabilities" = "info"
"torch.arch-list" = "info"
"""

# CASE SECONDS: curves of the GPUs, and what the ranks do meanwhile.
SCRIPT = """\
import math, os, signal, subprocess, sys, threading, time
import torch, torch.distributed as dist
from hpcenv import training
case, seconds = sys.argv[1], float(sys.argv[2])
dist.init_process_group("gloo")
torch.set_num_threads(1)
rank, ranks = dist.get_rank(), dist.get_world_size()
pids = [None] * ranks
dist.all_gather_object(pids, os.getpid())
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([parameter], lr=0.1)
began, stepped = time.time(), 0.0
busy = True

def values(gpu, age):
    # A healthy GPU: use, power and temperature move a little.
    wave = math.sin(age / 7 + gpu)
    found = {"utilization": round(92 + 5 * wave), "power": round(400000 + 20000 * wave), "temperature": round(60 + 4 * wave),
             "memory-mib": "81559 60000", "throttle": 4 if wave > 0 else 0, "energy": round(age * 400000), "clock": 1700,
             "process": f"{pids[gpu]} 60000"}
    if case == "gpus" and gpu == 1:
        found |= {"utilization": 0, "power": 70000}
    if case == "gpus" and gpu == 2:
        found |= {"throttle": 0x48, "clock": 900}
    if case == "gpus" and gpu == 3 and age > 70:
        found |= {"utilization": 0, "process": None}
    if case == "full":
        found |= {"memory-mib": f"81559 {80500 if gpu == 1 else 60000}", "ecc-uncorrected": 2 if gpu == 3 and age > 15 else 0}
    if case == "waits":
        found["utilization"] = 30
    if case == "bursts" and age // 10 % 5 < 2:
        found["utilization"] = 0
    if not busy:
        found["utilization"] = 0
    return found

def curve():
    path = os.environ["HPCENV_RUN_FOLDER"] + "/nvml.conf"
    head, *gpus = open(path).read().split("[gpu]")
    while True:
        text = head
        for number, gpu in enumerate(gpus):
            new = values(number, time.time() - began)
            kept = [line for line in gpu.splitlines() if line.partition(" = ")[0] not in new]
            text += "\\n".join(["[gpu]", *kept, *(f"{k} = {v}" for k, v in new.items() if v is not None), ""])
        with open(path + ".part", "w") as file:
            file.write(text)
        os.replace(path + ".part", path)
        time.sleep(2)

if rank == 0:
    threading.Thread(target=curve, daemon=True).start()

def works(length):
    until = time.time() + length
    while time.time() < until:
        sum(range(2000))
        time.sleep(0.02)

def step(length=0.2):
    works(length)
    optimizer.step()

def train(until, length=0.2):
    while time.time() < began + until:
        step(length)

class Data(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            time.sleep(0.6 if case == "waits" else 0.1)
            yield torch.ones(2)

if case in ("waits", "keeps-up"):
    for batch in torch.utils.data.DataLoader(Data(), num_workers=2, batch_size=2):
        step()
        if time.time() > began + seconds:
            break
elif case == "stopped":
    if rank == 1:
        signals = f"import os, time\\nwhile True: os.kill({os.getpid()}, 19); time.sleep(0.6); os.kill({os.getpid()}, 18); time.sleep(0.3)"
        stops = subprocess.Popen([sys.executable, "-I", "-c", signals])
    train(seconds)
    if rank == 1:
        stops.kill()
elif case == "evaluation":
    works(seconds)
elif case == "compile":
    busy = False
    subprocess.run([sys.executable, "-I", "-c", f"import time; time.sleep({seconds - 60})"])
    busy = True
    train(seconds)
elif case == "save":
    train(30)
    busy = False
    with training.saving(3) as file:
        time.sleep(seconds - 60)
        torch.save(parameter, file)
    busy = True
    train(seconds)
elif case == "accumulation":
    train(seconds, 8)
elif case == "evaluates":
    while time.time() < began + seconds:
        for _ in range(100):
            step()
        works(20)
elif case == "uneven":
    train(seconds, 0.2 + 0.03 * rank)
else:
    train(seconds)
os._exit(0)
"""


@pytest.fixture(scope="module")
def project(cluster: Cluster) -> Project:
    made = _project(cluster, f"use-{uuid.uuid4().hex[:6]}", SPEC)
    cluster.write(f"{made.folder}/use.py", SCRIPT)
    made.must("lock", timeout=600)
    return made


# What is said of a run, by its rule; each run says nothing else. The seconds are longer than the time of the rule.
ODD = {
    "gpus": (
        400,
        {
            "gpu.no-process": "1 of 4 GPUs of n[12] had no process after minute [123]",
            "gpu.idle": r"1 of 4 GPUs of n[12] was idle \(0 % use\) for [5-9] of [5-9] minutes",
            "gpu.slow": "1 of 4 GPUs of n[12] reports a hardware slowdown for heat",
        },
    ),
    "waits": (170, {"data.wait": r"the ranks waited for data \d\d % of each step: 4 workers for \d+ CPUs"}),
    "stopped": (
        170,
        {"rank.slow": r"rank 1 is \d\.\d times slower than the median; its process is stopped at times \(state T\)"},
    ),
}
HEALTHY = {
    "evaluation": 330,
    "compile": 400,
    "save": 400,
    "accumulation": 330,
    "evaluates": 330,
    "keeps-up": 330,
    "bursts": 330,
    "uneven": 330,
    "plain": 330,
    "short": 20,
}


def start(project: Project, case: str, seconds: int) -> None:
    ranks = {"gpus": "4", "full": "4", "waits": "2", "stopped": "2", "uneven": "2"}.get(case, "1")
    shape = ("--nodes", "1", "--gpus", ranks, "--nproc", ranks, "--cpus", ranks, "--time", "20", "--name", case)
    project.must("submit", "use.py", *shape, "--allow-cpu-torch", "--", case, str(seconds))


def said(project: Project, case: str) -> dict[str, str]:
    """Return the sentences about a run that has ended well, by their rules."""
    done = project.hpcenv("wait", case, timeout=1200)
    assert done.status == 0, done.text
    use = json.loads(project.must("report", case, "--json"))["data"]["use"]
    print(f"{case}: {use['samples']} samples, {use['figures']}: {[one['text'] for one in use['sentences']]}")
    assert use["gpus"] and use["samples"] and "% used" in use["figures"], use
    return {one["rule"]: one["text"] for one in use["sentences"]}


def test_a_full_gpu_and_lost_memory_have_their_sentences_and_a_run_of_20_seconds_has_none(project: Project) -> None:
    start(project, "full", 40)
    start(project, "briefest", 20)
    assert said(project, "briefest") == {}
    assert "nothing odd in what is known (GPUs 9" in " ".join(project.must("report", "briefest").split())
    found = said(project, "full")
    assert re.fullmatch("peak memory 84 of 86 GB of GPU 1 of n[12]", found.pop("memory.gpu"))
    assert re.fullmatch(r"GPU 3 of n[12] had 2 uncorrected memory errors \(ECC\)", found.pop("gpu.ecc"))
    assert found == {}
    report = " ".join(project.must("report", "full").split())
    assert "peak memory 84 of 86 GB of GPU 1" in report and "hint: use a smaller batch" in report


@pytest.fixture(scope="module")
def side_by_side(project: Project) -> Project:
    """All runs of minutes, started at the same time."""
    for case in HEALTHY:
        start(project, case, HEALTHY[case])
    for case, (seconds, _) in ODD.items():
        start(project, case, seconds)
    return project


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", ODD)
def test_what_is_odd_has_its_sentence_and_nothing_else_is_said(side_by_side: Project, case: str) -> None:
    expected, found = ODD[case][1], said(side_by_side, case)
    assert set(found) == set(expected)
    assert all(re.fullmatch(expected[rule], text) for rule, text in found.items()), found


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", HEALTHY)
def test_a_healthy_run_has_no_sentence(side_by_side: Project, case: str) -> None:
    assert said(side_by_side, case) == {}
