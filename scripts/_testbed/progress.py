"""Plain progress lines with the seconds since the start, on stderr: stdout stays for answers."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Progress:
    """Says what happens and how long each phase took."""

    started: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """One line, at once (also into a pipe), in one piece: several threads speak."""
        sys.stderr.write(f"[{time.monotonic() - self.started:6.1f} s] {text}\n")
        sys.stderr.flush()

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """A line at the begin, one with the duration at the end."""
        self.say(f"{text} ...")
        began = time.monotonic()
        yield
        self.say(f"{text}: done in {time.monotonic() - began:.1f} s")
