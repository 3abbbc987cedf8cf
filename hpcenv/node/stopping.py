"""A job that must end before its training does: who says so, why, until when, and what the ranks hear.

Runs on: COMPUTE NODE. Standard library only.

Slurm 24.11 does this (seen in the testbed, 2026-11; reference/launchers.md section 2.1): before
the time limit, and before a preemption where the site has `send_user_signal`, the job's
steps get the signal of `--signal`; elsewhere a preempted job's steps get TERM at once. In
both cases `scontrol show job` has the true end in EndTime from then on, and PreemptTime for
a preemption. At that end everything gets TERM, and KILL after KillWait (30 s by default).
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
from pathlib import Path
from typing import Literal

from hpcenv import wire
from hpcenv.adapters import process
from hpcenv.dataclass import dataclass
from hpcenv.errors import HpcenvError
from hpcenv.node.attempt import is_ours
from hpcenv.node.place import Place
from hpcenv.wire import SCHEMA, Manifest, RunFolder, StopRequest

Reason = Literal["time-limit", "preemption", "cancelled", "unknown"]
Stopped = Literal["", "time-limit", "preemption", "unknown"]

# What Slurm is asked to send; what the ranks get is the user's choice (`--stop-signal`).
WARNING = signal.SIGUSR2

# Slurm may send its warning up to a minute early (sbatch(1), --signal).
_EARLY = 60.0
# slurmctld answers in milliseconds, or it is in trouble and the ranks are told without it.
_SECONDS_TO_ASK = 8.0
# Nodes ask one after the other: a thousand of them at once would be a burden.
_SECONDS_BETWEEN_NODES = 0.02


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What Slurm says about the end of a job.

    Attributes:
        ends: seconds since the epoch; None where that is not known.
    """

    reason: Reason
    ends: float | None = None


def ask(job_id: str, environ: Mapping[str, str], *, warned: bool, grace: float) -> Answer:
    """Ask Slurm why a job shall end, and when.

    Args:
        warned: Slurm's warning came, not TERM.
        grace: seconds between warning and end as asked for.
    """
    scontrol = shutil.which("scontrol", path=environ.get("PATH"))
    if scontrol is None or not re.fullmatch("[0-9]+", job_id):
        return Answer(reason="unknown")
    try:
        said = process.run(
            [scontrol, "show", "job", "-o", job_id],
            timeout=_SECONDS_TO_ASK,
            env={**environ, "SLURM_TIME_FORMAT": "standard"},
        ).stdout
    except HpcenvError:
        return Answer(reason="unknown")
    return understand(said, warned=warned, grace=grace, now=time.time())


def understand(said: str, *, warned: bool, grace: float, now: float) -> Answer:
    """Return what a line of `scontrol show job -o` says (Slurm 22.05 to 26.05). Pure but for the time zone."""
    ends, started, preempted = (_time(_value(said, name)) for name in ("EndTime", "StartTime", "PreemptTime"))
    if preempted is not None and preempted >= (started or 0.0):
        return Answer(reason="preemption", ends=ends)
    state = _value(said, "JobState")
    if state == "TIMEOUT" or _value(said, "Reason") == "TimeLimit":
        return Answer(reason="time-limit", ends=ends)
    if state in ("CANCELLED", "COMPLETING"):
        return Answer(reason="cancelled")
    if warned and ends is not None and ends - now <= grace + _EARLY:
        return Answer(reason="time-limit", ends=ends)
    return Answer(reason="unknown")


def _value(said: str, name: str) -> str:
    found = re.search(rf"(?:\A|\s){name}=(\S*)", said)
    return found[1] if found else ""


