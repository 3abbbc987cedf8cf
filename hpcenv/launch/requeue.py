"""Decide what follows an attempt: nothing, a requeue of the job, or a requeue without the nodes that differ.

Runs on: COMPUTE NODE (the batch node), as the last step of the batch script. Standard library only.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hpcenv import process
from hpcenv.errors import HpcenvError, NodeRejected, NodesUnknown, Status
from hpcenv.judge import first_failure
from hpcenv.machine.this_node import ThisNode
from hpcenv.records.codec import SCHEMA
from hpcenv.records.files import load_record, read_json, write_text
from hpcenv.records.manifest import Manifest
from hpcenv.records.outcome import NodeExit
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.submission import Submission
from hpcenv.records.verdict import Verdict

StopReason = Literal["", "time-limit", "preemption", "hang", "idle", "unknown"]

_SECONDS = 20.0
# A list with more excluded nodes than this is damaged.
_LONGEST_NODELIST = 65536


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How an attempt ended, and what follows it.

    Attributes:
        stopped: why the attempt was asked to stop; empty if it was not asked to stop.
        saved: whether the script reported that it saved its state.
        before: whether the attempt was stopped before the training started.
        cancelled: whether the job was cancelled before the training started.
        unfinished: whether the training is not complete. This holds if it saved its state, or if it only reacts to
            signals (`--requeue always`). A script that ended on request without a report may have completed.
        again: whether the job is requeued.
        not_again: why an unfinished training is not requeued; empty in all other cases.
        without: nodes that the requeued job must not get.
        why: one line for the log; may be empty.
    """

    stopped: StopReason = ""
    saved: bool = False
    before: bool = False
    cancelled: bool = False
    unfinished: bool = False
    again: bool = False
    not_again: str = ""
    without: tuple[str, ...] = ()
    why: str = ""

    def status(self, own: int) -> int:
        """Return the exit status of the job: `own`, but never 0 for an unfinished training that is not requeued."""
        return Status.TERMINATED if own == 0 and self.not_again else own


def judge(
    manifest: Manifest,
    exits: Sequence[NodeExit],
    verdict: Verdict | None,
    *,
    status: int,
    attempt: int,
    retried: int,
    next_link: bool,
    before: StopReason | Literal["cancelled"] = "",
) -> Ending:
    """Decide what follows an attempt. Pure.

    Args:
        manifest: manifest of the run.
        exits: exit records of the nodes.
        verdict: verdict of this attempt; None without one.
        status: exit status of the batch script.
        attempt: number of this attempt; the first one is 0.
        retried: how often the job was requeued without some nodes.
        next_link: whether another job of the chain continues this run.
        before: why the job was asked to end before the training started; empty without such a request.
    """
    if before == "cancelled":
        return Ending(cancelled=True)
    if before:
        return _after_no_training(manifest, before, attempt=attempt, next_link=next_link)
    if status in (NodeRejected.exit_status, NodesUnknown.exit_status):
        return _after_rejection(manifest, verdict, retried=retried)
    known = [record.stopped for record in exits if record.stopped]
    # One node may know the reason, while another node got no answer from Slurm.
    stopped: StopReason = next((word for word in known if word != "unknown"), known[0] if known else "")
    saved = any(record.saved for record in exits)
    # If a node failed, srun asked the other nodes to end. Such a request does not count as a request to end the job.
    asked = any(record.asked_to_end for record in exits) and first_failure.first_status(exits) is None
    if not stopped and saved and asked:
        # `scontrol requeue` or `scancel` by hand: the script ends with 0, but its training is not finished.
        return Ending(saved=True, unfinished=True, not_again=_BY_HAND, why=f"{_BY_HAND}; the script saved its state")
    if not stopped:
        return Ending(saved=saved)
    ending = Ending(stopped=stopped, saved=saved, unfinished=saved or manifest.stop.requeue == "always")
    if stopped == "idle":
        # The next attempt would also do nothing.
        return _not_requeued(replace(ending, unfinished=True), _REASONS[stopped], "--idle-end")
    if stopped == "hang":
        # Ranks that hang cannot save their state. They are stopped only if [watch] on-stall requires this.
        ending = replace(ending, unfinished=True)
        if manifest.watch is None or manifest.watch.on_stall != "requeue":
            return _not_requeued(ending, _REASONS[stopped], "[watch] on-stall")
    if not ending.unfinished:
        return ending
    return _requeued(manifest, ending, _REASONS[stopped], attempt=attempt, next_link=next_link)


