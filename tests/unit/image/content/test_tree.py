"""The portable digest: what it counts, what it does not, and its agreement with `compare`."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from blake3 import blake3

from hpcenv.image.content.tree import TreeEntry, belongs_to_apptainer, compare, compare_and_digest, tree_digest

ROOT = TreeEntry(path=b"", kind="directory", mode=0o755)
MADE = [b"dev", b"etc", b"home", b"proc", b"root", b"sys", b"tmp", b"var", b"var/tmp"]


def file(path: bytes, content: bytes = b"", **said: object) -> TreeEntry:
    made = TreeEntry(path=path, kind="file", mode=0o644, size=len(content), blake3=blake3(content).hexdigest())
    return replace(made, **{"inode": path, **said})


def directory(path: bytes, **said: object) -> TreeEntry:
    return replace(TreeEntry(path=path, kind="directory", mode=0o755, inode=path), **said)


def tree(*entries: TreeEntry) -> list[TreeEntry]:
    return sorted([ROOT, *entries], key=lambda entry: entry.path)


IMAGE = tree(
    directory(b"etc"),
    file(b"etc/hosts", b"1.2.3.4 me\n"),
    file(b"etc/passwd", b"root:x:0:0::/:/bin/sh\n", uid=3, gid=4, mtime=5),
    directory(b"bin"),
    file(b"bin/su", b"#!", mode=0o4755),
    TreeEntry(path=b"lib", kind="symlink", mode=0o777, target=b"usr/lib", inode=b"lib"),
    TreeEntry(path=b"pipe", kind="fifo", mode=0o600, inode=b"pipe"),
    TreeEntry(path=b"null", kind="character-device", mode=0o666, device=(1, 3), inode=b"null"),
)


def test_the_digest_is_the_documented_one() -> None:
    """Computed by hand from the docstring: the digests of users must not change by accident."""
    lines = [
        (b"d", b"555", b"0", b"", b""),
        (b"d", b"555", b"0", b"", b"bin"),
        (b"f", b"4555", b"2", blake3(b"#!").hexdigest().encode(), b"bin/su"),
        (b"d", b"555", b"0", b"", b"dev"),
        (b"d", b"555", b"0", b"", b"etc"),
        (b"f", b"444", b"22", blake3(b"root:x:0:0::/:/bin/sh\n").hexdigest().encode(), b"etc/passwd"),
        (b"d", b"555", b"0", b"", b"home"),
        (b"l", b"0", b"0", b"usr/lib", b"lib"),
        (b"f", b"444", b"0", blake3(b"").hexdigest().encode(), b"null"),
        (b"p", b"400", b"0", b"", b"pipe"),
        (b"d", b"555", b"0", b"", b"proc"),
        (b"d", b"555", b"0", b"", b"root"),
        (b"d", b"555", b"0", b"", b"sys"),
        (b"d", b"555", b"0", b"", b"tmp"),
        (b"d", b"555", b"0", b"", b"var"),
        (b"d", b"555", b"0", b"", b"var/tmp"),
    ]
    text = b"hpcenv-tree-v1\0" + b"".join(field + b"\0" for line in lines for field in line)
    assert tree_digest(IMAGE) == f"sha256:{hashlib.sha256(text).hexdigest()}"


def test_what_apptainer_does_to_an_image_changes_nothing() -> None:
    """As seen on SIFs that Apptainer 1.4.5 built as root and as an ordinary user."""
    own = [TreeEntry(path=name, kind="symlink", mode=0o777, target=b".singularity.d/x") for name in (b".exec", b".run")]
    own += [directory(b".singularity.d"), file(b".singularity.d/labels.json", b"{}")]
    own += [TreeEntry(path=b"environment", kind="symlink", mode=0o777, target=b".singularity.d/env/90-environment.sh")]
    own += [directory(name) for name in MADE if name != b"etc"]
    kept = {entry.path: entry for entry in [*IMAGE, *own]}
    kept[b"etc/hosts"] = file(b"etc/hosts", mode=0o644)
    kept[b"etc/resolv.conf"] = file(b"etc/resolv.conf")
    kept[b"null"] = file(b"null", mode=0o666)  # as an ordinary user
    kept[b"etc/passwd"] = replace(
        kept[b"etc/passwd"], uid=0, gid=0, mtime=9, xattrs=((b"user.rootlesscontainers", b"x"),)
    )
    kept[b"bin"] = replace(kept[b"bin"], mode=0o775)  # umask 0002
    built = sorted(kept.values(), key=lambda entry: entry.path)
    assert tree_digest(built) == tree_digest(IMAGE)
    assert compare(IMAGE, built, exact=False) == ()
    assert compare(IMAGE, built, exact=True)


@pytest.mark.parametrize(
    "changed",
    [
        [file(b"new")],
        [file(b"bin/su", b"#?", mode=0o4755)],
        [file(b"bin/su", b"#!", mode=0o755)],
        [file(b"bin/su", b"#!", mode=0o4754)],
        [directory(b"bin", mode=0o700)],
        [TreeEntry(path=b"lib", kind="symlink", mode=0o777, target=b"usr/lib64")],
        [directory(b"lib")],
        [TreeEntry(path=b"null", kind="fifo", mode=0o666)],
        [directory(b"tmp", mode=0o1777)],
        [file(b"environment/x")],
        [file(b"etc/hosts2")],
        [file(b".singularity.dd")],
        [replace(ROOT, mode=0o750)],
    ],
)
def test_what_changes_the_digest(changed: list[TreeEntry]) -> None:
    kept = {entry.path: entry for entry in [*IMAGE, *changed]}
    other = sorted(kept.values(), key=lambda entry: entry.path)
    assert tree_digest(other) != tree_digest(IMAGE)
    assert [difference.path for difference in compare(IMAGE, other, exact=False)] == [changed[0].path] * len(
        compare(IMAGE, other, exact=False)
    )


def test_a_missing_var_tmp_is_not_made_below_a_link() -> None:
    link = TreeEntry(path=b"var", kind="symlink", mode=0o777, target=b"data")
    assert tree_digest(tree(link)) != tree_digest(tree(link, directory(b"var/tmp")))
    assert tree_digest(tree(directory(b"var"))) == tree_digest(tree(directory(b"var"), directory(b"var/tmp")))


def test_the_digest_and_compare_agree_on_random_trees() -> None:
    chance = random.Random(3)

    def grow() -> list[TreeEntry]:
        names = chance.sample([b"a", b"dev", b"etc", b"singularity", b"tmp", b"var", b"var/tmp", b"z", b"var-x"], 5)
        return tree(
            *(
                chance.choice([file(name, b"x"), directory(name, mode=chance.choice([0o755, 0o775, 0o700]))])
                for name in names
            )
        )

    equal = 0
    for _ in range(300):
        one = grow()
        # Sometimes a tree that differs only in what is not counted.
        two = [replace(entry, uid=7, mode=entry.mode ^ 0o020) for entry in one] if chance.random() < 0.3 else grow()
        same = compare(one, two, exact=False) == ()
        assert same == (tree_digest(one) == tree_digest(two))
        equal += same
    assert equal > 50


def test_exact_tells_every_field_in_order() -> None:
    one = file(b"a", b"1", xattrs=((b"user.x", b"\0"),))
    two = replace(one, mode=0o600, uid=1, gid=2, mtime=3, size=4, blake3="0" * 64, xattrs=(), inode=b"b")
    found = compare([ROOT, one], [ROOT, two], exact=True)
    assert [difference.field for difference in found] == [
        "mode",
        "uid",
        "gid",
        "mtime",
        "size",
        "blake3",
        "xattrs",
        "inode",
    ]
    assert (found[0].expected, found[0].found) == ("0644", "0600")
    assert (found[6].expected, found[6].found) == ("user.x=0x00", "")
    device = TreeEntry(path=b"n", kind="block-device", mode=0, device=(8, 1))
    [difference] = compare([device], [replace(device, device=(8, 2))], exact=True)
    assert (difference.expected, difference.found) == ("8:1", "8:2")


def test_paths_of_one_side_and_kinds() -> None:
    found = compare(tree(file(b"a"), file(b"c")), tree(file(b"b"), directory(b"c")), exact=True)
    assert [(d.path, d.field, d.expected, d.found) for d in found] == [
        (b"a", "path", "file", None),
        (b"b", "path", None, "file"),
        (b"c", "kind", "file", "directory"),
    ]


def test_trees_are_read_as_they_come() -> None:
    """Two long trees are compared side by side, neither is held."""
    read = [0, 0]

    def long(side: int) -> Iterator[TreeEntry]:
        for at in range(3000):
            read[side] += 1
            assert abs(read[0] - read[1]) <= 1
            yield file(b"%06d" % at)

    assert compare(long(0), long(1), exact=True) == ()
    assert read == [3000, 3000]


@pytest.mark.parametrize("entries", [[file(b"b"), file(b"a")], [file(b"a"), file(b"a")]])
def test_trees_must_be_sorted(entries: list[TreeEntry]) -> None:
    with pytest.raises(ValueError, match="not sorted"):
        tree_digest(entries)
    with pytest.raises(ValueError, match="not sorted"):
        compare(entries, entries, exact=True)


def test_a_file_without_its_blake3_has_no_digest() -> None:
    with pytest.raises(ValueError, match="has no blake3"):
        tree_digest([TreeEntry(path=b"a", kind="file", mode=0)])


@pytest.mark.parametrize("path", [b".singularity.d", b".singularity.d/env/x", b"etc/hosts", b".run", b"singularity"])
def test_what_is_apptainers(path: bytes) -> None:
    assert belongs_to_apptainer(path)
    assert not belongs_to_apptainer(b"x/" + path)


def test_one_walk_compares_and_digests_like_two() -> None:
    """Each path of the image missing, added or changed, alone and together with its neighbour."""
    added = [directory(b"a"), file(b"bin/zz", b"new"), directory(b"zz")]
    others = [IMAGE, [], IMAGE[:1], [*IMAGE, *added[2:]], tree(*IMAGE[1:], *added)]
    others += [IMAGE[:at] + IMAGE[at + many :] for at in range(len(IMAGE)) for many in (1, 2)]
    others += [
        [replace(entry, uid=77) if index in (at, at + many) else entry for index, entry in enumerate(IMAGE)]
        for at in range(len(IMAGE))
        for many in (0, 1)
    ]
    for other in others:
        assert compare_and_digest(IMAGE, other) == (compare(IMAGE, other, exact=True), tree_digest(IMAGE))
        assert compare_and_digest(other, IMAGE) == (compare(other, IMAGE, exact=True), tree_digest(other))
    with pytest.raises(ValueError, match="not sorted"):
        compare_and_digest(IMAGE, IMAGE[::-1])
    with pytest.raises(ValueError, match="not sorted"):
        compare_and_digest(IMAGE[::-1], IMAGE)
