"""Every pattern finds its example log; logs of runs that went well give nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcenv.runs.diagnose.diagnose import FailureDiagnosis, diagnose_files
from hpcenv.runs.diagnose.patterns import read_patterns

LOGS = Path(__file__).resolve().parents[3] / "logs"
PATTERNS = {pattern.id: pattern for pattern in read_patterns()}
FAILED = sorted(path.stem for path in (LOGS / "failed").glob("*.log"))
HEALTHY = sorted(path.stem for path in (LOGS / "healthy").glob("*.log"))
# Its only line stands below the failures of all ranks, and is used to order them.
POINTER = "torchrun-first-failure"


def diagnosis_of(kind: str, name: str) -> FailureDiagnosis:
    return diagnose_files([LOGS / kind / f"{name}.log"], [f"{name}.log"])


def test_every_pattern_has_an_example_and_no_example_is_left_over() -> None:
    assert FAILED == sorted(PATTERNS)
    assert len(FAILED) >= 60


def test_every_example_says_where_it_is_from() -> None:
    for path in LOGS.glob("*/*.log"):
        assert path.read_text().startswith(
            (
                "# hpcenv example log: recorded with torch",
                "# hpcenv example log: recorded on the testbed",
                "# hpcenv example log: synthesised from the texts in: ",
            )
        ), path


def test_many_examples_are_real_and_no_healthy_one_is_made_up() -> None:
    first = [path.read_text().partition("\n")[0] for path in (LOGS / "failed").glob("*.log")]
    assert sum("recorded" in line for line in first) >= 40
    assert all("recorded" in (LOGS / "healthy" / f"{name}.log").read_text()[:60] for name in HEALTHY)


@pytest.mark.parametrize("name", [name for name in FAILED if PATTERNS[name].kind != "cascade"])
def test_a_failure_is_diagnosed_to_its_pattern_and_owner(name: str) -> None:
    diagnosis = diagnosis_of("failed", name)
    assert diagnosis.cause is not None
    assert (diagnosis.cause.pattern, diagnosis.cause.owner) == (name, PATTERNS[name].owner)
    assert diagnosis.ok
    assert diagnosis.cause.line > 1


@pytest.mark.parametrize("name", [name for name in FAILED if PATTERNS[name].kind == "cascade" and name != POINTER])
def test_a_consequence_alone_is_never_a_cause(name: str) -> None:
    diagnosis = diagnosis_of("failed", name)
    assert (diagnosis.outcome, diagnosis.cause) == ("consequences", None)
    assert name in {one.pattern for one in diagnosis.others}


# What scripts write that refuse their arguments: argparse, parser.error of a script, a rank behind torchrun's label, click.
REFUSALS = (
    "train.py: error: unrecognized arguments: --warmup 10",
    "train.py: error: one of the arguments --a --b is required",
    "[rank0]: train.py: error: --steps must be positive",
    "[default0]:__main__.py: error: ambiguous option: --l could match --lr, --log",
    "Error: No such option '--warmup'.",
    "Error: Missing option '--lr'.",
)
# srun ends the other tasks of a step when one fails (--kill-on-bad-exit), and says that the step was cancelled.
STEP_ENDED = """\
srun: error: n1: task 0: Exited with exit code 2
srun: Terminating StepId=12.1
slurmstepd: error: *** STEP 12.1 ON n1 CANCELLED AT 2026-11-23T15:00:00 ***
srun: error: n2: task 1: Terminated
"""


@pytest.mark.parametrize("line", REFUSALS)
def test_arguments_that_the_script_refuses_are_the_cause_not_the_step_that_srun_cancels_then(
    tmp_path: Path, line: str
) -> None:
    log = tmp_path / "job.log"
    log.write_text(f"usage: train.py [-h] [--lr LR]\n{line}\n{STEP_ENDED}")
    cause = diagnose_files([log], ["job.log"]).cause
    assert cause is not None
    assert (cause.pattern, cause.line) == ("script-arguments", 2)


def test_a_step_that_srun_cancels_after_a_task_failed_is_no_cause(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(f"something that no pattern knows\n{STEP_ENDED}")
    diagnosis = diagnose_files([log], ["job.log"])
    assert (diagnosis.outcome, diagnosis.cause) == ("consequences", None)
    # In the other order the tasks ended because of it.
    *first, cancelled, last = STEP_ENDED.splitlines()
    log.write_text("\n".join([cancelled, *first, last]) + "\n")
    cause = diagnose_files([log], ["job.log"]).cause
    assert cause is not None and cause.pattern == "slurm-cancelled"


def test_a_time_limit_is_no_cause_where_something_failed_before_it(tmp_path: Path) -> None:
    """srun waited until then for a node that had lost its power; an older hpcenv named no node."""
    lines = (LOGS / "failed" / "node-no-record.log").read_text().splitlines(keepends=True)
    kept = [line for line in lines if "left no record" not in line]
    limit = "slurmstepd-n1: error: *** JOB 1 ON n1 CANCELLED AT 2026-11-25T23:35:58 DUE TO TIME LIMIT ***\n"
    log = tmp_path / "job.log"
    log.write_text("".join([*kept, limit]))
    diagnosis = diagnose_files([log], ["job.log"])
    assert (diagnosis.outcome, diagnosis.cause) == ("consequences", None)
    log.write_text("".join([kept[0], limit, *kept[1:]]))
    cause = diagnose_files([log], ["job.log"]).cause
    assert cause is not None and cause.pattern == "slurm-time-limit"


def test_a_start_that_a_node_refused_is_a_rejection_by_the_gate(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(f"{STEP_ENDED}hpcenv: the verdict is now mismatch: the start was refused on n2\n")
    cause = diagnose_files([log], ["job.log"]).cause
    assert cause is not None and cause.pattern == "gate-mismatch"


NO_TORCH = "torch cannot be imported: ImportError: /x/libc10.so: undefined symbol: _ZTV, version GLIBCXX_3.4.21"


@pytest.mark.parametrize(
    "lines",
    [
        # On a machine with an H200: the reason quotes the driver, and a pattern knows these words.
        (
            "error[node-rejected]: torch sees 0 of 1 GPUs in the container on n2",
            "why: CUDA_VISIBLE_DEVICES='-1' (--env) hides 1 of 1 GPUs (cuInit: 100 no CUDA-capable device is detected)",
            "hint: leave the variable out; to start nevertheless: --skip-check cuda.start",
            "hpcenv: the verdict is now mismatch: the start was refused on n2",
        ),
        # A library of --nv on n2 with which torch cannot be imported (tests/cluster/test_gpus.py).
        (
            f"hpcenv: node n2: loaded.differs (must): locked read, loaded {NO_TORCH}",
            "error[nodes-unknown]: node n2 cannot tell which libraries torch has loaded",
            f"why: {NO_TORCH}",
            "hpcenv: the verdict is now unknown: the start was refused on n2",
        ),
    ],
    ids=["a driver", "a library"],
)
def test_what_the_gate_says_of_a_refused_start_goes_before_what_it_quotes(
    tmp_path: Path, lines: tuple[str, ...]
) -> None:
    log = tmp_path / "job.log"
    log.write_text("\n".join(lines) + "\n")
    cause = diagnose_files([log], ["job.log"]).cause
    assert cause is not None and (cause.pattern, cause.node) == ("gate-start-refused", "n2")


@pytest.mark.parametrize("line", ["kernel.cu:12: error: expected", "mypy: pkg/a.py:3: error: Name", "Error: 3 of 7"])
def test_errors_of_other_programs_are_no_refused_arguments(tmp_path: Path, line: str) -> None:
    log = tmp_path / "job.log"
    log.write_text(f"{line}\n")
    assert diagnose_files([log], ["job.log"]).cause is None


# Log of a failure that was provoked on the testbed (tests/cluster/test_diagnose.py), read without the records of its run
# -> pattern, rank, line of code.
PROVOKED = {
    "arguments": ("script-arguments", 0, ""),
    "cut": ("slurm-node-failure", None, ""),
    "disk": ("checkpoint-not-written", 1, "provoked.py:28"),
    "exception": ("python-exception", 3, "provoked.py:18"),
    "killed": ("rank-killed", 3, ""),
    "module": ("python-module-missing", 0, "provoked.py:22"),
    "port-in-use": ("torch-address-in-use", 0, "provoked.py:33"),
    "port-of-another": ("torch-store-not-torch", 0, "provoked.py:36"),
    "srun-label": ("python-exception", 2, "labelled.py:9"),
    # Slurm says in its accounting only that it was the time.
    "time-limit": ("slurm-cancelled", None, ""),
    "wrong-port": ("torch-rendezvous-connect", 1, "provoked.py:42"),
}


def test_every_provoked_failure_is_listed() -> None:
    assert set(PROVOKED) == {path.stem for path in (LOGS / "testbed").glob("*.log")}


@pytest.mark.parametrize("name", PROVOKED)
def test_the_log_alone_of_a_provoked_failure_is_diagnosed(name: str) -> None:
    cause = diagnosis_of("testbed", name).cause
    assert cause is not None
    pattern = PROVOKED[name][0]
    assert (cause.pattern, cause.rank, cause.code) == PROVOKED[name]
    assert cause.owner == PATTERNS[pattern].owner
    assert cause.line > 1


@pytest.mark.parametrize("name", [name for name in PROVOKED if name not in ("cut", "time-limit", "srun-label")])
def test_the_same_log_with_labels_of_srun_says_the_same(name: str, tmp_path: Path) -> None:
    """`srun --label` puts the number of the task before each line; here torchrun starts the ranks."""
    text = (LOGS / "testbed" / f"{name}.log").read_text()
    (tmp_path / "job.log").write_text("".join(f"0: {line}" for line in text.splitlines(keepends=True)))
    cause = diagnose_files([tmp_path / "job.log"], ["job.log"]).cause
    assert cause is not None
    assert (cause.pattern, cause.rank, cause.code) == PROVOKED[name]


def test_there_are_twenty_healthy_logs() -> None:
    assert len(HEALTHY) >= 20


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_log_gives_nothing(name: str) -> None:
    diagnosis = diagnosis_of("healthy", name)
    assert (diagnosis.outcome, diagnosis.cause, diagnosis.others) == ("no-known-pattern", None, ())


def test_the_first_rank_that_failed_and_its_line_of_code_are_named() -> None:
    cause = diagnosis_of("failed", "python-exception").cause
    assert cause is not None
    assert (cause.rank, cause.code, cause.text) == (1, "train.py:7", "ValueError: loss is nan")


def test_a_killed_rank_is_named_from_torchruns_table() -> None:
    cause = diagnosis_of("failed", "rank-killed").cause
    assert cause is not None
    assert cause.rank == 1


def test_the_peer_that_is_named_most_often_is_counted() -> None:
    cause = diagnosis_of("failed", "nccl-ib-retry").cause
    assert cause is not None
    assert (cause.node, cause.peers) == ("n2", {"10.2.0.17": 2})
