"""Versions as numbers, and requirements on them. Pure; standard library only.

Runs on: LOGIN NODE, COMPUTE NODE.
"""

from __future__ import annotations

import re
from functools import cache

Numbers = tuple[int, ...]


@cache
def numbers(version: str) -> Numbers | None:
    """Return a version such as `580.65.06` as a tuple of numbers; None for a text that is not a version."""
    if len(version) > 64 or not re.fullmatch(r"[0-9]+(\.[0-9]+)*", version):
        return None
    return tuple(int(part) for part in version.split("."))


def padded(version: Numbers, length: int) -> Numbers:
    """Return a version with zeros at its end, at least `length` parts long."""
    return version + (0,) * (length - len(version))


def less(left: Numbers, right: Numbers) -> bool:
    """Return whether the left version is less than the right version. 12 and 12.0 are equal."""
    length = max(len(left), len(right))
    return padded(left, length) < padded(right, length)


def older(have: Numbers, floor: str) -> bool:
    """Return whether a version is older than a floor."""
    return less(have, numbers(floor) or ())


def sort_key(version: str) -> Numbers:
    """Return a key that sorts versions. A text that is not a version is sorted before all versions."""
    return numbers(version) or ()


def public(version: str) -> str:
    """Return a version without its local part: `2.7.1+cu118` becomes 2.7.1."""
    return version.partition("+")[0]


def minor(version: str) -> str:
    """Return the first two parts of a version: `2.7.1` becomes 2.7."""
    return ".".join(version.split(".")[:2])


_CLAUSE = re.compile(r"(==|>=|<=|~=|<|>)([0-9]+(?:\.[0-9]+)*)")


def is_requirement(text: str) -> bool:
    """Return whether `fits` can read a text as a requirement: `==9.1.0.70`, `>=13.1,<=13.2`, `~=3.9.0`."""
    return bool(text) and all(_CLAUSE.fullmatch(part) for part in text.split(","))


def fits(version: Numbers, requirement: str, *, known: int = 0) -> bool:
    """Return whether a version meets a requirement, with the meaning of PEP 440.

    Args:
        version: the numbers of the version.
        requirement: clauses, separated by commas. All clauses must hold.
        known: how many parts of the version are known; 0 means all parts. For example, cuDNN itself reports only
            9.10.2, but its wheel has version 9.10.2.21. Three parts of this version are known, and only these three
            parts are compared.
    """
    return all(_meets(version, match[1], match[2], known) for match in _CLAUSE.finditer(requirement))


def _meets(version: Numbers, sign: str, text: str, known: int) -> bool:
    wanted = numbers(text) or ()
    if sign == "~=":  # ~=3.9.0 is >=3.9.0, ==3.9.*
        series = len(wanted) - 1
        return not less(version, wanted) and padded(version, series)[:series] == wanted[:series]
    if known:
        version, wanted = version[:known], wanted[:known]
    below, above = less(version, wanted), less(wanted, version)
    # With `<` or `>`, the unknown parts may decide.
    strict = {"<": below or bool(known and not above), ">": above or bool(known and not below)}
    return {"==": not below and not above, ">=": not below, "<=": not above, **strict}[sign]
