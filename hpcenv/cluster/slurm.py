"""Slurm's query commands: squeue, sacct, scancel, and srun inside a running job.

Runs on: LOGIN NODE. Jobs are submitted with submitit (`submission/submitit_executor.py`).

Every word of Slurm for a state is translated. A state that a later Slurm adds becomes `unknown`,
never `completed`. The commands print formats with explicit separators, because `--json` changes with
every release (torchx#1101, #1373). These formats are the same in Slurm 22.05, 24.11 and 26.05.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hpcenv import process
from hpcenv.cluster import munge, slurm_command
from hpcenv.errors import HpcenvError, ToolFailed

State = Literal[
    "pending", "running", "completing", "suspended", "completed", "failed", "cancelled", "timeout",
    "preempted", "node-fail", "out-of-memory", "requeued", "unknown",
]  # fmt: skip

# squeue(1) and sacct(1), section JOB STATE CODES, Slurm 22.05 to 26.05.
_STATES: dict[str, State] = {
    "PENDING": "pending",
    "CONFIGURING": "pending",
    "REQUEUED": "requeued",
    "REQUEUE_HOLD": "requeued",
    "REQUEUE_FED": "requeued",
    "RESV_DEL_HOLD": "pending",
    "SPECIAL_EXIT": "requeued",
    "POWER_UP_NODE": "pending",
    "RUNNING": "running",
    "SIGNALING": "running",
    "STAGE_OUT": "completing",
    "COMPLETING": "completing",
    "RESIZING": "running",
    "SUSPENDED": "suspended",
    "STOPPED": "suspended",
    "COMPLETED": "completed",
    "FAILED": "failed",
    "BOOT_FAIL": "node-fail",
    "LAUNCH_FAILED": "failed",
    "RECONFIG_FAIL": "failed",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "DEADLINE": "timeout",
    "TIMEOUT": "timeout",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "node-fail",
    "OUT_OF_MEMORY": "out-of-memory",
}

ENDED: frozenset[State] = frozenset(
    {"completed", "failed", "cancelled", "timeout", "preempted", "node-fail", "out-of-memory"}
)

_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of a job as Slurm reports it.

    Attributes:
        state: the state, or `unknown` if neither squeue nor sacct knows it. If the state is `unknown`, `reason` says
            why.
        exit_status, exit_signal: of the batch script; None while they are unknown.
        nodelist: the nodes on which the job runs or ran.
        source: the command that reported the state, `squeue` or `sacct`; empty if neither did.
        gone: whether squeue answered and no longer lists the job. Such a job is over, but how it ended is unknown.
            `gone` is False if squeue did not answer.
        no_slurm: whether this machine has no squeue. Without squeue, only files say anything about the job.
        unconfirmed: True if squeue did not answer, and sacct says that the job has not ended. Sacct's state may be old.
    """

    state: State
    reason: str = ""
    exit_status: int | None = None
    exit_signal: int | None = None
    nodelist: str = ""
    elapsed: str = ""
    source: str = ""
    gone: bool = False
    no_slurm: bool = False
    unconfirmed: bool = False

    @property
    def ended(self) -> bool:
        """Whether the job has ended. A job whose state is `unknown` does not count as ended."""
        return self.state in ENDED


def parse_state(word: str) -> State:
    """Return the state for the name that Slurm prints. `CANCELLED by 1001` and `CANCELLED+` mean `cancelled`."""
    name = word.strip().split(" ")[0].rstrip("+").upper()
    return _STATES.get(name, "unknown")


def job_state(job_id: str, environ: Mapping[str, str]) -> JobState:
    """Return the state of one job; see `job_states`."""
    return job_states((job_id,), environ)[job_id]


