"""The report of runs that failed: from the records in their folders, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders

from hpcenv.records.files import save_record, write_text
from hpcenv.records.manifest import Environment, Manifest
from hpcenv.records.network import PortErrors
from hpcenv.records.outcome import NodeExit, RankExit
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.submission import Submission
from hpcenv.records.verdict import NodeVerdict, Verdict
from hpcenv.runs.report import last_metrics, report
from hpcenv.runs.report_text import RunReport

Make = Callable[..., RunFolder]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Make the folder of a local run of two nodes that has ended."""

    def run(name: str = "a", status: int = 7) -> RunFolder:
        folder = RunFolder(tmp_path / "runs" / name)
        manifest = Manifest(
            schema=1, run=name, run_folder=str(folder.path), cluster="local", nodes=2, nproc_per_node=2, gpus_per_node=0,
            cpus_per_task=0, backend="gloo", environment=Environment(kind="host", python="/p"), script="/s.py", script_sha256="0",
            args=(), workdir="/", settings=(), expectations=(), packages=(), probe_level="full", lockfile="l",
            lockfile_sha256="0", hpcenv_version="0",
        )  # fmt: skip
        save_record(manifest, folder.manifest)
        save_record(
            Submission(schema=1, run=name, cluster="local", job_id="local-1", submitted=1.0, command=("hpcenv",)),
            folder.submission,
        )
        write_text(json.dumps({"schema": 1, "status": status, "time": 1.0}), folder.finished)
        return folder

    return run


def put(folder: RunFolder, *records: NodeExit, launched: tuple[str, ...] = (), nodes: int = 2) -> None:
    names = tuple(f"n{number}" for number in range(1, nodes + 1))
    made = Verdict(
        schema=1, run="a", attempt=0, result="match", findings=(), rendezvous=None, settings={}, launched=launched,
        nodes=tuple(NodeVerdict(node=name, result="match", compared=3) for name in names),
    )  # fmt: skip
    save_record(made, folder.verdict)
    for record in records:
        save_record(record, folder.exit_of(record.node))


def ended(node: str, status: int, *ranks: RankExit, **changes: Any) -> NodeExit:
    return NodeExit(
        schema=1,
        run="a",
        node=node,
        attempt=0,
        status=status,
        signal="",
        started=0.0,
        ended=9.0,
        ranks=ranks,
        **changes,
    )


def failed(rank: int, status: int, message: str = "", at: float = 5.0) -> RankExit:
    traceback = f"Traceback (most recent call last):\n{message}" if message else ""
    return RankExit(
        rank=rank, local_rank=rank % 2, pid=1, status=status, ended=at, message=message, traceback=traceback,
        source="stderr" if message else "", log="ranks/n2/x/attempt_0/1/stderr.log",
    )  # fmt: skip


def of(tmp_path: Path) -> RunReport:
    found = report(tmp_path, "a", environ={}, runs="runs")
    assert isinstance(found, RunReport)
    return found


def test_the_first_failure_comes_first_in_text_and_json(make: Make, tmp_path: Path, hpcenv: Any) -> None:
    put(
        make(),
        ended("n1", 143, asked_to_end="SIGTERM", asked_at=6.0),
        ended("n2", 7, failed(3, 7, "E: x"), failed(2, 1)),
    )
    text = hpcenv("report", "a", "--runs-dir", "runs", cwd=tmp_path).stdout
    assert text.splitlines()[:4] == [
        "first failure: node n2, rank 3, exit 7, E: x; 3 others were cleaned up",
        "  Traceback (most recent call last):",
        "  E: x",
        f"  log: {tmp_path}/runs/a/ranks/n2/x/attempt_0/1/stderr.log",
    ]
    data = json.loads(hpcenv("report", "a", "--runs-dir", "runs", "--json", cwd=tmp_path).stdout)["data"]
    told = data["failure"]
    assert (told["node"], told["rank"], told["status"], told["others"], told["cause"]) == ("n2", 3, 7, 3, "rank")


