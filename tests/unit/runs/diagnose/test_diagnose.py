"""The diagnosis of a run from its folder: logs, records, clocks, dumps; and of files."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders

from hpcenv.records.facts import Facts, Network
from hpcenv.records.files import save_record
from hpcenv.records.manifest import Expectation
from hpcenv.records.network import PortErrors
from hpcenv.records.outcome import RankExit
from hpcenv.records.run_folder import RunFolder
from hpcenv.runs.diagnose.diagnose import FailureDiagnosis, diagnose, moment_of
from hpcenv.runs.diagnose.text import next_lines, render
from hpcenv.runs.diagnose.ticket import redact, write_ticket

LOGS = Path(__file__).resolve().parents[3] / "logs"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
Run = Callable[..., RunFolder]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Make a local run on two nodes with two ranks each, which failed."""

    def make(log: str = "", *, ranks: tuple[RankExit, ...] = (), **manifest: Any) -> RunFolder:
        folder = folders.make_run(
            tmp_path / "runs", "a", "local-1", cluster="local", nodes=2, nproc_per_node=2, **manifest
        )
        folders.start(folder, ["n1", "n2"], nproc=2, job_id="local-1")
        folders.end(folder, "n1", 143, asked_to_end="SIGTERM", asked_at=1.9)
        folders.end(folder, "n2", 1, ranks=ranks)
        folders.write(folder.finished, status=1, time=3.0)
        folder.log.write_text(log)
        return folder

    return make


def rank(number: int, message: str = "", traceback: str = "") -> RankExit:
    return RankExit(
        rank=number, local_rank=number % 2, pid=5, status=1, ended=1.5, message=message, traceback=traceback,
        source="stderr", log=f"ranks/n2/x/attempt_0/{number % 2}/stderr.log",
    )  # fmt: skip


def of(tmp_path: Path, *words: str) -> FailureDiagnosis:
    (found,) = diagnose(tmp_path, words or ("a",), environ={}, runs="runs")
    return found.diagnosis


def test_the_rank_that_failed_first_goes_before_the_first_line(run: Run, tmp_path: Path) -> None:
    run(f"[0] RuntimeError: mat1 and mat2 shapes cannot be multiplied\n[3] {OOM}\n", ranks=(rank(3),))
    diagnosis = of(tmp_path)
    assert diagnosis.cause is not None
    assert (diagnosis.cause.pattern, diagnosis.cause.rank, diagnosis.cause.node) == ("gpu-out-of-memory", 3, "n2")
    assert (diagnosis.cause.file, diagnosis.cause.line) == ("job.log", 2)
    assert [one.pattern for one in diagnosis.others] == ["shape-mismatch"]


@pytest.mark.parametrize(
    ("log", "pattern"),
    [
        # Cancelled, perhaps because the other ranks hung.
        ("[1] train.py: error: unrecognized arguments: --warmup 10\n{}\n", "script-arguments"),
        # What ranks say when they are ended.
        ("{}\n[1] RuntimeError: mat1 and mat2 shapes cannot be multiplied\n", "slurm-cancelled"),
    ],
)
def test_what_ended_a_rank_before_the_job_was_cancelled_is_the_cause(
    run: Run, tmp_path: Path, log: str, pattern: str
) -> None:
    folder = run(log.format("slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-23T15:00:00 ***"))
    folders.end(folder, "n2", 143, asked_to_end="SIGTERM", asked_at=1.9)
    folders.write(folder.finished, status=143, time=3.0, cancelled=True)
    cause = of(tmp_path).cause
    assert cause is not None
    assert cause.pattern == pattern


