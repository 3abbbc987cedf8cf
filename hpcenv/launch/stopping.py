"""Stop the training when its job must end early: find out why and when, and tell the ranks.

Runs on: COMPUTE NODE. Standard library only.

Behaviour of Slurm 24.11 (seen in the testbed, 2026-11): Before the time limit, the job's steps get the signal of
`--signal`. If the site sets `send_user_signal`, they also get this signal before a preemption. On other sites, the
steps of a preempted job get TERM at once. In all cases, `scontrol show job` then shows the end time in EndTime, and
PreemptTime for a preemption. At this end time all processes get TERM, and, after KillWait (30 s by default), KILL.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcenv import process
from hpcenv.errors import HpcenvError
from hpcenv.launch.current_attempt import is_current_attempt
from hpcenv.launch.requeue import StopReason
from hpcenv.machine import job_cgroup
from hpcenv.machine.this_node import ThisNode
from hpcenv.records.codec import SCHEMA
from hpcenv.records.files import load_record, save_record
from hpcenv.records.hangs import requests_of, why_to_end
from hpcenv.records.manifest import Manifest
from hpcenv.records.outcome import StopRequest
from hpcenv.records.run_folder import RunFolder

Reason = Literal["time-limit", "preemption", "cancelled", "hang", "idle", "unknown"]

# The signal that Slurm sends as a warning. The ranks get the signal of `--stop-signal`.
WARNING = signal.SIGUSR2

# Slurm may send its warning up to a minute early (sbatch(1), --signal).
_EARLY = 60.0
# slurmctld normally answers in milliseconds. After this time, the ranks are stopped without the answer.
_SECONDS_TO_ASK = 8.0
# The record of the ranks' end waits at most this time for Slurm's answer, because Slurm may kill the step soon.
_SECONDS_TO_SETTLE = 4.0
# Nodes ask one after the other, because a thousand requests at once would overload slurmctld.
_SECONDS_BETWEEN_NODES = 0.02
# Pause between two reads of the request file, in which a task finds Slurm's answer to the first task of its node.
_SECONDS_BETWEEN_LOOKS = 0.1
# Time between the request to end and the kill, if ranks hang or do nothing. Ranks that can still save their state may
# do so in this time.
_SECONDS_AFTER_WATCH = 30.0


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """Slurm's answer to the question why and when a job must end.

    Attributes:
        reason: why the job must end.
        ends: end time in seconds since the epoch; None if the value is unknown.
    """

    reason: Reason
    ends: float | None = None


def ask(job_id: str, environ: Mapping[str, str], *, warned: bool, grace: float) -> JobEnd:
    """Ask Slurm why a job must end, and when.

    Args:
        job_id: Slurm's job id.
        environ: environment variables for scontrol.
        warned: True after Slurm's warning signal, False after TERM.
        grace: seconds between warning and end, as requested from Slurm.
    """
    scontrol = shutil.which("scontrol", path=environ.get("PATH"))
    if scontrol is None or not re.fullmatch("[0-9]+", job_id):
        return JobEnd(reason="unknown")
    try:
        stdout = process.run(
            [scontrol, "show", "job", "-o", job_id],
            timeout=_SECONDS_TO_ASK,
            env={**environ, "SLURM_TIME_FORMAT": "standard"},
        ).stdout
    except HpcenvError:
        return JobEnd(reason="unknown")
    return parse_answer(stdout, warned=warned, grace=grace, now=time.time())


def parse_answer(line: str, *, warned: bool, grace: float, now: float) -> JobEnd:
    """Return why and when a job must end, from a line of `scontrol show job -o` (Slurm 22.05 to 26.05).

    Pure, but times are read in the local time zone.
    """
    ends, started, preempted = (_time(_value(line, name)) for name in ("EndTime", "StartTime", "PreemptTime"))
    if preempted is not None and preempted >= (started or 0.0):
        return JobEnd(reason="preemption", ends=ends)
    state = _value(line, "JobState")
    if state == "TIMEOUT" or _value(line, "Reason") == "TimeLimit":
        return JobEnd(reason="time-limit", ends=ends)
    if state in ("CANCELLED", "COMPLETING"):
        return JobEnd(reason="cancelled")
    if warned and ends is not None and ends - now <= grace + _EARLY:
        return JobEnd(reason="time-limit", ends=ends)
    return JobEnd(reason="unknown")


def _value(line: str, name: str) -> str:
    match = re.search(rf"(?:\A|\s){name}=(\S*)", line)
    return match[1] if match else ""


def _time(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None  # Unknown, None, N/A


class Stop:
    """The stop of the training on one node: asks Slurm for the reason, and writes the request for the ranks.

    If a node has several tasks, only the first task asks Slurm and writes the request. The other tasks read that
    request (`asks` is False).

    Attributes:
        answer: Slurm's answer; None until it has arrived or the time limit for it has passed.
    """

    def __init__(
        self, manifest: Manifest, this_node: ThisNode, environ: Mapping[str, str], *, asks: bool = True
    ) -> None:
        self._asks = asks
        self.answer: JobEnd | None = None
        self._manifest = manifest
        self._run = RunFolder(Path(manifest.run_folder))
        self._this_node = this_node
        self._environ = dict(environ)
        self._number = 0
        self._asked = 0.0
        self._asking: threading.Thread | None = None
        self._received: JobEnd | None = None

    @property
    def signal_for_ranks(self) -> int:
        """Number of the signal that the ranks get (`--stop-signal`)."""
        return int(getattr(signal, f"SIG{self._manifest.stop.signal}"))

    @property
    def ends(self) -> float:
        """The time when Slurm ends the job, in seconds since the epoch; if unknown, an estimate from `grace`."""
        known = None if self.answer is None else self.answer.ends
        return self._asked + self._manifest.stop.grace if known is None else known

    @property
    def grace(self) -> float:
        """Seconds from the request to the end."""
        return max(0.0, self.ends - self._asked)

    @property
    def is_preemption(self) -> bool:
        """Whether Slurm needs the nodes for another job."""
        return self.answer is not None and self.answer.reason == "preemption"

    @property
    def stopped(self) -> StopReason:
        """Why the training was asked to save its state and stop; empty without a request, and after a cancel."""
        reason = "unknown" if self.answer is None else self.answer.reason
        if self._number == 0 or reason == "cancelled" or (self._number != WARNING and reason == "unknown"):
            return ""
        return reason

    @property
    def saved(self) -> bool:
        """Whether a rank of this node reported that it has saved its state (`hpcenv.training`)."""
        try:
            return self._run.saved_on(self._this_node.node).exists()
        except OSError:
            return False

    def begin(self, number: int) -> None:
        """Begin a stop, and ask Slurm for the reason. After the warning signal, the ranks stop before Slurm answers.

        Args:
            number: the signal that arrived.
        """
        self._number, self._asked = number, time.time()
        watch, folder = self._manifest.watch, requests_of(self._run, self._this_node.attempt)
        # The watch of a node may have requested the stop (watch/hangs.py).
        reason = why_to_end(folder, watch) if number == WARNING and watch is not None else ""
        if reason:
            grace = self._manifest.stop.grace
            self.answer = JobEnd(reason=reason, ends=self._asked + min(_SECONDS_AFTER_WATCH, grace))
        if number == WARNING:
            self._write_request()
        if self.answer is not None:
            return
        if self._manifest.cluster == "local":
            self.answer = JobEnd(reason="unknown" if number == WARNING else "cancelled")
            self._write_request()
            return
        self._asking = threading.Thread(target=self._ask, name="hpcenv-stop", daemon=True)
        self._asking.start()

    def attend(self) -> bool:
        """Take Slurm's answer if it has arrived; return whether the ranks can be stopped now."""
        if self.answer is None:
            late = time.time() - self._asked > _SECONDS_TO_ASK + 2.0
            if self._asking is not None and self._asking.is_alive() and not late:
                return self._number == WARNING
            self.answer = self._received or JobEnd(reason="unknown")
            self._write_request()
        return True

    def settle(self) -> None:
        """After the ranks have ended, wait a limited time for Slurm's answer to this task."""
        if self._asks and self._asking is not None:
            self._asking.join(_SECONDS_TO_SETTLE)
        self.attend()

    def _ask(self) -> None:
        if not self._asks:
            self._received = self._of_first_task()
            return
        time.sleep(min(self._this_node.rank * _SECONDS_BETWEEN_NODES, _SECONDS_TO_ASK))
        self._received = ask(
            self._this_node.job_id, self._environ, warned=self._number == WARNING, grace=self._manifest.stop.grace
        )

    def _of_first_task(self) -> JobEnd | None:
        """Return Slurm's answer from the request that the first task of this node writes."""
        until = time.monotonic() + _SECONDS_TO_ASK + 1.0
        found: StopRequest | None = None
        while time.monotonic() < until:
            with contextlib.suppress(HpcenvError):
                found = load_record(StopRequest, self._run.stop_of(self._this_node.node))
                if found.attempt == self._this_node.attempt and found.reason != "unknown":
                    break
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        return None if found is None else JobEnd(reason=found.reason, ends=found.ends)

    def _write_request(self) -> None:
        """Write the stop request to the file that the ranks of this node read."""
        if not self._asks:
            return
        if not is_current_attempt(self._run, self._this_node):
            return  # the ranks belong to a later attempt
        request = StopRequest(
            schema=SCHEMA,
            run=self._manifest.run,
            node=self._this_node.node,
            attempt=self._this_node.attempt,
            signal=signal.Signals(self._number).name,
            reason="unknown" if self.answer is None else self.answer.reason,
            asked=self._asked,
            ends=None if self.answer is None else self.answer.ends,
        )
        # If it cannot be written, the ranks still get the signal.
        with contextlib.suppress(OSError):
            save_record(request, self._run.stop_of(self._this_node.node))


