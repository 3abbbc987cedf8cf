"""Compare one field of one node with the value in the lockfile. Pure.

Runs on: COMPUTE NODE (the batch node) and LOGIN NODE. Standard library only.
"""

from __future__ import annotations

import re

from hpcenv.records.facts import Facts
from hpcenv.records.manifest import Expectation, Value
from hpcenv.records.verdict import Finding, Result
from hpcenv.text import visible_ascii


def compare(expected: Expectation, facts: Facts) -> Finding | None:
    """Return the difference between a node and one expected value; None if they match."""
    locked = f">= {show(expected.value)}" if expected.rule == "at-least" else show(expected.value)
    if not facts.has(expected.field):
        return _finding(expected, facts, locked, why_unknown(expected.field, facts), "unknown")
    value = facts.values[expected.field]
    if expected.rule == "at-least":
        return _compare_minimum(expected, value, facts, locked)
    # In Python True == 1, but a lockfile with True and a node with 1 differ.
    if value == expected.value and isinstance(value, bool) == isinstance(expected.value, bool):
        return None
    note = _files_note(expected, facts) or expected.note
    note = note or _list_note(expected.value, value) or _kind_note(expected.value, value)
    return _finding(expected, facts, locked, show(value), "mismatch", note)


def why_unknown(field: str, facts: Facts) -> str:
    """Return why a value is missing.

    The reason is recorded for its field, or for the part of the check that reads it.
    """
    part = {"host": "host", "code": "script", "container": "sif"}.get(field.split(".", maxsplit=1)[0], "probe")
    return facts.unknown.get(field) or facts.unknown.get(part) or "this node did not report it"


def show(value: Value) -> str:
    """Return a value as one line of text."""
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _finding(expected: Expectation, facts: Facts, locked: str, found: str, result: Result, note: str = "") -> Finding:
    return Finding(
        node=facts.node,
        field=expected.field,
        locked=locked,
        found=found,
        result=result,
        severity=expected.if_unknown or expected.severity if result == "unknown" else expected.severity,
        note=note,
    )


def _compare_minimum(expected: Expectation, value: Value, facts: Facts, locked: str) -> Finding | None:
    minimum, version = _version(expected.value), _version(value)
    if minimum is None or version is None:
        return _finding(expected, facts, locked, show(value), "mismatch" if value == "absent" else "unknown")
    # 12 and 12.0 are the same version.
    if version + (0,) * (len(minimum) - len(version)) >= minimum:
        return None
    return _finding(expected, facts, locked, show(value), "mismatch")


def _version(value: Value) -> tuple[int, ...] | None:
    """Return a version such as `580.65.06`, or a count, as a tuple of numbers; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return None
    text = str(value)
    return tuple(int(part) for part in text.split(".")) if re.fullmatch(r"[0-9]+(\.[0-9]+)*", text) else None


def _files_note(expected: Expectation, facts: Facts) -> str:
    """Name the newest files that belong to no package. The lockfile contains only their number and digest."""
    count = facts.values.get("packages.unlisted-count")
    if expected.field != "packages.unlisted-digest" or not isinstance(count, int):
        return ""
    now = f"{expected.note}, now {count}" if expected.note else f"{count} such files"
    names = ", ".join(_short_path(path) for path in facts.unlisted)
    if not names:
        return now
    return f"{now}: {names}" if count <= len(facts.unlisted) else f"{now}, the newest: {names}"


def _short_path(path: str) -> str:
    """Return the end of a path, short enough for a line. The end of a path is the most useful part."""
    path = visible_ascii(re.sub(r"^.*?/(?=(site|dist)-packages/)", "", path))
    return path if len(path) <= _PATH_WIDTH else "..." + path[3 - _PATH_WIDTH :]


_PATH_WIDTH = 60


def _list_note(locked: Value, value: Value) -> str:
    if not isinstance(locked, tuple) or not isinstance(value, tuple):
        return ""
    added = [item for item in value if item not in locked]
    gone = [item for item in locked if item not in value]
    if not added and not gone:
        return "the same items in another order or number"
    return "; ".join(f"{word}: {', '.join(items[:3])}" for word, items in (("added", added), ("gone", gone)) if items)


def _kind_note(locked: Value, value: Value) -> str:
    """Name the types of two values that look the same in the table, for example the text `8` and the number 8."""
    if show(locked) != show(value):
        return ""
    return f"locked as {_KINDS[type(locked)]}, found as {_KINDS[type(value)]}"


_KINDS: dict[type, str] = {str: "text", int: "a number", float: "a number", bool: "true or false", tuple: "a list"}
