"""Text that every JSON reader accepts."""

import pytest

from hpcenv.incontainer.probe.text import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("torch 2.9.0+cu128", "torch 2.9.0+cu128"),
        ("", ""),
        ("Universität, \N{SNOWMAN}", "Universität, \N{SNOWMAN}"),
        ("a\tb\x00\x1b[31m\x7f\n", "a\\x09b\\x00\\x1b[31m\\x7f\\x0a"),
        (b"lib\xff.so".decode("utf-8", "surrogateescape"), "lib\\xff.so"),
    ],
)
def test_control_characters_and_broken_bytes_are_shown_as_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_every_ascii_character_is_as_before_the_short_cut() -> None:
    for code in range(128):
        assert printable(chr(code)) == (chr(code) if 32 <= code < 127 else f"\\x{code:02x}")