def _after_no_training(manifest: Manifest, stopped: StopReason, *, attempt: int, next_link: bool) -> Ending:
    """Return what follows an attempt that was stopped before the training started. Such an attempt saved nothing.

    After the time limit, only `--requeue always` requeues such an attempt, because the next attempt gets no more time.
    """
    ending, reason = Ending(stopped=stopped, before=True), f"{_REASONS[stopped]}, before the training started"
    options = manifest.stop
    if next_link and stopped == "time-limit":
        return _continued_by_chain(ending, reason)
    if options.requeue == "always" or (options.requeue == "saved" and stopped != "time-limit"):
        return _requeued(manifest, ending, reason, attempt=attempt, next_link=next_link)
    return replace(ending, why=reason)


def _requeued(manifest: Manifest, ending: Ending, reason: str, *, attempt: int, next_link: bool) -> Ending:
    """Requeue the job. If another job of the chain continues the run, or the options forbid a requeue, do not."""
    options, at_limit = manifest.stop, ending.stopped == "time-limit"
    if at_limit and next_link:
        return _continued_by_chain(ending, reason)
    refusal = ""
    if options.requeue == "never":
        refusal = "--requeue never"
    elif at_limit and manifest.chain > 1:
        refusal = "the last job of its chain"
    elif attempt >= options.max_requeues:
        refusal = "max-requeues"
    if not refusal:
        return replace(ending, again=True, why=f"{reason}: the job is requeued")
    # The next job of a chain continues a stopped run, independent of the reason for the stop (`previous_job.is_over`).
    return _continued_by_chain(ending, reason) if next_link else _not_requeued(ending, reason, refusal)


def _continued_by_chain(ending: Ending, reason: str) -> Ending:
    return replace(ending, why=f"{reason}: the next job of the chain continues")


def _not_requeued(ending: Ending, reason: str, refusal: str) -> Ending:
    why = f"{reason}: the job is not requeued ({refusal})"
    return replace(ending, not_again=refusal if ending.unfinished else "", why=why)


def after_refusal(ending: Ending, refusal: str, *, next_link: bool) -> Ending:
    """Return the ending of an attempt after the requeue of its job was refused."""
    return replace(ending, again=False, not_again=refusal if ending.unfinished and not next_link else "")


_BY_HAND = "ended on request"
_REASONS = {
    "time-limit": "the time limit",
    "preemption": "preempted",
    "hang": "the ranks hang",
    "idle": "no GPU and no CPU was in use",
    "unknown": "stop requested",
}


def _after_rejection(manifest: Manifest, verdict: Verdict | None, *, retried: int) -> Ending:
    bad = () if verdict is None else tuple(node.node for node in verdict.nodes if node.result != "match")
    if not manifest.retry_excluding or not bad:
        return Ending()
    if retried >= manifest.retry_excluding:
        return Ending(why=f"not requeued: it was requeued {retried} times without nodes (--retry-excluding)")
    return Ending(again=True, without=bad, why=f"the job is requeued without {', '.join(bad)}")


# -- acting -------------------------------------------------------------------------------


def slurm_does_it(environ: Mapping[str, str]) -> bool:
    """Return whether Slurm itself requeues this preempted job when its script ends.

    With PreemptMode=REQUEUE, Slurm requeues the job after any exit status of the script. If hpcenv also requeued the
    job, Slurm would requeue the job once more after the job has completed (both seen with 24.11). With preempt/qos, the
    mode of the QOS is not visible here, and the result is False.
    """
    scontrol = shutil.which("scontrol", path=environ.get("PATH"))
    partition = environ.get("SLURM_JOB_PARTITION", "")
    if scontrol is None or not partition:
        return False
    try:
        config = process.run([scontrol, "show", "config"], timeout=_SECONDS, env=environ).stdout
        shown = process.run([scontrol, "show", "partition", "-o", partition], timeout=_SECONDS, env=environ).stdout
    except HpcenvError:
        return False
    by_partition = re.search(r"^PreemptType\s*=\s*preempt/partition_prio\b", config, re.MULTILINE)
    return by_partition is not None and re.search(r"\bPreemptMode=\S*REQUEUE\b", shown) is not None


