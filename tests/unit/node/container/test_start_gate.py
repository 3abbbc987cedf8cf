"""The start gate: the training starts only from the file that was checked, whatever happens to its name."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hpcenv.incontainer
from hpcenv.node.check import sif_check
from hpcenv.node.container import start_gate
from hpcenv.node.container.start_gate import StartGate

AGENT = Path(hpcenv.incontainer.__file__).with_name("agent.py")


@pytest.fixture
def image(tmp_path, make_sif):
    return make_sif(tmp_path / "a.sif")


@pytest.fixture
def at_gate(tmp_path, image):
    """A gate, and a process that waits at it as the container's first command does."""
    descriptor = os.open(image, os.O_RDONLY)
    checked = sif_check.check(descriptor, path=str(image), staged=False, known=None, records=None)
    outside = tmp_path / "outside"
    outside.mkdir()
    there = StartGate(outside, descriptor, checked)
    # Outside a container the folder of the gate has its name on the host.
    words = [word.replace(there.bind.target, str(outside)) for word in start_gate.GATE_OPTIONS]
    torchrun = tmp_path / "site" / "torch" / "distributed" / "run.py"
    torchrun.parent.mkdir(parents=True)
    torchrun.write_text("def main(args): print('TRAINS')")
    # Regular packages: a namespace would come behind a real torch of this environment.
    for package in (torchrun.parent, torchrun.parents[1]):
        (package / "__init__.py").touch()
    # As an image may have it; with -S Python runs it only when it is asked to.
    (tmp_path / "site" / "sitecustomize.py").write_text("print('SITE')")
    argv = [sys.executable, "-S", str(AGENT), *words, str(tmp_path / "agent.json"), "--", "--nproc_per_node=1"]
    child = subprocess.Popen(argv, env={"PYTHONPATH": str(tmp_path / "site")}, stdout=subprocess.PIPE, text=True)
    yield there, child
    child.kill()
    child.wait()
    child.stdout.close()
    os.close(descriptor)


def attend(there):
    deadline = time.monotonic() + 15
    while not there.is_open:
        there.attend()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_very_file_lets_the_training_in(at_gate):
    there, child = at_gate
    attend(there)
    assert child.communicate(timeout=15)[0] == "SITE\nTRAINS\n"
    assert (child.returncode, there.refused) == (0, False)


def by_rename(image):
    shutil.copyfile(image, f"{image}.new")
    os.replace(f"{image}.new", image)


def away_and_back(image):
    """What a name check alone would not see: the rename shows in `ctime`."""
    os.rename(image, f"{image}.away")
    os.rename(f"{image}.away", image)


def one_byte(image):
    with open(image, "r+b") as file:
        file.write(b"x")


@pytest.mark.parametrize("swap", [by_rename, away_and_back, one_byte, os.unlink])
def test_after_a_swap_not_a_line_of_the_training_runs(at_gate, image, swap):
    there, child = at_gate
    time.sleep(0.02)  # a tick of the clock that stamps files
    swap(image)
    attend(there)
    assert child.communicate(timeout=15)[0] == ""
    assert (child.returncode, there.refused) == (90, True)


def test_a_container_that_never_comes_leaves_the_gate_closed(at_gate):
    there, child = at_gate
    child.kill()
    child.wait()
    there.attend()
    assert (there.is_open, there.refused) == (False, False)