def job_states(job_ids: Iterable[str], environ: Mapping[str, str]) -> dict[str, JobState]:
    """Return the states of jobs from squeue, then sacct: one call of each command for any number of jobs.

    A job that neither command knows is `unknown`, with the reasons of both commands. sacct is asked only about jobs
    that squeue does not list, and about jobs that squeue lists as ended. squeue still lists a job for MinJobAge after
    its end, but does not print the exit status.

    Args:
        job_ids: `123`, or `123_4` for an element of an array.
    """
    asked = dict.fromkeys(job_ids)
    valid = [job_id for job_id in asked if _JOB_ID.fullmatch(job_id)]
    env = slurm_command.clean_environment(environ)
    listed, no_squeue = _answers("squeue", _ask_squeue, valid, env)
    open_ids = [job_id for job_id in valid if job_id not in listed or listed[job_id].ended]
    # sacct needs munge, too.
    down = no_squeue if no_squeue.startswith(munge.DOWN) else ""
    accounted, no_sacct = ({}, down) if down else _answers("sacct", _ask_sacct, open_ids, env)
    found = {job_id: JobState(state="unknown", reason=f"`{job_id}` is not a job id") for job_id in asked}
    for job_id in valid:
        found[job_id] = _combine(listed.get(job_id), no_squeue, accounted.get(job_id), no_sacct)
    return found


# A job id comes from a file, so it must be checked: scancel would read `--me` or `-u alice` as an option.
_JOB_ID = re.compile(r"[0-9]{1,18}(_[0-9]{1,18})?")
# A job id, or the name of a run (submission/run_place.py). squeue accepts lists of ids and lists of names.
_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

# One argument of a program can have at most 128 KiB (MAX_ARG_STRLEN, execve(2)).
_MOST_CHARACTERS = 100_000

# Seconds before the next attempt. squeue sometimes fails when slurmctld is busy, or when its backup takes over.
_PAUSES = (0.3, 1.0)

# The message of `process.find_tool` for a missing program contains this text.
_MISSING = "is not on PATH"

_Ask = Callable[[Sequence[str], Mapping[str, str]], "dict[str, JobState]"]


def _answers(name: str, ask: _Ask, job_ids: Sequence[str], env: Mapping[str, str]) -> tuple[dict[str, JobState], str]:
    """Return the answer of a command, and the reason why it did not answer; the reason is empty if it answered."""
    if not job_ids:
        return {}, ""
    for pause in (*_PAUSES, None):
        try:
            return ask(job_ids, env), ""
        except HpcenvError as error:
            # No second attempt after a timeout: the user has waited long enough.
            again = isinstance(error, ToolFailed) and error.status is not None and not _DISABLED.search(error.stderr)
            if not again or pause is None:
                return {}, f"{error.what}: {_last_line(error)}"
        time.sleep(pause)
    raise AssertionError(name)


# What sacct prints if the cluster has no slurmdbd.
_DISABLED = re.compile(r"accounting storage is disabled|AccountingStorageType", re.IGNORECASE)


def _combine(listed: JobState | None, no_squeue: str, accounted: JobState | None, no_sacct: str) -> JobState:
    """Combine the answers of squeue and sacct about one job."""
    if listed is not None:
        # slurmdbd gets the end of a job later than squeue.
        return accounted if listed.ended and accounted is not None and accounted.ended else listed
    gone = not no_squeue
    if accounted is not None and accounted.ended:
        return accounted
    if accounted is not None and not gone:
        return replace(accounted, unconfirmed=True, reason=f"so says sacct; {no_squeue}")
    reasons = [no_squeue or "squeue does not know this job"]
    if accounted is not None:
        # If accounting has missed the end of a job ("runaway"), sacct prints RUNNING forever.
        reasons.append(f"sacct says {accounted.state}, which squeue does not confirm")
    else:
        reasons.append(no_sacct or "sacct does not know this job")
    return JobState(
        state="unknown", reason="; ".join(dict.fromkeys(reasons)), gone=gone, no_slurm=_MISSING in no_squeue
    )


def _last_line(error: HpcenvError) -> str:
    text = error.stderr if isinstance(error, ToolFailed) else error.why or ""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"


