"""The logs that were collected before the patterns were read (tests/logs/collected/README.md): how many are right.

Right means: the cause that stands first has the meaning that was written down, and quotes its line or stands at it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomllib

from hpcenv.runs.diagnose.diagnose import FailureDiagnosis, diagnose_files
from hpcenv.runs.diagnose.patterns import read_patterns

FOLDER = Path(__file__).resolve().parents[3] / "logs" / "collected"
PATTERNS = {pattern.id for pattern in read_patterns()}
# Cause as it was written down -> the patterns that say it.
MEANING = {
    "address-in-use": "torch-address-in-use", "cancelled": "slurm-cancelled", "collective-timeout": "torch-collective-timeout gloo-timeout",
    "crlf": "script-line-ends", "dataloader-killed": "dataloader-worker-killed", "dataloader-lost": "dataloader-worker-lost",
    "dataloader-shm": "dataloader-bus-error", "driver-old": "gpu-driver-too-old", "extension-build": "extension-not-built",
    "fabric-manager": "gpu-fabric-manager", "glibc": "glibc-too-old", "gpu-assert": "gpu-device-assert",
    "gpu-hardware": "gpu-ecc gpu-nvlink gpu-xid-hardware gpu-lost", "gpu-no-bf16": "gpu-no-bfloat16",
    "gpu-no-kernel": "gpu-no-kernel-image", "gpu-oom": "gpu-out-of-memory", "host-memory": "host-memory-allocation python-memory-error",
    "ib-connect": "nccl-ib-unreachable", "ib-link": "nccl-ib-link", "ib-memory": "nccl-dmabuf nccl-ib-memlock",
    "ib-retry": "nccl-ib-retry", "illegal-instruction": "rank-illegal-instruction", "io-error": "input-output-error",
    "killed": "rank-killed", "loss-scale": "loss-scale-minimum", "module-missing": "python-module-missing",
    "mpi-pmi": "mpi-no-pmi", "name-resolution": "slurm-name-resolution torch-name-resolution", "nccl-p2p": "nccl-p2p-disabled",
    "no-gpu": "gpu-none-visible", "no-gpu-torch": "torch-without-cuda", "node-failure": "slurm-node-failure",
    "ofi": "nccl-ofi-provider", "peer-closed": "nccl-peer-closed", "permission": "permission-denied",
    "preempted": "slurm-preempted", "ptxas-old": "triton-ptxas", "quota": "disk-quota", "rank-variables": "torch-rank-variables",
    "rendezvous-connect": "torch-rendezvous-connect torchrun-store-unreachable", "script-error": "python-exception",
    "script-library": "wandb-service", "segfault": "rank-segfault", "sighup": "torchrun-hangup",
    "slurm-account": "slurm-bad-account", "slurm-config": "slurm-no-configuration", "slurm-config-unavailable": "slurm-bad-gres",
    "slurm-conflict": "slurm-options-conflict", "slurm-gres": "slurm-bad-gres slurm-step-refused",
    "slurm-launch": "slurm-launch-failed", "slurm-mpi": "slurm-mpi-type", "slurm-oom": "slurm-oom-kill slurm-task-oom",
    "slurm-option": "slurm-bad-option slurm-cpu-bind", "slurm-step": "slurm-step-refused", "store-timeout": "torch-clients-missing",
    "time-limit": "slurm-time-limit", "too-many-files": "too-many-open-files torch-shm-failed", "apptainer-image": "apptainer-mount",
    "signal-from-outside": "torchrun-signal", "mpi-daemon": "mpi-daemon-lost", "command-missing": "command-not-found",
}  # fmt: skip


def logs(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads((FOLDER / f"{name}.toml").read_text())["log"]
    return found


def diagnosis_of(log: dict[str, Any], folder: Path) -> FailureDiagnosis:
    (folder / "job.log").write_text(log["text"])
    return diagnose_files([folder / "job.log"], ["job.log"])


def is_right(log: dict[str, Any], diagnosis: FailureDiagnosis) -> bool:
    cause = diagnosis.cause
    if "cause" not in log:
        return cause is None
    lines = log["text"].splitlines()
    return (
        cause is not None
        and cause.pattern in MEANING.get(log["cause"], log["cause"]).split()
        and log["line"] in "".join(lines[max(0, cause.line - 4) : cause.line + 3])
    )


def test_every_meaning_is_a_pattern() -> None:
    assert {one for words in MEANING.values() for one in words.split()} <= PATTERNS


@pytest.mark.parametrize(
    # The patterns were written with A. B was opened once, at commit "diagnose: any refusal of Slurm ..." of 2026-11-27:
    # 81 of 92 right first, no healthy log with a cause. Before that work: A 34, B 37, and 14 healthy logs with a cause.
    ("name", "right"),
    [("a", 89), ("b", 81)],
)
def test_the_cause_that_was_written_down_stands_first(tmp_path: Path, name: str, right: int) -> None:
    failures = [log for log in logs(name) if "cause" in log]
    assert len(failures) == 92
    wrong = [log["id"] for log in failures if not is_right(log, diagnosis_of(log, tmp_path))]
    assert len(failures) - len(wrong) >= right, wrong


@pytest.mark.parametrize("name", ["a", "b"])
def test_no_healthy_log_has_a_cause(tmp_path: Path, name: str) -> None:
    healthy = [log for log in logs(name) if "cause" not in log]
    assert len(healthy) == 20
    assert [log["id"] for log in healthy if not is_right(log, diagnosis_of(log, tmp_path))] == []


def test_every_log_has_its_source_and_its_truth() -> None:
    both = [*logs("a"), *logs("b")]
    assert all(log["source"] and log["truth"] for log in both)
    assert len({log["id"] for log in both}) == len(both)
