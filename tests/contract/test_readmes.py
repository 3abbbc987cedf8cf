"""README.md and README.zh-CN.md name the same commands, options and pages."""

import re
from pathlib import Path

from hpcenv.runs.diagnose.patterns import read_patterns

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "README.zh-CN.md")


def _text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def _blocks(text: str) -> list[str]:
    """Blocks of code: fenced, or lines with four spaces."""
    return re.findall(r"(?ms)^```.*?^```$|^    \S.*?$", text)


def test_both_have_the_same_blocks_of_code() -> None:
    english, chinese = map(_blocks, map(_text, PAGES))
    assert len(english) > 8
    assert english == chinese


def test_both_name_the_same_words_of_code_and_the_same_pages() -> None:
    for found in (r"`[^`\n]+`", r"\]\(([^)]+)\)"):
        english, chinese = ({*re.findall(found, _text(page))} - set(PAGES) for page in PAGES)
        assert english == chinese


def test_both_name_the_number_of_patterns() -> None:
    count = len(read_patterns())
    assert all(f"[{count} " in _text(page) for page in PAGES)


def test_the_first_line_of_each_leads_to_the_other() -> None:
    for page, other in zip(PAGES, reversed(PAGES), strict=True):
        assert f"]({other})" in _text(page).splitlines()[0]


def test_readme_is_short() -> None:
    assert len(_text("README.md").splitlines()) <= 150