def test_without_records_the_first_line_counts(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text(f"[0] RuntimeError: mat1 and mat2 shapes cannot be multiplied\n[3] {OOM}\n")
    cause = of(tmp_path, "x.log").cause
    assert cause is not None
    assert cause.pattern == "shape-mismatch"


def test_the_ranks_own_files_are_read_where_the_log_says_nothing(run: Run, tmp_path: Path) -> None:
    folder = run("[3] step 4\n", ranks=(rank(3),))
    path = folder.ranks / "n2/x/attempt_0/1/stderr.log"
    path.parent.mkdir(parents=True)
    path.write_text(f"{OOM}\n")
    cause = of(tmp_path).cause
    assert cause is not None
    assert (cause.pattern, cause.rank, cause.node) == ("gpu-out-of-memory", 3, "n2")
    assert cause.file == "ranks/n2/x/attempt_0/1/stderr.log"


def test_the_records_are_read_where_no_log_is_left(run: Run, tmp_path: Path) -> None:
    traceback = 'Traceback (most recent call last):\n  File "/p/train.py", line 3, in <module>\n    f()\nKeyError: 1'
    folder = run(ranks=(rank(3, "KeyError: 1", traceback),))
    folder.log.unlink()
    diagnosis = of(tmp_path)
    assert diagnosis.cause is not None
    assert (diagnosis.cause.pattern, diagnosis.cause.rank, diagnosis.cause.code) == (
        "python-exception",
        3,
        "train.py:3",
    )
    assert diagnosis.cause.file == "the records of the run"
    assert diagnosis.logs[0].problem == "No such file or directory"


def test_a_kill_for_lack_of_memory_is_known_from_the_records(run: Run, tmp_path: Path) -> None:
    folder = run("[3] step 4\n")
    killed = replace(rank(3), status=137, signal="SIGKILL")
    folders.end(folder, "n2", 1, ranks=(killed,), oom_kills=1)
    diagnosis = of(tmp_path)
    assert diagnosis.cause is not None
    assert (diagnosis.cause.pattern, diagnosis.cause.node, diagnosis.cause.line) == ("slurm-oom-kill", "n2", 0)
    assert next_lines(diagnosis)[0].startswith("fix: Ask for more with --mem")


@pytest.mark.parametrize("finished", [True, False])
def test_a_node_that_was_lost_is_the_cause_and_not_the_time_limit(run: Run, tmp_path: Path, finished: bool) -> None:
    """Recorded on the testbed (tests/cluster/test_faults.py); without `finished`, as an older hpcenv left it."""
    lines = (LOGS / "failed" / "node-no-record.log").read_text().splitlines(keepends=True)
    limit = "slurmstepd-n1: error: *** JOB 1 ON n1 CANCELLED AT 2026-11-25T23:35:58 DUE TO TIME LIMIT ***\n"
    folder = run("".join(lines if finished else [*(one for one in lines if "left no record" not in one), limit]))
    lost = "RuntimeError: Connection closed by peer [10.0.0.12]:7818"
    folders.end(folder, "n1", 1, ranks=(replace(rank(1, lost), log=""),))
    folder.exit_of("n2").unlink()
    cause = of(tmp_path).cause
    assert cause is not None
    assert (cause.pattern, cause.node, cause.owner) == ("node-no-record", "n2", "node")


def test_errors_of_rdma_ports_are_told_with_node_port_and_number(run: Run, tmp_path: Path) -> None:
    folder = run("[3] step 4\n")
    down = PortErrors(device="mlx5_3", port=1, counter="link_downed", grown=2, many=True)
    few = replace(down, counter="symbol_error", grown=3, many=False)
    folders.end(folder, "n1", 1, port_errors=(down, few))
    folders.end(folder, "n2", 1, port_errors_unknown="no error counter of mlx5_0:1 can be read")
    notes = [note for note in of(tmp_path).notes if "RDMA" in note]
    assert notes[0].startswith("node n1: RDMA errors while its ranks ran: mlx5_3:1 link_downed +2 [node: ib.errors]; ")
    assert "--exclude NODE" in notes[0] and "symbol_error" not in notes[0]
    assert notes[1] == "node n2: whether RDMA errors grew is unknown: no error counter of mlx5_0:1 can be read"


def test_a_rank_that_was_killed_goes_before_what_others_say_of_it(run: Run, tmp_path: Path) -> None:
    """As seen: rank 1 of two is killed while rank 0 connects to it."""
    killed = replace(rank(3), status=137, signal="SIGKILL")
    run(
        "[0] [rank0]: RuntimeError: mat1 and mat2 shapes cannot be multiplied\n"
        "[0] RuntimeError: Gloo connectFullMesh failed with [/p/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
        "Connection closed by peer [127.0.0.1]:168.\n"
        "hpcenv: node n2: rank 3 ended with SIGKILL\n",
        ranks=(killed,),
    )
    diagnosis = of(tmp_path)
    assert diagnosis.cause is not None
    assert (diagnosis.cause.pattern, diagnosis.cause.rank, diagnosis.cause.line) == ("rank-killed", 3, 3)
    assert [one.pattern for one in diagnosis.others] == ["shape-mismatch", "gloo-peer-closed"]


def test_a_signal_that_no_log_names_is_known_from_the_records(run: Run, tmp_path: Path) -> None:
    run("[0] x\n", ranks=(replace(rank(3), status=139, signal="SIGSEGV"),))
    cause = of(tmp_path).cause
    assert cause is not None
    assert (cause.pattern, cause.rank, cause.node, cause.file) == ("rank-segfault", 3, "n2", "the records of the run")


def test_no_known_pattern_is_said_honestly(run: Run, tmp_path: Path) -> None:
    run("[3] the program ended\n", ranks=(rank(3),))
    diagnosis = of(tmp_path)
    assert (diagnosis.outcome, diagnosis.ok, diagnosis.cause) == ("no-known-pattern", False, None)
    text = render(diagnosis)
    assert text.startswith(f"no known pattern: none of {diagnosis.patterns} patterns is in the logs\n  first failure: ")
    assert next_lines(diagnosis) == []


def test_consequences_alone_are_no_cause(run: Run, tmp_path: Path) -> None:
    run("[0] x [pair.cc:5] gloo Connection closed by peer [n2]:4\n", ranks=(rank(3),))
    assert render(of(tmp_path)).startswith("cause unknown: the logs show only consequences of another failure")


def test_a_run_that_completed_is_not_diagnosed(run: Run, tmp_path: Path) -> None:
    folder = run(f"{OOM}\n")
    for node in ("n1", "n2"):
        folders.end(folder, node, 0)
    folders.write(folder.finished, status=0, time=3.0)
    diagnosis = of(tmp_path)
    assert diagnosis.outcome == "no-failure"
    assert render(diagnosis) == "a: the run completed, and no failure is recorded"


def test_the_version_of_torch_in_the_lockfile_chooses_patterns(run: Run, tmp_path: Path) -> None:
    expected = Expectation(field="torch.version", value="2.15.0+cu132", severity="must", origin="l")
    log = (LOGS / "failed" / "torch-watchdog-stuck.log").read_text()
    run(log, ranks=(rank(3),), expectations=(expected,))
    diagnosis = of(tmp_path)
    assert (diagnosis.torch, diagnosis.outcome) == ("2.15.0+cu132", "no-known-pattern")


def test_a_wrong_clock_is_corrected_and_named(run: Run, tmp_path: Path) -> None:
    folder = run("x\n")
    for node, ahead in (("n1", 0.0), ("n2", 0.0), ("n3", 100.0)):
        facts = Facts(
            schema=1, run="a", node=node, attempt=0, values={}, unknown={}, network=Network(first_node="n1"),
            written=1_000_000.0 + ahead,
        )  # fmt: skip
        save_record(facts, folder.facts_of(node))
        os.utime(folder.facts_of(node), (1_000_000.5, 1_000_000.5))
    for node, minute in (("n1", 11), ("n3", 12)):
        path = folder.ranks / f"{node}/x/attempt_0/0/stderr.log"
        path.parent.mkdir(parents=True)
        # The line of n3 came 40 seconds earlier: its clock is 100 seconds ahead.
        path.write_text(
            f"2026-11-22 10:{minute}:00 x\n{OOM if node == 'n3' else 'RuntimeError: mat1 and mat2 shapes cannot be multiplied'}\n"
        )
    diagnosis = of(tmp_path)
    assert diagnosis.cause is not None
    assert (diagnosis.cause.pattern, diagnosis.cause.node) == ("gpu-out-of-memory", "n3")
    assert diagnosis.notes == ("the clock of node n3 is 100 s ahead: its times are corrected to compare them",)


def test_the_rank_that_failed_first_by_true_clocks(run: Run, tmp_path: Path) -> None:
    folder = run(f"[0] {OOM}\n[3] RuntimeError: mat1 and mat2 shapes cannot be multiplied\n")
    folders.end(folder, "n1", 1, ranks=(replace(rank(0, "OOM", "Traceback"), ended=50.0),))
    folders.end(folder, "n2", 1, ranks=(replace(rank(3, "shapes", "Traceback"), ended=110.0),))
    for node, ahead in (("n1", 0.0), ("n2", 100.0), ("n3", 0.0)):
        facts = Facts(
            schema=1, run="a", node=node, attempt=0, values={}, unknown={}, network=Network(first_node="n1"),
            written=1_000_000.0 + ahead,
        )  # fmt: skip
        save_record(facts, folder.facts_of(node))
        os.utime(folder.facts_of(node), (1_000_000.5, 1_000_000.5))
    diagnosis = of(tmp_path)
    assert diagnosis.cause is not None
    assert (diagnosis.cause.pattern, diagnosis.cause.rank) == ("shape-mismatch", 3)
    assert diagnosis.failure.startswith("node n2, rank 3")


def test_files_are_ordered_by_their_times_and_the_answer_says_so(tmp_path: Path) -> None:
    (tmp_path / "1.log").write_text("2026-11-22 10:12:00 x\nRuntimeError: mat1 and mat2 shapes cannot be multiplied\n")
    (tmp_path / "2.log").write_text(f"2026-11-22 10:11:00 x\n{OOM}\n")
    diagnosis = of(tmp_path, "1.log", "2.log")
    assert diagnosis.cause is not None
    assert (diagnosis.cause.pattern, diagnosis.cause.file) == ("gpu-out-of-memory", "2.log")
    assert "nodes' clocks" in diagnosis.notes[0]


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("1970-01-01 00:01:00.5", 60.5), ("1970-01-01T00:01:00,25", 60.25), ("1970-01-01_00:01:00", 60.0),
        ("0101 00:01:00.5", 60.5), ("102 00:00:00.0", 86400.0), ("", None), ("9999 99:99:99.9", None),
    ],
)  # fmt: skip
def test_the_times_of_logs(text: str, moment: float | None) -> None:
    assert moment_of(text, year=1970) == moment


