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
from hpcenv.node.container.start_gate import Release, StartGate

AGENT = Path(hpcenv.incontainer.__file__).with_name("agent.py")


@pytest.fixture
def image(tmp_path, make_sif):
    return make_sif(tmp_path / "a.sif")


# A torch that says when it is imported, and torchrun, which says what it gets.
TORCHRUN = """
import json, os
print("TORCHRUN LOADED", flush=True)
def main(args): print("TRAINS", json.dumps(args), os.environ.get("LATE"), os.environ.get("EARLY"), flush=True)
"""


@pytest.fixture
def at_gate(tmp_path, image):
    """A gate, and a process that waits at it as the container's first command does."""
    descriptor = os.open(image, os.O_RDONLY)
    checked = sif_check.check(descriptor, path=str(image), staged=False, known=None, records=None)
    outside = tmp_path / "outside"
    outside.mkdir()
    there = StartGate(outside, (descriptor, checked))
    torchrun = tmp_path / "site" / "torch" / "distributed" / "run.py"
    torchrun.parent.mkdir(parents=True)
    torchrun.write_text(TORCHRUN)
    # Regular packages: a namespace would come behind a real torch of this environment.
    for package in (torchrun.parent, torchrun.parents[1]):
        (package / "__init__.py").touch()
    # As an image may have it; with -S Python runs it only when it is asked to.
    (tmp_path / "site" / "sitecustomize.py").write_text("print('SITE', flush=True)")
    # Outside a container the folder of the gate has its name on the host.
    argv = [sys.executable, "-S", str(AGENT), str(tmp_path / "agent.json"), start_gate.OPTION, str(outside)]
    environ = {"PYTHONPATH": str(tmp_path / "site"), "EARLY": "1"}
    child = subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True)
    yield there, child
    child.kill()
    child.wait()
    child.stdout.close()
    os.close(descriptor)


START = Release(words=("--", "--nproc_per_node=1"), variables={"LATE": "a 'b'\n$c"}, unset=("EARLY",))
TRAINS = """TRAINS ["--nproc_per_node=1"] a 'b'\n$c None\n"""


def said(child):
    """What the process has printed by now."""
    os.set_blocking(child.stdout.fileno(), False)
    try:
        return os.read(child.stdout.fileno(), 1 << 16).decode()
    except BlockingIOError:
        return ""
    finally:
        os.set_blocking(child.stdout.fileno(), True)


def attend(there, until):
    deadline = time.monotonic() + 60
    while not until():
        there.wait(0.1)
        assert time.monotonic() < deadline


def lets_in(there):
    there.load_when(lambda _report: (), {"torch": True})
    there.release(START)
    attend(there, lambda: there.is_open or there.refused)


def test_the_very_file_lets_the_training_in(at_gate):
    there, child = at_gate
    lets_in(there)
    assert child.communicate(timeout=60)[0] == f"SITE\nTORCHRUN LOADED\n{TRAINS}"
    assert (child.returncode, there.refused) == (0, False)


def test_code_of_the_image_is_loaded_before_the_release_and_the_training_starts_after_it(at_gate):
    there, child = at_gate
    there.load_when(lambda _report: (), {"torch": True})
    attend(there, lambda: there.loaded is not None)
    assert said(child) == "SITE\nTORCHRUN LOADED\n"
    there.release(START)
    assert child.communicate(timeout=60)[0] == TRAINS


@pytest.mark.parametrize("answer", ["nothing may be loaded", "nothing of that folder", "no answer"])
def test_without_leave_nothing_of_the_image_runs_until_the_release(at_gate, tmp_path, answer):
    there, child = at_gate
    reports = []

    def leave(report):
        reports.append(report)
        return None if answer == "nothing may be loaded" else (str(tmp_path / "site"),)

    if answer != "no answer":
        there.load_when(leave, {"torch": True})
        attend(there, lambda: len(reports) > 1 or (reports and answer == "nothing may be loaded"))
        assert str(tmp_path / "site") in reports[0]["code"]
        assert "- proc" in reports[0]["mountinfo"]
    # site itself runs only from folders of the image: the launch step refuses this folder beforehand (early_start.py).
    assert said(child) == ("SITE\n" if answer == "nothing of that folder" else "")
    lets_in(there)
    assert child.communicate(timeout=60)[0].endswith(f"TORCHRUN LOADED\n{TRAINS}")


def test_a_closed_gate_ends_the_agent(at_gate):
    there, child = at_gate
    there.load_when(lambda _report: (), {"torch": True})
    attend(there, lambda: there.loaded is not None)
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
    lets_in(there)
    assert child.communicate(timeout=60)[0] == ""
    assert (child.returncode, there.refused) == (90, True)


def test_a_swap_after_the_code_was_loaded_is_seen_before_the_release(at_gate, image):
    there, child = at_gate
    there.load_when(lambda _report: (), {"torch": True})
    attend(there, lambda: there.loaded is not None)
    by_rename(image)
    there.release(START)
    assert "TRAINS" not in child.communicate(timeout=60)[0]
    assert (child.returncode, there.refused) == (90, True)


def test_a_container_that_never_comes_leaves_the_gate_closed(at_gate):
    there, child = at_gate
    child.kill()
    child.wait()
    there.attend()
    assert (there.is_open, there.refused) == (False, False)


@pytest.mark.parametrize("when", ["before it may load", "after it has loaded"])
def test_an_overlay_that_changes_after_the_check_keeps_the_training_out(tmp_path, image, when):
    overlay = tmp_path / "overlay.sqsh"
    overlay.write_bytes(b"hsqs" + bytes(4092))
    descriptors = [os.open(path, os.O_RDONLY) for path in (image, overlay)]
    checks = [
        sif_check.check(descriptor, path=str(path), staged=False, known=None, records=None)
        for descriptor, path in zip(descriptors, (image, overlay), strict=True)
    ]
    outside = tmp_path / "outside"
    outside.mkdir()
    there = StartGate(outside, (descriptors[0], checks[0]), overlay=checks[1])
    assert there.is_same()
    argv = [sys.executable, "-S", str(AGENT), str(tmp_path / "agent.json"), start_gate.OPTION, str(outside)]
    child = subprocess.Popen(argv, env={}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    if when == "after it has loaded":
        there.load_when(lambda _report: (), {"torch": False})
        attend(there, lambda: there.loaded is not None)
    changed = tmp_path / "new.sqsh"
    changed.write_bytes(b"hsqs" + bytes(4091) + b"X")
    changed.rename(overlay)
    lets_in(there)
    assert (there.refused, there.is_open) == (True, False)
    assert "TRAINS" not in child.communicate(timeout=60)[0]
    there.close()
    for descriptor in descriptors:
        os.close(descriptor)
