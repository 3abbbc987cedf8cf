"""The list of files of a hub is untrusted: names become paths, sizes become downloads."""

from __future__ import annotations

from typing import Any

import pytest
from huggingface_hub.hf_api import RepoFile, RepoFolder
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.errors import DataUnavailable
from hpcenv.hub.repository_files import MOST_FILES, HubFile, parse_entries, select
from tests.hub_server import entry, git_sha1, sha256


def parsed(*entries: Any) -> tuple[HubFile, ...]:
    kinds: dict[Any, Any] = {"file": RepoFile, "directory": RepoFolder}
    return parse_entries([kinds[one["type"]](**one) for one in entries], origin="`lab/tiny`")


def refused(*entries: Any) -> str:
    with pytest.raises(DataUnavailable) as caught:
        parsed(*entries)
    return str(caught.value.why)


def test_large_files_have_the_hash_of_their_content_and_small_ones_that_of_git() -> None:
    large, small = parsed(
        entry("w.bin", b"abc", lfs=True), entry("a/c.json", b"{}"), {"type": "directory", "path": "a", "oid": "0" * 40}
    )[::-1]
    assert (large.path, large.digest, large.size) == ("w.bin", f"sha256:{sha256(b'abc')}", 3)
    assert (small.path, small.digest) == ("a/c.json", f"git-sha1:{git_sha1(b'{}')}")


NAMES = [
    "../x", "a/../../x", "/etc/passwd", "a//b", "a/", "", ".", "..", "./a", "a/.", "a\0b", "a\nb", "a\x1b[2Jb", "a\\b",
    "C:\\x", ".git/config", "a/.git/hooks/post-checkout", ".GIT", "\ud800", "a\u202eb", "x" * 256, "/".join(["d" * 200] * 6), None, 3, ["a"],
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_that_is_no_plain_path_is_refused(name: Any) -> None:
    assert "not a plain path" in refused(entry("a", b"", path=name))


@given(st.text(max_size=40))
def test_no_name_leaves_the_folder(name: str) -> None:
    try:
        (file,) = parsed(entry("a", b"", path=name))
    except DataUnavailable:
        return
    parts = file.path.split("/")
    assert file.path == name
    assert not name.startswith("/")
    assert not {"", ".", ".."} & set(parts)
    assert "\\" not in name
    assert name.isprintable()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"size": -1}, "has the size"),
        ({"size": True}, "has the size"),
        ({"size": 1 << 60}, "has the size"),
        ({"size": "3"}, "has the size"),
        ({"size": None}, "has the size"),
        ({"oid": "0" * 39}, "no valid digest"),
        ({"oid": None}, "no valid digest"),
        ({"lfs": {"oid": "0" * 40, "size": 1, "pointerSize": 1}}, "no valid digest"),
        ({"lfs": {"oid": "0" * 64, "size": 1.5, "pointerSize": 1}}, "has the size"),
    ],
)
def test_an_entry_that_is_not_valid_is_refused(changed: dict[str, Any], said: str) -> None:
    assert said in refused({**entry("a", b""), **changed})


def test_names_that_collide_are_refused() -> None:
    assert "two files" in refused(entry("a", b""), entry("a", b"x"))
    assert "a file and a folder" in refused(entry("a", b""), entry("a/b/c", b""))


def test_one_digest_with_two_sizes_is_refused() -> None:
    lying = {**entry("b", b"abc"), "lfs": {"oid": sha256(b"abc"), "size": 4, "pointerSize": 1}}
    assert "a different size" in refused(entry("a", b"abc", lfs=True), lying)
    assert len(parsed(entry("a", b"abc", lfs=True), entry("b", b"abc", lfs=True))) == 2


def test_too_many_files_are_refused() -> None:
    assert "more than" in refused(*(entry(f"{number}", b"") for number in range(MOST_FILES + 1)))


def test_patterns_choose_files_and_a_pattern_without_files_is_refused() -> None:
    files = parsed(entry("a.json", b""), entry("w/x.bin", b""), entry("w/y.txt", b""))

    def chosen(*patterns: str) -> list[str]:
        return [file.path for file in select(files, patterns, origin="`lab/tiny`")]

    assert chosen() == ["a.json", "w/x.bin", "w/y.txt"]
    assert chosen("*.json", "w/*.bin") == ["a.json", "w/x.bin"]
    assert chosen("w/") == chosen("w/*") == ["w/x.bin", "w/y.txt"]
    assert chosen("*.bin") == ["w/x.bin"], "as in the hub's library, * also stands for /"
    with pytest.raises(DataUnavailable) as caught:
        chosen("*.json", "*.safetensors")
    assert "`*.safetensors`" in caught.value.what
    assert "a.json" in str(caught.value.why)
    with pytest.raises(DataUnavailable):
        select((), (), origin="`lab/tiny`")
