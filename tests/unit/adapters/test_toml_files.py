"""TOML on disk: plain data in, canonical text out, never half a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.adapters import toml_files
from hpcenv.errors import LockfileInvalid, SpecError

WORDS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.integers(-(2**63), 2**63 - 1) | WORDS | st.booleans(),
    lambda inner: st.lists(WORDS, max_size=6) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(WORDS, VALUES, max_size=4))
def test_what_is_written_is_read_back(data: dict[str, Any]) -> None:
    import tomlkit

    assert tomlkit.parse(toml_files.dumps(data, header="a\n\nb")).unwrap() == data


def test_long_lists_have_one_line_per_item_so_that_diffs_can_be_read() -> None:
    assert toml_files.dumps({"a": ["1", "2"], "b": ["1", "2", "3", "4"]}, header="h") == (
        '# h\na = ["1", "2"]\nb = [\n    "1",\n    "2",\n    "3",\n    "4",\n]\n'
    )


def test_an_unchanged_file_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.toml"
    assert toml_files.write("a = 1\n", path) is True
    inode = path.stat().st_ino
    assert toml_files.write("a = 1\n", path) is False
    assert path.stat().st_ino == inode
    assert toml_files.write("a = 2\n", path) is True
    assert [item.name for item in path.parent.iterdir()] == ["a.toml"]


@pytest.mark.parametrize(
    ("content", "what"),
    [(b"a = \xff", "is not UTF-8 text"), (b"a =", "is not TOML"), (b"a = 1\na = 2", "is not TOML"), (b"a = 2020-13-45", "is not TOML")],
)  # fmt: skip
def test_what_cannot_be_read_names_file_and_reason(content: bytes, what: str, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=what) as caught:
        toml_files.read(path, error=SpecError)
    assert str(path) in caught.value.what
    assert caught.value.why


def test_the_caller_says_which_error_it_is(tmp_path: Path) -> None:
    with pytest.raises(LockfileInvalid) as caught:
        toml_files.read(tmp_path, error=LockfileInvalid, hint="do this")
    assert (caught.value.why, caught.value.hint) == ("Is a directory", "do this")
