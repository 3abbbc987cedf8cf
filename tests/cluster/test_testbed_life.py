"""The testbed's own life: up, up again, other kinds of sites, faults, down, and nothing of it left."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import ACCEPT, HOST_PYTHON, ROOT, TESTBED, Cluster

pytestmark = pytest.mark.cluster

INSTANCE = "lifetest"


def own_testbed(*words: str, stdin: str = "", timeout: float = 600) -> subprocess.CompletedProcess[str]:
    argv = [str(TESTBED), "--instance", INSTANCE, *words]
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=timeout)


def must(*words: str, stdin: str = "") -> str:
    done = own_testbed(*words, stdin=stdin)
    assert done.returncode == 0, f"{words} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def until(what: str, *command: str, seconds: float) -> str:
    """Ask inside the testbed until the answer holds these words."""
    deadline = time.monotonic() + seconds
    while what not in (said := own_testbed("exec", "--", *command).stdout):
        assert time.monotonic() < deadline, f"no {what!r} after {seconds} s, but {said!r}"
        time.sleep(0.3)
    return said


def leftovers() -> list[str]:
    """What the machine still has of the instance: namespaces, links, mounts, processes."""
    found = []
    for command in (["ip", "netns", "list"], ["ip", "-o", "link"], ["cat", "/proc/mounts"]):
        said = subprocess.run(command, capture_output=True, text=True).stdout
        found += [line for line in said.splitlines() if INSTANCE in line]
    found += [str(one) for one in Path("/sys/fs/cgroup").glob(f"*/*{INSTANCE}*")]
    own = {os.getpid(), os.getppid()}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                environ = file.read()
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command_line = file.read()
        except OSError:
            continue
        if int(pid) not in own and (INSTANCE.encode() in command_line or f"={INSTANCE}".encode() in environ):
            found.append(f"process {pid}: {command_line!r}")
    return found


def test_a_second_instance_comes_up_twice_beside_the_first_and_leaves_nothing(cluster: Cluster) -> None:
    try:
        first = own_testbed("up", "--nodes", "1")
        assert first.returncode == 0, first.stdout + first.stderr
        assert own_testbed("exec", "--", "srun", "-N1", "hostname").stdout == "n1\n"
        started = time.monotonic()
        second = own_testbed("up", "--nodes", "1")
        assert second.returncode == 0, second.stdout + second.stderr
        assert time.monotonic() - started < 60
        assert own_testbed("status").returncode == 0
        # A user's process that holds a folder open must not keep it alive.
        own_testbed("exec", "--", "sh", "-c", "nohup sleep 1000 >/dev/null 2>&1 &")
    finally:
        down = own_testbed("down")
    assert down.returncode == 0, down.stdout + down.stderr
    assert leftovers() == []
    assert own_testbed("status").returncode != 0
    assert cluster.testbed("status").status == 0, "the other instance must not notice"


def test_an_up_that_was_killed_is_cleaned_up(cluster: Cluster) -> None:
    up = subprocess.Popen([str(TESTBED), "--instance", INSTANCE, "up", "--nodes", "1"], stdout=subprocess.DEVNULL)
    time.sleep(2.5)
    up.kill()
    up.wait()
    down = own_testbed("down")
    assert down.returncode == 0, down.stdout + down.stderr
    assert leftovers() == []


# Says which signal each process of a task gets: the task, its child, and the child's child, which are
# as rank 0 and rank 1 are to torchrun.
TREE = """
import os, signal, sys, time
log, role, *others = sys.argv[1:]
def say(text):
    with open(log, "a") as file:
        file.write(f"{role} {text}\\n")
for name in ("USR2", "TERM"):
    signal.signal(getattr(signal, f"SIG{name}"), lambda number, _: say(signal.Signals(number).name))
if others:
    rank = {"RANK": str(2 - len(others)), "LOCAL_RANK": "0"}
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, __file__, log, *others], {**os.environ, **rank})
say("ready")
while True:
    time.sleep(0.2)
