"""The step `decide`: the verdict on all nodes.

Runs on: COMPUTE NODE.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from hpcenv.container.manifest import open_manifest
from hpcenv.errors import RecordInvalid
from hpcenv.judge import decide, verdict_table
from hpcenv.judge.network.rendezvous import Choice
from hpcenv.machine.this_node import ThisNode
from hpcenv.records.codec import SCHEMA
from hpcenv.records.facts import Facts
from hpcenv.records.files import load_record, read_end, save_record, write_text
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import SRUN_GAVE_UP, NodeSettings, Verdict
from hpcenv.steps import smoke_judge
from hpcenv.steps.this_step import SECONDS_FOR_FILES, exit_status, find_place, started_at

# What srun writes when slurmd of a node cannot check its credential (Slurm 24.11).
_NO_MUNGE = re.compile(r"munge|zero bytes were transmitted|authentication|invalid.*credential", re.IGNORECASE)
_LOG_BYTES = 64 * 1024


def decide_run(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Judge all nodes, write verdict and settings, print the table.

    Returns 0 if the training may start, 90 on a mismatch, 91 if a needed value is unknown.
    """
    manifest = open_manifest(run, environ)
    place = find_place(run, manifest, environ)
    reported, problems = _collect(run, place)
    started = started_at(run)
    window = None if started is None else (started, time.time())
    verdict, choice = decide.judge(
        manifest, place.nodes, reported, problems, attempt=place.attempt, job_id=place.job_id, window=window
    )
    if verdict.rendezvous is not None:
        _write_settings(run, manifest, place, verdict, choice)
    # The verdict is written last: a reader who finds it also finds the settings.
    save_record(verdict, run.verdict)
    print(verdict_table.brief(verdict, lockfile=manifest.lockfile), flush=True)
    if verdict.result == "match":
        _use_image(manifest.environment.sif)
    if manifest.smoke is not None and verdict.result == "match":
        verdict = smoke_judge.plan(manifest, run, verdict, reported, job_id=place.job_id)
    return exit_status(verdict)


def _use_image(sif: str) -> None:
    """Record the use of a SIF in the image store, because `hpcenv image prune` removes SIFs by their last use."""
    if Path(sif).parent.name == "images":
        with contextlib.suppress(OSError):  # read-only, or no store
            os.utime(Path(sif).with_suffix(".json"))


def _write_settings(run: RunFolder, manifest: Manifest, place: ThisNode, verdict: Verdict, choice: Choice) -> None:
    assert verdict.rendezvous is not None
    # The files are not flushed to disk, because each attempt writes them again, and a large job has a thousand of them.
    write_text("\n".join(verdict.launched) + "\n", run.launched, durable=False)
    if any(setting.value.startswith(f"{run.flight}/") for settings in choice.settings.values() for setting in settings):
        run.flight_of(place.attempt).mkdir(parents=True, exist_ok=True)
    if manifest.launch.launcher == "ray":
        token = os.open(f"{run.ray_of(verdict.rendezvous.id)}.token", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(token, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
    for rank, node in enumerate(verdict.launched):
        settings = NodeSettings(
            schema=SCHEMA,
            run=manifest.run,
            node=node,
            attempt=place.attempt,
            node_rank=rank,
            local_address=choice.local_addresses[node],
            rendezvous=verdict.rendezvous,
            settings=choice.settings[node],
            binds=choice.binds.get(node, ()),
        )
        save_record(settings, run.env_of(node), durable=False)


def _collect(run: RunFolder, place: ThisNode) -> tuple[dict[str, Facts], dict[str, str]]:
    """Read the facts of every node; wait a short time for files that are not visible yet."""
    reported: dict[str, Facts] = {}
    problems: dict[str, str] = {}
    deadline = time.monotonic() + SECONDS_FOR_FILES
    for node in place.nodes:
        try:
            reported[node] = _read_facts(run.facts_of(node), deadline)
        except FileNotFoundError:
            unknown = "this node reported no facts; its lines in the log above may give the reason"
            problems[node] = _why_srun_gave_up(run) or unknown
        except RecordInvalid as error:
            problems[node] = f"{error.what}: {error.why}" if error.why else error.what
    return reported, problems


def _why_srun_gave_up(run: RunFolder) -> str:
    """Return why srun could not start the check on a node, if the log of this job names munge as the cause."""
    try:
        lines = read_end(run.log, most=_LOG_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = next((line for line in lines if line.startswith(("srun:", "slurmstepd")) and _NO_MUNGE.search(line)), "")
    if not said:
        return ""
    return f"{SRUN_GAVE_UP}: authentication failed, munged may be down there ({said[:200]})"


def _read_facts(path: Path, deadline: float) -> Facts:
    while True:
        try:
            return load_record(Facts, path)
        except RecordInvalid as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            if time.monotonic() > deadline:
                raise error.__cause__ from None
        time.sleep(0.2)
