"""A problem of hpcenv.toml names the line of its key."""

from __future__ import annotations

import pytest

from hpcenv.project.toml_lines import line_of

TEXT = """\
image = "host"
submit.nodes = 1
# [env]
[env]
  A = "1"
"B" = "2"
[[bind]]
source = "/a"
[[bind]]
source = 3
[policy]
"system.glibc" = "x"
"""


@pytest.mark.parametrize(
    ("location", "line"),
    [
        (("image",), 1),
        (("submit", "nodes"), 2),
        (("env",), 4),
        (("env", "A"), 5),
        (("env", "B"), 6),
        (("bind", 0, "source"), 8),
        (("bind", 1, "source"), 10),
        (("bind", 1, "target"), 9),
        (("absent",), None),
        ((), None),
    ],
)
def test_a_key_is_found_by_its_line(location: tuple[str | int, ...], line: int | None) -> None:
    assert line_of(TEXT, location) == line


def test_a_text_that_is_no_toml_has_no_lines() -> None:
    assert line_of("[[[\n= = =\n\x00", ("a", "b")) is None
