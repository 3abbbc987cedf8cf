"""The pages of `status`, `report` and `list`, recorded whole in tests/golden: review every text as a diff."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders

from hpcenv.records.files import save_record
from hpcenv.records.outcome import NodeExit, RankExit
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import Finding, NodeVerdict, Verdict

GOLDEN = Path(__file__).resolve().parents[2] / "golden"


@pytest.fixture
def project(tmp_path: Path, fake_slurm: Any) -> Path:
    """A project with a run that trains, one whose rank failed, one that the gate rejected, and one that waits."""
    runs = tmp_path / "runs"
    running = folders.make_run(runs, "running", "7", submitted=5.0, nodes=2, nproc_per_node=2)
    folders.start(running, ["n1", "n2"], nproc=2)
    failed = folders.make_run(runs, "failed", "8", submitted=4.0, nodes=2, nproc_per_node=2)
    folders.start(failed, ["n1", "n2"], nproc=2, job_id="8")
    _fail(failed)
    rejected = folders.make_run(runs, "rejected", "9", submitted=3.0, nodes=2, lockfile="lockfiles/default.lock.toml")
    _reject(rejected)
    folders.make_run(runs, "waiting", "10", submitted=2.0, nodes=2)
    folders.make_sweep(runs, "sweep", ["11_0", "11_1"], submitted=1.0, values=[{"lr": "1e-3"}, {"lr": "3e-4"}])
    fake_slurm.answers(
        "squeue",
        "7|RUNNING|None|n[1-2]|1:02\n10|PENDING|Priority||0:00\n11_0|RUNNING|None|n1|0:30\n11_1|PENDING|Resources||0:00\n",
    )
    fake_slurm.answers("sacct", "8|FAILED|7:0|n[1-2]|00:10:00\n9|FAILED|90:0|n[1-2]|00:00:09\n")
    return tmp_path


def _fail(run: RunFolder) -> None:
    """Rank 3 on n2 fails; n1 is ended because of it."""
    rank = RankExit(
        rank=3, local_rank=1, pid=5, status=7, ended=601.0, message="ValueError: loss is nan",
        traceback='Traceback (most recent call last):\n  File "train.py", line 12, in <module>\nValueError: loss is nan',
        source="error-file", log="ranks/n2/8.0_x/attempt_0/1/stderr.log",
    )  # fmt: skip
    values = {"schema": 1, "run": "failed", "attempt": 0, "signal": "", "started": 1.0, "ended": 602.0}
    save_record(NodeExit(**values, node="n2", status=7, ranks=(rank,)), run.exit_of("n2"))
    ended = NodeExit(**values, node="n1", status=143, asked_to_end="SIGTERM", asked_at=601.5)
    save_record(ended, run.exit_of("n1"))
    folders.write(run.finished, status=7, time=603.0)
    run.log.write_text("[3] step 41  loss 2.1\n[3] ValueError: loss is nan\n")


def _reject(run: RunFolder) -> None:
    """The SIF on n2 differs from the lockfile."""
    folders.write(run.started, attempt=0, nodes=["n1", "n2"], job_id="9", node="n1", time=1.0)
    finding = Finding(
        node="n2", field="container.sif.sha256", severity="must", result="mismatch", locked="a" * 64, found="b" * 64
    )
    nodes = (
        NodeVerdict(node="n1", result="match", compared=40),
        NodeVerdict(node="n2", result="mismatch", compared=40),
    )
    verdict = Verdict(
        schema=1, run="rejected", attempt=0, result="mismatch", nodes=nodes, findings=(finding,), rendezvous=None,
        settings={},
    )  # fmt: skip
    save_record(verdict, run.verdict)
    folders.write(run.finished, status=90, time=10.0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("status-running", ("status", "running")),
        ("status-failed", ("status", "failed")),
        ("report-failed", ("report", "failed")),
        ("report-rejected", ("report", "rejected")),
        ("diagnose-failed", ("diagnose", "failed")),
        ("list", ("list",)),
        ("list-sweep", ("list", "sweep")),
    ],
)
def test_the_page_is_as_recorded(
    project: Path, fake_slurm: Any, hpcenv: Any, name: str, words: tuple[str, ...]
) -> None:
    """HPCENV_UPDATE_GOLDEN=1 pytest records it again."""
    done = hpcenv(*words, "--runs-dir", "runs", cwd=project, environ=fake_slurm.environ)
    # A new pattern of a failure changes the number, not the page.
    text = re.sub(
        r"\b[0-9]+ patterns$", "N patterns", done.stdout.replace(str(project), "/project"), flags=re.MULTILINE
    )
    assert (done.status, done.stderr) == (0, "")
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("HPCENV_UPDATE_GOLDEN"):
        path.write_text(text)
    recorded = path.read_text()
    diff = difflib.unified_diff(recorded.splitlines(), text.splitlines(), "recorded", "rendered", lineterm="")
    assert text == recorded, "\n".join(diff)
