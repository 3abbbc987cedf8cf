"""Read metrics from CSV and JSONL files that a training wrote: one row, or one object, for each step.

Runs on: LOGIN NODE. Standard library only. These files are untrusted, so the numbers of rows, columns and bytes are
limited. Numbers in these files are text. A number with few digits was rounded, so it is not the training's exact
number.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from hpcenv.records.files import read_file
from hpcenv.reproduction.series import PRINTED, Series, by_step

_MOST_ROWS = 1_000_000
_MOST_NAMES = 200
_LONGEST_NAME = 200

# Names of the column with the step. If a file has several of these columns, the first name in this list is used.
_STEPS = ("step", "global_step", "iteration", "iter", "epoch")
# The shortest text from which Python reads the same float64 again has up to 17 digits, and usually at least 15 digits.
# For float32, such a text has 6 to 9 digits.
_DIGITS_OF_FLOAT64 = 15
# Longer texts are not read as numbers, because no float needs so many characters.
_LONGEST_NUMBER = 400
_NUMBER = re.compile(
    r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,5})?|[-+]?(?:nan|inf|infinity)", re.IGNORECASE
)

Cells = Mapping[str, str]


def read_csv(path: Path, *, name: str) -> tuple[Series, ...]:
    """Return the metrics of a CSV file with a header and a column of steps; empty for another kind of file.

    Args:
        name: path in the run folder, for the series.

    Raises:
        OSError: the file cannot be read, or is too large.
    """
    text = read_file(path, follow=False).decode("utf-8", errors="replace").replace("\0", "")
    rows = csv.DictReader(text.splitlines(), strict=True)
    try:
        header = rows.fieldnames or ()
        if len(header) > _MOST_NAMES or _step_name(header) is None:
            return ()
        return _series(_cells(rows), source="csv", name=name)
    except csv.Error as error:
        return _nothing("csv", name, f"{name} is not CSV: {error}")


def _cells(rows: Iterable[Mapping[str, object]]) -> Iterator[Cells]:
    """Yield the cells with text. The csv module puts a list into rows that are too long, and None into short rows."""
    for row in rows:
        yield {key: value for key, value in row.items() if isinstance(key, str) and isinstance(value, str)}


def read_jsonl(path: Path, *, name: str) -> tuple[Series, ...]:
    """Return the metrics of a file with one JSON object in each line; empty for another kind of file.

    Args:
        name: path in the run folder, for the series.

    Raises:
        OSError: the file cannot be read, or is too large.
    """
    text = read_file(path, follow=False).decode("utf-8", errors="replace")
    return _series(_objects(text), source="jsonl", name=name)


class _Digits(str):
    """The text of a number in a JSON file, before it is parsed."""

    __slots__ = ()


def _objects(text: str) -> Iterator[Cells]:
    for line in text.splitlines():
        try:
            found = json.loads(line, parse_float=_Digits, parse_int=_Digits, parse_constant=_Digits)
        except (ValueError, RecursionError):
            continue  # the last line of a run that was killed
        if isinstance(found, dict):
            yield {key: str(value) for key, value in found.items() if isinstance(value, _Digits)}


def _series(rows: Iterable[Cells], *, source: str, name: str) -> tuple[Series, ...]:
    columns: dict[str, list[tuple[int, str]]] = {}
    notes: list[str] = []
    for count, row in enumerate(rows):
        if count >= _MOST_ROWS:
            notes.append(f"{name}: only its first {_MOST_ROWS} rows were read")
            break
        key = _step_name(row)
        step = None if key is None else _step(row[key])
        for column, text in row.items() if step is not None else ():
            known = column in columns or len(columns) < _MOST_NAMES
            if column != key and column not in _STEPS and known and len(column) <= _LONGEST_NAME and _is_number(text):
                columns.setdefault(column, []).append((step or 0, text))
    return tuple(_column(column, cells, source, name, notes) for column, cells in columns.items())


def _step_name(names: Iterable[str]) -> str | None:
    present = set(names)
    return next((step for step in _STEPS if step in present), None)


def _step(text: str) -> int | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return int(value) if math.isfinite(value) and value == int(value) and abs(value) < 1 << 62 else None


def _is_number(text: str) -> bool:
    return len(text) <= _LONGEST_NUMBER and _NUMBER.fullmatch(text.strip()) is not None


def _column(column: str, cells: list[tuple[int, str]], source: str, name: str, notes: list[str]) -> Series:
    texts = [text.strip() for _, text in cells]
    digits = max(map(_digits, texts))
    whole = all(re.fullmatch(r"[-+]?[0-9]{1,15}", text) for text in texts)
    is_exact = whole or digits >= _DIGITS_OF_FLOAT64
    steps, values, twice = by_step([(step, float(text)) for step, text in cells])
    own = [] if is_exact else [f"{name}: {column} is printed with {digits} digits, not at full precision"]
    if twice:
        own.append(f"{name}: {column} has {twice} steps more than once; the last value counts")
    return Series(
        name=column, source=source, file=name, dtype="float64" if is_exact else PRINTED, steps=steps, values=values,
        notes=(*notes, *own),
    )  # fmt: skip


def _digits(text: str) -> int:
    """Return the number of significant digits of a decimal text."""
    mantissa = re.split("[eE]", text)[0]
    return len(re.sub(r"[^0-9]", "", mantissa).lstrip("0"))


def _nothing(source: str, name: str, note: str) -> tuple[Series, ...]:
    return (Series(name="", source=source, file=name, dtype=PRINTED, steps=(), values=(), notes=(note,)),)
