"""The answer of a probe: values by field, or "unknown" with a reason.

Runs on: inside the image.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing is not imported: this takes longer than most probes; type checkers know the name
if TYPE_CHECKING:
    from typing import TypeAlias

    Value: TypeAlias = "str | int | list[str] | Unknown"
    Facts: TypeAlias = "dict[str, Value]"


class Unknown:
    """Replaces a value that could not be read, and contains the reason."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason
