"""One part of the checks, and how it ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["passed", "failed", "not run"]
# Lines of the output of a failed part that the section shows.
_LINES = 6
_LINE = 200
# After TERM.
_SECONDS_TO_END = 5.0


class PartError(Exception):
    """A part failed: its text says what was seen."""


class NotRunError(Exception):
    """A part cannot be run here: its text says why."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    status: int
    output: str

    @property
    def end(self) -> str:
        """The last lines of the output."""
        lines = [line.rstrip()[:_LINE] for line in self.output.splitlines() if line.strip()]
        return " | ".join(lines[-_LINES:]) or "no output"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part.

    Attributes:
        seconds: its limit.
        needs_gpu: it cannot be run without one; the other parts then run on the CPU.
        run: does it within the seconds that it is given, and returns what was seen, in one line each.
    """

    name: str
    what: str
    seconds: float
    run: Callable[[Deadline], Sequence[str]]
    needs_gpu: bool = False


@dataclass(frozen=True, kw_only=True)
class PartResult:
    """How a part ended; `seen` is what was measured, or why it failed or was not run."""

    name: str
    what: str
    state: State
    seconds: float
    seen: tuple[str, ...]


class Deadline:
    """When a part must have ended: commands of the part get what is left."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left; 0 if none are."""
        return max(0.0, self._end - time.monotonic())

    def command(self, argv: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Ended:
        """Run a command and return how it ended.

        Raises:
            PartError: it ran longer than the part may.
        """
        started = subprocess.Popen(
            argv, cwd=cwd, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = started.communicate(timeout=self.left)
        except subprocess.TimeoutExpired:
            output = _end(started)
            shown = Ended(status=-1, output=output.decode(errors="replace")).end
            raise PartError(f"it took longer than {self.seconds:g} s: {shown}") from None
        return Ended(status=started.returncode, output=output.decode(errors="replace"))

    def json(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        statuses: tuple[int, ...] = (0,),
    ) -> dict[str, object]:
        """Run a command and return the JSON object that is the last line of its output.

        Raises:
            PartError: it ended with another status, or printed something else.
        """
        done = self.command(argv, cwd=cwd, env=env)
        if done.status not in statuses:
            raise PartError(f"exit status {done.status}: {done.end}")
        text = done.output.strip()
        try:
            found = json.loads(text if text.startswith("{") else text.splitlines()[-1])
        except (ValueError, IndexError):
            raise PartError(f"no JSON: {done.end}") from None
        if not isinstance(found, dict):
            raise PartError(f"no JSON object: {done.end}")
        return found


def _end(started: subprocess.Popen[bytes]) -> bytes:
    """End a command and all that it started; return its output."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(started.pid, number)
            return started.communicate(timeout=_SECONDS_TO_END)[0]
        except ProcessLookupError:
            return b""
        except subprocess.TimeoutExpired:
            continue
    return b""


def run_part(part: Part, *, gpus: int, left: float) -> PartResult:
    """Run one part within its limit and what is left of all of them; nothing that it raises ends the others."""
    begin = time.monotonic()
    state: State = "passed"
    try:
        if part.needs_gpu and not gpus:
            raise NotRunError("no GPU")
        if left < 1:
            raise NotRunError("no time is left: the parts before took it")
        seen = tuple(part.run(Deadline(min(part.seconds, left))))
    except NotRunError as error:
        state, seen = "not run", (str(error),)
    except PartError as error:
        state, seen = "failed", (str(error),)
    except Exception as error:
        state, seen = "failed", (f"{type(error).__name__}: {error}",)
    return PartResult(name=part.name, what=part.what, state=state, seconds=time.monotonic() - begin, seen=seen)