def test_errors_of_rdma_ports_while_it_ran_are_told(make: Make, tmp_path: Path, hpcenv: Any) -> None:
    down = PortErrors(device="mlx5_3", port=1, counter="link_downed", grown=2, many=True)
    few = PortErrors(device="mlx5_3", port=1, counter="symbol_error", grown=3, many=False)
    put(make(), ended("n1", 0, port_errors=(down, few)), ended("n2", 1, port_errors_unknown="no counter"))
    text = hpcenv("report", "a", "--runs-dir", "runs", cwd=tmp_path).stdout
    assert "            RDMA errors while it ran (ib.errors): mlx5_3:1 link_downed +2\n" in text
    assert "            RDMA errors unknown: no counter\n" in text
    data = json.loads(hpcenv("report", "a", "--runs-dir", "runs", "--json", cwd=tmp_path).stdout)["data"]
    (errors,) = [node["port_errors"] for node in data["status"]["exits"] if node["node"] == "n1"]
    assert [(one["counter"], one["grown"]) for one in errors] == [("link_downed", 2), ("symbol_error", 3)]


def test_nodes_that_did_not_train_are_not_missed(make: Make, tmp_path: Path) -> None:
    put(make(), ended("n1", 7, failed(0, 7)), ended("n3", 0), launched=("n1", "n3"), nodes=3)
    found = of(tmp_path).failure
    assert found is not None
    assert found.notes == ()


def test_attempts_before_are_told_too(make: Make, tmp_path: Path, hpcenv: Any) -> None:
    folder = make(status=0)
    put(folder, ended("n1", 0), ended("n2", 0))
    for attempt, records in (
        ("0", (ended("n1", 0, stopped="preemption", saved=True), ended("n2", 0, stopped="preemption", saved=True))),
        ("2", (ended("n1", 1, failed(0, 1, "E: y")),)),
        ("10", (ended("n1", 0), ended("n2", 0))),
    ):
        put(RunFolder(folder.attempts / attempt), *records)
    (folder.attempts / "rubbish").mkdir()
    found = of(tmp_path)
    assert found.failure is None
    assert found.ok
    assert [(one.attempt, one.failure.headline) for one in found.earlier] == [
        ("0", "the job was preempted; the script saved its state"),
        ("2", "node n1, rank 0, exit 1, E: y"),
    ]
    text = hpcenv("report", "a", "--runs-dir", "runs", cwd=tmp_path).stdout
    assert text.startswith("attempt 0: the job was preempted; the script saved its state\nattempt 2: node n1, rank 0, ")
    assert "  node n2: no record of its end\n" in text


@pytest.mark.parametrize("at", [5.0, 7.0], ids=["before the others are asked to end", "after it"])
@pytest.mark.parametrize("where", ["n1", "n2"])
def test_a_rank_that_got_sigterm_is_not_the_reason_where_slurm_lost_a_node(
    make: Make, tmp_path: Path, where: str, at: float
) -> None:
    """Without slurmd n2 trains on until the attempt ends there, and may write its record as one that failed."""
    folder = make(status=143)
    attempt = RunFolder(folder.attempts / "0")
    got = RankExit(rank=3, local_rank=1, pid=1, status=143, signal="SIGTERM", ended=at)
    other = {"n1": "n2", "n2": "n1"}[where]
    put(attempt, ended(where, 1, got), ended(other, 143, asked_to_end="SIGTERM", asked_at=6.0))
    end: dict[str, Any] = {"schema": 1, "status": 143, "time": 9.0, "down": {"n2": "Not responding"}}
    write_text(json.dumps(end), attempt.finished)
    assert [one.failure.headline.partition(";")[0] for one in of(tmp_path).earlier] == [
        "node failure: node n2, says Slurm: Not responding"
    ]
    write_text(json.dumps(end | {"down": {}}), attempt.finished)
    assert [one.failure.headline.partition(";")[0] for one in of(tmp_path).earlier] == [
        f"node {where}, rank 3, SIGTERM"
    ]


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 1, "nodes": 3}', "\x00\xff", "[" * 100000])
def test_records_that_cannot_be_read_are_as_good_as_none(make: Make, tmp_path: Path, text: str) -> None:
    folder = make()
    put(folder, ended("n1", 0))
    put(RunFolder(folder.attempts / "0"))
    for path in (
        folder.exit_of("n2"),
        folder.attempts / "0" / "verdict.json",
        folder.attempts / "0" / "exits" / "n1.json",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="latin-1")
    found = of(tmp_path)
    assert found.failure is not None
    assert found.failure.headline == "node n2 left no record of how the training ended"
    assert found.earlier == ()