# -- flight recorder ----------------------------------------------------------------------


def test_dumps_say_which_rank_did_not_come(run: Run, tmp_path: Path) -> None:
    """The two dumps are recorded: gloo, torch 2.13, rank 1 left out the fourth operation."""
    folder = run("x\n", ranks=(rank(3),))
    shutil.copytree(LOGS / "flight", folder.flight_of(2))
    shutil.copytree(LOGS / "flight", folder.flight_of(1))
    (folder.flight_of(1) / "rank_1").write_bytes(b"\x80 of an earlier attempt")
    expected = (
        "flight recorder, group default_pg: rank 1 stopped after operation 3 (gloo:all_reduce); "
        "rank 0 went on to operation 4 (gloo:all_reduce)"
    )
    assert of(tmp_path).notes == (expected,)


def test_dumps_with_different_operations(tmp_path: Path) -> None:
    for number, name in enumerate(("nccl:all_reduce", "nccl:broadcast", "nccl:all_reduce")):
        entry = {"process_group": ("0", "tp"), "collective_seq_id": 7, "profiling_name": name, "is_p2p": False}
        (tmp_path / f"rank_{number}").write_bytes(pickle.dumps({"entries": [entry]}))
    (note,) = of(tmp_path, "rank_0", "rank_1", "rank_2").notes
    assert note.endswith("in operation 7: ranks 0, 2 called nccl:all_reduce; rank 1 called nccl:broadcast")


