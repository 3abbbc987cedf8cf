"""YAML of somebody else: plain data, bounded, nothing executed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcenv.errors import FileUnusable, LockfileInvalid
from hpcenv.locking.pins.formats import open_pins
from hpcenv.locking.pins.pin import PinSource
from hpcenv.locking.pins.yaml_text import parse_yaml

HERE = Path("some.yml")
LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 20))


def test_every_value_is_text():
    text = "a: 1.10\nb: 0_0\nc: [yes, ~, 12:30:45, 2024-01-01, 0x10]\nd: {e: 'x'}\nf:\n"
    assert parse_yaml(HERE, text) == {
        "a": "1.10",
        "b": "0_0",
        "c": ["yes", "~", "12:30:45", "2024-01-01", "0x10"],
        "d": {"e": "x"},
        "f": "",
    }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (LAUGHS, "the alias `*a0`"),
        (
            "a: !!python/object/apply:os.mkdir [made-by-yaml]\n",
            "the tag `tag:yaml.org,2002:python/object/apply:os.mkdir`",
        ),
        ("a: !!binary aGVsbG8=\n", "line 1 has the tag"),
        ("a: 1\nb: 2\na: 3\n", "line 3 has the key `a` a second time"),
        ("? [a]\n: 1\n", "a key that is not a text"),
        ("base: &b {x: 1}\nc:\n  <<: *b\n", "the alias `*b`"),
        ("a: 1\n---\nb: 2\n", "2 documents"),
        ("", "no documents"),
        ("- a\n", "not a table"),
        ("a: " + "[" * 30 + "]" * 30, "nested more than 20 levels"),
        ("".join(f"{' ' * n}a{n}:\n" for n in range(500)), "nested more than 20 levels"),
    ],
)
def test_what_no_lockfile_contains_is_refused(tmp_path, monkeypatch, text, why):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LockfileInvalid, match="YAML that hpcenv does not read") as caught:
        parse_yaml(HERE, text)
    assert why in str(caught.value.why)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("text", ["a: " + "[" * 100_000, "".join(f"{' ' * n}a{n}:\n" for n in range(5_000))])
def test_what_is_nested_deeper_than_any_yaml_is_refused(text):
    """PyYAML 6.0.4 refuses 1,000 levels by itself, before it tells hpcenv of the first 21."""
    with pytest.raises(LockfileInvalid) as caught:
        parse_yaml(HERE, text)
    assert re.search("nested more than 20 levels|exceeded maximum nesting depth", str(caught.value.why))


@pytest.mark.parametrize("text", ["a: [1\n", "a: 'x\n", "\ta: 1\n", "a: b: c\n", "a: \x01\n", "%YAML 9.9\n---\na: 1\n"])
def test_what_is_no_yaml(text):
    with pytest.raises(LockfileInvalid, match="is not YAML"):
        parse_yaml(HERE, text)


def test_many_values_are_too_many_before_they_fill_the_memory():
    """Six million values in 12 MB of text, less than a file may have. A separate process measures its memory."""
    program = """
import resource
from pathlib import Path
from hpcenv.errors import LockfileInvalid
from hpcenv.locking.pins.yaml_text import parse_yaml
text = "a: [" + "1," * 6_000_000 + "]"
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    parse_yaml(Path("some.yml"), text)
except LockfileInvalid as error:
    print(error.why)
used = resource.getrusage(resource.RUSAGE_SELF)
print((used.ru_maxrss - before) >> 10, int(used.ru_utime))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    why, numbers = done.stdout.splitlines()
    mib, seconds = map(int, numbers.split())
    assert why == "it has more than 1,000,000 values"
    assert mib < 256 and seconds < 20


def test_a_file_may_have_16_mib(tmp_path):
    with (tmp_path / "pixi.lock").open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(FileUnusable, match="cannot read") as caught:
        open_pins(PinSource(path=tmp_path / "pixi.lock"))
    assert "more than 16 MiB" in str(caught.value.why)