@dataclass(frozen=True, kw_only=True)
class Queued:
    """Result of a request to requeue a job.

    Attributes:
        done: whether the job is in the queue again.
        problem: what went wrong; empty if nothing went wrong. A job that is in the queue may have a problem too.
    """

    done: bool
    problem: str = ""


def queue_again(this_node: ThisNode, environ: Mapping[str, str], *, without: Sequence[str]) -> Queued:
    """Requeue this job.

    The excluded nodes can be changed only while a job is pending (22.05 to 24.11). The job is pending
    as soon as it is requeued, and this process keeps running for some seconds after that.

    Args:
        this_node: this node and this job.
        environ: environment variables for scontrol.
        without: nodes that the job must not get again.
    """
    scontrol = shutil.which("scontrol", path=environ.get("PATH"))
    if scontrol is None:
        return Queued(done=False, problem="scontrol is not on PATH")
    before = _excluded_already(scontrol, this_node.job_id, environ) if without else ""
    try:
        process.run([scontrol, "requeue", this_node.job_id], timeout=_SECONDS, env=environ)
    except HpcenvError as error:
        if not _is_pending(scontrol, this_node.job_id, environ):
            return Queued(done=False, problem=f"{error.what}: {error.why}")
        # Slurm has requeued the job already, after a preemption.
    if not without:
        return Queued(done=True)
    nodes = ",".join(filter(None, (before, *without)))
    try:
        process.run(
            [scontrol, "update", f"JobId={this_node.job_id}", f"ExcNodeList={nodes}"], timeout=_SECONDS, env=environ
        )
    except HpcenvError as error:
        problem = f"the job is requeued, but may get the same nodes: {error.what}: {error.why}"
        return Queued(done=True, problem=problem)
    return Queued(done=True)


def _show(scontrol: str, job_id: str, environ: Mapping[str, str]) -> str:
    try:
        return process.run([scontrol, "show", "job", "-o", job_id], timeout=_SECONDS, env=environ).stdout
    except HpcenvError:
        return ""


def _is_pending(scontrol: str, job_id: str, environ: Mapping[str, str]) -> bool:
    shown = _show(scontrol, job_id, environ)
    restarts = re.search(r"\bRestarts=(\d+)", shown)
    now = environ.get("SLURM_RESTART_COUNT") or "0"
    return "JobState=PENDING" in shown or (restarts is not None and int(restarts[1]) > int(now))


def _excluded_already(scontrol: str, job_id: str, environ: Mapping[str, str]) -> str:
    """Return the nodes that are excluded already, as Slurm writes them."""
    match = re.search(r"\bExcNodeList=(\S+)", _show(scontrol, job_id, environ))
    return match[1] if match and match[1] != "(null)" and len(match[1]) < _LONGEST_NODELIST else ""


# -- files --------------------------------------------------------------------------------


def read_retries(run: RunFolder) -> int:
    """Return how often this job was requeued without some nodes."""
    try:
        retries = read_json(run.excluded)["retries"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return len(retries) if isinstance(retries, list) else 0


def note_retry(run: RunFolder, this_node: ThisNode, without: Sequence[str]) -> None:
    """Record that the job is requeued without these nodes."""
    try:
        retries = read_json(run.excluded)["retries"]
        retries = retries if isinstance(retries, list) else []
    except (OSError, ValueError, KeyError, TypeError):
        retries = []
    retries.append({"attempt": this_node.attempt, "job_id": this_node.job_id, "without": list(without)})
    write_text(json.dumps({"schema": SCHEMA, "retries": retries}, indent=1) + "\n", run.excluded)


def has_next_link(run: RunFolder, manifest: Manifest, job_id: str) -> bool:
    """Return whether another job of this run's chain follows this job."""
    if manifest.chain < 2:
        return False
    try:
        chain = load_record(Submission, run.submission).chain
    except HpcenvError:
        return False
    return job_id in chain[:-1]
