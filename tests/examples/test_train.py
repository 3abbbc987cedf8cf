"""examples/train.py as its users run it: real torchrun, real processes, on CPU."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PYTHON = os.environ.get("HPCENV_TEST_TORCH_PYTHON", sys.executable)
_import = subprocess.run([PYTHON, "-c", "import torch"], capture_output=True, text=True, timeout=120)
if _import.returncode != 0:
    why = (_import.stderr.splitlines() or ["no message"])[-1]
    pytest.skip(
        f"examples/train.py NOT TESTED: {PYTHON} cannot import torch ({why});"
        " set HPCENV_TEST_TORCH_PYTHON to a Python that can",
        allow_module_level=True,
    )
pytestmark = pytest.mark.torch

TRAIN = Path(__file__).resolve().parents[2] / "examples" / "train.py"
RANKS = 3  # two ranks' gradients add up to the same bits in any order, three ranks' need not
RUN = ("--steps", "20", "--batch-size", "4", "--log-every", "5", "--checkpoint-every", "10")
LIMIT_S = 120


def environment():
    """No torchrun or NCCL word of whatever runs the tests, one thread, and no GPU."""
    names = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def start(argv):
    return subprocess.Popen(
        [PYTHON, *argv],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process, before=""):
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, before + out, err


def torchrun(*args):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    return start([*launcher, str(TRAIN), *args])


SAME_BITS = """
import sys, torch
one, other = [torch.load(path, map_location="cpu", weights_only=True) for path in sys.argv[1:]]
assert one["loss"] == other["loss"], (one["loss"], other["loss"])
assert one["model"].keys() == other["model"].keys()
assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
"""


def assert_same_last_checkpoint(directory, other):
    """Same loss and same weights, every bit."""
    name = "step-00000020.pt"
    status, _, err = finish(start(["-c", SAME_BITS, str(directory / name), str(other / name)]))
    assert status == 0, err


@pytest.fixture(scope="module")
def full_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("full")
    status, out, err = finish(torchrun(*RUN, "--checkpoint-dir", str(directory)))
    assert status == 0, out + err
    return directory, out, err


def test_every_rank_introduces_itself_in_one_line(full_run):
    _, out, _ = full_run
    ranks = re.findall(
        rf"^rank (\d)  local_rank \1  world_size {RANKS}  host \S+  pid \d+"
        r"  backend gloo  device cpu  torch \S+$",
        out,
        re.MULTILINE,
    )
    assert sorted(ranks) == [str(rank) for rank in range(RANKS)]


def test_the_loss_falls_and_the_last_line_says_so(full_run):
    _, out, _ = full_run
    steps = re.findall(r"^step +(\d+)  loss \d\.\d{4}  \d+\.\d s$", out, re.MULTILINE)
    assert steps == ["1", "5", "10", "15", "20"]
    last_line = out.splitlines()[-1]
    final, first = re.fullmatch(r"final loss (\d\.\d{4}) \(first (\d\.\d{4})\)", last_line).groups()
    assert float(final) < float(first) - 0.8


def test_nothing_is_written_to_stderr(full_run):
    _, _, err = full_run
    assert err == ""


def test_checkpoints_are_there_and_no_half_written_one(full_run):
    directory, _, _ = full_run
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["step-00000010.pt", "step-00000020.pt"]


def test_the_same_seed_gives_the_same_bits(full_run, tmp_path):
    directory, _, _ = full_run
    status, out, err = finish(torchrun(*RUN, "--checkpoint-dir", str(tmp_path)))
    assert status == 0, out + err
    assert_same_last_checkpoint(directory, tmp_path)


def read_until(process, text):
    seen = ""
    while text not in seen:
        line = process.stdout.readline()
        assert line, seen + process.stderr.read()
        seen += line
    return seen


def test_a_signal_to_one_rank_stops_all_and_resume_ends_with_the_same_bits(full_run, tmp_path):
    process = torchrun(*RUN, "--checkpoint-dir", str(tmp_path), "--sleep-per-step", "0.2")
    seen = read_until(process, "step  5")
    os.kill(int(re.search(r"^rank 1 .* pid (\d+) ", seen, re.MULTILINE).group(1)), signal.SIGUSR1)
    status, out, err = finish(process, seen)
    assert status == 0, out + err
    stopped_at = int(re.search(r"^stopped by a signal after step (\d+) ", out, re.M).group(1))
    assert 5 <= stopped_at < 20
    assert (tmp_path / f"step-{stopped_at:08d}.pt").exists()
    assert "final loss" not in out

    status, out, err = finish(torchrun(*RUN, "--checkpoint-dir", str(tmp_path), "--resume"))
    assert status == 0, out + err
    assert f"resumed after step {stopped_at}\n" in out
    directory, full_out, _ = full_run
    assert out.splitlines()[-1] == full_out.splitlines()[-1]
    assert_same_last_checkpoint(directory, tmp_path)


def test_sigterm_with_a_checkpoint_dir_ends_with_a_checkpoint_and_status_0(tmp_path):
    process = start([str(TRAIN), "--checkpoint-dir", str(tmp_path), "--sleep-per-step", "0.2"])
    seen = read_until(process, "step   1")
    process.terminate()
    status, out, err = finish(process, seen)
    assert (status, err) == (0, "")
    assert out.splitlines()[-1].startswith("stopped by a signal after step ")
    assert len(list(tmp_path.glob("step-*.pt"))) == 1


def test_sigterm_without_a_checkpoint_dir_just_ends_it():
    process = start([str(TRAIN), "--sleep-per-step", "0.2"])
    read_until(process, "step   1")
    process.terminate()
    status, _, _ = finish(process)
    assert status == -signal.SIGTERM


def test_alone_it_is_one_rank_and_leaves_no_thread_that_could_break_the_exit(tmp_path):
    code = (
        "import glob, runpy, sys; sys.argv = sys.argv[1:];"
        "runpy.run_path(sys.argv[0], run_name='__main__');"
        "print(sorted(open(p).read().strip() for p in glob.glob('/proc/self/task/*/comm')))"
    )
    text = tmp_path / "ä text.txt"
    text.write_text("Grüße, 世界! " * 30, encoding="utf-8")
    argv = ["-c", code, str(TRAIN), "--steps", "2", "--text", str(text)]
    status, out, err = finish(start(argv))
    assert (status, err) == (0, "")
    assert "rank 0  local_rank 0  world_size 1  " in out
    assert "final loss " in out
    assert "gloo" not in out.splitlines()[-1]


def test_wrong_arguments_are_refused():
    cases = {
        "unrecognized arguments: --epochs 3": ["--epochs", "3"],
        "--resume needs --checkpoint-dir": ["--resume"],
        "argument --steps: 0 is not at least 1": ["--steps", "0"],
    }
    processes = [(start([str(TRAIN), *args]), message) for message, args in cases.items()]
    for process, message in processes:
        status, out, err = finish(process)
        assert (status, out) == (2, "")
        assert err.endswith(f"train.py: error: {message}\n")


def test_a_directory_of_another_run_is_refused_without_resume(tmp_path):
    latest = tmp_path / "step-00000020.pt"
    latest.write_bytes(b"")
    (tmp_path / "step-00000009.pt").write_bytes(b"")
    (tmp_path / ".step-00000030.pt.part").write_bytes(b"")
    status, _, err = finish(start([str(TRAIN), "--checkpoint-dir", str(tmp_path)]))
    assert status == 1
    assert err == f"train.py: found {latest}: add --resume, or choose an empty --checkpoint-dir\n"
