"""The trace of chosen optimizer steps: each operation of torch that a rank called, with hashes of inputs and outputs.

Runs on: LOGIN NODE. Standard library only. The ranks write these files (incontainer/start_hook/trace.py). A line in
another form is recorded as a problem, and raises no error.

There is one file for each rank and attempt: `trace/attempt-K/rank-R.jsonl`, at most 32 MiB. Each line is one JSON
object:

`start`: a process of this rank begins. `first`, `last`: the first and last step to trace.
    {"kind": "start", "schema": 1, "restart": 0, "pid": 4711, "time": 1763877600.1, "world_size": 4,
     "first": 1, "last": 1}
`begin`: a step begins. If the previous step has no `end` line, its operations do not count. `resumed`: the step of the
    checkpoint with which the process began; 0 without a checkpoint. The first step of a process also contains the
    operations that set up the model.
    {"kind": "begin", "resumed": 0}
`op`: one operation, in the order of the calls.
    {"kind": "op", "i": 17, "name": "aten.addmm.default", "phase": "forward", "module": "Net.head", "class": "Linear",
     "at": "source/train.py:11", "in": [["self", "float32[5]", "c4bf..."], ...], "args": "beta=1", "out": [...]}
    `phase`: `setup` (before the first module is called), `forward`, `backward`, `gradients` (between the backward pass
    and the optimizer) or `optimizer`. `module`, `class`: name and class of the module that called the operation. `at`:
    line of the script; in the backward pass, the line of the forward pass. `in` and `out`: for each tensor, its name in
    the operation's schema (a number for a returned value), its type, and the first 32 digits of the sha256 over its
    bytes in order. Instead of a hash, `-` stands for memory to which nothing was written yet, and for results of a send
    or receive. A list of tensors also has the type and the first eight digits of the hash of each tensor. `generator`
    is the state from which random numbers are drawn. `args`: the arguments that are not tensors.
`end`: the step has ended; `step` is its number.
    {"kind": "end", "step": 1, "operations": 214}
`note`: a sentence about something that the trace does not show.
`limit`: the file has reached its size limit, so no step after this line is complete.
    {"kind": "limit", "bytes": 33554432}
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from hpcenv.records.files import read_lines
from hpcenv.records.metrics import rank_files
from hpcenv.records.run_folder import RunFolder

TracePhase = Literal["setup", "forward", "backward", "gradients", "optimizer"]
PHASES: tuple[TracePhase, ...] = get_args(TracePhase)

UNKNOWN = "-"

# A damaged file has many bad lines, and the first of them are enough for a reader.
_MOST_PROBLEMS = 20
_HASH = re.compile(r"[0-9a-f]{8,32}\Z")


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """An argument or a result of an operation.

    Attributes:
        name: name of the argument or result in the schema of the operation; a number for a returned value.
        type: dtype, shape and device, for example `float32[16, 5] cuda`; `number` for a result that is not a tensor.
        hash: hash of the tensor's bytes, or `-` without a hash; for the type `number`, the number as text.
        each: for a list of tensors, the first digits of the hash of each tensor; empty if there are too many.
        types: for a list of tensors, the type of each tensor.
    """

    name: str
    type: str
    hash: str
    each: tuple[str, ...] = ()
    types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TracedOperation:
    """One operation.

    Attributes:
        index: the number of the operation in its step, from 0.
        name: torch's name, for example `aten.addmm.default`.
        module, module_class: name and class of the module that called the operation; empty outside of modules.
        at: `file:line` of the script; empty if the value is unknown.
        arguments: the arguments that are not tensors.
    """

    index: int
    name: str
    phase: TracePhase
    module: str
    module_class: str
    at: str
    inputs: tuple[TracedTensor, ...]
    outputs: tuple[TracedTensor, ...]
    arguments: str = ""


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """One complete optimizer step.

    Attributes:
        resumed: the step of the checkpoint with which the process began; 0 without a checkpoint.
    """

    step: int
    resumed: int
    operations: tuple[TracedOperation, ...]


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What one rank traced in one attempt.

    Attributes:
        steps: number -> step, for complete steps. If a step was traced twice, the later trace counts.
        notes: sentences about something that the trace does not show.
        problems: lines of the file that could not be read, and whether the limit was reached.
    """

    attempt: int
    rank: int
    steps: dict[int, TracedStep] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def read_run_trace(run: RunFolder) -> dict[int, RankTrace]:
    """Return rank -> its trace over all attempts. If two attempts have the same step, the later attempt counts."""
    found: dict[int, RankTrace] = {}
    for attempt, rank, path in rank_files(run.trace, ".jsonl"):
        new, old = read_trace(path, attempt, rank), found.get(rank)
        if old is not None:
            new = RankTrace(
                attempt=attempt,
                rank=rank,
                steps={**old.steps, **new.steps},
                notes=tuple(dict.fromkeys((*old.notes, *new.notes))),
                problems=(*old.problems, *new.problems),
            )
        found[rank] = new
    return dict(sorted(found.items()))


