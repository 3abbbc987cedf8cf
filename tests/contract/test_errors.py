"""Codes and exit statuses: unique, stable, and documented."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from hpcenv import errors
from hpcenv.errors import Command, HpcenvError, Status, ToolFailed

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
    table = dict(re.findall(r"(?:\|-|`-|   ) (\w+) +(\d+) ", errors.__doc__ or ""))
    assert table == {k.__name__: str(k.exit_status) for k in all_errors()}


def test_no_other_status_is_that_of_an_error_and_each_is_documented() -> None:
    others = {value for name, value in vars(Status).items() if name.isupper()}
    assert others.isdisjoint(kind.exit_status for kind in all_errors())
    text = (ROOT / "docs" / "reference" / "errors.md").read_text()
    rows = re.findall(r"^\| ([\d, ]+) \| [^|]+", text, re.MULTILINE)
    assert {int(number) for row in rows for number in row.split(",")} == others | {0}


def test_an_error_has_what_why_and_hint() -> None:
    assert str(HpcenvError("what", why="because", hint="do")) == "what\nwhy: because\nhint: do"


def test_a_command_in_a_hint_is_quoted_where_it_is_shown() -> None:
    status = Command("hpcenv", "status", "my run")
    assert HpcenvError("x", hint=status).hint == "hpcenv status 'my run'"
    assert HpcenvError("x", hint=("see ", status, ", or wait")).hint == "see `hpcenv status 'my run'`, or wait"
    assert HpcenvError("x").hint is None


def test_a_changed_error_is_another_one_of_the_same_kind() -> None:
    first = ToolFailed("a", argv=("sbatch",), status=2, why="b", hint=Command("c"))
    second = first.changed(why="d")
    assert (str(first), str(second)) == ("a\nwhy: b\nhint: c", "a\nwhy: d\nhint: c")
    assert (type(second), second.argv, second.status) == (ToolFailed, ("sbatch",), 2)
    assert (first.changed(what="e").args, first.changed(hint="f").hint) == (("e",), "f")


def test_no_error_is_changed_after_it_was_raised() -> None:
    """`error.why = ...` would lose the first text; `error.changed(...)` keeps both errors."""
    for path in sorted((ROOT / "hpcenv").rglob("*.py")):
        if path.name == "errors.py":
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                changed = isinstance(target, ast.Attribute) and target.attr in ("what", "why", "hint", "hint_parts")
                of_self = isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
                assert not changed or of_self, f"{path}:{node.lineno}"


def test_an_error_says_what_is_wrong_and_asks_nothing() -> None:
    kinds = {kind.__name__ for kind in all_errors()}
    questions = []
    for path in sorted((ROOT / "hpcenv").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in kinds and call.args:
                parts = getattr(call.args[0], "values", [call.args[0]])
                if str(getattr(parts[-1], "value", "")).endswith("?"):
                    questions.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert questions == []
