"""Ranks that hang on two nodes with two ranks each: the log names the rank and its line before the job ends.

Slow ranks that work give no alarm, and no process but the ranks gets a signal: probes count it.
"""

from __future__ import annotations

import re
import signal
import time
import uuid
from collections.abc import Iterator

import pytest

from tests.slow_ranks import QUICK, SLOW

from .conftest import HOST_PYTHON, IMAGE, STORE, Cluster, Project, _project

pytestmark = pytest.mark.cluster

SHAPE = ("--nodes", "2", "--gpus", "0", "--nproc", "2", "--cpus", "2", "--time", "20")

# Writes a line, and one more for each real-time signal that it gets.
PROBE = """\
import signal, sys
def write(text):
    with open(sys.argv[1], "a") as file:
        file.write(text + "\\n")
for number in range(signal.SIGRTMIN, signal.SIGRTMAX):
    signal.signal(number, lambda number, frame: write(f"signal {number}"))
write("counts")
while True:
    signal.pause()
"""

HEAD = """\
import datetime, hashlib, multiprocessing, os, re, signal, subprocess, sys, tempfile, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.set_num_threads(1)
rank, case = dist.get_rank(), sys.argv[1]
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([parameter], lr=0.1)
def step():
    dist.all_reduce(torch.ones(2))  # reduce
    optimizer.step()
"""

HANGS = (
    HEAD
    + """\
run = os.environ["HPCENV_RUN_FOLDER"]
probe = subprocess.Popen([sys.executable, "-I", os.path.dirname(sys.argv[0]) + "/probe.py", f"{run}/probe-{rank}"])
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        time.sleep(1000)  # loads
def mounted():
    # A file of a FUSE mount whose server is stopped: a read of it never ends.
    folder = tempfile.mkdtemp()
    for name in ("data", "mount"):
        os.mkdir(f"{folder}/{name}")
    with open(f"{folder}/data/train.bin", "wb") as file:
        file.write(os.urandom(3000000))
    subprocess.run(["mksquashfs", f"{folder}/data", f"{folder}/image", "-quiet"], stdout=subprocess.DEVNULL, check=True)
    server = subprocess.Popen(["squashfuse", "-f", "-o", "auto_unmount", f"{folder}/image", f"{folder}/mount"])
    while not os.path.exists(f"{folder}/mount/train.bin"):
        time.sleep(0.2)
    file = open(f"{folder}/mount/train.bin", "rb", buffering=0)
    server.send_signal(signal.SIGSTOP)
    return file
groups = [dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1, 2, 3])]
for _ in range(3):
    step()
if case == "groups":
    dist.all_reduce(torch.ones(1), group=groups[rank % 2])  # crossed
elif case == "ended" and rank != 3:
    store = dist.distributed_c10d._get_default_store()
    store.wait(["what rank 3 sets"], datetime.timedelta(hours=1))  # waits
elif case == "skipped" and rank != 3:
    dist.barrier()  # barrier
elif rank == 3:
    if case == "loader":
        for batch in torch.utils.data.DataLoader(Data()):
            pass
    elif case == "lock":
        re.match("(a+)+$", "a" * 64 + "b")  # holds
    elif case == "mount":
        file = mounted()
        file.read(1)  # reads
    elif case == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case == "ended":
        os._exit(0)
step()
time.sleep(1000)
"""
)
# Kinds of work by run, one after the other: `before-` is before the first step.
RUNS = {
    "one": ("before-sleeps", "evaluates", "one-call", "saves", "writes"),
    "two": ("before-compiles", "rank-0-evaluates", "one-call-in-all", "rank-0-saves", "reads"),
    "three": ("workers-compute", "workers-read", "slow-batches", "accumulates", "compiles"),
    "four": ("pool", "gathers", "polls", "ends-early", "closure", "suspended"),
}

# What the line in the log says of the ranks; {name} is the line of the script that ends with this comment.
WAIT = r"ranks 0-2 wait in all_reduce no. 4 \(hang.py:{reduce}\); rank 3 "
ANSWERS = {
    "loader": WAIT + r"never entered it: it is in DataLoader.__next__ \(hang.py:{loads}\)",
    "lock": WAIT + r"did not say whether it entered it: it is in match \(hang.py:{holds}\), which holds Python's lock",
    "mount": WAIT + r"never entered it: it is in <module> \(hang.py:{reads}\), in a call that cannot be interrupted, "
    r"read of /tmp/\w+/mount/train.bin on fuse.squashfuse at /tmp/\w+/mount",
    "stopped": WAIT + "did not say whether it entered it: it is stopped",
    "skipped": r"ranks 0-2 wait in barrier no. 4 \(hang.py:{barrier}\); "
    r"rank 3 called all_reduce in its place: it waits in all_reduce no. 4 \(hang.py:{reduce}\)",
    "ended": r"ranks 0-2 are in <module> \(hang.py:{waits}\); rank 3 is gone: its process has ended",
    "groups": r"ranks 0, 2 wait in all_reduce no. 1 of group 1 \(hang.py:{crossed}\); "
    r"ranks 1, 3 never entered it: they wait in all_reduce no. 1 of group 2 \(hang.py:{crossed}\)",
}


def made_with(cluster: Cluster, spec: str) -> Project:
    made = _project(cluster, f"hang-{uuid.uuid4().hex[:6]}", f'{spec}[watch]\nstall-after = "10s"\n')
    for name, text in (("hang.py", HANGS), ("slow.py", HEAD + SLOW), ("probe.py", PROBE)):
        cluster.write(f"{made.folder}/{name}", text)
    made.must("lock", timeout=600)
    return made


