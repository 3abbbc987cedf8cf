"""One machine without Slurm: two users take the GPUs of node n1, wait for them, and are killed; no GPU is given twice.

The node's driver is the stand-in (scripts/_testbed/stub_nvml.c). Each training locks a file for each of its GPUs, so the
kernel says whether a second one has the GPU, too; and the stand-in reports it as a process on the GPU, as a driver does.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from .conftest import Cluster, Done

pytestmark = pytest.mark.cluster

WITNESS = """\
import fcntl, os, sys, time
locks = []
names = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
for name in names:
    locks.append(open(f"/run/gpus/{name}", "r+"))
    try:
        fcntl.flock(locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"TWICE {name}")
    os.pwrite(locks[-1].fileno(), b"%10d" % os.getpid(), 0)
print("has", len(names), "GPUs", flush=True)
time.sleep(float(sys.argv[1]))
"""

# The files that are locked, and the processes on the GPUs.
PREPARE = r"""
cp /etc/stub-nvml.conf /run/nvml.before && mkdir -p /run/gpus
for gpu in $(sed -n 's/^uuid = //p' /etc/stub-nvml.conf); do
  : > "/run/gpus/$gpu" && chmod 666 "/run/gpus/$gpu"
  sed -i "s|^uuid = $gpu|&\nprocess-file = /run/gpus/$gpu|" /etc/stub-nvml.conf
done
"""
MENDED = "cp /run/nvml.before /etc/stub-nvml.conf; rm -rf /run/gpus"

# It starts the command, as `systemd-run --scope` does, in the same process. What it writes is what the kernel would have.
SYSTEMD_RUN = """\
#!/bin/sh
printf '%s\\n' "$*" >> ~/one/systemd-run.log
case "$*" in
  *OOMPolicy*) echo "Unknown assignment: OOMPolicy=continue" >&2; exit 1;;
  *memory.max*) echo "memory.max:2147483648"; exit 0;;
esac
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""

# Starts runs of one user, and ends them: by themselves, by TERM (what `hpcenv cancel` sends), and by KILL for the process
# that holds the GPUs: alone, with the step of the training, or with all that it has started.
DRIVER = """\
import json, os, random, signal, subprocess, sys, time
from pathlib import Path
user, starts = sys.argv[1], int(sys.argv[2])
chance, running, folders = random.Random(user), [], []

def hpcenv(*words):
    return subprocess.run(["hpcenv", *words], stdout=subprocess.PIPE, check=True, text=True).stdout

def kill(*pids, number=signal.SIGKILL):
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass

def children(pid):
    said = subprocess.run(["pgrep", "-P", str(pid)], stdout=subprocess.PIPE, text=True).stdout
    return [int(word) for word in said.split()]

def below(pid):
    return [one for child in children(pid) for one in (*below(child), child)]

def end(run, pid):
    how = chance.choice(("itself", "itself", "term", "kill", "kill both", "kill all"))
    if how == "term":
        kill(pid, number=signal.SIGTERM)
    elif how == "kill":
        kill(pid)
    elif how == "kill all":
        kill(*below(pid), pid)
    elif how == "kill both" and "has" in (run / "job.log").read_text():
        kill(pid, *children(pid))

for number in range(starts):
    words = ("submit", "witness.py", "--cluster", "local", "--nproc", "1", "--launcher", "srun", "--gpus")
    shape = (str(chance.choice((1, 1, 2, 3, 6))), "--mem", "2G", "--cpus", "1", "--name", f"r{starts}-{number}")
    made = json.loads(hpcenv(*words, *shape, "--json", "--", str(chance.choice((0.5, 2, 4)))))["data"]
    folders.append(Path(made["run_folder"]))
    running.append((folders[-1], int(made["job_id"].partition("-")[2])))
    while len(running) > 3:
        end(*running.pop(chance.randrange(len(running))))
until = time.monotonic() + 300
while subprocess.run(["pgrep", "-u", user, "-f", "step.py|witness.py"], stdout=subprocess.DEVNULL).returncode == 0:
    if time.monotonic() > until:
        sys.exit("runs have not ended within 300 s")
    time.sleep(0.5)
logs = [(folder / "job.log").read_text() for folder in folders]
print(json.dumps({"runs": len(logs), "twice": [log for log in logs if "TWICE" in log],
    "had": sum("has " in log for log in logs), "waited": sum("hpcenv: waits" in log for log in logs)}))
"""


