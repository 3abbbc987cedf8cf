"""Comparison, hash and text of frozen dataclasses, written once.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

`dataclass` writes these methods as text for each class, and Python compiles them at each start: a tenth of
`hpcenv submit` (docs/decisions/0021). A class that a submission or a node loads takes them from here:

    @dataclass(frozen=True, kw_only=True, eq=False, repr=False)
    class Bind(Frozen):
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any


class Frozen:
    """Base of frozen dataclasses: equal are two of the same class with equal fields, as `dataclass` has it."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return _compared(self) == _compared(other)

    def __hash__(self) -> int:
        kind: Any = type(self)
        counts = (field for field in fields(kind) if (field.compare if field.hash is None else field.hash))
        return hash(tuple(getattr(self, field.name) for field in counts))

    def __repr__(self) -> str:
        kind: Any = type(self)
        values = (f"{field.name}={getattr(self, field.name)!r}" for field in fields(kind) if field.repr)
        return f"{kind.__qualname__}({', '.join(values)})"


def _compared(record: Any) -> tuple[Any, ...]:
    return tuple(getattr(record, field.name) for field in fields(record) if field.compare)
