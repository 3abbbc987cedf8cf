"""An answer to the question whether two things run together, for example a driver and a CUDA toolkit.

Runs on: LOGIN NODE, COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcenv.records.verdict import Result


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """An answer. `what` is one sentence, `why` is the reason with its source, and `hint` says what would work."""

    result: Result
    what: str
    why: str = ""
    hint: str = ""

    def __str__(self) -> str:
        return "; ".join(part for part in (self.what, self.why, self.hint) if part)