@pytest.mark.parametrize("data", [b"\x80\x02cos\nsystem\n.", b"\x80\x05", b"\x80\x02]q\x00.", b"\x80" + b"(" * 100_000])
def test_a_hostile_dump_runs_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "rank_0").write_bytes(data)
    assert of(tmp_path, "rank_0").notes[0].startswith("flight recorder: rank_0 cannot be read: ")


# -- the ticket ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('File "/home/alice/My Projects/x.py", line 3', 'File ".../x.py", line 3'),
        ("cannot open /scratch/alice/data/train.bin: No", "cannot open .../train.bin: No"),
        ("~alice/x ~/a/b.txt", ".../x .../b.txt"),
        ("/usr/lib/libc.so.6 /dev/shm/x /etc/hosts", "/usr/lib/libc.so.6 /dev/shm/x /etc/hosts"),
        ("3/4 steps, a/b, n1:29500", "3/4 steps, a/b, n1:29500"),
        ("--data=/scratch/alice/d --lr 3e-4", "--data=.../d --lr 3e-4"),
        ("http://alice:pw@proxy:3128/x", "http://***@proxy:3128/x"),
        ("HF_TOKEN=abcdef x", "HF_TOKEN=*** x"),
        ("api_key: 12345, x", "api_key: ***, x"),
        ("got hf_abcdefghijkl", "got ***"),
        ("Authorization: Bearer abcdefghij.klm", "Authorization: ***"),
        ("job of alice on n1", "job of USER on n1"),
    ],
)  # fmt: skip
def test_what_a_ticket_leaves_out(text: str, shown: str) -> None:
    assert redact(text, user="alice") == shown


def test_the_ticket_of_a_run(run: Run, tmp_path: Path) -> None:
    command = ("hpcenv", "submit", "/home/alice/p/train.py", "--env", "API_KEY=s3cr3t", "--", "--data", "/home/alice/d")
    folder = run(f"[3] OSError: /home/alice/d: {OOM}\n", ranks=(rank(3),), command=command)
    facts = Facts(
        schema=1, run="a", node="n2", attempt=0, values={"host.driver-version": "580.95", "torch.version": "2.13.0"},
        unknown={"host.gpu-models": "NVML does not answer"}, network=Network(first_node="n1"),
    )  # fmt: skip
    save_record(facts, folder.facts_of("n2"))
    (found,) = diagnose(tmp_path, ("a",), environ={}, runs="runs")
    text = write_ticket(found.diagnosis, found.run, found.status, user="alice").text
    for part in (
        "job ids: local-1; attempt 0", "node list: n1,n2", "n2: exit status 1; failed: rank 3",
        "host.driver-version: 580.95", "host.gpu-models: unknown: NVML does not answer",
        "shape: 2 nodes, 0 GPUs and 2 ranks per node", "cause (user): A rank needs more GPU memory",
        "environment: match; 6 fields compared on 2 nodes before the start", "## To repeat it",
    ):  # fmt: skip
        assert part in text, text
    for private in ("alice", "s3cr3t", str(tmp_path)):
        assert private not in text, text