def test_what_stands_in_a_log_cannot_steer_a_terminal(make: Make, tmp_path: Path, hpcenv: Any) -> None:
    make().log.write_bytes(b"\x1b]0;x\x07 \x1b[2J" + b"y" * 5000 + b"\n")
    text = hpcenv("report", "a", "--runs-dir", "runs", cwd=tmp_path).stdout
    assert all(line.isprintable() for line in text.splitlines())
    assert max(len(line) for line in text.splitlines()) < 500


def test_each_job_of_a_chain_is_told_with_what_it_did(tmp_path: Path, fake_slurm: Any, hpcenv: Any) -> None:
    folder = folders.make_run(tmp_path / "runs", "c", "7", chain=("7", "8", "9"))
    for attempt, job_id, status in ((0, "7", 1), (1, "7", 0), (2, "8", 3)):
        aside = RunFolder(folder.attempts / str(attempt))
        folders.start(aside, ["n1"], attempt=attempt, job_id=job_id)
        folders.end(aside, "n1", status, ranks=(failed(0, status, f"E: {job_id}"),) if status else ())
    folders.start(folder, ["n1"], attempt=3, job_id="9")
    fake_slurm.answers("squeue", "9|RUNNING|None|n1|0:10\n")
    fake_slurm.answers("sacct", "7|COMPLETED|0:0|n1|1\n8|FAILED|3:0|n1|1\n")
    done = hpcenv("report", "c", "--runs-dir", "runs", cwd=tmp_path, environ=fake_slurm.environ)
    said = " ".join(done.stdout.split())
    assert "attempt 0, link 1 of 3, job 7: node n1, rank 0, exit 1, E: 7" in said
    assert "attempt 2, link 2 of 3, job 8: node n1, rank 0, exit 3, E: 8" in said
    assert "earlier attempt 1 (link 1 of 3, job 7): match; n1 ended with 0" in said
    assert "chain link 3 of 3 jobs: 7, 8, 9" in said
    data = hpcenv("report", "c", "--runs-dir", "runs", "--json", cwd=tmp_path, environ=fake_slurm.environ).envelope[
        "data"
    ]
    assert [(one["attempt"], one["link"]) for one in data["earlier"]] == [
        ("0", "link 1 of 3, job 7"), ("2", "link 2 of 3, job 8"),
    ]  # fmt: skip


@pytest.mark.parametrize(("count", "lines"), [(0, ()), (2, ("b", "c")), (9, ("a", "b", "c"))])
def test_the_end_of_the_log(make: Make, tmp_path: Path, count: int, lines: tuple[str, ...]) -> None:
    make().log.write_bytes(b"a\nb\nc\n")
    found = report(tmp_path, "a", environ={}, runs="runs", lines=count)
    assert isinstance(found, RunReport)
    assert found.last_lines == lines


# -- sweeps -------------------------------------------------------------------------------

SWEPT = [{"lr": lr, "seed": seed} for lr in ("1e-3", "3e-4") for seed in ("0", "1")]


