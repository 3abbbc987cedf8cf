"""Each page in Chinese names the same commands, options and pages as the page in English."""

import os
import re
from pathlib import Path

import pytest

from hpcenv.runs.diagnose.patterns import read_patterns

ROOT = Path(__file__).resolve().parents[2]
READMES = ("README.md", "README.zh-CN.md")
PAIRS = [
    READMES,
    ("docs/tutorial.md", "docs/zh-CN/tutorial.md"),
    *((f"docs/how-to/{name}.md", f"docs/zh-CN/{name}.md") for name in ("start", "submit", "diagnose")),
]
ENGLISH = {chinese: english for english, chinese in PAIRS}

each_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: Path(pair[0]).stem)


def _text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def _blocks(text: str) -> list[str]:
    """Blocks of code: fenced, or lines with four spaces."""
    return re.findall(r"(?ms)^```.*?^```$|^    \S.*?$", text)


def _words(text: str) -> set[str]:
    """Words of code within the sentences; such a word may go on in the next line."""
    sentences = re.sub(r"(?ms)^```.*?^```$", "", text)
    return {" ".join(word.split()) for word in re.findall(r"`[^`]+`", sentences)}


def _pages(page: str) -> set[str]:
    """What a page leads to: its own files by their path, a Chinese one by the path of the English one."""
    targets = {target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", _text(page))} - {""}
    paths = {one if "://" in one else os.path.normpath(Path(page).parent / one) for one in targets}
    return {ENGLISH.get(path, path) for path in paths} - {page, ENGLISH.get(page, page)}


@each_pair
def test_both_have_the_same_blocks_of_code(pair: tuple[str, str]) -> None:
    english, chinese = map(_blocks, map(_text, pair))
    assert len(english) > 3
    assert english == chinese


@each_pair
def test_both_name_the_same_words_of_code_and_the_same_pages(pair: tuple[str, str]) -> None:
    english, chinese = pair
    assert _words(_text(english)) == _words(_text(chinese))
    assert _pages(english) == _pages(chinese)


def test_both_name_the_number_of_patterns() -> None:
    count = len(read_patterns())
    assert all(f"[{count} " in _text(page) for page in READMES)


@each_pair
def test_the_first_line_of_each_leads_to_the_other(pair: tuple[str, str]) -> None:
    for page, other in zip(pair, reversed(pair), strict=True):
        assert f"]({os.path.relpath(other, Path(page).parent)})" in _text(page).splitlines()[0]


def test_each_page_in_chinese_is_one_of_these() -> None:
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "docs/zh-CN").iterdir()} == {*ENGLISH} - {READMES[1]}


def test_readme_is_short() -> None:
    assert len(_text("README.md").splitlines()) <= 150
