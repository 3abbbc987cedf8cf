"""Run folders as `submit` and the nodes leave them, for tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcenv.records.files import save_record, write_text
from hpcenv.records.manifest import Environment, Manifest
from hpcenv.records.outcome import NodeExit
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.submission import Submission
from hpcenv.records.sweep import SweepElement, SweepRecord
from hpcenv.records.verdict import NodeSettings, NodeVerdict, Rendezvous, Verdict

COMMAND = ("hpcenv", "submit", "train.py", "--nproc", "1")


def make_run(
    parent: Path,
    name: str,
    job_id: str = "7",
    *,
    submitted: float = 1.0,
    cluster: Any = "slurm",
    chain: Sequence[str] = (),
    command: Sequence[str] = COMMAND,
    **manifest: Any,
) -> RunFolder:
    """Write manifest and submission of a run in `parent`."""
    folder = RunFolder(parent / name)
    values = {
        "schema": 1, "run": name, "run_folder": str(folder.path), "cluster": cluster, "nodes": 1, "nproc_per_node": 1,
        "gpus_per_node": 0, "cpus_per_task": 0, "backend": "gloo", "environment": Environment(kind="host", python="/p"),
        "script": "/s.py", "script_sha256": "0", "args": (), "workdir": "/", "settings": (), "expectations": (), "packages": (),
        "probe_level": "full", "lockfile": "l", "lockfile_sha256": "0", "hpcenv_version": "0",
    }  # fmt: skip
    save_record(Manifest(**{**values, **manifest}), folder.manifest)
    record = Submission(
        schema=1, run=name, cluster=cluster, job_id=job_id, submitted=submitted, command=tuple(command), chain=tuple(chain)
    )  # fmt: skip
    save_record(record, folder.submission)
    return folder


def make_sweep(
    parent: Path,
    name: str,
    job_ids: Sequence[str],
    *,
    submitted: float = 1.0,
    values: Sequence[Mapping[str, str]] = (),
) -> Path:
    """Write a sweep's folder with one run for each job id.

    Args:
        values: of each run: name -> value.
    """
    for number, job_id in enumerate(job_ids):
        make_run(parent / name, f"{number:04}", job_id, submitted=submitted)
    swept = values or [{} for _ in job_ids]
    record = SweepRecord(
        schema=1, run=name, run_folder=str(parent / name), names=tuple(swept[0]),
        elements=tuple(SweepElement(index=n, folder=f"{n:04}", values=dict(own)) for n, own in enumerate(swept)),
    )  # fmt: skip
    save_record(record, RunFolder(parent / name).sweep)
    return parent / name


def write(path: Path, **record: Any) -> None:
    """Write a small record."""
    write_text(json.dumps({"schema": 1, **record}), path)


def start(folder: RunFolder, nodes: Sequence[str], *, nproc: int = 1, attempt: int = 0, job_id: str = "7") -> None:
    """Write what is there once the gate has opened; nodes get the addresses 10.0.0.1 and so on."""
    write(folder.started, attempt=attempt, nodes=list(nodes), job_id=job_id, node=nodes[0], time=1.0)
    rendezvous = Rendezvous(host="10.0.0.1", port=1, id=f"{job_id}.{attempt}")
    run = folder.path.name
    verdict = Verdict(
        schema=1, run=run, attempt=attempt, result="match", rendezvous=rendezvous, findings=(), settings={},
        nodes=tuple(NodeVerdict(node=node, result="match", compared=3) for node in nodes),
    )  # fmt: skip
    save_record(verdict, folder.verdict)
    for rank, node in enumerate(nodes):
        settings = NodeSettings(
            schema=1, run=run, node=node, attempt=attempt, node_rank=rank, local_address=f"10.0.0.{rank + 1}",
            rendezvous=rendezvous, settings=(),
        )  # fmt: skip
        save_record(settings, folder.env_of(node))


def end(folder: RunFolder, node: str, status: int, **more: Any) -> None:
    """Write how the launch ended on one node."""
    record = NodeExit(
        schema=1, run=folder.path.name, node=node, attempt=0, status=status, signal="", started=1.0, ended=2.0, **more
    )
    save_record(record, folder.exit_of(node))
