"""TOML on disk: plain data in, canonical text out, never half a file."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.errors import LockfileInvalid, SpecError
from hpcenv.project import toml_files

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


KEY = ".".join(["a"] * 33)
LONG_KEYS = {
    "plain": f"{KEY} = 1",
    "after other lines": f"a = 1\n# {KEY}\n\n{KEY} = 1",
    "header": f"[{KEY}]",
    "header of an array of tables": f"[[ {KEY} ]]",
    "inline table": "a = {" + KEY + " = 1}",
    "inline table, later": 'a = {b = 1, "c" = [{d = 1}, {' + KEY + " = 1}]}",
    "spaces": " . ".join(["a"] * 33) + " = 1",
    "quoted parts": ".".join(['"a.b"', "'c'"] * 17) + " = 1",
    "quoted parts with quotes": ".".join([r'"\\\""', "x"] * 17) + " = 1",
    "after a string with quotes": 'a = ["""x"""", {' + KEY + " = 1}]",
    "after a literal string": "a = ['''x''''', {" + KEY + " = 1}]",
    "after a multi-line string": 'a = """\n\\"""\n"""\n' + KEY + " = 1",
    "after a string that looks open": f"a = '\\'\n{KEY} = 1",
    "between strings": f'"a\\\\".{KEY}."b" = "c"',
    "carriage returns": f"a = 1\r\n{KEY} = 1\r\n",
    "many keys": "".join(f"k{n}.b = 1\n" for n in range(100_001)),
}


@pytest.mark.parametrize("content", LONG_KEYS.values(), ids=LONG_KEYS)
def test_a_key_with_many_parts_is_refused_before_it_is_parsed(content: str, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(content, newline="")
    with pytest.raises(SpecError) as caught:
        toml_files.read(path, error=SpecError, most=1 << 30)
    assert "has a key with more than 32 parts" in caught.value.what or "too many dotted keys" in caught.value.what
    assert str(path) in caught.value.what
    assert str(caught.value.why).startswith("line ")


DOTS = ". " * 40
NO_LONG_KEYS = {
    "32 parts": ".".join(["a"] * 32) + " = 1",
    "string": f'a = "{KEY}"',
    "literal string": f"a = '{KEY}'",
    "multi-line string": f'a = """\n{DOTS}\n"\\"""{KEY}"""',
    "multi-line literal string": f"a = '''\n{DOTS}{KEY}\n'''",
    "comment": f"a = 1 # {KEY}",
    "comment with a quote": f"a = 1 # it's {KEY}\nb = 2",
    "numbers": "a = [" + ", ".join(["1.5"] * 50) + "]",
    "quoted key": f'"{KEY}" = 1',
    "strings in an array": f'a = ["{KEY}", "\\\\" , \'"{KEY}\', "\\"{KEY}"] # "',
}


@pytest.mark.parametrize("content", NO_LONG_KEYS.values(), ids=NO_LONG_KEYS)
def test_other_dots_are_no_parts_of_a_key(content: str, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(content)
    toml_files.read(path, error=SpecError)


@pytest.mark.parametrize("piece", ['"\\"', '"', "'.", '".', '\\"'])
def test_a_hostile_line_of_quotes_takes_no_time(piece: str) -> None:
    content = b"a = " + piece.encode() * 300_001 + b"." * 40
    started = time.process_time()
    with contextlib.suppress(SpecError):
        toml_files.require_short_keys(content, Path("a"), error=SpecError)
    assert time.process_time() - started < 10  # the square of the length takes hours


def test_a_large_file_is_refused_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("#" * (1 << 20))
    toml_files.read(path, error=SpecError)
    path.write_text("#" * ((1 << 20) + 1))
    with pytest.raises(SpecError) as caught:
        toml_files.read(path, error=SpecError)
    assert caught.value.why == "it has more than 1 MiB"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="NOT RUN: Python 3.10 has no TOML reader of its own")
@given(st.lists(st.sampled_from([*".\\'\"\n\t ={}[],#a1\r", '"""', "'''", ".a" * 40, "a = "]), max_size=30))
def test_no_document_that_is_accepted_has_a_long_key(pieces: list[str]) -> None:
    import tomllib

    content = "".join(pieces)
    try:
        data = tomllib.loads(content)
    except ValueError:
        return
    depth, level = 0, [data]
    while level := [inner for table in level for inner in tables_in(table)]:
        depth += 1
    # Two headers or inline tables can be below each other.
    if depth > 2 * 33:
        with pytest.raises(SpecError):
            toml_files.require_short_keys(content.encode(), Path("a"), error=SpecError)


def tables_in(value: Any) -> list[Any]:
    found = value.values() if isinstance(value, dict) else value
    return [inner for inner in found if isinstance(inner, (dict, list))]


def test_a_hostile_key_takes_no_memory(tmp_path: Path) -> None:
    """100 kB took 9.6 GB. The limit of this process's child is far below that."""
    spec = tmp_path / "hpcenv.toml"
    spec.write_text('image = "host"\na' + ".a" * 50_000 + " = 1\n")
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30));"
        "sys.argv = ['hpcenv', 'lock', '--check']; from hpcenv.cli import main; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "error[spec-invalid]" in done.stderr
    assert "a key with more than 32 parts" in done.stderr
