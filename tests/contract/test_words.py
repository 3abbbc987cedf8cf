"""Plain English: words of an old dialect do not stand in docstrings, errors, help texts and pages.

CONTRIBUTING.md says what to write instead. The list is short on purpose: it holds what a reader who is not a
native speaker stumbles over.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

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
    r"(?:is|are) of (?!type|(?:the|an) unknown type|no use|several types|different|the few)": "say `belongs to`, `has` or `describes`",
    r"as [A-Za-z.]+ has it": "say `as X writes it`, or name the place",
    r"(?:differs? from|compared with) (?:its|their) sums?": "say `checksum`",
    r"unproved sha256|proved (?:hash(?:es)?|wheels?|sha256)": "say `confirmed`",
    r"^Looked at(?=:)": "say `Considered and rejected`",
    r"with the check in front": "say `the check runs before it`",
    r"comes? on (?:PYTHON)?PATH": "say `is put on PATH`",
    r"reach(?:es)? outside": "say `has an effect outside`",
}
PATTERN = re.compile("|".join(rf"\b(?:{words})\b" for words in AVOID), re.IGNORECASE)


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield every text constant of a file, docstrings and the fixed parts of f-strings among them, with its line."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    return enumerate(path.read_text(encoding="utf-8").splitlines(), 1)


def _comments(path: Path) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in _lines(path) if line.lstrip().startswith("#"))


def _found(texts: Iterator[tuple[int, str]], path: Path) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {match.group(0)!r}"
        for number, text in texts
        for match in PATTERN.finditer(text)
    ]


def test_source_texts_use_plain_words() -> None:
    found = [line for path in SOURCES for texts in (_texts(path), _comments(path)) for line in _found(texts, path)]
    assert not found, "\n".join(found)


def test_pages_use_plain_words() -> None:
    found = [line for path in PAGES for line in _found(_lines(path), path)]
    assert not found, "\n".join(found)
