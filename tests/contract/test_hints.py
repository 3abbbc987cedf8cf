"""Each command that a hint names is followed by a test on the testbed, or has a reason why no test can follow it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.hint_cases import CASES, NOT_FOLLOWED

PACKAGE = Path(__file__).resolve().parents[2] / "hpcenv"


def hinted() -> Iterator[str]:
    """Yield `file: words` of each Command in the code; `*` stands for words that are computed."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            named = isinstance(node, ast.Call) and getattr(node.func, "id", "")
            if named in ("Command", "HintCommand") and path.name != "errors.py":
                words = [word.value if isinstance(word, ast.Constant) else "*" for word in node.args]  # type: ignore[attr-defined]
                yield f"{path.relative_to(PACKAGE)}: {' '.join(map(str, words))}"


def test_every_command_of_a_hint_is_in_one_of_both_lists() -> None:
    followed = {place for case in CASES for place in case.places}
    assert followed.isdisjoint(NOT_FOLLOWED)
    assert set(hinted()) == followed | set(NOT_FOLLOWED)
