"""What long work says of itself while it runs.

Runs on: LOGIN NODE. A step reports events; `cli` shows them as bars, lines or JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["resolve", "fetch", "index", "merge", "pack", "build", "verify", "stage", "publish", "wait", "note"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One moment of a phase.

    Attributes:
        phase: which part of the work.
        what: what it is done to: a layer's digest, a path, or for `note` and `wait` a
            sentence for a person.
        done, total: how far, in `unit`; `total` is None where it is not known before.
            `done == total` ends the phase for this `what`.
        unit: `bytes`, `entries`, or empty where nothing is counted.
    """

    phase: Phase
    what: str
    done: int = 0
    total: int | None = None
    unit: Literal["bytes", "entries", ""] = ""


OnEvent = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """Take events that nobody wants."""
