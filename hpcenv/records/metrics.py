"""What the ranks of a run recorded: losses, metrics and hashes of parameters, each to the last bit.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only. The ranks write these files (incontainer/start_hook), so
this reader limits sizes and counts. A line in another form is recorded as a problem, and raises no error.

There is one file for each rank and attempt: `metrics/attempt-K/rank-R.jsonl`. K is the number of the attempt (0 is the
first), R is the global rank. Each line is one JSON object with `kind`:

`start`: a process of this rank begins. This line is the first of the file. Each restart by torchrun repeats the line.
    {"kind": "start", "schema": 1, "restart": 0, "pid": 4711, "time": 1763877600.1, "world_size": 4}
`count`: the number from which this process counts its optimizer steps. The process writes this line at its first step.
    {"kind": "count", "before": 10, "from": "optimizer"}
    `before`: optimizer steps of the training before this process; null if this number is unknown, so that the count
    begins at 0. `from`: how `before` is known: `start` (no state was loaded), `optimizer` (the step counter in the
    optimizer's state), `checkpoint` (the number of the checkpoint that `hpcenv.training.resume_path` returned), or
    `unknown`.
`loss`: the scalar on which `backward` was called.
    {"kind": "loss", "step": 11, "index": 0, "name": "loss", "value": "0x1.9p+1", "dtype": "float32", "used": true}
    `step`: the optimizer step that follows this loss; the first step is 1. `index`: the number of this call of
    `backward` among the calls for this step, from 0. Several calls mean gradient accumulation or several losses.
    `used`: false if the gradients were set to zero before an optimizer used them; then `index` is -1. `scale`: the
    factor of a GradScaler (a float as text). The recorded value was divided by this factor. The key is missing without
    a GradScaler.
`metric`: a value that the script gave to `hpcenv.training.log_metrics`. `step` is the number that the script gave.
    {"kind": "metric", "step": 11, "name": "accuracy", "value": "0x1.8p-1", "dtype": "float64"}
`parameters`: sha256 over the bytes of all parameters of all optimizers, in order, after an optimizer step.
    {"kind": "parameters", "step": 11, "name": "parameters", "value": "9f86...", "dtype": "sha256", "tensors": 2,
     "bytes": 64, "at": "interval"}
    `at`: why the parameters were hashed: `interval`, `checkpoint` (`hpcenv.training` saved one) or `end` (all
    optimizers were deleted, or the process ends).
`note`: a sentence about something that the other lines do not show.
    {"kind": "note", "step": 1, "text": "backward was called on a tensor with 64 elements: ..."}
`end`: the process ends normally. A process that was killed has no such line.
    {"kind": "end", "steps": 20, "reason": "finished", "time": 1763877612.9}
    `steps`: the number of the last optimizer step. `reason`: `finished`, `stop-after-steps` or `exception`.

`value` is `float.hex()` of the exact value, `nan`, `inf` or `-inf`; a whole number has dtype `int` and decimal
digits. `dtype` is torch's name without `torch.`, or `float64` for a Python float. The sign of zero counts.

If two attempts recorded the same step, both records are kept: after a restart, the later attempt repeated the step.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpcenv.records.files import read_end, read_lines
from hpcenv.records.run_folder import RunFolder

MetricKind = Literal["loss", "metric", "parameters"]
KINDS: tuple[MetricKind, ...] = ("loss", "metric", "parameters")

# A damaged file has many bad lines, and the first of them are enough for a reader.
_MOST_PROBLEMS = 20
# Some programs do not read larger numbers in a JSON file exactly (RFC 8259, section 6).
_LARGEST = 1 << 53
# `read_last` reads at most this number of bytes at the end of a file (some hundred steps), and at most this number of
# files.
_END = 64 << 10
_MOST_FILES = 64

_FLOAT = re.compile(r"-?0x[01](?:\.[0-9a-f]{1,16})?p[+-][0-9]{1,4}\Z|nan\Z|-?inf\Z")
_WHOLE = re.compile(r"-?[0-9]{1,40}\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,39}\Z")


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One recorded value.

    Attributes:
        step: optimizer step; for a metric, the number that the script gave.
        value: text in the file; `number` returns the float.
        dtype: for example `float32`; `int` for a whole number; `sha256` for parameters.
        index: for a loss, the position of its `backward` among the calls of `backward` in this step, from 0; -1 if no
            optimizer used the loss.
        used: for a loss, whether an optimizer used its gradients.
        process: number of the process that wrote this record, 0 for the first process in the file.
        at: for parameters, why the parameters were hashed at that time.
        scale: factor of a GradScaler by which the value was divided, as text; empty without a GradScaler.
    """

    kind: MetricKind
    step: int
    name: str
    value: str
    dtype: str
    index: int = 0
    used: bool = True
    process: int = 0
    at: str = ""
    scale: str = ""

    @property
    def label(self) -> str:
        """The name. If one step has several losses, their index is added from the second loss on: `loss[1]`."""
        return f"{self.name}[{self.index}]" if self.index > 0 else self.name


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """One process of a rank.

    Attributes:
        restart: how many times torchrun had started the ranks before.
        started, ended: in seconds since the epoch; `ended` is None if the process did not end normally.
        before: optimizer steps of the training before this process. `before` is None if this number is unknown, so that
            the count begins at 0.
        before_from: how `before` is known: `start`, `optimizer`, `checkpoint` or `unknown`; empty without any step.
        steps: number of the last optimizer step; None if the process did not end normally.
        reason: `finished`, `stop-after-steps` or `exception`; empty if the process did not end normally.
    """

    restart: int
    pid: int
    started: float
    world_size: int
    before: int | None = None
    before_from: str = ""
    steps: int | None = None
    reason: str = ""
    ended: float | None = None


