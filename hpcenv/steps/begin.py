"""The steps `begin` and `former`: decide whether the attempt has work to do, and prepare its folder.

Runs on: COMPUTE NODE. `begin` is the first step, and the job waits for it. So `begin` loads only what every run needs.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from hpcenv.container import secret
from hpcenv.container.manifest import open_manifest
from hpcenv.errors import RecordInvalid, Status
from hpcenv.identity import code
from hpcenv.launch import reserve
from hpcenv.launch.previous_job import read_previous_job
from hpcenv.machine.this_node import ThisNode
from hpcenv.records.code_listing import CopyAfterAttempt
from hpcenv.records.codec import SCHEMA
from hpcenv.records.files import load_record, read_json, save_record, write_text
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.submission import Submission
from hpcenv.steps.this_step import find_place, say, started_at


def begin(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Move the records of an earlier attempt aside, and record that this attempt has started.

    Returns Status.RUN_HAS_ENDED, and changes nothing, if an earlier job of a chain has ended the run.
    """
    manifest = open_manifest(run, environ)
    place = find_place(run, manifest, environ)
    before = read_previous_job(manifest, run, attempt=place.restarts)
    if before.over:
        say(f"hpcenv: {before.why}")

        secret.forget(manifest)
        return Status.RUN_HAS_ENDED
    _forget_other_attempts(run)
    leftovers = [path for path in run.of_one_attempt() if os.path.lexists(path)]
    if leftovers:
        aside = _free_name(run.attempts, _attempt_of(run))
        aside.mkdir(parents=True)
        for path in leftovers:
            shutil.move(path, aside / path.name)
    marker = {"schema": SCHEMA, "attempt": place.attempt, "node": place.node, "nodes": list(place.nodes)}
    marker |= {"restarts": place.restarts, "submitted_as": _submitted_as(place, environ)}
    write_text(json.dumps(marker | {"job_id": place.job_id, "time": time.time()}, indent=1) + "\n", run.started)
    if manifest.launches:
        reserve.make(run, place.nodes)
    if manifest.cluster == "slurm" and not os.path.lexists(run.submission):
        _record_submission(manifest, run, place, environ)
    if manifest.source is not None:
        code.make_own_copy(manifest.source, run)
    return 0


def _forget_other_attempts(run: RunFolder) -> None:
    """Remove the record of the code copy if it is not from the last attempt.

    In this case, the node of the last attempt failed before it wrote a record.
    """
    try:
        written = load_record(CopyAfterAttempt, run.listing_after).started
    except RecordInvalid:
        written = None
    if written != started_at(run):
        run.listing_after.unlink(missing_ok=True)


def _record_submission(manifest: Manifest, run: RunFolder, place: ThisNode, environ: Mapping[str, str]) -> None:
    """Record a job that Slurm queued, although `hpcenv submit` got no answer from sbatch (SubmitUncertain).

    A job of a chain is not recorded, because the other jobs of the chain are not known here. If `hpcenv submit` still
    runs on the login node, `hpcenv submit` replaces this record by a record that also has the command line.
    """
    if manifest.chain:
        return

    submission = Submission(
        schema=SCHEMA,
        run=manifest.run,
        cluster=manifest.cluster,
        job_id=_submitted_as(place, environ),
        submitted=time.time(),
        command=(),
        nodes=manifest.nodes,
    )
    save_record(submission, run.submission)


def _submitted_as(place: ThisNode, environ: Mapping[str, str]) -> str:
    """Return this job's id as `submission.json` writes it: an element of a job array is the array's id and an index."""
    array = [environ.get(f"SLURM_ARRAY_{name}_ID", "") for name in ("JOB", "TASK")]
    return "_".join(array) if all(array) else place.job_id


def _attempt_of(run: RunFolder) -> int:
    try:
        return int(read_json(run.started)["attempt"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _free_name(folder: Path, number: int) -> Path:
    """Return `attempts/N`, with a suffix if a script that was started by hand has used this number."""
    names = [folder / str(number), *(folder / f"{number}.{again}" for again in range(1, 1000))]
    return next(name for name in names if not name.exists())


def former(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Return the status with which the run has ended already."""
    manifest = open_manifest(run, environ)
    return read_previous_job(manifest, run, attempt=find_place(run, manifest, environ).restarts).status
