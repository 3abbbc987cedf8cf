"""Files of traces, in the words of `hpcenv.records.trace`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hpcenv.records.run_folder import RunFolder

START = {"kind": "start", "schema": 1, "restart": 0, "pid": 1, "time": 1.0, "world_size": 1, "first": 1, "last": 1}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def operation(name: str, reads: Mapping[str, str], writes: Mapping[str, str], **more: Any) -> dict[str, Any]:
    """Return one operation; its values are named by any texts, `-` is one without a hash."""

    def rows(values: Mapping[str, str]) -> list[list[str]]:
        return [[key, "float32[2]", "-" if text == "-" else digest(text)] for key, text in values.items()]

    return {"kind": "op", "name": name, "phase": "forward", "in": rows(reads), "out": rows(writes), **more}


# A step of two operations between which everything is equal.
STEP = (
    operation("aten.mm.default", {"self": "x", "mat2": "w"}, {"0": "h"}, module="Net.fc", **{"class": "Linear"}),
    operation("aten.tanh.default", {"self": "h"}, {"0": "y"}, at="source/train.py:3"),
)


def lines(*steps: Sequence[Mapping[str, Any]], first: int = 1, resumed: int = 0) -> list[dict[str, Any]]:
    """Return the lines of a rank that traced these steps."""
    found: list[dict[str, Any]] = [dict(START)]
    for number, operations in enumerate(steps, start=first):
        found.append({"kind": "begin", "resumed": resumed})
        found += [{**one, "i": index} for index, one in enumerate(operations)]
        found.append({"kind": "end", "step": number, "operations": len(operations)})
    return found


def write(run: RunFolder, rank: int, found: Sequence[Mapping[str, Any]], *, attempt: int = 0) -> None:
    path = run.trace_of(attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in found))
