"""The columns of `hpcenv list`: their names, their values for a run, and how runs are chosen and sorted by them. Pure.

Runs on: LOGIN NODE.

The rule for names: `arg.NAME` is an argument of the script, `metric.NAME` is a metric, and a name in `COLUMNS` is a
column of hpcenv. Any other NAME means the argument or the metric with this name. If an argument and a metric have this
name, NAME is refused.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from hpcenv.errors import UsageError
from hpcenv.project import duration
from hpcenv.runs.run_line import RunLine
from hpcenv.text import listed, visible

# A value in a column; None if it is unknown.
Cell = str | float | None

# Column -> attribute of RunLine.
COLUMNS = {
    "run": "run",
    "job": "job_id",
    "state": "state",
    "exit": "exit_status",
    "nodes": "nodes",
    "attempt": "attempt",
    "elapsed": "elapsed",
    "submitted": "submitted",
    "kind": "kind",
    "cluster": "cluster",
    "commit": "commit",
    "fingerprint": "fingerprint",
    "reason": "detail",
}
_MOST_NAMES = 20


def full_names(lines: Iterable[RunLine]) -> tuple[str, ...]:
    """Return the full names of all columns of these runs: the columns of hpcenv, the arguments, and the metrics."""
    arguments: set[str] = set()
    metrics: set[str] = set()
    for line in lines:
        arguments.update(line.arguments)
        metrics.update(line.metrics)
    return (*COLUMNS, *(f"arg.{name}" for name in sorted(arguments)), *(f"metric.{name}" for name in sorted(metrics)))


def find_names(names: Iterable[str], lines: Sequence[RunLine]) -> dict[str, str]:
    """Return name -> full name of some columns. Empty names are left out. If there is no run, every name is accepted.

    Raises:
        UsageError: no run has such a column, or the name is both an argument and a metric.
    """
    wanted = dict.fromkeys(name for name in names if name)
    known = full_names(lines) if wanted and lines else ()
    return {name: _find_name(name, known) if lines else name for name in wanted}


def _find_name(name: str, known: Sequence[str]) -> str:
    if name in known:
        return name
    found = [full for full in (f"arg.{name}", f"metric.{name}") if full in known]
    if len(found) > 1:
        either = " or ".join(map(visible, found))
        raise UsageError(f"`{visible(name)}` is an argument and a metric", hint=f"write {either}")
    if found:
        return found[0]
    hint = f"columns: {', '.join(COLUMNS)}"
    for kind, prefix in (("arguments", "arg."), ("metrics", "metric.")):
        names = [visible(full.removeprefix(prefix)) for full in known if full.startswith(prefix)]
        hint += f"; {kind}: {listed(names, _MOST_NAMES) or 'none'}"
    why = "it is no column, and no argument or metric of these runs"
    if not any(full.startswith("metric.") for full in known):
        hint += " (none is recorded with `record-metrics = false` under [submit] of hpcenv.toml)"
    raise UsageError(f"no run has `{visible(name)}`", why=why, hint=hint)


def cell(line: RunLine, full: str) -> Cell:
    """Return the value of a run in a column. An argument whose text is a number becomes a number."""
    if full in COLUMNS:
        value: Cell = getattr(line, COLUMNS[full])
        if full == "submitted":
            return _time(line.submitted)
        return None if value == "" else value
    kind, _, name = full.partition(".")
    if kind == "metric":
        return line.metrics.get(name)
    text = line.arguments.get(name)
    return None if text is None else _number_or_text(text)


def text_of(line: RunLine, full: str, *, digits: int = 0) -> str:
    """Return a value as text; empty if it is unknown. An argument is returned as it was given.

    Args:
        digits: how many significant digits a metric has; 0 for all.
    """
    kind, _, name = full.partition(".")
    if full not in COLUMNS and kind == "arg":
        return line.arguments.get(name, "")
    value = cell(line, full)
    return "" if value is None else f"{value:.{digits}g}" if digits and isinstance(value, float) else str(value)


def _time(seconds: float | None) -> str | None:
    try:
        return None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):  # the record is damaged
        return None


def _number_or_text(text: str) -> str | float:
    # A text with `_` is not read as a number. Python would read 9_1 as the number 91, but 9_1 is a job id.
    for kind in (int, float) if "_" not in text and len(text) < 400 else ():
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# -- conditions ----------------------------------------------------------------------------------

_CONDITION = re.compile(r"(.+?)(==|!=|<=|>=|=|<|>)(.*)", re.DOTALL)
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunCondition:
    """A condition for runs: a column, one of the signs `=`, `!=`, `<`, `<=`, `>` and `>=`, and a value.

    Numbers are compared as numbers, other values as text. A run whose value is unknown fulfils no condition.
    """

    name: str
    sign: str
    value: str

    def chooses(self, line: RunLine, full: str) -> bool:
        """Whether a run fulfils the condition. `full` is the full name of the column."""
        found = _comparable(line, full)
        if found is None:
            return False
        wanted: str | float = self.value
        if full == "elapsed":
            wanted = _seconds(self.value)
        elif isinstance(found, float | int) or full not in COLUMNS:
            wanted = _number_or_text(self.value)
        elif full in ("commit", "fingerprint"):
            # The beginning of a commit or fingerprint is enough, as in git.
            found = str(found)[: len(self.value)]
        if self.sign in ("=", "!="):
            # A loss can be nan, and `loss=nan` finds it.
            same = found == wanted or (found != found and wanted != wanted)  # noqa: PLR0124
            return same == (self.sign == "=")
        return isinstance(found, str) == isinstance(wanted, str) and _ORDERS[self.sign](found, wanted)


def read_condition(text: str) -> RunCondition:
    """Return the condition that a text such as `lr=3e-4` or `loss<2` means.

    Raises:
        UsageError: the text has no sign, or compares `elapsed` with something that is not a length of time.
    """
    match = _CONDITION.fullmatch(text)
    if match is None or (match[1].strip() == "elapsed" and math.isnan(_seconds(match[3].strip()))):
        raise UsageError(
            f"`{visible(text)}` is not a condition",
            why="it is NAME=VALUE with =, !=, <, <=, > or >=; the value of `elapsed` is a length of time, as 2h",
            hint="quote a condition with < or >: --where 'loss<2'",
        )
    return RunCondition(name=match[1].strip(), sign="=" if match[2] == "==" else match[2], value=match[3].strip())


def _comparable(line: RunLine, full: str) -> Cell:
    """Return the value of a run for comparisons. A length of time becomes seconds."""
    value = cell(line, full)
    return _seconds(str(value)) if full == "elapsed" and value is not None else value


def _seconds(text: str) -> float:
    try:
        return duration.parse(text, number="seconds")
    except ValueError:
        return float("nan")


# -- order ---------------------------------------------------------------------------------------


def in_order(lines: Sequence[RunLine], full: str, *, descending: bool) -> list[RunLine]:
    """Return the runs sorted by a column. nan and unknown values are last, also in descending order.

    In ascending order, numbers are before texts.
    """
    values = [(_comparable(line, full), line) for line in lines]
    known = [((isinstance(value, str), value), line) for value, line in values if value is not None and value == value]  # noqa: PLR0124
    known.sort(key=lambda one: one[0], reverse=descending)
    others = [(value is None, line) for value, line in values if value is None or value != value]  # noqa: PLR0124
    others.sort(key=lambda one: one[0])
    return [line for _, line in (*known, *others)]
