"""GPUs of a machine without Slurm: none is given twice, also when runs are killed.

The driver is the testbed's stand-in (scripts/_testbed/stub_nvml.c), read by the real pynvml in the real child process. The
runs are processes. Each of them locks a file for each of its GPUs: the kernel says whether a second one has the GPU, too.
"""

from __future__ import annotations

import os
import pwd
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
GCC = shutil.which("gcc") or shutil.which("cc")
pytestmark = pytest.mark.skipif(GCC is None, reason="NOT RUN: no C compiler for the stand-in of the driver's library")

RUN = """\
import fcntl, os, sys, time
from pathlib import Path
from hpcenv.errors import HpcenvError
from hpcenv.machine import free_gpus, gpus
folder, count = Path(sys.argv[1]), int(sys.argv[2])
told = []
def wait(why):
    if why not in told:
        told.append(why)
        print("wait", why, flush=True)
look = lambda: gpus.read(environ=os.environ, dev=folder / "dev", seconds=20)
try:
    held = free_gpus.take(count, os.environ, look=look, on_wait=wait, stopped=(folder / f"stop-{os.getpid()}").exists)
except HpcenvError as error:
    sys.exit(f"{error.code}: {error}")
if held is None:
    sys.exit("stopped")
print("note", held.note, flush=True)
locks = []
for name in held.uuids:
    locks.append(open(folder / f"{name}.lock", "a"))
    try:
        fcntl.flock(locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"TWICE {name}")
print("has", *held.uuids, flush=True)
(folder / f"has-{os.getpid()}").touch()
if "CHILD" in os.environ:
    import subprocess
    child = subprocess.Popen(["sleep", "60"], pass_fds=held.files, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print("child", child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvml")
    source = ROOT / "scripts" / "_testbed" / "stub_nvml.c"
    subprocess.run([str(GCC), "-shared", "-fPIC", "-O1", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    return folder


class Machine:
    """A machine whose GPUs have names that no other has: tests that run beside each other have other queues."""

    def __init__(self, folder: Path, library: Path, count: int) -> None:
        self.folder = folder
        (folder / "dev").mkdir()
        (folder / "dev" / "nvidiactl").touch()
        self.gpus = [f"GPU-{uuid.uuid4()}" for _ in range(count)]
        self.extra = {gpu: "" for gpu in self.gpus}
        self.write()
        self.environ = {
            "PATH": os.environ["PATH"],
            "LD_LIBRARY_PATH": str(library),
            "STUB_NVML": str(self.folder / "nvml.conf"),
        }
        self.children: list[subprocess.Popen[str]] = []

    def write(self) -> None:
        text = "driver = 580.95.05\ncuda = 13000\n"
        for number, gpu in enumerate(self.gpus, 1):
            rows = f"name = NVIDIA A100\nuuid = {gpu}\nbus = 00000000:0{number}:00.0\n"
            text += f"[gpu]\n{rows}{self.extra[gpu]}" + ("" if "mig = " in self.extra[gpu] else "mig = 0\n")
        aside = self.folder / "nvml.new"
        aside.write_text(text)
        aside.rename(self.folder / "nvml.conf")

    def start(self, count: int, **environ: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", RUN, str(self.folder), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environ | environ,
            cwd=ROOT,
        )
        self.children.append(child)
        return child

    def has(self, child: subprocess.Popen[str]) -> list[str]:
        """Wait until a run has its GPUs; return them."""
        assert child.stdout
        assert child.stderr
        for line in child.stdout:
            if line.startswith("has"):
                return line.split()[1:]
        raise AssertionError(child.stderr.read())

    def one_that_has(self, children: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
        """Wait until one of these runs has its GPUs."""
        until = time.monotonic() + 60
        while not (found := [child for child in children if (self.folder / f"has-{child.pid}").exists()]):
            assert time.monotonic() < until, "no run of the queue gets its GPUs"
            time.sleep(0.05)
        return found[0]

    def refusal(self, child: subprocess.Popen[str]) -> str:
        _, stderr = child.communicate(timeout=60)
        assert child.returncode == 1, stderr
        return stderr

    def line(self, child: subprocess.Popen[str]) -> str:
        assert child.stdout
        return child.stdout.readline().rstrip("\n")

    def end(self, child: subprocess.Popen[str]) -> None:
        child.kill()
        child.communicate()


@pytest.fixture
def machine(tmp_path: Path, library: Path) -> Iterator[Machine]:
    made = Machine(tmp_path, library, 3)
    yield made
    for child in made.children:
        made.end(child)


def test_a_run_has_gpus_that_no_other_run_has_and_they_are_free_when_it_is_killed(machine: Machine) -> None:
    first, second = machine.start(1), machine.start(2)
    has = machine.has(first), machine.has(second)
    assert sorted((*has[0], *has[1])) == sorted(machine.gpus)
    third = machine.start(1)
    said = machine.line(third)
    assert said.startswith("wait waits for 1 GPU, and 0 of 3 are free; others are used: ")
    assert (
        f"GPU {machine.gpus.index(has[0][0])}: a run of {pwd.getpwuid(os.getuid()).pw_name} (process {first.pid})"
        in said
    )
    machine.end(first)
    assert machine.has(third) == has[0]


def test_gpus_are_given_in_the_order_of_the_bus(machine: Machine) -> None:
    assert machine.has(machine.start(2)) == machine.gpus[:2]


def test_a_gpu_with_a_process_of_another_program_is_taken(machine: Machine) -> None:
    machine.extra[machine.gpus[0]] = "process = 4711 20\n"
    machine.write()
    assert machine.has(machine.start(1)) == [machine.gpus[1]]
    waiting = machine.start(2)
    said = machine.line(waiting)
    assert "waits for 2 GPUs, and 1 of 3 are free; others are used: GPU 0: process 4711; GPU 1: a run of " in said
    machine.extra[machine.gpus[0]] = ""
    machine.write()
    assert machine.has(waiting) == [machine.gpus[0], machine.gpus[2]]


def test_who_asked_first_is_first_also_for_more_gpus(machine: Machine) -> None:
    holder = machine.start(1)
    machine.has(holder)
    large = machine.start(3)
    assert machine.line(large).startswith("wait waits for 3 GPUs, and 2 of 3 are free")
    small = machine.start(1)
    assert machine.line(small).startswith("wait waits behind 1 run that asked earlier: the first one of ")
    machine.end(holder)
    assert machine.has(large) == machine.gpus
    machine.end(large)
    assert machine.has(small) == machine.gpus[:1]


def test_a_run_that_ends_in_the_queue_makes_room(machine: Machine) -> None:
    machine.has(machine.start(1))
    large, small = machine.start(3), None
    machine.line(large)
    small = machine.start(1)
    machine.line(small)
    (machine.folder / f"stop-{large.pid}").touch()
    assert machine.refusal(large) == "stopped\n"
    assert machine.has(small) == [machine.gpus[1]]


def test_what_a_killed_run_has_started_keeps_its_gpu(machine: Machine) -> None:
    first = machine.start(3, CHILD="yes")
    machine.has(first)
    left = int(machine.line(first).split()[1])
    machine.end(first)
    waiting = machine.start(1)
    assert machine.line(waiting).startswith("wait waits for 1 GPU, and 0 of 3 are free")
    os.kill(left, signal.SIGKILL)
    assert machine.has(waiting) == machine.gpus[:1]


def test_the_users_own_choice_of_gpus_limits_the_choice(machine: Machine) -> None:
    assert machine.has(machine.start(1, CUDA_VISIBLE_DEVICES="2")) == [machine.gpus[2]]
    assert machine.has(machine.start(1, CUDA_VISIBLE_DEVICES=machine.gpus[1])) == [machine.gpus[1]]
    assert "names other GPUs than the driver lists" in machine.refusal(machine.start(1, CUDA_VISIBLE_DEVICES="7"))


def test_more_gpus_than_the_machine_has_are_refused_at_once(machine: Machine) -> None:
    said = machine.refusal(machine.start(4))
    assert said.startswith("node-rejected: this machine has 3 GPUs for a run, and the run asks for 4")


def test_a_split_gpu_is_not_given_and_its_parts_are_named_by_the_user(machine: Machine) -> None:
    machine.extra[machine.gpus[0]] = "mig = 1\n"
    machine.write()
    assert machine.has(machine.start(2)) == machine.gpus[1:]
    part = f"MIG-{uuid.uuid4()}"
    own = machine.start(1, CUDA_VISIBLE_DEVICES=part)
    assert machine.line(own) == f"note whether other programs use {part} is not known: the driver does not say it"


def test_a_driver_that_does_not_say_who_uses_a_gpu_is_told(machine: Machine) -> None:
    machine.extra[machine.gpus[0]] = "process = !999\n"
    machine.write()
    assert machine.line(machine.start(1)).startswith(f"note whether other programs use {machine.gpus[0]} is not known")


def test_a_driver_that_does_not_name_its_gpus_gives_none(machine: Machine) -> None:
    (machine.folder / "nvml.conf").write_text("driver = 580.95.05\ninit = !999\n")
    assert machine.refusal(machine.start(1)).startswith("nodes-unknown: which GPUs are free is not known")


@pytest.mark.parametrize("starts", [20, pytest.param(400, marks=pytest.mark.long)])
def test_no_gpu_is_given_twice_in_many_starts_and_kills(machine: Machine, starts: int) -> None:
    """tests/cluster/test_one_machine.py does it with whole runs of two users."""
    chance, running, ended = random.Random(starts), [], []
    for _ in range(starts):
        running.append(machine.start(chance.choice((1, 1, 2, 3))))
        time.sleep(chance.choice((0, 0.05, 0.3)))
        while len(running) > 4:
            child = running.pop(chance.randrange(len(running)))
            child.send_signal(chance.choice((signal.SIGKILL, signal.SIGTERM)))
            ended.append(child)
    while running:
        # Those in the queue still get their GPUs, one after the other. Which is first is not said by the order of the
        # starts: a process that started later may have come to the queue earlier.
        child = machine.one_that_has(running)
        running.remove(child)
        machine.end(child)
        ended.append(child)
    said = [child.stderr.read() if child.stderr and not child.stderr.closed else "" for child in ended]
    assert [text for text in said if text] == []
    assert len(ended) == starts