def _ask_squeue(job_ids: Sequence[str], env: Mapping[str, str]) -> dict[str, JobState]:
    squeue = _find("squeue", "ask for the state of a job", env)
    argv = [squeue, "--noheader", "--states=all", "--array"]
    words = ",".join(job_ids)
    if len(words) <= _MOST_CHARACTERS:
        argv.append(f"--jobs={words}")
    # Without --jobs all jobs are listed.
    argv.append("--format=%i|%T|%r|%N|%M")
    try:
        text = _output(argv, env)
    except ToolFailed as error:
        # This error occurs only for a single job. For several jobs, squeue leaves out jobs that it does not know.
        if "Invalid job id" in error.stderr:
            return {}
        raise
    return _parse_squeue(text, job_ids)


def _reason(state: State, word: str, reason: str = "") -> str:
    """Return the reason of a state. For an unknown state, return the word that Slurm prints instead."""
    return f"Slurm says {word}" if state == "unknown" else reason


def _parse_squeue(text: str, job_ids: Iterable[str]) -> dict[str, JobState]:
    wanted = set(job_ids)
    found: dict[str, JobState] = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) == 5 and fields[0] in wanted:
            job_id, word, reason, nodelist, elapsed = fields
            state = parse_state(word)
            found[job_id] = JobState(
                state=state,
                reason=_reason(state, word, "" if reason == "None" else reason),
                nodelist=nodelist,
                elapsed=elapsed,
                source="squeue",
            )
    return found


def _ask_sacct(job_ids: Sequence[str], env: Mapping[str, str]) -> dict[str, JobState]:
    sacct = _find("sacct", "ask for the state of an ended job", env)
    # JobIDRaw is not used, because it has a different number for an element of an array.
    columns = "JobID,State,ExitCode,NodeList,Elapsed"
    found: dict[str, JobState] = {}
    # Elements that never started share one line: `123_[0,2,4-9%2]`. sacct prints this line only if it is asked for the
    # whole array. sacct has the option --array since 23.02.
    for words in _portions(list(dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids))):
        argv = [sacct, "--noheader", "--parsable2", "--allocations", f"--jobs={words}", f"--format={columns}"]
        found |= _parse_sacct(_output(argv, env), job_ids)
    return found


def _portions(job_ids: Sequence[str]) -> list[str]:
    """Join job ids with commas. Return several arguments only if one argument would be too long."""
    portions = [""]
    for job_id in job_ids:
        if len(portions[-1]) + len(job_id) >= _MOST_CHARACTERS:
            portions.append("")
        portions[-1] += ("," if portions[-1] else "") + job_id
    return portions


_NEVER_STARTED = re.compile(r"([0-9]{1,18})_\[([0-9,:-]{1,200000})(?:%[0-9]{1,9})?\]")


