"""The start of torchrun: which rank was first, with what status everything ends, what is written down.

A folder with a few lines of `torch` stands for torch; what torch itself does is seen in tests/cluster/test_failures.py.
"""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import hpcenv.incontainer
from hpcenv.incontainer.agent import PARENT_PIPE, _in_order
from hpcenv.launch import launch

AGENT = Path(hpcenv.incontainer.__file__).with_name("agent.py")

ERRORS = """
class ChildFailedError(Exception):
    def __init__(self, failures):
        self.failures = failures
"""

# As torchrun: it looks now and then, ends the other ranks after the first failure, and gives all of them the time of
# its last look.
RUN = """
import os, subprocess, sys, time, types
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

def main(args):
    programs = args[args.index("--") + 1:]
    ranks = {}
    for rank, program in enumerate(programs):
        names = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks[rank] = subprocess.Popen(["sh", "-c", program], env={**os.environ, **names})
    while not any(child.poll() for child in ranks.values()):
        if all(child.poll() == 0 for child in ranks.values()):
            return
        time.sleep(0.3)
    order = [rank for rank, child in ranks.items() if child.poll()]
    for child in ranks.values():
        if child.poll() is None:
            child.terminate()
        child.wait()
    # torch 2.13 (SubprocessContext._poll): first those that it finds ended, then those that it ended.
    order += [rank for rank in ranks if rank not in order]
    files = {rank: os.path.join(os.environ.get("ERRORS", "/nonexistent"), str(rank)) for rank in ranks}
    raise ChildFailedError({
        rank: types.SimpleNamespace(
            local_rank=rank, pid=child.pid, exitcode=child.returncode,
            error_file=files[rank] if os.path.exists(files[rank]) else "<N/A>",
            timestamp=int(os.stat(files[rank]).st_mtime if os.path.exists(files[rank]) else time.time()),
        )
        for rank, child in ((rank, ranks[rank]) for rank in order) if child.returncode != 0
    })
"""


class Agent:
    def __init__(self, base: Path) -> None:
        self.base = base
        self.record_path = base / "run" / "ranks" / "n1" / "agent.json"
        self.torch(RUN)
        folder = base / "site" / "torch" / "distributed" / "elastic" / "multiprocessing"
        folder.mkdir(parents=True)
        (folder / "errors.py").write_text(ERRORS)

    def torch(self, run: str) -> None:
        folder = self.base / "site" / "torch" / "distributed"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.py").write_text(textwrap.dedent(run))

    def start(self, *programs: str, program: Path = AGENT, **more: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            # -S: no torch of this environment beside the one here.
            [sys.executable, "-S", str(program), str(self.record_path), "--"]
            + [f"--nproc_per_node={len(programs)}", "--", *programs],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(self.base / "site"), **more},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
        )

    @property
    def record(self) -> dict:
        return json.loads(self.record_path.read_text())

    @property
    def ranks(self) -> list:
        return [(rank["rank"], rank["status"]) for rank in self.record["ranks"]]


@pytest.fixture
def agent(tmp_path):
    return Agent(tmp_path)


def test_a_training_that_ends_well_leaves_no_record(agent):
    assert agent.start("exit 0", "exit 0").returncode == 0
    assert not agent.record_path.exists()


@pytest.mark.parametrize(
    ("program", "status"), [("exit 7", 7), ("kill -KILL $$", 137), ("kill -SEGV $$", 139), ("kill -TERM $$", 143)]
)
def test_the_status_is_that_of_the_rank_which_failed(agent, program, status):
    assert agent.start("exec sleep 30", f"sleep 0.4; {program}").returncode == status
    assert agent.ranks == [(1, status), (0, 143)]


def test_of_two_that_fail_between_two_looks_the_first_one_counts(agent):
    # torch gives both the same time, and would name rank 0.
    assert agent.start("sleep 0.5; exit 3", "sleep 0.4; exit 9").returncode == 9
    assert agent.ranks == [(1, 9), (0, 3)]
    first, second = (rank["ended"] for rank in agent.record["ranks"])
    assert 0.05 < second - first < 5


