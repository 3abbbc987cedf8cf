"""Read YAML that may come from a person whom the user does not know, as plain data in which each value is text.

Runs on: LOGIN NODE.

PyYAML (libyaml) reads the syntax. This module makes lists, tables and texts from PyYAML's events, in one pass. Values
are not converted to types. The reason is that PyYAML implements YAML 1.1, in which the build `0_0` is the number 0. But
pixi writes YAML 1.2, in which `0_0` is a text. Tags have no effect, so nothing is constructed or executed. Tags,
aliases (a small file could expand to a huge one), duplicate keys, deep nesting and more than one document are refused,
because pixi and conda-lock do not write such a file. docs/decisions/0034-yaml-of-other-tools.md says why PyYAML is
used.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpcenv.errors import LockfileInvalid
from hpcenv.locking.pins.pin import describe_error

# environments.NAME.packages.PLATFORM[].conda has 6 levels, and run_exports has 5 levels.
_DEEPEST = 20
# A pixi.lock has one value per 20 bytes, so the largest file that is read has 800,000 values. They take 100 MiB.
_MOST_VALUES = 1_000_000


def parse_yaml(path: Path, text: str) -> dict[str, Any]:
    """Return the table in a YAML file.

    Raises:
        LockfileInvalid: the text is not YAML, is not a table, or contains something that is refused.
    """
    import yaml  # loading this module takes longer than reading most files

    try:
        return _table(yaml.parse(text, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader)))
    except _RefusedError as error:
        raise LockfileInvalid(
            f"`{path}` contains YAML that hpcenv does not read",
            why=str(error),
            hint="pixi and conda-lock do not write such files: write the file again with the tool",
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise LockfileInvalid(f"`{path}` is not YAML", why=describe_error(error)[:500]) from error


class _RefusedError(Exception):
    """The YAML is valid, but contains something that no lockfile needs."""


def _table(events: Iterable[Any]) -> dict[str, Any]:
    """Return the only document in a stream of PyYAML's events."""
    top: list[Any] = []
    stack: list[_Open] = [_Open(top)]
    count = 0
    for event in events:
        kind = type(event).__name__
        if kind in ("SequenceEndEvent", "MappingEndEvent"):
            stack.pop()
            continue
        value = _value(event, kind)
        if value is None:
            continue
        count += 1
        if count > _MOST_VALUES:
            raise _RefusedError(f"it has more than {_MOST_VALUES:,} values")
        stack[-1].add(value, event)
        if not isinstance(value, str):
            stack.append(_Open(value))
            if len(stack) > _DEEPEST + 1:
                raise _RefusedError(f"{_line(event)} is nested more than {_DEEPEST} levels deep")
    if len(top) != 1:
        raise _RefusedError(f"it has {len(top) or 'no'} documents")
    if not isinstance(top[0], dict):
        raise _RefusedError("it is not a table of names and values")
    return top[0]


def _value(event: Any, kind: str) -> Any:
    """Return a text, or an empty list or table, which the next events fill.

    Return None for an event without a value.
    """
    if kind == "AliasEvent":
        raise _RefusedError(f"{_line(event)} has the alias `*{event.anchor}`")
    if kind not in ("ScalarEvent", "SequenceStartEvent", "MappingStartEvent"):
        return None
    if event.tag is not None:
        raise _RefusedError(f"{_line(event)} has the tag `{event.tag[:60]}`")
    return event.value if kind == "ScalarEvent" else [] if kind == "SequenceStartEvent" else {}


class _Open:
    """A list or a table that is being filled."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key: str | None = None

    def add(self, value: Any, event: Any) -> None:
        if isinstance(self.value, list):
            self.value.append(value)
        elif self.key is None:
            if not isinstance(value, str):
                raise _RefusedError(f"{_line(event)} has a key that is not a text")
            if value in self.value:
                raise _RefusedError(f"{_line(event)} has the key `{value[:60]}` a second time")
            self.key = value
        else:
            self.value[self.key] = value
            self.key = None


def _line(event: Any) -> str:
    return f"line {event.start_mark.line + 1}"
