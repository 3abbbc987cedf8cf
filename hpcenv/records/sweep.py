"""Sweeps and arrays: many runs of one script that differ in their arguments.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcenv.errors import UsageError

# Slurm's MaxArraySize is 1001 by default, and the largest index is 1000 (slurm.conf(5), 22.05 to 26.05).
MOST_ELEMENTS = 1000
_HIGHEST_INDEX = 4_000_000

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_RANGE = re.compile(r"(-?[0-9]{1,9})\.\.(-?[0-9]{1,9})")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One name of a sweep, with all values that the sweep gives this name."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Elements:
    """The elements of a sweep or array.

    Attributes:
        names: names of the sweep, in the order in which they were given; empty for an array.
        values: index in the array -> name -> value.
        at_once: how many elements may run at a time; None for no limit.
    """

    names: tuple[str, ...]
    values: Mapping[int, Mapping[str, str]]
    at_once: int | None = None

    @property
    def array(self) -> str:
        """The value of sbatch's option --array."""
        return array_spec(tuple(self.values), self.at_once)


@dataclass(frozen=True, kw_only=True)
class SweepElement:
    """One element of a sweep or array.

    Attributes:
        index: index in Slurm's array.
        folder: name of its run folder in the folder of the sweep.
        values: name -> value; empty for an array.
    """

    index: int
    folder: str
    values: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """The elements of a sweep or array (`sweep.json`). The login node writes this file once.

    Attributes:
        names: names of the sweep, in the order in which they were given; empty for an array.
        at_once: how many elements may run at a time, 0 for any number.
    """

    schema: int
    run: str
    run_folder: str
    names: tuple[str, ...]
    elements: tuple[SweepElement, ...]
    at_once: int = 0


def of_sweep(words: Sequence[str], at_once: int | None) -> Elements:
    r"""Return every combination of the values; the last name varies fastest.

    Args:
        words: `NAME=V1,V2` (values are literal, `\,` is a comma in a value) or `NAME=0..4` (from 0 to 4, both
            included).

    Raises:
        UsageError: a word has a different form, a name or value is given twice, or there are too many elements.
    """
    axes = [_axis(word) for word in words]
    names = tuple(axis.name for axis in axes)
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"`--sweep {name}=...` is given twice", hint=f"--sweep {name}=V1,V2,V3")
    count = 1
    for axis in axes:
        count *= len(axis.values)
        _require_count(count)
    combinations = itertools.product(*(axis.values for axis in axes))
    return Elements(
        names=names,
        values={index: dict(zip(names, values, strict=True)) for index, values in enumerate(combinations)},
        at_once=at_once,
    )


def _axis(word: str) -> Axis:
    name, equals, text = word.partition("=")
    if not equals or not _NAME.fullmatch(name):
        raise UsageError(
            f"`--sweep {word}` is not NAME=VALUES", hint="--sweep lr=1e-3,3e-4, or --sweep seed=0..4 for 0, 1, 2, 3, 4"
        )
    if not text:
        raise UsageError(f"`--sweep {word}` has no values", hint=f"--sweep {name}=V1,V2")
    between = _RANGE.fullmatch(text)
    if between is not None:
        first, last = int(between[1]), int(between[2])
        if first > last:
            raise UsageError(f"`--sweep {word}` is empty", hint=f"--sweep {name}={last}..{first}")
        _require_count(last - first + 1)
        return Axis(name=name, values=tuple(str(number) for number in range(first, last + 1)))
    values = tuple(value.replace("\\,", ",") for value in re.split(r"(?<!\\),", text))
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise UsageError(f"`--sweep {word}` has {twice!r} twice", why="both elements would be the same run")
    return Axis(name=name, values=values)


def _require_count(count: int) -> None:
    if count > MOST_ELEMENTS:
        raise UsageError(
            f"the sweep has more than {MOST_ELEMENTS} elements",
            why="they are the elements of one job array, and Slurm's MaxArraySize is 1001 by default",
            hint="submit it in parts",
        )


def of_array(spec: str, at_once: int | None) -> Elements:
    """Return the elements for a value of sbatch's --array, for example `0-9`, `1,3,7`, `0-20:5` or `0-9%N`.

    Raises:
        UsageError: `spec` has another form, or `%N` is given together with --max-parallel.
    """
    text, percent, limit = spec.partition("%")
    if percent and (not re.fullmatch("[1-9][0-9]{0,8}", limit) or at_once is not None):
        raise UsageError(
            f"`--array {spec}` cannot be used",
            why="`%N` must be given once, after all indices"
            if at_once is None
            else "`%N` and --max-parallel say the same",
            hint=f"--array {text} --max-parallel N",
        )
    indices: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7})(?::([1-9][0-9]{0,6}))?)?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(
                f"`--array {spec}` is not a list of indices", hint="--array 0-9, --array 1,3,7, --array 0-20:5"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last > _HIGHEST_INDEX:
            raise UsageError(f"`--array {spec}`: {last} is larger than Slurm's largest index")
        indices.extend(itertools.islice(range(first, last + 1, int(match[3] or 1)), MOST_ELEMENTS + 1))
        _require_count(len(set(indices)))
    return Elements(
        names=(),
        values={index: {} for index in sorted(set(indices))},
        at_once=int(limit) if percent else at_once,
    )


def array_spec(indices: Sequence[int], at_once: int | None = None) -> str:
    """Return the value of sbatch's --array for these indices (ascending): `0-3,7%2`."""
    parts: list[str] = []
    for _, group in itertools.groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        members = [index for _, index in group]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(parts) + ("" if at_once is None else f"%{at_once}")


def arguments(args: Sequence[str], values: Mapping[str, str], index: int) -> tuple[str, ...]:
    """Return the script's arguments for one element.

    `{NAME}` in an argument is replaced by the value of NAME. If no argument contains `{NAME}`, `--NAME=VALUE` is
    appended. `{element}` is replaced by the index. Values are literal, so braces in a value are not replaced.
    """
    known = {"element": str(index), **values}
    used: set[str] = set()

    def value(match: re.Match[str]) -> str:
        used.add(match[1])
        return known[match[1]]

    holes = re.compile(r"\{(" + "|".join(re.escape(name) for name in known) + r")\}")
    filled = [holes.sub(value, word) for word in args]
    return (*filled, *(f"--{name}={text}" for name, text in values.items() if name not in used))


def require_names(args: Sequence[str], names: Sequence[str]) -> None:
    """Refuse an argument that looks like a misspelt `{NAME}`, because every element would get the argument unchanged.

    Raises:
        UsageError: an argument contains `{WORD}`, and WORD is similar to a name of the sweep.
    """
    for word in args:
        for hole in re.findall(r"\{([A-Za-z_][A-Za-z0-9_.-]*)\}", word):
            close = difflib.get_close_matches(hole, names, n=1, cutoff=0.75)
            if hole not in names and hole != "element" and close:
                raise UsageError(
                    f"`{word}` is in no `--sweep`", why=f"nothing replaces `{{{hole}}}`", hint=f"{{{close[0]}}}"
                )


def folder_name(index: int) -> str:
    """Return the name of an element's run folder: the index with four digits, as Slurm's `%4a` writes it."""
    return f"{index:04d}"