@pytest.fixture(scope="module")
def project(cluster: Cluster) -> Project:
    return made_with(cluster, f'image = "host"\npython = "{HOST_PYTHON}"\n')


def log(project: Project, run: str) -> str:
    return project.cluster.run("cat", f"{project.folder}/runs/{run}/job.log").stdout


def answer(project: Project, run: str) -> str:
    """Return the line of the log that says who hangs, while the job runs."""
    until = time.monotonic() + 300
    while "hpcenv: the ranks hang: " not in (text := log(project, run)):
        assert time.monotonic() < until, text
        time.sleep(1)
    [line] = [line for line in text.splitlines() if "hpcenv: the ranks hang: " in line]
    job = project.record(run, "submission.json")["job_id"]
    assert project.cluster.must("squeue", "-h", "-o", "%T", "-j", job).strip() == "RUNNING"
    return line.partition("hpcenv: the ranks hang: ")[2]


def check(project: Project, run: str, case: str) -> None:
    lines = {line.rpartition("# ")[2]: number + 1 for number, line in enumerate(HANGS.splitlines()) if "# " in line}
    said = answer(project, run)
    print(f"{case}: {said}")
    assert re.fullmatch(ANSWERS[case].format(**lines), said), said
    assert said in " ".join(project.must("report", run).split())
    stacks = project.must("stacks", run)
    assert "in <module>" in stacks and "ranks " in stacks
    project.must("cancel", run)


@pytest.fixture(scope="module")
def hanging(project: Project) -> Iterator[Project]:
    """Runs of all cases, at the same time."""
    for case in ANSWERS:
        project.must("submit", "hang.py", *SHAPE, "--name", case, "--", case)
    yield project
    for case in ANSWERS:
        project.hpcenv("cancel", case)


@pytest.mark.long
@pytest.mark.timeout(1200)  # the first one has the time of all submissions
@pytest.mark.parametrize("case", ANSWERS)
def test_the_log_names_the_rank_and_its_line(hanging: Project, case: str) -> None:
    check(hanging, case, case)


@pytest.mark.long
@pytest.mark.parametrize("case", ["loader", "lock", "stopped"])
def test_a_rank_that_hangs_in_a_container_is_named(in_image: Project, case: str) -> None:
    in_image.must("submit", "hang.py", *SHAPE, "--name", case, "--", case)
    check(in_image, case, case)


@pytest.fixture(scope="module")
def in_image(cluster: Cluster) -> Project:
    return made_with(cluster, f'image = "{IMAGE}"\nplain-http = ["registry:5000"]\n[paths]\nstore = "{STORE}"\n')


def test_a_read_that_hangs_is_named_and_no_other_process_gets_a_signal(project: Project, cluster: Cluster) -> None:
    """Probes: a process of each rank, and one of the same user outside the job."""
    outside, run = f"{project.folder}/outside", f"{project.folder}/runs/mount-short"
    start = f"setsid python3 -I {project.folder}/probe.py {outside} > /dev/null 2>&1 & echo $!"
    pid = cluster.must("sh", "-c", start, node="n2").strip()
    try:
        project.must("submit", "hang.py", *SHAPE, "--name", "mount-short", "--", "mount")
        check(project, "mount-short", "mount")
        counted = [cluster.must("cat", f"{run}/probe-{rank}") for rank in range(4)]
        assert [*counted, cluster.must("cat", outside)] == ["counts\n"] * 5
        # It would have counted one.
        number = signal.SIGRTMIN + 7
        cluster.must("kill", f"-{number}", pid, node="n2")
        cluster.must("sh", "-c", f"until grep -q 'signal {number}' {outside}; do sleep 0.2; done", timeout=20)
    finally:
        cluster.run("kill", "-9", pid, node="n2")


def no_alarm(project: Project, run: str, kinds: tuple[str, ...]) -> None:
    """A slow run ends well, its ranks were looked at in each kind of work that is long, and none was called a hang."""
    done = project.hpcenv("wait", run, timeout=1200)
    assert done.status == 0, done.text
    text = log(project, run)
    begins = [(kind, int(at)) for kind, at in re.findall(r"kind ([\w-]+) (\d+)", text)]
    names = project.cluster.run("sh", "-c", f"ls {project.folder}/runs/{run}/hangs/*/").stdout
    looks = [int(at) for at in re.findall(r"-(\d+)\.found\.json", names)]
    looked = {next(kind for kind, at in reversed(begins) if at <= look) for look in looks}
    print(f"{run}: {len(looks)} looks, in {', '.join(sorted(looked))}")
    assert not re.search("hpcenv: the ranks (may )?hang", text), text
    assert [kind for kind, _ in begins] == [*kinds]
    assert set(looked) >= set(kinds) - QUICK, text


def test_a_rank_in_one_long_call_gives_no_alarm(project: Project) -> None:
    project.must("submit", "slow.py", *SHAPE, "--name", "one-call", "--", "one-call")
    no_alarm(project, "one-call", ("one-call",))


@pytest.fixture(scope="module")
def slow(project: Project) -> Project:
    """All slow runs, at the same time."""
    for run, kinds in RUNS.items():
        project.must("submit", "slow.py", *SHAPE, "--name", run, "--", *kinds)
    return project


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("run", RUNS)
def test_slow_healthy_work_gives_no_alarm(slow: Project, run: str) -> None:
    no_alarm(slow, run, RUNS[run])