# -- before the training ------------------------------------------------------------------


def note_before_training(
    manifest: Manifest, this_node: ThisNode, environ: Mapping[str, str], *, number: int
) -> Reason | None:
    """Ask Slurm why this job must end before its training started. Record the answer for the last step of the job.

    Args:
        manifest: manifest of the run.
        this_node: this node and this attempt.
        environ: environment variables for scontrol.
        number: the signal that the batch script or one of its steps got.

    Returns the reason. If the signal was TERM and the reason is unknown, returns None and records nothing.
    """
    answer = ask(this_node.job_id, environ, warned=number != signal.SIGTERM, grace=manifest.stop.grace)
    if number == signal.SIGTERM and answer.reason == "unknown":
        return None
    request = StopRequest(
        schema=SCHEMA,
        run=manifest.run,
        node=this_node.node,
        attempt=this_node.attempt,
        signal=signal.Signals(number).name,
        reason=answer.reason,
        asked=time.time(),
        ends=answer.ends,
    )
    run = RunFolder(Path(manifest.run_folder))
    if is_current_attempt(run, this_node):
        save_record(request, run.stop_of(this_node.node))
    return answer.reason


def noted_before_training(manifest: Manifest, this_node: ThisNode) -> Reason | None:
    """Return the reason that `note_before_training` recorded in this attempt; None without one."""
    try:
        request = load_record(StopRequest, RunFolder(Path(manifest.run_folder)).stop_of(this_node.node))
    except HpcenvError:
        return None
    return request.reason if (request.run, request.attempt) == (manifest.run, this_node.attempt) else None