def test_one_that_torchrun_ended_was_not_first_whatever_it_had_met(agent, tmp_path):
    # It had lost its peer, wrote that down, and torchrun ended it: the time is not known. What it wrote has whole seconds.
    programs = (f"sleep 1; echo lost > {tmp_path}/0; exec sleep 30", "sleep 1.2; exit 6")
    assert agent.start(*programs, ERRORS=str(tmp_path)).returncode == 6
    assert agent.ranks == [(1, 6), (0, 143)]


@pytest.mark.parametrize(
    ("listed", "first"),
    [
        # torchrun took the status of rank 1 before the agent saw its end. Then it ended rank 0.
        ([(1, 6, None), (0, 143, 100.0)], 6),
        ([(0, 6, None), (1, 137, 100.0), (2, 143, 99.0)], 6),
        # The kernel killed rank 0. Rank 1 caught TERM, and ended with 1.
        ([(0, 137, 100.0), (1, 1, None)], 137),
        # Rank 0 was seen to fail before torchrun ended anything.
        ([(1, 9, None), (0, 3, 99.0), (2, 143, 100.0)], 3),
    ],
)
def test_a_rank_whose_end_was_not_seen_comes_before_those_that_torchrun_ended(listed, first):
    ranks = [{"rank": number, "status": status, "ended": ended} for number, status, ended in listed]
    assert _in_order(ranks)[0]["status"] == first


def test_a_rank_that_ended_well_is_not_among_those_that_failed(agent):
    agent.start("exit 0", "sleep 0.5; exit 2")
    assert agent.ranks == [(1, 2)]


def test_what_torchrun_itself_fails_of(agent):
    agent.torch("def main(args): raise ValueError('nobody came')")
    done = agent.start("exit 0")
    assert (done.returncode, agent.record["error"], agent.ranks) == (1, "ValueError: nobody came", [])
    assert done.stderr.splitlines()[-1] == "ValueError: nobody came"


@pytest.mark.parametrize(("end", "status"), [("2", 2), ("'no'", 1), ("None", 0), ("0", 0)])
def test_a_torchrun_that_ends_itself(agent, end, status):
    agent.torch(f"import sys\ndef main(args): sys.exit({end})")
    assert agent.start("exit 0").returncode == status
    assert agent.record_path.exists() == (status != 0)


def test_an_image_without_torch_ends_with_an_error(agent):
    done = agent.start("exit 0", PYTHONPATH="/nowhere")
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr


def test_a_torch_without_the_exceptions_still_ends_with_its_error(agent):
    (agent.base / "site/torch/distributed/elastic/multiprocessing/errors.py").unlink()
    agent.torch("def main(args): raise RuntimeError('rank 1 failed')")
    assert (agent.start("exit 0").returncode, agent.record["error"]) == (1, "RuntimeError: rank 1 failed")


def test_a_record_that_cannot_be_written_changes_no_status(agent):
    agent.record_path.parent.parent.parent.mkdir(parents=True, exist_ok=True)
    (agent.base / "run" / "ranks").write_text("a file in the way")
    done = agent.start("exit 7")
    assert done.returncode == 7
    assert done.stderr.startswith(f"hpcenv: cannot write {agent.record_path}: ")


def test_ranks_can_import_what_hpcenv_offers_them_after_everything_else(agent):
    inside = agent.base / "run" / "inside"
    inside.mkdir(parents=True)
    say = f'printf %s "$PYTHONPATH" > {agent.base}/seen'
    agent.start(say, HPCENV_RUN_FOLDER=str(agent.base / "run"))
    assert (agent.base / "seen").read_text() == f"{agent.base}/site:{inside}"
    agent.start(say, HPCENV_RUN_FOLDER="/nowhere")
    assert (agent.base / "seen").read_text() == f"{agent.base}/site"


