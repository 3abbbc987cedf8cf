"""Ranks without torchrun, on real processes: tasks of srun, and a program that starts its ranks itself."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import hpcenv.incontainer

AGENT = Path(hpcenv.incontainer.__file__).parent / "agent.py"
SAYS = "import os, sys\nprint({n: os.environ.get(n) for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR')})\n"

# A program that starts two ranks, as torchrun does, and ends with status 1 if one of them fails.
PROGRAM = """\
import os, subprocess, sys, time
ranks = [
    subprocess.Popen([sys.executable, "-c", sys.argv[1]],
        env={**os.environ, "RANK": str(2 * int(os.environ["NODE_RANK"]) + n), "LOCAL_RANK": str(n)})
    for n in range(2)
]
time.sleep(2)  # longer than the first rank to fail lives: what asks at once may take its status first
while all(rank.poll() is None for rank in ranks):
    time.sleep(0.1)
for rank in ranks:
    rank.terminate() if rank.poll() is None else None
sys.exit(max(map(abs, (rank.wait() for rank in ranks))) and 1)
"""


def agent(tmp_path, *words, program):
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(program))
    options = ["--nodes=2", "--node-rank=1", "--tasks-per-node=2", f"--log-dir={tmp_path / 'logs'}"]
    done = subprocess.run(
        [sys.executable, str(AGENT), str(tmp_path / "agent.json"), "--tasks", *options, *words],
        capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, cwd=tmp_path,
    )  # fmt: skip
    record = tmp_path / "agent.json"
    return done, json.loads(record.read_text()) if record.exists() else None


def test_a_task_of_srun_is_one_rank_of_the_node(tmp_path):
    set_ = ("--only=1", "--prefix=[{rank}] ", "--set=MASTER_ADDR=10.0.0.1=x")
    done, record = agent(tmp_path, *set_, "--", "program.py", program=SAYS)
    assert (done.returncode, record) == (0, None), done.stderr
    assert done.stdout == "[3] {'RANK': '3', 'LOCAL_RANK': '1', 'WORLD_SIZE': '4', 'MASTER_ADDR': '10.0.0.1=x'}\n"
    assert (tmp_path / "logs" / "tasks" / "attempt_0" / "1" / "stdout.log").read_text() == done.stdout[4:]


def test_a_program_has_no_rank_and_its_lines_are_not_changed(tmp_path):
    done, record = agent(tmp_path, "--program", "--", "program.py", program=SAYS)
    assert (done.returncode, record) == (0, None), done.stderr
    assert done.stdout == "{'RANK': None, 'LOCAL_RANK': None, 'WORLD_SIZE': None, 'MASTER_ADDR': None}\n"
    assert (tmp_path / "logs" / "program" / "stdout.log").read_text() == done.stdout


@pytest.mark.parametrize(
    ("rank", "status"),
    [
        ("import os, sys, time; time.sleep(0.7 if os.environ['LOCAL_RANK'] == '1' else 30); sys.exit(5)", 5),
        ("import os, time; time.sleep(0.7 if os.environ['LOCAL_RANK'] == '1' else 30); os.kill(os.getpid(), 9)", 137),
    ],
)
def test_the_rank_of_a_program_that_failed_first_is_named_with_its_status(tmp_path, rank, status):
    words = ("--program", "--set=NODE_RANK=1", "--", "program.py", rank)
    done, record = agent(tmp_path, *words, program=PROGRAM)
    assert done.returncode == status, done.stderr
    rows = [(row["rank"], row["local_rank"], row["status"]) for row in record["ranks"]]
    assert rows[0] == (3, 1, status)
    assert rows[1:] in ([], [(2, 0, 143)]), "the program may take the status of the rank that it ended first"
    assert abs(record["ranks"][0]["ended"] - time.time()) < 30


def test_a_program_that_fails_without_a_failed_rank_is_named_itself(tmp_path):
    done, record = agent(tmp_path, "--program", "--", "program.py", program="import sys; sys.exit(4)")
    assert done.returncode == 4
    assert [(row["rank"], row["local_rank"], row["status"]) for row in record["ranks"]] == [(-1, -1, 4)]


def test_workers_of_a_rank_are_no_ranks(tmp_path):
    worker = "import time, sys; time.sleep(0.5); sys.exit(9)"
    rank = f"import subprocess, sys, os; subprocess.run([sys.executable, '-c', {worker!r}]); "
    rank += "sys.exit(5 if os.environ['LOCAL_RANK'] == '0' else 0)"
    done, record = agent(tmp_path, "--program", "--set=NODE_RANK=0", "--", "program.py", rank, program=PROGRAM)
    assert done.returncode == 5, done.stderr
    assert (record["ranks"][0]["rank"], record["ranks"][0]["status"]) == (0, 5)
    assert {row["rank"] for row in record["ranks"]} <= {0, 1}
    assert os.listdir(tmp_path / "logs") == ["program"]