# -- processes that must survive the signals ----------------------------------------------


def fuse_that_outlives(folder: Path, environ: Mapping[str, str]) -> str | None:
    """Return a folder for PATH with a squashfuse_ll that ignores signals until the ranks have saved their state.

    proctrack/linuxproc signals every process of the step, also squashfuse_ll, which serves the
    container's files. If squashfuse_ll ends, the ranks get SIGBUS. Apptainer's processes lose ignored
    signals and signal masks (Go resets them at exec; 1.4.5). But libfuse does not change signals that
    are already ignored when it starts. With proctrack/cgroup, only the step itself gets signals, so
    this folder is not needed.

    Args:
        folder: an empty folder of this job on this node.
        environ: environment variables; PATH is searched for squashfuse_ll.

    Returns None if the folder is not needed or cannot be made. It cannot be made if there is no squashfuse_ll on PATH
    (Apptainer may bring and prefer a different squashfuse_ll), or if `folder` is mounted noexec.
    """
    if _followed_by_cgroup():
        return None
    real = shutil.which("squashfuse_ll", path=f"{environ.get('PATH', '')}:/usr/local/bin:/usr/bin:/bin")
    try:
        if real is None or os.statvfs(folder).f_flag & os.ST_NOEXEC:
            return None
        script = folder / "squashfuse_ll"
        script.write_text(f"#!/bin/sh\ntrap '' HUP INT QUIT TERM USR1 USR2\nexec {_quoted(real)} \"$@\"\n")
        script.chmod(0o755)
    except OSError:
        return None
    return str(folder)


def _quoted(path: str) -> str:
    return "'" + path.replace("'", "'\\''") + "'"


def _followed_by_cgroup() -> bool:
    try:
        return job_cgroup.is_followed(Path("/proc/self/cgroup").read_text(errors="replace"))
    except OSError:
        return False