@dataclass(frozen=True, kw_only=True)
class RankMetrics:
    """What one rank recorded in one attempt.

    Attributes:
        processes: in the order of their starts; more than one if torchrun started the rank again.
        records: in the order of the file.
        notes: sentences about something that the records do not show.
        problems: the first lines of the file that could not be read, with the reasons.
        cut: whether the last line has no line end, because the rank was killed while it wrote.
    """

    attempt: int
    rank: int
    processes: tuple[RankProcess, ...] = ()
    records: tuple[Recorded, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    cut: bool = False


def number(record: Recorded) -> float:
    """Return the value of a loss or metric as a float. Pure; the float is exact, except for large `int` values.

    Raises:
        ValueError: the record is a hash.
    """
    if record.kind == "parameters":
        raise ValueError("a hash of parameters is not a number")
    return float(int(record.value)) if record.dtype == "int" else float.fromhex(record.value)


def read_run_metrics(run: RunFolder) -> tuple[RankMetrics, ...]:
    """Return what all ranks of a run recorded, by attempt and rank; empty if nothing was recorded."""
    return tuple(read_metrics(path, attempt, rank) for attempt, rank, path in rank_files(run.metrics, ".jsonl"))


def read_last(run: RunFolder) -> dict[str, float]:
    """Return label -> last value of the losses and metrics of a run.

    The values are from the newest attempt that recorded values, and from its first rank with values. Only the last
    `_END` bytes of the file are read, so that a list of many runs is fast. A metric that is not in these bytes is left
    out.
    """
    newest = sorted(rank_files(run.metrics, ".jsonl"), key=lambda file: (-file[0], file[1]))
    for _attempt, _rank, path in newest[:_MOST_FILES]:
        found = _read_end(path)
        if found:
            return found
    return {}


def _read_end(path: Path) -> dict[str, float]:
    try:
        content = read_end(path, most=_END)
    except OSError:
        return {}
    # Only the last line of each name and index is decoded. Decoding every line would take ten times as long.
    lines = {
        (line.partition(b'"name": ')[2].partition(b', "')[0], line.partition(b'"index": ')[2].partition(b",")[0]): line
        for line in content.split(b"\n")[:-1]
    }
    found = {}
    for line in lines.values():
        try:
            data = _object(line)
            if data.get("kind") in ("loss", "metric") and data.get("used", True):
                record = _recorded(data["kind"], data, process=0)
                found[record.label] = number(record)
        except (ValueError, RecursionError, OverflowError):
            continue
    return found


def rank_files(folder: Path, suffix: str) -> list[tuple[int, int, Path]]:
    """Return (attempt, rank, path) of the files `attempt-K/rank-R<suffix>` in a folder, in order.

    Files with other names are left out.
    """
    found = []
    for attempt, place in _numbered(folder, "attempt-", ""):
        found += [(attempt, rank, path) for rank, path in _numbered(place, "rank-", suffix)]
    return sorted(found)


def _numbered(folder: Path, prefix: str, suffix: str) -> Iterator[tuple[int, Path]]:
    pattern = re.compile(re.escape(prefix) + r"(0|[1-9][0-9]{0,8})" + re.escape(suffix) + r"\Z")
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        match = pattern.match(name)
        if match is not None:
            yield int(match[1]), folder / name


def read_metrics(path: Path, attempt: int, rank: int) -> RankMetrics:
    """Return the content of the file of one rank. Lines that cannot be read are in `problems`."""
    reading = _Reading()
    try:
        for line in read_lines(path):
            reading.take(line)
    except OSError as error:
        reading.problem(f"the file cannot be read: {error.strerror}")
    return RankMetrics(
        attempt=attempt,
        rank=rank,
        processes=tuple(RankProcess(**process) for process in reading.processes),
        records=tuple(reading.records),
        notes=tuple(reading.notes),
        problems=tuple(reading.problems),
        cut=reading.cut,
    )


class _Reading:
    """The lines of one file so far."""

    def __init__(self) -> None:
        self.processes: list[dict[str, Any]] = []
        self.records: list[Recorded] = []
        self.notes: list[str] = []
        self.problems: list[str] = []
        self.cut = False
        self._number = 0

    def problem(self, text: str) -> None:
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(text)

    def take(self, line: bytes) -> None:
        """Read one line. The last line has no line end if the rank was killed while it wrote."""
        self._number += 1
        if not line.endswith(b"\n"):
            self.cut = True
            return
        try:
            self._take(_object(line))
        except (ValueError, RecursionError, OverflowError) as error:
            self.problem(f"line {self._number}: {error}")

    def _take(self, data: dict[str, Any]) -> None:
        kind = data.get("kind")
        if kind == "start":
            self.processes.append(_start(data))
        elif not self.processes:
            raise ValueError("it comes before the start of a process")
        elif kind == "count":
            before = data.get("before")
            how = _text(data, "from")
            self.processes[-1].update(before=None if before is None else _whole(data, "before"), before_from=how)
        elif kind == "end":
            end = {"steps": _whole(data, "steps"), "reason": _text(data, "reason"), "ended": _seconds(data)}
            self.processes[-1].update(end)
        elif kind == "note":
            self.notes.append(_text(data, "text"))
        elif kind in KINDS:
            self.records.append(_recorded(kind, data, process=len(self.processes) - 1))
        else:
            raise ValueError("its kind is unknown")


def _object(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise ValueError("it is not JSON") from error
    if not isinstance(data, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004  (one kind of error for every bad line)
    return data


def _start(data: dict[str, Any]) -> dict[str, Any]:
    return {
        "restart": _whole(data, "restart"),
        "pid": _whole(data, "pid"),
        "started": _seconds(data),
        "world_size": _whole(data, "world_size"),
    }


def _recorded(kind: MetricKind, data: dict[str, Any], *, process: int) -> Recorded:
    value, dtype, scale = _text(data, "value"), _text(data, "dtype"), data.get("scale", "")
    form = _SHA256 if kind == "parameters" else _WHOLE if dtype == "int" else _FLOAT
    if not form.match(value) or not _DTYPE.match(dtype) or (kind == "parameters" and dtype != "sha256"):
        raise ValueError("its value is not written exactly")
    if form is _FLOAT:
        float.fromhex(value)
    used = data.get("used", True)
    if not isinstance(used, bool) or not isinstance(scale, str) or (scale and not _FLOAT.match(scale)):
        raise ValueError("`used` or `scale` has another type")
    return Recorded(
        kind=kind,
        step=_whole(data, "step"),
        name=_text(data, "name"),
        value=value,
        dtype=dtype,
        index=_whole(data, "index", least=-1) if "index" in data else 0,
        used=used,
        process=process,
        at=_text(data, "at") if "at" in data else "",
        scale=scale,
    )


def _whole(data: dict[str, Any], key: str, *, least: int = 0) -> int:
    value = data.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST:
        raise ValueError(f"`{key}` is not a whole number")
    return value


def _seconds(data: dict[str, Any]) -> float:
    value = data.get("time")
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < _LARGEST:
        raise ValueError("`time` is not a number of seconds")
    return float(value)


def _text(data: dict[str, Any], key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str):
        raise ValueError(f"`{key}` is not a text")  # noqa: TRY004  (one kind of error for every bad line)
    return value