def test_ranks_can_import_it_where_the_code_is_behind_a_link(agent):
    """An element of an array has links to the code of all; a file system may have a link above all runs."""
    inside = agent.base / "run" / "inside"
    inside.mkdir(parents=True)
    (agent.base / "run" / "code").symlink_to(AGENT.parent)
    say = f'printf %s "$PYTHONPATH" > {agent.base}/seen'
    agent.start(say, program=agent.base / "run" / "code" / AGENT.name, HPCENV_RUN_FOLDER=str(agent.base / "run"))
    assert (agent.base / "seen").read_text() == f"{agent.base}/site:{inside}"


def test_the_words_reach_torchrun_as_they_are(agent):
    agent.torch("import json\ndef main(args): print(json.dumps(args))")
    words = ["a b", "", "$(id)", "`x`", "line\nbreak", "--", "é"]
    assert json.loads(agent.start(*words).stdout) == ["--nproc_per_node=7", "--", *words]


PARSER = """
import argparse, json
def get_args_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument({options})
    return parser
def main(args): print(json.dumps(args))
"""


@pytest.mark.parametrize(("options", "left"), [("'--local-addr', '--local_addr'", 1), ("'--nnodes'", 0)])
def test_an_option_that_an_old_torchrun_does_not_know_is_left_out(agent, options, left):
    agent.torch(PARSER.format(options=options))
    ours, script = "--local_addr=10.0.0.1", ["--", "x.py", "--local_addr=of the script"]
    argv = [sys.executable, "-S", str(AGENT), str(agent.record_path), "--", ours, "--tee=3", *script]
    done = subprocess.run(argv, env={"PYTHONPATH": str(agent.base / "site")}, capture_output=True, text=True)
    assert json.loads(done.stdout) == [ours] * left + ["--tee=3", *script]
    assert done.stderr == ("" if left else f"hpcenv: torchrun of this torch does not know {ours}\n")


def test_without_its_words_it_says_how_it_is_called(agent):
    done = subprocess.run([sys.executable, "-S", str(AGENT), "x"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        "usage: agent.py RECORD [--start-gate FOLDER] -- TORCHRUN-ARGUMENTS...\n",
    )


# -- the launch step outside --------------------------------------------------------------


def begin(agent, stdin, *programs):
    return subprocess.Popen(
        [
            sys.executable,
            "-S",
            str(AGENT),
            str(agent.record_path),
            "--",
            f"--nproc_per_node={len(programs)}",
            "--",
            *programs,
        ],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(agent.base / "site"), "HERE": str(agent.base)},
        stdin=stdin,
    )


def wait_for(path):
    for _ in range(1000):
        if path.exists() and path.read_text().endswith("\n"):
            return path.read_text().strip()
        time.sleep(0.02)
    raise AssertionError(f"no {path}")


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_when_the_launch_step_is_gone_nothing_below_it_is_left(agent):
    # Deaf to TERM, with a child of its own.
    deaf = "trap '' TERM; sleep 300 & echo $! >$HERE/child; echo $$ >$HERE/rank; wait"
    leash, end = os.pipe()
    os.write(end, PARENT_PIPE)
    child = begin(agent, leash, deaf)
    os.close(leash)
    pids = [int(wait_for(agent.base / name)) for name in ("child", "rank")]
    assert all(is_alive(pid) for pid in pids)
    assert child.poll() is None
    os.close(end)
    assert child.wait(timeout=20) == 137
    assert not any(is_alive(pid) for pid in pids)


def test_a_standard_input_that_is_no_leash_ends_nobody_and_ranks_have_none(agent):
    child = begin(agent, subprocess.PIPE, "cat; exit 7")
    child.stdin.write(b"something else")
    child.stdin.close()
    assert child.wait(timeout=20) == 7


def test_both_ends_know_the_same_leash():
    assert launch.PARENT_PIPE == PARENT_PIPE