class OneMachine:
    """Node n1 with a project of alice and one of bob."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.name = f"one-{uuid.uuid4().hex[:6]}"

    def prepare(self) -> None:
        self.cluster.must("sh", "-c", PREPARE, node="n1", user="root")
        spec = 'image = "host"\npython = "venv/bin/python"\n[policy]\n"torch.version" = "info"\n'
        files = {"hpcenv.toml": spec, "witness.py": WITNESS, "driver.py": DRIVER, "bin/systemd-run": SYSTEMD_RUN}
        for user in ("alice", "bob"):
            for name, text in files.items():
                self.cluster.write(f"/home/{user}/one/{name}", text, user=user, node="n1")
            line = "cd && rm -rf one/runs one/systemd-run.log && cd one && chmod +x bin/systemd-run"
            self.must(user, f"{line} && python3 -m venv --without-pip venv")
            done = self.cluster.run("hpcenv", "lock", cwd=f"/home/{user}/one", user=user, node="n1")
            assert done.status == 0, done.text

    def shell(self, user: str, line: str, timeout: float = 300) -> Done:
        path = f"export PATH=/home/{user}/one/bin:$PATH; {line}"
        return self.cluster.run("sh", "-c", path, cwd=f"/home/{user}", user=user, node="n1", timeout=timeout)

    def must(self, user: str, line: str, timeout: float = 300) -> str:
        done = self.shell(user, line, timeout)
        assert done.status == 0, done.text
        return done.text

    def hpcenv(self, user: str, *words: str) -> str:
        return self.must(user, f"cd one && hpcenv {' '.join(words)}")

    def submit(self, user: str, gpus: int, name: str, *words: str, seconds: int = 300) -> str:
        shape = (f"--gpus {gpus} --nproc 1 --launcher srun --name {name}", *words)
        return self.hpcenv(user, "submit witness.py --cluster local", *shape, f"-- {seconds}")

    def until(self, user: str, name: str, *states: str) -> dict[str, str]:
        until = time.monotonic() + 120
        while (found := json.loads(self.shell(user, f"cd one && hpcenv status {name} --json").stdout)["data"])[
            "state"
        ] not in states:
            assert time.monotonic() < until, found
            time.sleep(0.5)
        return dict(found)


@pytest.fixture(scope="module")
def machine(cluster: Cluster) -> Iterator[OneMachine]:
    made = OneMachine(cluster)
    made.prepare()
    yield made
    for user in ("alice", "bob"):
        made.shell(user, f"pkill -9 -u {user} -f 'step.py|witness.py|agent.py'")
    cluster.must("sh", "-c", MENDED, node="n1", user="root")


def test_two_users_and_a_queue_of_which_status_and_list_say_why(machine: OneMachine) -> None:
    said = machine.submit("alice", 6, "first")
    assert "not limited: memory (--mem limits it)" in said
    assert "not limited: CPUs (--cpus limits them)" in said
    machine.until("alice", "first", "running")
    machine.must("alice", "until grep -q 'has 6 GPUs' one/runs/first/job.log; do sleep 0.2; done")

    machine.submit("bob", 3, "second")
    waits = machine.until("bob", "second", "pending")
    pid = machine.must("alice", "sed -n 's/.*local-\\([0-9]*\\).*/\\1/p' one/runs/first/submission.json").strip()
    why = (
        f"waits for 3 GPUs, and 2 of 8 are free; others are used: GPU 0, 1, 2, 3, 4, 5: a run of alice (process {pid})"
    )
    assert waits["detail"] == why
    assert "waits for 3 GPUs, and 2 of 8 are free" in machine.hpcenv("bob", "list")
    assert f"hpcenv: {why}\n" in machine.must("bob", "cat one/runs/second/job.log")

    machine.submit("alice", 1, "third")
    behind = machine.until("alice", "third", "pending")["detail"]
    assert behind.startswith("waits behind 1 run that asked earlier: the first one of bob (process ")
    machine.submit("bob", 1, "fourth")
    machine.until("bob", "fourth", "pending")
    machine.hpcenv("bob", "cancel fourth")
    assert machine.until("bob", "fourth", "cancelled")["exit_status"] == 143

    machine.hpcenv("alice", "cancel first")
    machine.until("bob", "second", "running")
    machine.until("alice", "third", "running")
    machine.hpcenv("bob", "cancel second")
    machine.hpcenv("alice", "cancel third")


def test_what_is_limited_is_said_and_what_is_not(machine: OneMachine) -> None:
    """systemd took both limits, and the kernel has only one of them."""
    said = machine.submit("alice", 1, "limited", "--mem 2G --cpus 4 --wait", seconds=0)
    assert "limited by a scope of systemd: 2G of memory" in said
    assert "not limited: CPUs: the user's systemd may not set cpu.max on this machine" in said
    words = machine.must("alice", "tail -n 1 one/systemd-run.log")
    assert words.startswith(
        "--user --scope --quiet --description=hpcenv limited --property=MemoryMax=2G --property=CPUQuota="
    )
    assert "step.py local /home/alice/one/runs/limited" in words
    assert machine.until("alice", "limited", "completed")["exit_status"] == 0


def test_more_gpus_than_there_are_end_the_run_with_its_reason(machine: OneMachine) -> None:
    machine.submit("alice", 9, "many")
    found = machine.until("alice", "many", "failed", "rejected")
    assert found["exit_status"] == 90
    assert "error[node-rejected]: this machine has 8 GPUs for a run, and the run asks for 9" in found["detail"]


@pytest.mark.parametrize("starts", [6, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_no_gpu_is_given_twice_to_two_users_whose_runs_are_killed(machine: OneMachine, starts: int) -> None:
    def drive(user: str) -> dict[str, object]:
        return dict(json.loads(machine.must(user, f"cd one && python3 driver.py {user} {starts // 2}", 3000)))

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(drive, ("alice", "bob")))
    print(found)
    assert [one["twice"] for one in found] == [[], []]
    assert [one["runs"] for one in found] == [starts // 2] * 2
    assert min(int(str(one["had"])) for one in found) >= starts // 8
    # Nothing of the killed runs holds a GPU.
    assert "has 8 GPUs" in machine.must(
        "alice",
        f"cd one && hpcenv submit witness.py --cluster local --gpus 8 --nproc 1 --launcher srun --name all-{starts} "
        f"--wait -- 0 && cat runs/all-{starts}/job.log",
    )