"""


@pytest.fixture
def other_site(cluster: Cluster) -> Iterator[str]:
    """A site without accounting and, where this machine can, with proctrack/cgroup; which one it is."""
    words = ("up", "--nodes", "1", "--no-accounting", "--no-preempt-signal")
    try:
        up = own_testbed(*words, "--proctrack", "cgroup")
        proctrack = "cgroup"
        if up.returncode == 3:
            assert "this machine cannot run proctrack/cgroup\n  why: no" in up.stderr, up.stderr
            must(*words)
            proctrack = "linuxproc"
        else:
            assert up.returncode == 0, up.stdout + up.stderr
        yield proctrack
    finally:
        down = own_testbed("down")
    assert down.returncode == 0, down.stdout + down.stderr
    assert leftovers() == []


@pytest.mark.long
def test_a_site_without_accounting_whose_slurm_signals_by_group_and_what_can_be_broken_there(other_site: str) -> None:
    state = json.loads(must("status", "--json"))
    assert (state["accounting"], state["preempt_signal"], state["proctrack"]) == (False, False, other_site)
    refused = own_testbed("up", "--proctrack", "linuxproc" if other_site == "cgroup" else "cgroup")
    assert refused.returncode == 6, refused.stderr

    sacct = own_testbed("exec", "--", "sacct")
    assert sacct.returncode != 0
    assert "accounting storage is disabled" in sacct.stderr
    must("exec", "--", "sh", "-c", "cat >tree.py", stdin=TREE)
    script = "#!/bin/bash\nsrun python3 tree.py $PWD/log task child grandchild\n"
    job = must("exec", "--", "sbatch", "--parsable", "--gpus-per-node=8", stdin=script).strip()
    until("grandchild ready", "cat", "log", seconds=30)

    # A step's signal reaches the whole tree or only its root, as the site's proctrack has it.
    must("exec", "--", "scancel", "--signal=USR2", job)
    until("task SIGUSR2", "cat", "log", seconds=20)
    must("exec", "--", "scancel", "--signal=TERM", job)
    said = until("task SIGTERM", "cat", "log", seconds=20)
    assert ("child SIGUSR2" in said) == (other_site == "linuxproc"), said

    wrong = own_testbed("fault", "kill", "rank7")
    assert wrong.returncode == 5
    assert "rank1@n1 of job" in wrong.stderr
    assert f"kill: rank1@n1 of job {job}" in must("fault", "kill", "rank1")
    assert own_testbed("fault", "kill", "rank1").returncode == 5, "it is dead"
    must("fault", "kill", "slurmd@n1")
    assert own_testbed("status").returncode == 1
    must("fault", "heal", "slurmd@n1")
    assert must("exec", "--", "squeue", "--noheader", "--format=%T").split() == ["RUNNING"]
    must("fault", "kill", "agent@n1", "--job", job)
    until("FAILED", "scontrol", "show", "job", job, seconds=30)

    must("fault", "flaky", "squeue", "--every", "2")
    statuses = [own_testbed("exec", "--", "squeue").returncode for _ in range(4)]
    assert statuses == [0, 1, 0, 1]
    assert own_testbed("exec", "--user", "bob", "--", "squeue").returncode == 0
    assert "FLAKY     squeue for alice" in own_testbed("status").stdout
    must("fault", "heal", "squeue")
    assert own_testbed("exec", "--", "squeue").returncode == 0
    assert own_testbed("status").returncode == 0


@pytest.mark.long
@pytest.mark.parametrize(("version", "apptainer"), [("22.05", False), ("26.05", True)])
def test_the_other_slurms_run_a_training_on_two_nodes_without_a_container(
    cluster: Cluster, version: str, apptainer: bool
) -> None:
    try:
        must("up", "--slurm", version)
        assert json.loads(must("status", "--json"))["apptainer"] == apptainer
        assert own_testbed("exec", "--", "sh", "-c", "command -v apptainer").returncode == (0 if apptainer else 127)
        assert f"slurm-wlm {version}." in must("exec", "--", "srun", "-N1", "srun", "--version")
        gpus = must(
            "exec", "--", "srun", "-N2", "--gpus-per-node=8", "sh", "-c", "echo $(hostname) $CUDA_VISIBLE_DEVICES"
        )
        assert sorted(gpus.split("\n")) == ["", "n1 0,1,2,3,4,5,6,7", "n2 0,1,2,3,4,5,6,7"]
        must("frameworks")
        imports = "import accelerate, lightning, torch; print(torch.__version__)"
        assert must("exec", "--", "/shared/frameworks/bin/python", "-c", imports).startswith("2.13.0")

        for name in ("train.py", "data/as_you_like_it.txt"):
            words = ("sh", "-c", 'mkdir -p "$(dirname "$1")" && cat >"$1"', "sh", f"examples/{name}")
            must("exec", "--", *words, stdin=(ROOT / "examples" / name).read_text(encoding="utf-8"))
        must("exec", "--", "sh", "-c", "cat >hpcenv.toml", stdin=f'image = "host"\npython = "{HOST_PYTHON}"\n')
        must("exec", "--", "/shared/hpcenv/venv/bin/python", "-c", ACCEPT)
        must("exec", "--", "hpcenv", "lock")
        must("exec", "--", "hpcenv", "submit", "examples/train.py", "--nodes", "2", "--gpus", "0", "--nproc", "2")
        until("train-|COMPLETED|0:0|n[1-2]", *LAST_TRAINING, seconds=180)
    finally:
        down = own_testbed("down")
    assert down.returncode == 0, down.stdout + down.stderr


LAST_TRAINING = (
    "sh",
    "-c",
    "sacct -nPX -o jobname,state,exitcode,nodelist | sed -n 's/^train-[^|]*/train-/p'",
)
