"""What comes after an attempt: nothing, the same job once more, or once more without the nodes that differ.

Runs on: COMPUTE NODE (the batch node), as the batch script's last step. Standard library only.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Mapping, Sequence
from typing import Literal

from hpcenv import wire
from hpcenv.adapters import process
from hpcenv.dataclass import dataclass, replace
from hpcenv.errors import HpcenvError, NodeRejected, NodesUnknown
from hpcenv.node.place import Place
from hpcenv.wire import SCHEMA, Manifest, NodeExit, RunFolder, Submission, Verdict

Stopped = Literal["", "time-limit", "preemption", "unknown"]

# The exit status of a training that has more to do: that of one which TERM ended at its time limit.
CUT_OFF = 128 + signal.SIGTERM

_SECONDS = 20.0
# More nodes than this in a user's own list of excluded ones are damage, not a list.
_LONGEST_NODELIST = 65536


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How an attempt ended, and what shall come after it.

    Attributes:
        stopped: why it was asked to stop; empty when it was not.
        saved: the script said that it saved itself.
        before: it was stopped before the training began.
        cancelled: somebody cancelled it before the training began.
        unfinished: its training has more to do, as far as can be told: it saved itself, or knows only signals
            (`--requeue always`). One that ended when asked to, and said nothing, may have come to its end by itself.
        again: the job shall be queued again.
        not_again: why an unfinished training is not gone on with; empty when it is.
        without: nodes that it shall not get again.
        why: one line for the log; empty when there is nothing to say.
    """

    stopped: Stopped = ""
    saved: bool = False
    before: bool = False
    cancelled: bool = False
    unfinished: bool = False
    again: bool = False
    not_again: str = ""
    without: tuple[str, ...] = ()
    why: str = ""

    def status(self, own: int) -> int:
        """Return the exit status of the job: never 0, its script's own, for a training that is not gone on with."""
        return CUT_OFF if own == 0 and self.not_again else own


def judge(
    manifest: Manifest,
    exits: Sequence[NodeExit],
    verdict: Verdict | None,
    *,
    status: int,
    attempt: int,
    retried: int,
    next_link: bool,
    before: Stopped | Literal["cancelled"] = "",
) -> Ending:
    """Decide what comes after an attempt. Pure.

    Args:
        exits: the records of this attempt's nodes.
        verdict: of this attempt; None without one.
        status: exit status of the batch script.
        attempt: how often the job started before.
        retried: how often it was queued again without some nodes.
        next_link: another job of a chain goes on with this run.
        before: why it was asked to end before the training began; empty when it was not.
    """
    if before == "cancelled":
        return Ending(cancelled=True)
    if before:
        return _after_no_training(manifest, before, attempt=attempt, next_link=next_link)
    if status in (NodeRejected.exit_status, NodesUnknown.exit_status):
        return _after_rejection(manifest, verdict, retried=retried)
    known = [record.stopped for record in exits if record.stopped]
    # One node may know why where another got no answer.
    stopped: Stopped = next((word for word in known if word != "unknown"), known[0] if known else "")
    saved = any(record.saved for record in exits)
    if not stopped and saved and any(record.asked_to_end for record in exits):
        # `scontrol requeue` or `scancel`, by hand: what it ends with then, and that is 0, is not the end of its work.
        return Ending(saved=True, unfinished=True, not_again=_BY_HAND, why=f"{_BY_HAND}, and saved itself")
    if not stopped:
        return Ending(saved=saved)
    ending = Ending(stopped=stopped, saved=saved, unfinished=saved or manifest.stop.requeue == "always")
    if not ending.unfinished:
        return ending
    return _in_the_queue(manifest, ending, _WORDS[stopped], attempt=attempt, next_link=next_link)


def _after_no_training(manifest: Manifest, stopped: Stopped, *, attempt: int, next_link: bool) -> Ending:
    """Return what comes after an attempt that was stopped before a line of the script ran: there was nothing to save.

    At the time limit only `always` queues it again: the next start has no more time.
    """
    ending, words = Ending(stopped=stopped, before=True), f"{_WORDS[stopped]}, before the training began"
    options = manifest.stop
    if next_link and stopped == "time-limit":
        return _followed(ending, words)
    if options.requeue == "always" or (options.requeue == "saved" and stopped != "time-limit"):
        return _in_the_queue(manifest, ending, words, attempt=attempt, next_link=next_link)
    return replace(ending, why=words)


def _in_the_queue(manifest: Manifest, ending: Ending, words: str, *, attempt: int, next_link: bool) -> Ending:
    """Queue it again, unless another job goes on, or it was asked for no more jobs."""
    options, at_limit = manifest.stop, ending.stopped == "time-limit"
    if at_limit and next_link:
        return _followed(ending, words)
    refusal = ""
    if options.requeue == "never":
        refusal = "--requeue never"
    elif at_limit and manifest.chain > 1:
        refusal = "the last job of its chain"
    elif attempt >= options.max_requeues:
        refusal = "--max-requeues"
    if not refusal:
        return replace(ending, again=True, why=f"{words}: the job is queued again")
    # A stopped run is gone on with by the next job, whatever stopped it (`former.is_over`).
    return _followed(ending, words) if next_link else _not_again(ending, words, refusal)