def _time(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None  # Unknown, None, N/A


class Stop:
    """The stop of the training on one node: asked of Slurm, written for the ranks, remembered for the record.

    Attributes:
        answer: what Slurm says; None until it, or the time to ask it, is over.
    """

    def __init__(self, manifest: Manifest, place: Place, environ: Mapping[str, str]) -> None:
        self.answer: Answer | None = None
        self._manifest = manifest
        self._run = RunFolder(Path(manifest.run_folder))
        self._place = place
        self._environ = dict(environ)
        self._number = 0
        self._asked = 0.0
        self._asking: threading.Thread | None = None
        self._heard: Answer | None = None

    @property
    def signal_for_ranks(self) -> int:
        """Number of the signal that the user chose for the ranks."""
        return int(getattr(signal, f"SIG{self._manifest.stop.signal}"))

    @property
    def ends(self) -> float:
        """When Slurm ends the job, in seconds since the epoch, as far as is known."""
        known = None if self.answer is None else self.answer.ends
        return self._asked + self._manifest.stop.grace if known is None else known

    @property
    def grace(self) -> float:
        """Seconds from the request to the end."""
        return max(0.0, self.ends - self._asked)

    @property
    def is_preemption(self) -> bool:
        """Whether Slurm wants the nodes for another job."""
        return self.answer is not None and self.answer.reason == "preemption"

    @property
    def stopped(self) -> Stopped:
        """Why the training was asked to save itself; empty when it was not, or was only told to end."""
        reason = "unknown" if self.answer is None else self.answer.reason
        if self._number == 0 or reason == "cancelled" or (self._number != WARNING and reason == "unknown"):
            return ""
        return reason

    @property
    def saved(self) -> bool:
        """Whether a rank of this node said that it saved itself (`hpcenv.training`)."""
        try:
            return self._run.saved_on(self._place.node).exists()
        except OSError:
            return False

    def begin(self, number: int) -> None:
        """Start to ask why; at Slurm's warning the ranks are told without waiting for the answer."""
        self._number, self._asked = number, time.time()
        if number == WARNING:
            self._tell()
        if self._manifest.cluster == "local":
            self.answer = Answer(reason="unknown" if number == WARNING else "cancelled")
            self._tell()
            return
        self._asking = threading.Thread(target=self._ask, name="hpcenv-stop", daemon=True)
        self._asking.start()

    def attend(self) -> bool:
        """Take the answer when it is there; return whether the ranks can be told what to do."""
        if self.answer is None:
            late = time.time() - self._asked > _SECONDS_TO_ASK + 2.0
            if self._asking is not None and self._asking.is_alive() and not late:
                return self._number == WARNING
            self.answer = self._heard or Answer(reason="unknown")
            self._tell()
        return True

    def _ask(self) -> None:
        time.sleep(min(self._place.rank * _SECONDS_BETWEEN_NODES, _SECONDS_TO_ASK))
        self._heard = ask(
            self._place.job_id, self._environ, warned=self._number == WARNING, grace=self._manifest.stop.grace
        )

    def _tell(self) -> None:
        """Write the request where the ranks of this node look."""
        if not is_ours(self._run, self._place):
            return  # they are those of a later attempt by now
        request = StopRequest(
            schema=SCHEMA,
            run=self._manifest.run,
            node=self._place.node,
            attempt=self._place.attempt,
            signal=signal.Signals(self._number).name,
            reason="unknown" if self.answer is None else self.answer.reason,
            asked=self._asked,
            ends=None if self.answer is None else self.answer.ends,
        )
        # Where it cannot be written, the ranks get the signal; the record of this node says the rest.
        with contextlib.suppress(OSError):
            wire.write(request, self._run.stop_of(self._place.node))


# -- before the training ------------------------------------------------------------------


def note_before_training(manifest: Manifest, place: Place, environ: Mapping[str, str], *, number: int) -> Reason | None:
    """Ask Slurm why this job shall end before its training began, and write it down for the job's end.

    Args:
        number: the signal that the batch script or a step of it got.

    Returns why; None where TERM came and nobody knows why: then nothing is written.
    """
    answer = ask(place.job_id, environ, warned=number != signal.SIGTERM, grace=manifest.stop.grace)
    if number == signal.SIGTERM and answer.reason == "unknown":
        return None
    request = StopRequest(
        schema=SCHEMA,
        run=manifest.run,
        node=place.node,
        attempt=place.attempt,
        signal=signal.Signals(number).name,
        reason=answer.reason,
        asked=time.time(),
        ends=answer.ends,
    )
    run = RunFolder(Path(manifest.run_folder))
    if is_ours(run, place):
        wire.write(request, run.stop_of(place.node))
    return answer.reason


def noted_before_training(manifest: Manifest, place: Place) -> Reason | None:
    """Return what `note_before_training` has written in this attempt; None without it."""
    try:
        found = wire.read(StopRequest, RunFolder(Path(manifest.run_folder)).stop_of(place.node))
    except HpcenvError:
        return None
    return found.reason if (found.run, found.attempt) == (manifest.run, place.attempt) else None


# -- what must outlive the signals --------------------------------------------------------


def fuse_that_outlives(folder: Path, environ: Mapping[str, str]) -> str | None:
    """Return a folder for PATH whose squashfuse_ll ignores what would end it before the ranks have saved.

    proctrack/linuxproc signals every process below the step, also the one that serves the
    container's files: without it the ranks get SIGBUS. A signal mask or ignored signals do
    not get through Apptainer's own processes (Go resets them at exec; 1.4.5), but libfuse
    leaves alone what is ignored when it starts. Where Slurm follows processes by their
    cgroup only the step itself gets signals, and nothing has to be done.

    Args:
        folder: an empty folder of this job on this node.

    Returns None where it is not needed, or cannot be done: no squashfuse_ll (Apptainer may
    bring its own, which it prefers), or nothing in `folder` may be executed.
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
    """Whether slurmstepd put this process into a cgroup that it signals: v1 freezer or v2, below job_N."""
    try:
        lines = Path("/proc/self/cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(
        "/job_" in path and controllers in ("", "freezer")
        for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2)
    )
