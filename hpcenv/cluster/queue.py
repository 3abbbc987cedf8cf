"""Say why a job waits: Slurm's reason in words, the job's place in the queue, and its expected start.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from hpcenv import process
from hpcenv.cluster import slurm_command
from hpcenv.errors import HpcenvError
from hpcenv.text import plural

_SECONDS = 30.0

# The reasons in squeue(1), section JOB REASON CODES (Slurm 24.11). The first pattern that matches is used.
_REASONS = (
    ("Resources", "the nodes that it needs are not free yet"),
    ("Priority", "jobs with a higher priority go first"),
    (
        "DependencyNeverSatisfied",
        "the job that it depends on did not end in the required way, so this job does not start: cancel it",
    ),
    ("Dependency", "it waits for the end of another job"),
    ("BeginTime", "the time of --begin has not come, or Slurm waits before it starts a requeued job again"),
    ("JobHeldUser|job requeued in held state", "it is held; `scontrol release JOB` lets it go"),
    ("JobHeldAdmin|launch failed requeued held", "Slurm or an administrator holds it: ask the site"),
    ("JobArrayTaskLimit", "as many elements of its array run as --array allows"),
    ("ReqNodeNotAvail.*", "a node that it needs is down, drained or reserved"),
    ("Reservation.*", "its reservation has not begun"),
    ("Licenses", "the licences that it needs are in use"),
    ("NodeDown", "a node that it needs is down"),
    ("Partition(NodeLimit|TimeLimit)", "it asks for more than the partition allows"),
    ("Partition(Down|Inactive|Config)", "its partition starts no jobs now"),
    (
        r"\w+Per(Job|Node)\w*|MaxMemPerLimit",
        "a part of its request exceeds a limit for one job, so Slurm does not start it: cancel it, and request less",
    ),
    (
        r"QOSMin\w*",
        "a part of its request is below a minimum of its QOS, so Slurm does not start it: cancel it, and request more",
    ),
    (
        "BadConstraints",
        "no nodes have what it requests, so Slurm does not start it: cancel it, and change --constraint or the shape",
    ),
    (
        "InvalidAccount|AccountNotAllowed|InvalidQOS|QOSNotAllowed",
        "its account or QOS does not allow it, so Slurm does not start it: cancel it, and change --account or --qos",
    ),
    ("(QOS|Assoc|Max|Group).*", "a limit of its account or QOS is reached; it waits for other jobs of them to end"),
)

# A job with one of these reasons does not start when other jobs end. It starts only after a change of the job or of a
# limit.
_NEVER = re.compile(
    r"DependencyNeverSatisfied|\w+Per(?:Job|Node)\w*|MaxMemPerLimit|QOSMin\w*|BadConstraints|"
    r"Invalid(?:Account|QOS)|(?:Account|QOS)NotAllowed"
)

# Jobs with these reasons do not wait for nodes. So they are not counted as jobs that start earlier.
_NO_NODES = re.compile(r"Dependency|JobHeld|BeginTime|JobArrayTaskLimit|.*held")


@dataclass(frozen=True, kw_only=True)
class QueuePlace:
    """The place of a job in the queue.

    Attributes:
        before: how many jobs in the queue of its partition will start earlier; None if the value is unknown.
        start: when Slurm expects to start the job, in Slurm's format and local time; empty while Slurm has no
            estimate.
        waited: seconds since the job was submitted or queued again; None if the value is unknown.
        hidden: whether Slurm hides the jobs of other users.
    """

    partition: str
    waited: int | None = None
    before: int | None = None
    start: str = ""
    hidden: bool = False

    def __str__(self) -> str:
        if self.hidden:
            place = "its place in the queue is unknown: this cluster hides other users' jobs (PrivateData)"
        elif self.before is None:
            place = "its place in the queue is unknown"
        else:
            place = f"{plural(self.before, 'job')} before it in the queue of partition {self.partition}"
        start = f"Slurm expects to start it at {self.start.replace('T', ' ')}" if self.start else ""
        return f"{place}; {start or 'Slurm does not expect a start yet'}"

    @property
    def short(self) -> str:
        """A shorter text with the same content, for a narrow terminal."""
        before = "place unknown" if self.before is None else f"{self.before} before it"
        start = f"start {self.start.replace('T', ' ')[:16]}" if self.start else "no start expected yet"
        return f"{before}; {start}"


def in_words(reason: str) -> str:
    """Return the reason why a job waits. If the meaning of the last word of the reason is known, add the meaning."""
    word = reason.rpartition("; ")[2]
    meaning = next((words for pattern, words in _REASONS if re.fullmatch(pattern, word)), "")
    return f"{reason}: {meaning}" if meaning else reason


def can_never_start(reason: str) -> str:
    """Return Slurm's word in a reason if Slurm cannot start the job without a change; empty for any other reason."""
    return next((word for word in reason.split("; ") if _NEVER.fullmatch(word)), "")


def find_place(job_id: str, environ: Mapping[str, str]) -> QueuePlace | None:
    """Return the place of a job in the queue; None if the job does not wait, or if Slurm does not answer."""
    env = slurm_command.clean_environment(environ)
    try:
        squeue = process.find_tool("squeue", needed_for="ask for the queue", path=environ.get("PATH"))
        ask = [squeue, "--noheader", "--states=PENDING"]
        text = slurm_command.run([*ask, f"--jobs={job_id}", "--format=%P|%Q|%S|%u|%V"], env, timeout=_SECONDS).stdout
        own = text.strip().split("\n")[0].split("|")
        if len(own) != 5 or not own[1].isdecimal():
            return None
        partition, priority, start, user, since = own
        queue = [*ask, f"--partition={partition}", "--sort=-p,i", "--format=%i|%Q|%u|%r"]
        lines = slurm_command.run(queue, env, timeout=_SECONDS).stdout.splitlines()
        rows = [row for line in lines if len(row := line.strip().split("|", 3)) == 4 and row[1].isdecimal()]
        hidden = all(row[2] == user for row in rows) and _hides_jobs(env)
    except HpcenvError:
        return None
    first = [row for row in rows if _goes_first(row, job_id, int(priority)) and not _NO_NODES.match(row[3])]
    known = "" if start in ("N/A", "Unknown") else start
    before = None if hidden else len(first)
    return QueuePlace(partition=partition, before=before, start=known, waited=_seconds_since(since), hidden=hidden)


def _seconds_since(moment: str) -> int | None:
    """Return the seconds since a moment that Slurm printed in local time; None if it is not a time."""
    try:
        return max(0, int(time.time() - time.mktime(time.strptime(moment, "%Y-%m-%dT%H:%M:%S"))))
    except (ValueError, OverflowError):
        return None


def _goes_first(row: list[str], job_id: str, priority: int) -> bool:
    """Whether the job of a row has a higher priority than our job, or the same priority and a lower job id."""
    number, own = (int(re.match(r"[0-9]*", one)[0] or 0) for one in (row[0], job_id))  # type: ignore[index]
    return int(row[1]) > priority or (int(row[1]) == priority and number < own)


def _hides_jobs(env: Mapping[str, str]) -> bool:
    """Whether Slurm shows users only their own jobs, because of PrivateData in slurm.conf(5)."""
    scontrol = process.find_tool("scontrol", needed_for="ask for the cluster's settings", path=env.get("PATH"))
    text = process.run([scontrol, "show", "config"], timeout=_SECONDS, env=env).stdout
    found = re.search(r"^PrivateData\s*=\s*(.*)$", text, re.MULTILINE)
    return found is not None and "jobs" in found[1].split(",")