@pytest.fixture
def swept(tmp_path: Path, fake_slurm: Any) -> Path:
    """A sweep of which one run ended well, one failed on a rank, one was rejected and one waits."""
    folder = folders.make_sweep(tmp_path / "runs", "sw", [f"9_{n}" for n in range(4)], values=SWEPT)
    runs = [RunFolder(folder / f"{n:04}") for n in range(4)]
    for run, status in zip(runs[:3], (0, 7, 90), strict=True):
        folders.start(run, ["n1"], job_id="9")
        folders.write(run.finished, status=status, time=1.0)
    folders.write(runs[2].verdict, result="mismatch")
    folders.end(runs[1], "n1", 7, ranks=(failed(0, 7, "ValueError: lr " + "x" * 100),))
    fake_slurm.answers("squeue", "9_3|PENDING|JobArrayTaskLimit||0:00\n")
    fake_slurm.answers("sacct", "".join(f"9_{n}|{w}|0:0|n1|00:00:0{n}\n" for n, w in ((0, "COMPLETED"), (1, "FAILED"))))
    return tmp_path


def test_a_sweep_is_a_table_of_its_values_and_what_became_of_them(swept: Path, fake_slurm: Any, hpcenv: Any) -> None:
    done = hpcenv("report", "sw", "--runs-dir", "runs", cwd=swept, environ=fake_slurm.environ)
    head, *lines = done.stdout.splitlines()[1:7]
    rows = [line for line in lines if not line.startswith(" ")]
    assert head.split() == ["RUN", "lr", "seed", "STATE", "EXIT", "ELAPSED", "FIRST", "FAILURE"]
    assert [row.split()[:6] for row in rows] == [
        ["0000", "1e-3", "0", "completed", "0", "00:00:00"],
        ["0001", "1e-3", "1", "failed", "7", "00:00:01"],
        ["0002", "3e-4", "0", "rejected", "90", "-"],
        ["0003", "3e-4", "1", "pending", "-", "0:00"],
    ]
    assert "node n1, rank 0, exit 7" in rows[1]
    assert lines[lines.index(rows[2]) + 1] == "      before training: a node differs from the lockfile", (
        "below, for it does not fit"
    )
    assert max(len(line) for line in lines) <= 80
    assert "0001, first failure: node n1, rank 0, exit 7, ValueError: lr" in done.stdout


def test_a_sweep_as_data_has_the_values_whole(swept: Path, fake_slurm: Any, hpcenv: Any) -> None:
    long = "x" * 300
    path = swept / "runs" / "sw" / "sweep.json"
    path.write_text(path.read_text().replace('"3e-4"', f'"{long}"'))
    done = hpcenv("report", "sw", "--runs-dir", "runs", "--json", cwd=swept, environ=fake_slurm.environ)
    data = done.envelope["data"]
    assert data["names"] == ["lr", "seed"]
    assert [run["values"] for run in data["runs"]][2] == {"lr": long, "seed": "0"}
    assert [(run["state"], run["exit_status"]) for run in data["runs"]] == [
        ("completed", 0), ("failed", 7), ("rejected", 90), ("pending", None),
    ]  # fmt: skip
    assert data["failures"]["0001"]["status"] == 7
    for verb in ("report", "status", "list"):
        text = hpcenv(verb, "sw", "--runs-dir", "runs", cwd=swept, environ=fake_slurm.environ).stdout
        assert "xxx..." in text
        assert long not in text


def test_a_run_of_a_sweep_says_its_values(swept: Path, fake_slurm: Any, hpcenv: Any) -> None:
    folders.make_run(swept / "runs" / "sw", "0003", "9_3", element={"lr": "3e-4", "seed": "\x1b[2J"})
    done = hpcenv("report", "sw/0003", "--runs-dir", "runs", cwd=swept, environ=fake_slurm.environ)
    assert "  values    lr=3e-4, seed=\\x1b[2J\n" in done.stdout


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_what_runs_again_has_not_failed_yet(swept: Path, fake_slurm: Any, hpcenv: Any, state: str) -> None:
    again = RunFolder(swept / "runs" / "sw" / "0001")
    folders.write(again.started, attempt=0, nodes=["n1"], job_id="9", submitted_as="9_1", time=1.0)
    folders.make_run(swept / "runs" / "sw", "0001", "12_1")
    fake_slurm.answers("squeue", f"12_1|{state}|None|n1|0:01\n")
    report = ("report", "sw", "--runs-dir", "runs")
    text = hpcenv(*report, cwd=swept, environ=fake_slurm.environ).stdout
    row = next(line.split() for line in text.splitlines() if line.startswith("0001"))
    assert row == ["0001", "1e-3", "1", state.lower(), "-", "0:01"]
    assert "0001, first failure" not in text
    alone = hpcenv("report", "sw/0001", "--runs-dir", "runs", cwd=swept, environ=fake_slurm.environ).stdout
    assert alone.startswith("attempt 0: node n1, rank 0, exit 7")
    assert "verdict of attempt 0, before the job was requeued" in alone

    fake_slurm.answers("squeue", "")
    fake_slurm.answers("sacct", "12_1|CANCELLED|0:0|n1|00:00:00\n")
    text = hpcenv(*report, cwd=swept, environ=fake_slurm.environ).stdout
    assert "0001, first failure: the job was cancelled, before the training started" in text
    assert "exit 7" not in text


