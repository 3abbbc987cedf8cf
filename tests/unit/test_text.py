from __future__ import annotations

import pytest

from hpcenv.text import columns, cut, listed, plural, printable, visible, visible_ascii, wrap


def test_characters_that_a_terminal_would_act_upon_are_shown_as_escapes() -> None:
    assert visible("größe\x1b[2J\n\u202e模") == "größe\\x1b[2J\\n\\u202e模"
    assert visible("a\tb\n", keep="\t") == "a\tb\\n"
    assert printable("größe\x1b[2J\n") == "größe?[2J?"
    assert visible_ascii("größe\x1b[2J 模") == "gr\\xf6\\xdfe\\x1b[2J \\u6a21"


def test_a_paragraph_fits_the_terminal_and_a_path_is_not_broken() -> None:
    path = "/scratch/a-long-name" * 5
    lines = wrap(f"{'word ' * 20}{path}", indent=4).splitlines()
    assert [len(line) <= 80 for line in lines] == [True, True, False]
    assert lines[1:] == ["    word word word word", f"    {path}"]


def test_a_command_between_backticks_is_not_broken() -> None:
    command = "`hpcenv submit --accept 0123456789ab 'my train.py' -- --lr 0.1`"
    assert wrap(f"{'word ' * 5}then: {command}, or --dry-run", indent=2).splitlines() == [
        "word word word word word then:",
        f"  {command}, or --dry-run",
    ]


def test_without_whole_words_no_line_is_too_long() -> None:
    lines = wrap("a-" * 100, first="why: ", indent=5, whole_words=False).splitlines()
    assert [len(line) for line in lines] == [79, 79, 57]
    assert lines[0].startswith("why: a-")
    assert lines[1].startswith("     a-")


def test_a_text_that_is_cut_ends_with_three_dots() -> None:
    assert [cut("abcdefgh", most) for most in (7, 8)] == ["abcd...", "abcdefgh"]


def test_columns_are_aligned_without_blanks_at_the_end() -> None:
    assert columns([("NAME", "SIZE", ""), ("a", "1 kB", "x"), ("longer", "", "")]) == [
        "NAME    SIZE",
        "a       1 kB  x",
        "longer",
    ]


@pytest.mark.parametrize(("count", "text"), [(0, "0 nodes"), (1, "1 node"), (2, "2 nodes")])
def test_a_noun_follows_its_number(count: int, text: str) -> None:
    assert plural(count, "node") == text


@pytest.mark.parametrize(
    ("most", "text"), [(1, "a and 2 more"), (2, "a, b and 1 more"), (3, "a, b, c"), (9, "a, b, c")]
)
def test_a_long_list_ends_with_the_number_of_the_others(most: int, text: str) -> None:
    assert listed(["a", "b", "c"], most) == text