def read_trace(path: Path, attempt: int, rank: int) -> RankTrace:
    """Return the content of the file of one rank. Lines that cannot be read are in `problems`."""
    reading = _TraceLines()
    try:
        for line in read_lines(path):
            reading.take(line)
    except OSError as error:
        reading.problem(f"the trace cannot be read: {error.strerror}")
    return RankTrace(
        attempt=attempt,
        rank=rank,
        steps=reading.steps,
        notes=tuple(reading.notes),
        problems=tuple(reading.problems),
    )


class _TraceLines:
    """The lines of one file so far."""

    def __init__(self) -> None:
        self.steps: dict[int, TracedStep] = {}
        self.notes: list[str] = []
        self.problems: list[str] = []
        self._operations: list[TracedOperation] | None = None
        self._resumed = 0
        self._number = 0

    def problem(self, text: str) -> None:
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(text)

    def take(self, line: bytes) -> None:
        """Read one line. A line that cannot be read makes its step incomplete."""
        self._number += 1
        if not line.endswith(b"\n"):
            self.problem(f"line {self._number} is cut: the trace ends there")
            return
        try:
            data = json.loads(line)
            if not isinstance(data, dict):
                raise ValueError("it is not a JSON object")  # noqa: TRY004  (one kind of error for every bad line)
            self._take(data)
        except (ValueError, RecursionError, OverflowError, TypeError, IndexError) as error:
            self._operations = None
            self.problem(f"line {self._number}: {error}")

    def _take(self, data: dict[str, Any]) -> None:
        kind = data.get("kind")
        if kind == "op":
            if self._operations is not None:
                self._operations.append(_operation(data, len(self._operations)))
        elif kind == "begin":
            self._operations, self._resumed = [], _whole(data, "resumed")
        elif kind == "end":
            self._end(_whole(data, "step"), _whole(data, "operations"))
        elif kind == "note":
            self.notes.append(_text(data.get("text")))
        elif kind == "limit":
            self._operations = None
            size = _whole(data, "bytes") >> 20
            self.problem(f"the trace reached its limit of {size} MiB: later operations are not in it")
        elif kind == "start":
            self._operations = None
        else:
            raise ValueError("its kind is unknown")

    def _end(self, step: int, count: int) -> None:
        found, self._operations = self._operations, None
        if found is None:
            return
        if len(found) != count:
            raise ValueError(f"step {step} has {len(found)} operations and not {count}")
        self.steps[step] = TracedStep(step=step, resumed=self._resumed, operations=tuple(found))


def _operation(data: dict[str, Any], index: int) -> TracedOperation:
    if _whole(data, "i") != index:
        raise ValueError(f"it is not operation {index}: lines are missing")
    phase = data.get("phase")
    if phase not in PHASES:
        raise ValueError("its phase is unknown")
    return TracedOperation(
        index=index,
        name=_text(data.get("name")),
        phase=phase,
        module=_text(data.get("module", "")),
        module_class=_text(data.get("class", "")),
        at=_text(data.get("at", "")),
        inputs=_values(data.get("in")),
        outputs=_values(data.get("out")),
        arguments=_text(data.get("args", "")),
    )


def _values(rows: Any) -> tuple[TracedTensor, ...]:
    if not isinstance(rows, list):
        raise ValueError("`in` or `out` is not a list of values")  # noqa: TRY004  (one kind of error for every bad line)
    return tuple(_value(row) for row in rows)


def _value(row: Any) -> TracedTensor:
    if not isinstance(row, list) or len(row) not in (3, 5):
        raise ValueError("a value is not written as name, type and hash")
    name, kind, known = (_text(one) for one in row[:3])
    if kind != "number" and known != UNKNOWN and not _HASH.match(known):
        raise ValueError("a hash is not written in hexadecimal digits")
    each, types = row[3:] if len(row) == 5 else ([], [])
    if not isinstance(each, list) or not isinstance(types, list) or len(each) != len(types):
        raise ValueError("the tensors of a list have another form")
    return TracedTensor(name, kind, known, tuple(_text(one) for one in each), tuple(_text(one) for one in types))


def _whole(data: dict[str, Any], key: str) -> int:
    value = data.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 1 << 53:
        raise ValueError(f"`{key}` is not a whole number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a text is missing")  # noqa: TRY004  (one kind of error for every bad line)
    return value