def test_a_value_cannot_steer_a_terminal(swept: Path, fake_slurm: Any, hpcenv: Any) -> None:
    path = swept / "runs" / "sw" / "sweep.json"
    path.write_text(path.read_text().replace('"3e-4"', '"\\u001b]0;x\\u0007"').replace('"seed"', '"\\u009b2J"'))
    for verb in ("report", "status", "list"):
        text = hpcenv(verb, "sw", "--runs-dir", "runs", cwd=swept, environ=fake_slurm.environ).stdout
        assert "]0;x" in text
        assert all(line.isprintable() for line in text.splitlines())


def test_runs_of_a_sweep_that_cannot_be_told_are_named(swept: Path, fake_slurm: Any, hpcenv: Any) -> None:
    (swept / "runs" / "sw" / "0000" / "submission.json").write_text("{")
    done = hpcenv("report", "sw", "--runs-dir", "runs", cwd=swept, environ=fake_slurm.environ)
    assert "note: 0000: " in done.stderr
    assert "is not JSON" in done.stderr
    (swept / "runs" / "sw" / "sweep.json").write_text("{")
    done = hpcenv("report", "sw", "--runs-dir", "runs", cwd=swept, environ=fake_slurm.environ)
    assert "their values are unknown" in done.stderr
    assert "0001" in done.stdout


@pytest.mark.parametrize("content", [None, "{", '{"schema": 1}'])
def test_a_run_whose_manifest_cannot_be_read_has_a_report(
    make: Make, tmp_path: Path, hpcenv: Any, content: str | None
) -> None:
    folder = make("damaged")
    folder.log.write_text("the last line\n")
    folder.manifest.unlink() if content is None else folder.manifest.write_text(content)
    done = hpcenv("report", "damaged", "--runs-dir", "runs", cwd=tmp_path)
    assert done.status == 0, done.stderr
    assert str(folder.manifest) in done.stdout
    assert "the job id is from submission.json" in done.stdout
    assert done.stdout.endswith("  the last line\n")
    data = hpcenv("report", "damaged", "--json", "--runs-dir", "runs", cwd=tmp_path).envelope["data"]
    assert data["manifest"] is None


@pytest.mark.parametrize(
    "line",
    [
        "[0] step 20  loss 2.4431  0.1 s",
        "[0] final loss 2.4431 (first 4.3812)",
        "Epoch 3: 100%| 12/12 [00:01<00:00, v_num=3, train_loss=0.31]",
        "{'loss': 0.5134, 'learning_rate': 1e-05, 'epoch': 2.99}",
        "[0] val/acc: 97.1%",
        "step 7 loss nan",
        "Acc@1 97.13",
        "recall f1_3 = 0.8",
        "map@100: .31",
    ],
)
def test_a_line_with_a_metric_is_found_behind_others(line: str) -> None:
    after = ["[0] saved", "hpcenv: node n1: loss 3", "error[internal]: loss 2"]
    assert last_metrics(["loss 9", line, *after]) == line


def test_a_log_without_a_metric_has_none() -> None:
    assert last_metrics(["[0] step 3", "ValueError: loss is nan", "map the file", "lossless 3"]) == ""
    assert last_metrics([]) == ""
