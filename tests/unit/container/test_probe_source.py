"""The probe as one text."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hpcenv.container.probe_source import join_chapters, probe_source, read_chapters


def test_every_chapter_is_in_the_text_and_the_text_is_ascii() -> None:
    text = probe_source()
    assert {"__init__", "__main__", "run", "packages", "libraries"} <= set(read_chapters())
    for name in read_chapters():
        assert name == "__main__" or f"'{name}': " in text
    assert text.isascii()


@pytest.mark.parametrize("text", ["'''", '"""', "\\", "\N{SNOWMAN}\U0001f600", "\x00\r\n", "@{x} %s {0}"])
def test_a_chapter_may_hold_any_text(text: str) -> None:
    program = join_chapters({"strange": text, "__main__": "import sys; sys.stdout.write(ascii(SOURCES['strange']))"})
    done = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == ascii(text)
