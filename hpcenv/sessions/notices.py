"""Tell the shells of a session that its time limit is near.

Runs on: COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping

from hpcenv import process
from hpcenv.errors import HpcenvError

MINUTES = (30, 5)


def say(text: str) -> None:
    """Write a line to the log of the job."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


class Notices:
    """Gives each notice once.

    Args:
        environ: variables of the job step. Slurm sets SLURM_JOB_END_TIME (since 22.05).
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        end = environ.get("SLURM_JOB_END_TIME", "")
        self._ends = int(end) if end.isdecimal() else None
        self._left = list(MINUTES)
        self._environ = environ

    def give(self, now: float, terminals: Iterable[str]) -> None:
        """Write the notice that is due, if there is one, to the terminals and the job's log."""
        text = self.due(now)
        if not text:
            return
        say(f"hpcenv: {text}")
        for path in terminals:
            # This process must not wait for a terminal that the user has stopped (^S).
            with (
                contextlib.suppress(OSError),
                open(os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK), "wb") as it,
            ):
                it.write(f"\r\n\a{text}\r\n".encode())

    def due(self, now: float) -> str:
        """Return the notice that is due; empty if no notice is due."""
        if self._ends is None or not self._passed(self._ends - now):
            return ""
        asked = _asked_end(self._environ)
        if asked not in (None, self._ends):
            self._ends, self._left = asked, list(MINUTES)
        passed = self._passed(self._ends - now)
        if not passed:
            return ""
        self._left = [minutes for minutes in self._left if minutes not in passed]
        left = max(0, round((self._ends - now) / 60))
        at = time.strftime("%H:%M", time.localtime(self._ends))
        return f"this session ends at {at}, in {left} min (its time limit): save your work"

    def _passed(self, seconds: float) -> list[int]:
        return [minutes for minutes in self._left if seconds <= minutes * 60]


def _asked_end(environ: Mapping[str, str]) -> int | None:
    """Ask Slurm when the job ends, because its time limit may have changed since its start.

    None if Slurm gives no answer.
    """
    squeue, job = shutil.which("squeue", path=environ.get("PATH")), environ.get("SLURM_JOB_ID")
    if squeue is None or job is None:
        return None
    try:
        argv = [squeue, "--noheader", "--jobs", job, "--format", "%e"]
        said = process.run(argv, timeout=20, env={**environ, "SLURM_TIME_FORMAT": "%s"}).stdout.strip()
    except HpcenvError:
        return None
    return int(said) if said.isdecimal() else None