def _elements(job_id: str, wanted: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the wanted ids that a line of sacct describes.

    Args:
        job_id: the job id in the line, which may stand for several elements of an array.
        wanted: number of a job or array -> the wanted ids with this number.
    """
    match = _NEVER_STARTED.fullmatch(job_id)
    if match is None:
        return [job_id] if job_id in wanted.get(job_id.partition("_")[0], ()) else []
    spans = []
    for part in match[2].split(","):
        numbers = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?(?::([0-9]{1,9}))?", part)
        if numbers is not None:
            spans.append(range(int(numbers[1]), int(numbers[2] or numbers[1]) + 1, int(numbers[3] or 1) or 1))
    return [
        one
        for one in wanted.get(match[1], ())
        if (index := one.partition("_")[2]) and any(int(index) in span for span in spans)
    ]


def _parse_sacct(text: str, job_ids: Iterable[str]) -> dict[str, JobState]:
    wanted: dict[str, list[str]] = {}
    for job_id in job_ids:
        wanted.setdefault(job_id.partition("_")[0], []).append(job_id)
    found: dict[str, JobState] = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        for job_id in _elements(fields[0], wanted) if len(fields) == 5 else ():
            _, word, code, nodelist, elapsed = fields
            status, _, number = code.partition(":")
            state = parse_state(word)
            found[job_id] = JobState(
                state=state,
                reason=_reason(state, word),
                exit_status=int(status) if re.fullmatch("[0-9]{1,9}", status) else None,
                exit_signal=int(number) if re.fullmatch("[0-9]{1,9}", number) else None,
                nodelist="" if nodelist == "None assigned" else nodelist,
                elapsed=elapsed,
                source="sacct",
            )
    return found


def cancel(job_id: str, environ: Mapping[str, str]) -> None:
    """Cancel a job.

    Raises:
        ToolMissing, ToolFailed: scancel is missing, or failed.
    """
    cancel_all((job_id,), environ)


def cancel_all(job_ids: Sequence[str], environ: Mapping[str, str], *, kill: bool = False) -> None:
    """Cancel jobs with one call of scancel.

    Args:
        job_ids: `123` (for an array: all elements), or `123_4`.
        kill: send KILL at once to all processes of the jobs, including the batch script. Without `kill`, Slurm itself
            sends KILL, KillWait seconds after a job was cancelled.

    Raises:
        ToolMissing, ToolFailed: scancel is missing, or failed. A job that has already ended is no error.
    """
    for job_id in job_ids:
        if not _JOB_ID.fullmatch(job_id):
            raise ToolFailed(f"`{job_id}` is not a job id")
    scancel = _find("scancel", "cancel a job", environ)
    how = ("--signal=KILL", "--full") if kill else ()
    try:
        _output([scancel, *how, *job_ids], slurm_command.clean_environment(environ))
    except ToolFailed as error:
        lines = [line for line in error.stderr.splitlines() if line.strip()]
        if not lines or not all(_OVER.search(line) for line in lines):
            raise


# What scancel prints for jobs that have ended (24.11). scancel then continues with the other jobs.
_OVER = re.compile(r"Invalid job id|already completing or completed|Job/step already complet", re.IGNORECASE)


def kill_wait(environ: Mapping[str, str]) -> float:
    """Return the seconds between TERM and KILL when a job is cancelled: KillWait of slurm.conf(5).

    If scontrol does not print it, return 30, which is Slurm's default.
    """
    try:
        scontrol = _find("scontrol", "ask for the cluster's settings", environ)
        text = process.run(
            [scontrol, "show", "config"], timeout=_SECONDS, env=slurm_command.clean_environment(environ)
        ).stdout
    except HpcenvError:
        return 30.0
    match = re.search(r"^KillWait\s*=\s*([0-9]{1,6})\b", text, re.MULTILINE)
    return 30.0 if match is None else float(match[1])


def shell_argv(
    job_id: str, node: str, command: Sequence[str], environ: Mapping[str, str], *, tty: bool, protocol: bool = False
) -> list[str]:
    """Return the srun command that runs `command` inside a running job, on one node, parallel to its other steps.

    With `--overlap` (Slurm 20.11 and later), the step shares the job's CPUs, memory and GPUs.

    Args:
        protocol: whether a protocol uses standard input and output, so that bytes must arrive at once and unchanged.

    Raises:
        ToolMissing: srun is missing.
        ToolFailed: the recorded job id is not valid.
    """
    if not _JOB_ID.fullmatch(job_id):
        raise ToolFailed(f"`{job_id}` is not a job id")
    srun = _find("srun", "run a command inside a job", environ)
    where = (f"--jobid={job_id}", "--overlap", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--cpu-bind=none")
    how = ("--quiet", "--unbuffered") if protocol else ("--pty",) if tty else ()
    return [srun, *where, *how, *command]


@dataclass(frozen=True, kw_only=True)
class Found:
    """A job that waits or runs, found by its name and working directory.

    Attributes:
        job_id: the job id. For an array, the id of the whole array, for example `123`, even if squeue shows
            `123_[0-3%2]` or `123_7`.
        state: the state. For an array, the state of one of its elements; `running` if any element runs.
    """

    job_id: str
    state: State


def find_jobs(places: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, tuple[Found, ...]]:
    """Return the jobs that wait or run, by their working directories, with one call of squeue for all folders.

    The search is for runs whose submission got no answer. Only the name and the working directory of such a run are
    known.

    Args:
        places: working directory -> name of the job.

    Returns:
        Folder -> its jobs in the order of their ids; empty for a folder without jobs.

    Raises:
        ToolMissing, ToolFailed: squeue is missing, or did not answer in several attempts.
    """
    found: dict[str, dict[str, State]] = {folder: {} for folder in places}
    names = dict.fromkeys(places.values())
    for words in _portions(list(names)) if places else ():
        for line in _ask_by_name(words, environ).splitlines():
            job_id, _, rest = line.strip().partition("|")
            word, _, place = rest.partition("|")
            if re.fullmatch("[0-9]{1,18}", job_id) and place in found and found[place].get(job_id) != "running":
                found[place][job_id] = parse_state(word)
    return {
        folder: tuple(Found(job_id=job_id, state=jobs[job_id]) for job_id in sorted(jobs, key=int))
        for folder, jobs in found.items()
    }


@dataclass(frozen=True, kw_only=True)
class OwnJob:
    """A job of this user that squeue still knows.

    Attributes:
        job_id: for an array, the id of the whole array.
        script: path of the batch script.
    """

    job_id: str
    name: str
    state: State
    script: str
    nodelist: str


def own_job(word: str, environ: Mapping[str, str]) -> OwnJob | None:
    """Return a job of this user by its id or name; None if squeue does not list it, or if it belongs to another user.

    For a job array, return an element that has not ended, if such an element exists.

    Raises:
        ToolMissing, ToolFailed: squeue is missing or did not answer.
    """
    if not _JOB_NAME.fullmatch(word):
        return None
    squeue = _find("squeue", "look for the job", environ)
    which = f"--jobs={word}" if _JOB_ID.fullmatch(word) else f"--name={word}"
    argv = [squeue, "--noheader", "--states=all", "--me", which, "--format=%F|%T|%N|%j|%o"]
    try:
        lines = _output(argv, slurm_command.clean_environment(environ)).splitlines()
    except ToolFailed as error:
        if "Invalid job id" in error.stderr:
            return None
        raise
    rows = [fields for line in lines if len(fields := line.strip().split("|", 4)) == 5]
    jobs = [
        OwnJob(job_id=row[0], state=parse_state(row[1]), nodelist=row[2], name=row[3], script=row[4]) for row in rows
    ]
    return next((job for job in jobs if job.state not in ENDED), jobs[0] if jobs else None)


def own_folders(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the jobs of this user that wait or run: job id -> working directory.

    Raises:
        ToolMissing, ToolFailed: squeue is missing or did not answer.
    """
    squeue = _find("squeue", "look for jobs that need images", environ)
    # Without --states, squeue lists the jobs that are not over yet (squeue(1)). %F is the number of a whole array.
    lines = _output([squeue, "--noheader", "--me", "--format=%F|%Z"], slurm_command.clean_environment(environ))
    return {job: folder for job, bar, folder in (line.strip().partition("|") for line in lines.splitlines()) if bar}


def cancel_others(folder: str, name: str, known: Container[str], environ: Mapping[str, str]) -> None:
    """Cancel all jobs of a folder except the known jobs.

    Args:
        folder, name: the working directory and name of the jobs, as for `find_jobs`.
        known: ids of jobs that must not be cancelled.

    Raises:
        ToolMissing, ToolFailed: a command is missing or failed, so it is not known which jobs are queued.
    """
    for job in find_jobs({folder: name}, environ)[folder]:
        if job.job_id not in known:
            cancel(job.job_id, environ)


def _ask_by_name(names: str, environ: Mapping[str, str]) -> str:
    squeue = _find("squeue", "look for the job", environ)
    # For an array, %F is the number of the whole array, but %i can be the id of an element. For other jobs, %F is the
    # job id (squeue(1), 22.05 to 26.05).
    argv = [squeue, "--noheader", f"--name={names}", "--format=%F|%T|%Z"]
    env = slurm_command.clean_environment(environ)
    for pause in _PAUSES:
        try:
            return _output(argv, env)
        except ToolFailed as error:
            if error.status is None:
                raise
        time.sleep(pause)
    return _output(argv, env)


def _output(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the output of a Slurm command. If the command is slow, find out whether munge is the reason."""
    return slurm_command.run(argv, env, timeout=_SECONDS).stdout


def _find(tool: str, needed_for: str, environ: Mapping[str, str]) -> str:
    return process.find_tool(tool, needed_for=needed_for, path=environ.get("PATH"))
