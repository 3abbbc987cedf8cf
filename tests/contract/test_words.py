"""Plain English: words of an old dialect do not stand in docstrings, errors, help texts and pages.

CONTRIBUTING.md says what to write instead. The list is short on purpose: it holds what a reader who is not a
native speaker stumbles over.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*(ROOT / "hpcenv").rglob("*.py"), ROOT / "examples" / "train.py"])
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
    if path.name != "CHANGELOG.md" and "reference" not in path.parts
)
AVOID = {
    r"nobody": "use the passive, or name the subject",
    r"whoever": "name the person or the program",
    r"thereof|therein|whereof": "say of what",
    r"besides": "say `in addition`, or `except`",
    r"shall": "say `must` or `will`",
    r"of (?:its|their|one's) own": "say `own`, or leave it out",
    r"(?:is|was|are|were) told": "say `is reported`, or name the message",
    r"what (?:nobody|is no)\b": "name the thing",
    r"there is none": "say `there is no X`",
    r"for ever": "say `forever`, or give the limit",
    r"heeded|heeds?": "say `used`",
    r"meanwhile": "say `in the meantime`, or give the order",
    r"nothing comes of": "say `has no effect`",
    r"as it comes|as they come": "say `unchanged`",
    r"takes? the word of": "say `trusts`",
}
PATTERN = re.compile("|".join(rf"\b(?:{words})\b" for words in AVOID), re.IGNORECASE)


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield every text constant of a file, docstrings and the fixed parts of f-strings among them, with its line."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _comments(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("#"):
            yield number, line


def _found(texts: Iterator[tuple[int, str]], path: Path) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {match.group(0)!r}"
        for number, text in texts
        for match in PATTERN.finditer(text)
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_texts_use_plain_words(path: Path) -> None:
    found = [*_found(_texts(path), path), *_found(_comments(path), path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_use_plain_words(path: Path) -> None:
    found = _found(iter(enumerate(path.read_text(encoding="utf-8").splitlines(), 1)), path)
    assert not found, "\n".join(found)
