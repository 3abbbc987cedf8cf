"""Progress events of long work.

Runs on: LOGIN NODE. A function reports events; `cli` prints them as bars, lines or JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Phase = Literal[
    "resolve", "fetch", "index", "merge", "pack", "build", "verify", "stage", "publish", "wait", "note"
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Event:
    """The progress of one phase at one moment.

    Attributes:
        phase: the part of the work.
        what: the object of the work, for example the digest of a layer, or a path. For `note` and `wait`, this is a
            sentence for the user.
        done, total: progress in `unit`; `total` is None if the total is not known in advance. `done == total` ends the
            phase for this `what`.
        unit: `bytes`, `entries`, or empty if nothing is counted.
    """

    phase: Phase
    what: str
    done: int = 0
    total: int | None = None
    unit: Literal["bytes", "entries", ""] = ""


OnEvent = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """Ignore an event. Callers that show no progress pass this function."""
