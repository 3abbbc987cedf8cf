"""The start gate: the training starts only from the file that was checked, whatever happens to its name."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hpcenv.incontainer
from hpcenv.container import start_gate
from hpcenv.container.start_gate import StartGate
from hpcenv.identity import sif_check

AGENT = Path(hpcenv.incontainer.__file__).with_name("agent.py")


@pytest.fixture
def image(tmp_path, make_sif):
    return make_sif(tmp_path / "a.sif")


# A torch that says when it is imported, and torchrun, which says what it gets.
TORCHRUN = """
import json, os
print("TORCHRUN LOADED", flush=True)
def main(args): print("TRAINS", json.dumps(args), flush=True)
"""


@pytest.fixture
def at_gate(tmp_path, image):
    """A gate, and a process that waits at it as the container's first command does."""
    descriptor = os.open(image, os.O_RDONLY)
    checked = sif_check.check(descriptor, path=str(image), staged=False, known=None, records=None)
    outside = tmp_path / "outside"
    outside.mkdir()
    there = StartGate(outside, (descriptor, checked), load={"torch": True})
    torchrun = tmp_path / "site" / "torch" / "distributed" / "run.py"
    torchrun.parent.mkdir(parents=True)
    torchrun.write_text(TORCHRUN)
    # Regular packages: a namespace would come behind a real torch of this environment.
    for package in (torchrun.parent, torchrun.parents[1]):
        (package / "__init__.py").touch()
    # Outside a container the folder of the gate has its name on the host.
    argv = [sys.executable, "-S", str(AGENT), str(tmp_path / "agent.json"), start_gate.OPTION, str(outside)]
    argv += ["--", "--nproc_per_node=1"]
    child = subprocess.Popen(argv, env={"PYTHONPATH": str(tmp_path / "site")}, stdout=subprocess.PIPE, text=True)
    yield there, child
    there.close()
    child.kill()
    child.wait()
    child.stdout.close()
    os.close(descriptor)


TRAINS = """TRAINS ["--nproc_per_node=1"]\n"""


def answer(there):
    deadline = time.monotonic() + 60
    while not (there.is_open or there.refused):
        there.wait(0.1)
        assert time.monotonic() < deadline


def wait_for_report(child):
    """Wait until torchrun is loaded, and a little for the report that follows."""
    assert child.stdout.readline() == "TORCHRUN LOADED\n"
    time.sleep(0.2)


def test_the_very_file_lets_the_training_in(at_gate):
    there, child = at_gate
    answer(there)
    assert child.communicate(timeout=60)[0] == f"TORCHRUN LOADED\n{TRAINS}"
    assert (child.returncode, there.refused) == (0, False)


def test_torchrun_is_loaded_before_the_answer_and_the_training_starts_after_it(at_gate):
    there, child = at_gate
    wait_for_report(child)
    assert child.poll() is None
    answer(there)
    assert child.communicate(timeout=60)[0] == TRAINS


def test_a_closed_gate_ends_the_agent(at_gate):
    there, child = at_gate
    wait_for_report(child)
    there.close()
    assert "TRAINS" not in child.communicate(timeout=60)[0]
    assert child.returncode == 90


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
    answer(there)
    assert "TRAINS" not in child.communicate(timeout=60)[0]
    assert (child.returncode, there.refused) == (90, True)


def test_a_swap_after_the_code_was_loaded_is_seen_too(at_gate, image):
    there, child = at_gate
    wait_for_report(child)
    by_rename(image)
    answer(there)
    assert "TRAINS" not in child.communicate(timeout=60)[0]
    assert (child.returncode, there.refused) == (90, True)


def test_a_container_that_never_comes_leaves_the_gate_closed(at_gate):
    there, child = at_gate
    child.kill()
    child.wait()
    there.wait(0.1)
    assert (there.is_open, there.refused) == (False, False)


def test_an_overlay_that_changes_after_the_check_keeps_the_training_out(tmp_path, image):
    overlay = tmp_path / "overlay.sqsh"
    overlay.write_bytes(b"hsqs" + bytes(4092))
    descriptors = [os.open(path, os.O_RDONLY) for path in (image, overlay)]
    checks = [
        sif_check.check(descriptor, path=str(path), staged=False, known=None, records=None)
        for descriptor, path in zip(descriptors, (image, overlay), strict=True)
    ]
    outside = tmp_path / "outside"
    outside.mkdir()
    there = StartGate(outside, (descriptors[0], checks[0]), overlay=checks[1], load={"torch": False})
    assert there.is_same()
    argv = [sys.executable, "-S", str(AGENT), str(tmp_path / "agent.json"), start_gate.OPTION, str(outside)]
    argv += ["--", "--nproc_per_node=1"]
    child = subprocess.Popen(argv, env={}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    changed = tmp_path / "new.sqsh"
    changed.write_bytes(b"hsqs" + bytes(4091) + b"X")
    changed.rename(overlay)
    answer(there)
    assert (there.refused, there.is_open) == (True, False)
    assert "TRAINS" not in child.communicate(timeout=60)[0]
    there.close()
    for descriptor in descriptors:
        os.close(descriptor)


def test_what_was_loaded_and_does_not_fit_keeps_the_training_out(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    reports = []

    def judge(report):
        reports.append(report)
        return False

    there = StartGate(outside, load={"torch": True}, judge=judge)
    argv = [sys.executable, "-S", str(AGENT), str(tmp_path / "agent.json"), *there.options, "--", "--nproc_per_node=1"]
    child = subprocess.Popen(argv, env={}, stdout=subprocess.PIPE, text=True)
    while child.poll() is None:
        there.wait(0.1)
    assert (child.returncode, there.is_open, there.refused) == (90, False, False)
    (report,) = reports
    assert report["problem"].startswith("torch cannot be imported: ")
    child.stdout.close()
    there.close()
