"""The step `finish`: record how the attempt ended, and requeue the job if needed.

Runs on: COMPUTE NODE.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from hpcenv.container import secret
from hpcenv.container.manifest import open_manifest
from hpcenv.errors import HpcenvError, RecordInvalid, Status
from hpcenv.identity import code
from hpcenv.judge import decide, first_failure
from hpcenv.launch import current_attempt, node_exit, requeue, reserve, stopping
from hpcenv.machine.this_node import LOCAL_CANCELLED, ThisNode
from hpcenv.records.codec import SCHEMA
from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.outcome import NodeExit
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.severities import Severities
from hpcenv.records.verdict import Verdict
from hpcenv.steps.this_step import REQUESTS, find_place, read_status, say, started_at


def finish(run: RunFolder, environ: Mapping[str, str], status: str) -> int:
    """Record the exit status of the batch script, and requeue the job if this is requested.

    Clusters without accounting and the next job of a chain need this record.

    Returns Status.NOT_DONE if the training has more to do, but the job is not requeued.
    """
    number = read_status(status)
    try:
        manifest = open_manifest(run, environ)
        place = find_place(run, manifest, environ)
        if not current_attempt.is_current_attempt(run, place):
            say(f"hpcenv: attempt {place.attempt} writes no record: a later attempt has begun")
            return 0
        _let_verdict_follow(run, manifest, place)
        ending = _ending(run, manifest, place, number, environ)
    except HpcenvError:
        _write_finished(run, number, requeue.Ending())
        return 0
    by_slurm = ending.again and ending.stopped == "preemption" and requeue.slurm_does_it(environ)
    by = "" if not ending.again else "slurm" if by_slurm else "scontrol"
    _write_finished(run, ending.status(number), ending, by=by)
    down = _down(run, manifest, place, environ) if number != 0 else {}
    if down:
        # The status is recorded above, before Slurm is asked for lost nodes: Slurm may answer slowly, and it kills this
        # process soon.
        _write_finished(run, ending.status(number), ending, by=by, down=down)
    _record_copy(run, manifest)
    if ending.why:
        say(f"hpcenv: {ending.why}")
    silent = current_attempt.silent_nodes(run, place.nodes)
    if ending.before and ending.stopped == "time-limit" and silent:
        say(f"hpcenv: {first_failure.no_facts(silent)}")
    if ending.again and not by_slurm:
        refused = _queue_again(run, manifest, place, ending, environ)
        if refused is not None:
            ending = refused
            _write_finished(run, ending.status(number), ending, down=down)
    if _is_last(run, manifest, place, ending):
        secret.forget(manifest)
    return Status.NOT_DONE if ending.status(number) != number else 0


def _record_copy(run: RunFolder, manifest: Manifest) -> None:
    """Record how this attempt leaves the run's copy of the code, for the check of the next attempt."""
    started = started_at(run)
    if manifest.source is None or not manifest.source.digest or started is None:
        return
    after = code.note_after(run, schema=SCHEMA, started=started)
    with contextlib.suppress(OSError):
        if after is not None:
            save_record(after, run.listing_after)


def _is_last(run: RunFolder, manifest: Manifest, place: ThisNode, ending: requeue.Ending) -> bool:
    """Return whether no attempt can follow this one.

    After this step, Slurm or a user (`scontrol requeue`) may requeue a job that was asked to end. The next hpcenv
    command that sees the end of such a run removes its secrets (`runs/state.py`).
    """
    if ending.again or ending.cancelled or ending.stopped not in ("", "time-limit"):
        return False
    exits = node_exit.read_all(run, place)
    asked = any(record.asked_to_end for record in exits) and not ending.stopped
    return not asked and not requeue.has_next_link(run, manifest, place.job_id)


