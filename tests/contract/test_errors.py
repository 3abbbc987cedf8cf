"""Codes and exit statuses: unique, stable, and documented."""

from __future__ import annotations

import re
from pathlib import Path

from hpcenv import errors
from hpcenv.errors import HpcenvError

ROOT = Path(__file__).resolve().parents[2]


def all_errors() -> list[type[HpcenvError]]:
    found = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, HpcenvError)]
    return sorted(found, key=lambda kind: kind.exit_status)


def documented() -> dict[str, tuple[int, str, str]]:
    text = (ROOT / "docs" / "reference" / "errors.md").read_text()
    rows = re.findall(r"^\| `([a-z-]+)` \| (\d+) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    return {code: (int(status), meaning, remedy) for code, status, meaning, remedy in rows}


def test_codes_and_statuses_are_unique() -> None:
    assert len({kind.code for kind in all_errors()}) == len(all_errors())
    assert len({kind.exit_status for kind in all_errors()}) == len(all_errors())


def test_statuses_fit_into_a_byte_and_zero_is_success() -> None:
    assert all(1 <= kind.exit_status <= 130 for kind in all_errors())


def test_every_error_is_documented_in_order_and_nothing_else_is() -> None:
    assert [(code, row[0]) for code, row in documented().items()] == [(k.code, k.exit_status) for k in all_errors()]


def test_the_documentation_says_what_to_do() -> None:
    assert all(meaning.strip() and remedy.strip() for _, meaning, remedy in documented().values())


def test_the_modules_own_table_agrees() -> None:
    table = dict(re.findall(r"(?:\|-|`-) (\w+) +(\d+) ", errors.__doc__ or ""))
    assert table == {k.__name__: str(k.exit_status) for k in all_errors() if k is not HpcenvError}


def test_an_error_tells_what_why_and_hint() -> None:
    assert str(HpcenvError("what", why="because", hint="do")) == "what\nwhy: because\nhint: do"
