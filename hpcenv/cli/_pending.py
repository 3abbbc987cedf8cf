"""The line about a run that waits in the queue. A terminal shows updates; a log gets the line every 10 minutes."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hpcenv.cli import _render, _streams
from hpcenv.cli._terminal import escape_control
from hpcenv.cluster.queue import in_words
from hpcenv.project import duration
from hpcenv.runs.status import RunStatus, with_queue
from hpcenv.text import cut

if TYPE_CHECKING:
    from typing_extensions import Self

# Seconds between two calls of Slurm's commands for the queue, and between two lines in a log.
_ASK, _REPEAT = 60.0, 600.0


class PendingLine:
    """Prints to standard error why a run waits. If several runs wait, the line is about the first run.

    Args:
        environ: environment variables, for the Slurm commands.
        clock: returns a time in seconds that never decreases.
    """

    def __init__(self, environ: Mapping[str, str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._environ, self._clock = environ, clock
        self._waiting: dict[str, RunStatus] = {}
        self._asked = self._told = float("-inf")
        self._shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_stop: object) -> None:
        self.clear()

    @property
    def waits(self) -> bool:
        """Whether a run was waiting at the last call of `see`."""
        return bool(self._waiting)

    def see(self, status: RunStatus) -> bool:
        """Store the newest state of a run, and return whether the run waits. If the run waits, print a line."""
        name = str(status.run_folder)
        before = self._waiting.get(name)
        if not status.waits_on_slurm:
            self._waiting.pop(name, None)
            self.clear()
            return False
        self._waiting[name] = replace(status, queue=None if before is None else before.queue)
        if before is None or before.detail != status.detail:
            self._told = float("-inf")
        self.renew()
        return True

    def renew(self) -> None:
        """Print the line again if enough time has passed."""
        if not self._waiting:
            return
        now, name = self._clock(), next(iter(self._waiting))
        if now - self._asked >= _ASK:
            self._asked = now
            self._waiting[name] = with_queue(self._waiting[name], self._environ)
        text = self._text(name, now)
        if sys.stderr.isatty():
            width = max(20, shutil.get_terminal_size().columns - 1)
            text = cut(text if len(text) <= width else self._text(name, now, short=True), width)
            if text != self._shown:
                print(f"\r\x1b[K{text}", end="", file=_streams.unchanged(sys.stderr), flush=True)
                self._shown = text
        elif now - self._told >= _REPEAT:
            self._told = now
            _render.tell(text)

    def clear(self) -> None:
        """Remove the line from the terminal, before other text is printed."""
        if self._shown:
            print("\r\x1b[K", end="", file=_streams.unchanged(sys.stderr), flush=True)
            self._shown = ""

    def _text(self, name: str, now: float, *, short: bool = False) -> str:
        status = self._waiting[name]
        more = f"; {len(self._waiting) - 1} more wait" if len(self._waiting) > 1 else ""
        reason = f" ({status.detail if short else in_words(status.detail)})" if status.detail else ""
        queue, waited = "", ""
        if status.queue is not None:
            queue = f"; {status.queue.short if short else status.queue}"
            if status.queue.waited is not None:
                waited = f" for {duration.clock(status.queue.waited + int(now - self._asked))}"
        return escape_control(f"{status.run}: {status.state}{waited}{reason}{queue}{more}")