def _let_verdict_follow(run: RunFolder, manifest: Manifest, place: ThisNode) -> None:
    """Replace the verdict if a node refused to start afterwards, for example because the SIF was replaced."""
    exits = node_exit.read_all(run, place)
    refused = [record for record in exits if record.refused]
    try:
        verdict = load_record(Verdict, run.verdict) if refused else None
        if verdict is None or not verdict.allows(place.attempt):
            return

        changed = decide.after_launch(verdict, refused, Severities(manifest.severities))
        save_record(changed, run.verdict)
    except (HpcenvError, OSError) as error:
        say(f"hpcenv: the verdict could not be replaced: {error}")
        return
    names = ", ".join(record.node for record in refused)
    say(f"hpcenv: the verdict is now {changed.result}: the start was refused on {names}")


def _queue_again(
    run: RunFolder, manifest: Manifest, place: ThisNode, ending: requeue.Ending, environ: Mapping[str, str]
) -> requeue.Ending | None:
    """Requeue this job; return how the attempt ended if Slurm refused, else None."""
    # The retry is recorded before the requeue, because Slurm ends a requeued job within seconds.
    if ending.without:
        requeue.note_retry(run, place, ending.without)
    queued = requeue.queue_again(place, environ, without=ending.without)
    if queued.problem:
        say(f"hpcenv: {queued.problem}")
    if queued.done:
        return None
    next_link = requeue.has_next_link(run, manifest, place.job_id)
    return requeue.after_refusal(ending, queued.problem, next_link=next_link)


def _ending(
    run: RunFolder, manifest: Manifest, place: ThisNode, status: int, environ: Mapping[str, str]
) -> requeue.Ending:
    if manifest.cluster == "local":
        return requeue.Ending(cancelled=bool(environ.get(LOCAL_CANCELLED)))
    exits = node_exit.read_all(run, place)
    try:
        verdict: Verdict | None = load_record(Verdict, run.verdict)
    except RecordInvalid:
        verdict = None
    return requeue.judge(
        manifest,
        exits,
        verdict,
        status=status,
        attempt=place.restarts,
        retried=requeue.read_retries(run),
        next_link=requeue.has_next_link(run, manifest, place.job_id),
        before=_stopped_before(manifest, place, exits, verdict, status, environ),
    )


def _stopped_before(
    manifest: Manifest,
    place: ThisNode,
    exits: Sequence[NodeExit],
    verdict: Verdict | None,
    status: int,
    environ: Mapping[str, str],
) -> stopping.Reason | Literal[""]:
    """Return why this attempt was asked to end before its training began; empty without such a request."""
    if exits:
        # The launch has begun, and its records say whether it was stopped. A node may have recorded a later request
        # that came from srun itself: srun ends the other nodes if one node refuses to start.
        return ""
    if verdict is None or verdict.result != "match":
        return stopping.noted_before_training(manifest, place) or ""
    if status == 0 or os.path.lexists(RunFolder(Path(manifest.run_folder)).ranks):
        return ""
    # The signal came before the launch step could handle it, or Slurm no longer started the step.
    number = status - 128 if status - 128 in REQUESTS else signal.SIGTERM
    return stopping.note_before_training(manifest, place, environ, number=number) or ""


def _down(run: RunFolder, manifest: Manifest, place: ThisNode, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the nodes that Slurm has lost, if a node did not end by itself."""
    if manifest.cluster != "slurm":
        return {}
    exits = node_exit.read_all(run, place)
    if len(exits) == len(place.nodes) and not any(record.asked_to_end for record in exits):
        return {}
    return current_attempt.down_nodes(place.nodes, environ)


def _write_finished(
    run: RunFolder, status: int, ending: requeue.Ending, *, by: str = "", down: Mapping[str, str] | None = None
) -> None:
    record: dict[str, object] = {"schema": SCHEMA, "status": status, "time": time.time()}
    record |= {"stopped": ending.stopped, "saved": ending.saved, "again": ending.again, "by": by}
    record |= {"before_training": ending.before, "cancelled": ending.cancelled, "down": dict(down or {})}
    record |= {"unfinished": ending.unfinished, "not_again": ending.not_again}
    reserve.write(run, reserve.BATCH, json.dumps(record, indent=1) + "\n", run.finished)
    if not ending.again:
        reserve.remove(run)