def _followed(ending: Ending, words: str) -> Ending:
    return replace(ending, why=f"{words}: the next job of the chain goes on")


def _not_again(ending: Ending, words: str, refusal: str) -> Ending:
    why = f"{words}: the job is not queued again ({refusal})"
    return replace(ending, not_again=refusal if ending.unfinished else "", why=why)


def after_refusal(ending: Ending, refusal: str, *, next_link: bool) -> Ending:
    """Return how an attempt ended that should be queued again, and could not be."""
    return replace(ending, again=False, not_again=refusal if ending.unfinished and not next_link else "")


_BY_HAND = "told to end"
_WORDS = {"time-limit": "the time limit", "preemption": "preempted", "unknown": "asked to stop"}


def _after_rejection(manifest: Manifest, verdict: Verdict | None, *, retried: int) -> Ending:
    bad = () if verdict is None else tuple(node.node for node in verdict.nodes if node.result != "match")
    if not manifest.retry_excluding or not bad:
        return Ending()
    if retried >= manifest.retry_excluding:
        return Ending(why=f"queued again without the nodes that differ {retried} times: no more (--retry-excluding)")
    return Ending(again=True, without=bad, why=f"the job is queued again without {', '.join(bad)}")


# -- acting -------------------------------------------------------------------------------


def slurm_does_it(environ: Mapping[str, str]) -> bool:
    """Whether Slurm itself queues this preempted job again when its script ends.

    Where PreemptMode is REQUEUE it does, whatever the script's status. `scontrol requeue` in
    between leaves the time of the preemption in the job, and Slurm queues it once more when
    it has completed (both seen with 24.11). Where a QOS decides (preempt/qos) it is not told
    here, and the answer is no.
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
    """What became of a request to queue a job again.

    Attributes:
        problem: what is wrong, though it may be queued; empty when nothing is.
    """

    done: bool
    problem: str = ""


def queue_again(place: Place, environ: Mapping[str, str], *, without: Sequence[str]) -> Queued:
    """Queue this job again.

    The nodes to leave out can be changed only while a job is pending (22.05 to 24.11), which
    it is as soon as it is queued again; this process goes on for some seconds after that.
    """
    scontrol = shutil.which("scontrol", path=environ.get("PATH"))
    if scontrol is None:
        return Queued(done=False, problem="scontrol is not on PATH")
    before = _excluded_already(scontrol, place.job_id, environ) if without else ""
    try:
        process.run([scontrol, "requeue", place.job_id], timeout=_SECONDS, env=environ)
    except HpcenvError as error:
        if not _is_pending(scontrol, place.job_id, environ):
            return Queued(done=False, problem=f"{error.what}: {error.why}")
        # Slurm did it first: a preemption.
    if not without:
        return Queued(done=True)
    nodes = ",".join(filter(None, (before, *without)))
    try:
        process.run(
            [scontrol, "update", f"JobId={place.job_id}", f"ExcNodeList={nodes}"], timeout=_SECONDS, env=environ
        )
    except HpcenvError as error:
        problem = f"the job is queued again, but may get the same nodes: {error.what}: {error.why}"
        return Queued(done=True, problem=problem)
    return Queued(done=True)


def _show(scontrol: str, job_id: str, environ: Mapping[str, str]) -> str:
    try:
        return process.run([scontrol, "show", "job", "-o", job_id], timeout=_SECONDS, env=environ).stdout
    except HpcenvError:
        return ""


def _is_pending(scontrol: str, job_id: str, environ: Mapping[str, str]) -> bool:
    said = _show(scontrol, job_id, environ)
    restarts = re.search(r"\bRestarts=(\d+)", said)
    now = environ.get("SLURM_RESTART_COUNT") or "0"
    return "JobState=PENDING" in said or (restarts is not None and int(restarts[1]) > int(now))


def _excluded_already(scontrol: str, job_id: str, environ: Mapping[str, str]) -> str:
    """Return the nodes that the user or an earlier attempt left out, as Slurm writes them."""
    found = re.search(r"\bExcNodeList=(\S+)", _show(scontrol, job_id, environ))
    return found[1] if found and found[1] != "(null)" and len(found[1]) < _LONGEST_NODELIST else ""


# -- files --------------------------------------------------------------------------------


def read_retries(run: RunFolder) -> int:
    """Return how often this job was queued again without some nodes."""
    try:
        found = json.loads(run.excluded.read_text(encoding="utf-8"))["retries"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return len(found) if isinstance(found, list) else 0


def note_retry(run: RunFolder, place: Place, without: Sequence[str]) -> None:
    """Remember that the job is queued again without these nodes."""
    try:
        retries = json.loads(run.excluded.read_text(encoding="utf-8"))["retries"]
        retries = retries if isinstance(retries, list) else []
    except (OSError, ValueError, KeyError, TypeError):
        retries = []
    retries.append({"attempt": place.attempt, "job_id": place.job_id, "without": list(without)})
    wire.write_text(json.dumps({"schema": SCHEMA, "retries": retries}, indent=1) + "\n", run.excluded)


def has_next_link(run: RunFolder, manifest: Manifest, job_id: str) -> bool:
    """Whether another job of this run's chain comes after this one."""
    if manifest.chain < 2:
        return False
    try:
        chain = wire.read(Submission, run.submission).chain
    except HpcenvError:
        return False
    return job_id in chain[:-1]
