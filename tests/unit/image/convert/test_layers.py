"""Layers indexed, merged and written again: every case against umoci, hostile ones against limits."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard
from blake3 import blake3
from layer_cases import (
    CASES,
    END,
    HOSTILE,
    Hostile,
    base,
    bomb,
    compress,
    digest_of,
    directory,
    file,
    from_folder,
    header,
    padded,
    pax,
    tar,
    umoci_unpacks,
    whiteout,
)

from hpcenv.errors import Command, FileUnusable, ImageMismatch, RecordInvalid, UsageError
from hpcenv.image.content import tar_stream, tree
from hpcenv.image.content.tree import TreeEntry
from hpcenv.image.convert import layer_stream, layers
from hpcenv.image.convert.layers import LayerIndex, LayerLimits, MergedTree

# -- what the tests share -----------------------------------------------------------------


def index(layer: bytes, limits: LayerLimits | None = None) -> LayerIndex:
    return layers.index_layer(io.BytesIO(layer), diff_id=digest_of(layer), limits=limits)


def merged(*each: bytes) -> MergedTree:
    return layers.merge([index(layer) for layer in each])


def emitted(whole: MergedTree, each: list[bytes], **said: object) -> bytes:
    out = io.BytesIO()
    layer_stream.emit(whole, lambda at: contextlib.nullcontext(io.BytesIO(each[at])), out, **said)
    return out.getvalue()


def from_tar(data: bytes, root: TreeEntry) -> list[TreeEntry]:
    """A finished stream as entries, by the standard library's reader: not the one that is tested."""
    import tarfile

    kinds = {b"0": "file", b"5": "directory", b"2": "symlink", b"3": "character-device"}
    kinds |= {b"4": "block-device", b"6": "fifo"}
    found: dict[bytes, TreeEntry] = {b"": root}
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8", errors="surrogateescape") as archive:
        for info in archive:
            path = os.fsencode(info.name)
            assert path not in found
            if info.islnk():
                first = found[os.fsencode(info.linkname)]
                found[path] = TreeEntry(**{**{name: getattr(first, name) for name in first.__slots__}, "path": path})
                continue
            content = archive.extractfile(info).read() if info.isfile() else b""
            extra = {key: value for key, value in info.pax_headers.items() if key.startswith("SCHILY.xattr.")}
            found[path] = TreeEntry(
                path=path,
                kind=kinds[info.type],
                mode=info.mode,
                uid=info.uid,
                gid=info.gid,
                mtime=int(info.mtime),
                size=info.size,
                blake3=blake3(content).hexdigest() if info.isfile() else None,
                target=os.fsencode(info.linkname),
                device=(info.devmajor, info.devminor) if info.isdev() and not info.isfifo() else None,
                xattrs=tuple(sorted((key[13:].encode(), os.fsencode(value)) for key, value in extra.items())),
                inode=path,
            )
    assert all(found[path.rpartition(b"/")[0]].kind == "directory" for path in found)
    return sorted(found.values(), key=lambda entry: entry.path)


def paths(whole: MergedTree) -> list[bytes]:
    return [entry.path for entry in whole.entries()]


# -- every case ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made() -> Iterator[Callable[[str], tuple[list[bytes], MergedTree]]]:
    """Each case's layers and its merged tree, made once."""
    kept: dict[str, tuple[list[bytes], MergedTree]] = {}

    def make(name: str) -> tuple[list[bytes], MergedTree]:
        if name not in kept:
            each = CASES[name].layers()
            kept[name] = each, merged(*each)
        return kept[name]

    yield make
    kept.clear()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.unlike_umoci])
def test_the_tree_is_what_umoci_unpacks(name: str, made: Callable, tmp_path: Path) -> None:
    """Types, modes, owners, times, content, targets, devices, xattrs and hard links, for each case."""
    if shutil.which("umoci") is None:
        pytest.skip("THE COMPARISON WITH UMOCI DID NOT RUN: umoci is not installed")
    if os.geteuid() != 0:
        pytest.skip("THE COMPARISON WITH UMOCI DID NOT RUN: devices and owners need root")
    each, whole = made(name)
    unpacked = umoci_unpacks(each, tmp_path)
    untimed = CASES[name].untimed
    differences = [
        entry
        for entry in tree.compare(unpacked, whole.entries(), exact=True)
        if not (entry.field == "mtime" and entry.path in untimed)
    ]
    assert differences == []


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.same_as])
def test_what_umoci_refuses_is_read_as_its_plain_form(name: str, made: Callable) -> None:
    _, whole = made(name)
    _, plain = made(CASES[name].same_as)
    assert tree.compare(plain.entries(), whole.entries(), exact=True) == ()


@pytest.mark.parametrize("name", CASES)
def test_the_tree_is_sorted_and_the_stream_holds_it(name: str, made: Callable) -> None:
    each, whole = made(name)
    entries = list(whole.entries())
    assert [entry.path for entry in entries] == sorted(entry.path for entry in entries)
    assert not any(b"/.wh." in b"/" + entry.path for entry in entries)
    written = [
        # Hard links are compared by their own test: a tar has no inodes.
        TreeEntry(**{**{field: getattr(entry, field) for field in entry.__slots__}, "inode": entry.path})
        for entry in whole.written()
    ]
    again = [
        TreeEntry(**{**{field: getattr(entry, field) for field in entry.__slots__}, "inode": entry.path})
        for entry in from_tar(emitted(whole, each), written[0])
    ]
    assert tree.compare(written, again, exact=True) == ()
    assert whole.size()[0] == len(entries)


@pytest.mark.parametrize("name", CASES)
def test_an_index_is_kept_and_read_again(name: str, made: Callable) -> None:
    each, _ = made(name)
    for layer in each:
        first = index(layer)
        assert LayerIndex.from_bytes(first.to_bytes(), diff_id=first.diff_id) == first


@pytest.mark.parametrize("name", ["one-layer", "gzip-members", "zstd", "zstd-frames", "mixed-compression"])
def test_blobs_are_opened_by_what_they_are(name: str, tmp_path: Path) -> None:
    """The media type says something else than the bytes, as in registries it may."""
    case = CASES[name]
    for at, layer in enumerate(case.layers()):
        blob = tmp_path / str(at)
        blob.write_bytes(compress(layer, case.packed[at % len(case.packed)]))
        with layers.open_blob(blob, "application/vnd.oci.image.layer.v1.tar+other") as stream:
            assert layers.index_layer(stream, diff_id=digest_of(layer)) == index(layer)


def test_gzip_is_read_without_isal_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "isal", None)
    blob = tmp_path / "blob"
    blob.write_bytes(compress(base(), "gzip-members"))
    with layers.open_blob(blob) as stream:
        assert layers.index_layer(stream, diff_id=digest_of(base())) == index(base())
    blob.write_bytes(compress(base(), "gzip")[:-20])
    with layers.open_blob(blob) as stream, pytest.raises(ImageMismatch, match="cannot be decompressed"):
        layers.index_layer(stream, diff_id=digest_of(base()))


# -- merging ------------------------------------------------------------------------------


def test_hard_links_share_the_smallest_of_their_names(made: Callable) -> None:
    _, whole = made("hard-links")
    groups: dict[bytes, list[bytes]] = {}
    for entry in whole.entries():
        if entry.kind != "directory":
            groups.setdefault(entry.inode, []).append(entry.path)
    assert groups[b"d/a"] == [b"d/a", b"d/b", b"z"]
    assert groups[b"one"] == [b"one", b"two"]
    assert groups[b"null"] == [b"null", b"null2"]
    _, without = made("hard-link-group-loses-one")
    assert [entry.path for entry in without.entries() if entry.inode == b"d/b"] == [b"d/b", b"z"]
    assert {entry.path: entry.size for entry in without.entries()}[b"two"] == len(b"one")


def test_random_layers_equal_a_simple_model() -> None:
    """Whiteouts, opaque directories and every kind over every kind, against ten lines of dict."""
    chance = random.Random(20261120)
    names = [b"a", b"b", b"a-", b"a.b"]
    for _ in range(80):
        model: dict[bytes, str] = {}
        each = []
        for _ in range(chance.randint(1, 4)):
            hidden, members = [], [directory(b".")]
            above = _random_paths(chance, names)
            for path, kind in sorted(above.items()):
                members.append(directory(path) if kind == "directory" else file(path, path))
            for _ in range(chance.randint(0, 2)):
                gone = b"/".join(chance.choices(names, k=chance.randint(1, 2)))
                hidden.append(gone)
                members.insert(chance.randrange(len(members) + 1), whiteout(gone))
            for path in list(model):
                if any(path == gone or path.startswith(gone + b"/") for gone in hidden):
                    del model[path]
            for path, kind in sorted(above.items()):
                if not (kind == "directory" == model.get(path)):
                    model = {other: was for other, was in model.items() if not (other + b"/").startswith(path + b"/")}
                model[path] = kind
            each.append(tar(*members))
        try:
            found = {entry.path: entry.kind for entry in merged(*each).entries() if entry.path}
        except ImageMismatch:  # a parent is a file: the model does not know that
            continue
        assert found == model


def _random_paths(chance: random.Random, names: list[bytes]) -> dict[bytes, str]:
    """Some paths whose parents are among them and are directories."""
    made: dict[bytes, str] = {}
    for _ in range(chance.randint(1, 6)):
        parts = chance.choices(names, k=chance.randint(1, 3))
        for depth in range(1, len(parts)):
            made[b"/".join(parts[:depth])] = "directory"
        made.setdefault(b"/".join(parts), chance.choice(["file", "directory"]))
    return {path: "directory" if any(o.startswith(path + b"/") for o in made) else kind for path, kind in made.items()}


def test_sorting_is_by_bytes_of_the_whole_path() -> None:
    each = tar(
        directory(b"a"), file(b"a/b"), file(b"a-b"), file(b"a.b"), file(b"a0"), directory(b"a/b.d"), file(b"a/b.d/c")
    )
    assert paths(merged(each)) == [b"", b"a", b"a-b", b"a.b", b"a/b", b"a/b.d", b"a/b.d/c", b"a0"]


def test_directories_that_only_paths_imply_have_fixed_attributes() -> None:
    whole = merged(tar(file(b"x/y/file", b"f")))
    entries = {entry.path: entry for entry in whole.entries()}
    assert entries[b"x/y"] == TreeEntry(path=b"x/y", kind="directory", mode=0o755, inode=b"x/y")
    assert whole.root() == entries[b""] == TreeEntry(path=b"", kind="directory", mode=0o755)


# -- one stream ---------------------------------------------------------------------------


def test_the_stream_is_the_same_every_time_and_goes_in_order(made: Callable) -> None:
    each, whole = made("hard-link-target-replaced")
    data = emitted(whole, each)
    assert data == emitted(merged(*each), each)
    kinds = [member.kind for member in tar_stream.Reader([data])]
    order = ["file", "directory", "symlink", "hard-link"]
    assert kinds == sorted(kinds, key=order.index)


def test_a_layer_without_a_surviving_file_is_not_opened() -> None:
    each = [base(), tar(file(b"bin/tool", b"2")), tar(whiteout(b"bin")), tar(file(b"new", b"3"))]
    opened = []

    def open_layer(at: int) -> contextlib.AbstractContextManager[io.BytesIO]:
        opened.append(at)
        return contextlib.nullcontext(io.BytesIO(each[at]))

    layer_stream.emit(merged(*each), open_layer, io.BytesIO())
    assert opened == [3, 0]


def ahead(each: list[bytes], kept: frozenset[int] = frozenset(), **said: object) -> tuple[bytes, MergedTree]:
    """The stream written while the layers are read, those in `kept` from an index."""
    out, indexes = io.BytesIO(), [LayerIndex(diff_id="")] * len(each)
    extra = said.pop("extra", ())
    given: dict[str, object] = {"limits": LayerLimits(), "most_comparisons": 10**9, **said}
    writer = layer_stream.Ahead(out, extra=[entry for entry, _ in extra], **given)
    for at in reversed(range(len(each))):
        writer.begin_layer()
        layer = each[at]
        if at in kept:
            indexes[at] = index(layer)
            writer.copy(indexes[at], lambda layer=layer: contextlib.nullcontext(io.BytesIO(layer)))
        else:
            indexes[at] = layers.index_layer(io.BytesIO(layer), diff_id=digest_of(layer), sink=writer)
        writer.end_layer(indexes[at])
    whole = layers.merge(indexes)
    writer.finish(whole, extra)
    return out.getvalue(), whole


# Where the layers one by one do not say where a file goes: through a symbolic link of another layer, under
# the name that is left of a hard link, or twice.
NOT_AHEAD = {
    "below-dangling-symlink",
    "below-symlink",
    "below-symlink-chain",
    "directory-becomes-symlink",
    "hard-link-group-loses-one",
    "hard-link-renames",
    "hard-link-renames-whiteout-first",
    "hard-link-target-hidden",
    "hard-link-target-replaced",
    "twice-in-one-layer",
    "whiteout-below-symlink",
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_what_is_written_ahead_is_what_is_written_afterwards(name: str) -> None:
    each = CASES[name].layers()
    whole = merged(*each)
    for kept in (frozenset[int](), frozenset([0]), frozenset([len(each) - 1]), frozenset(range(len(each)))):
        if name in NOT_AHEAD:
            with pytest.raises(layer_stream.GuessedWrong):
                ahead(each, kept)
        else:
            data, found = ahead(each, kept)
            assert data == emitted(whole, each)
            assert list(found.entries()) == list(whole.entries())


def test_no_more_is_written_ahead_than_merging_would_allow() -> None:
    many = tar(directory(b"d"), *(file(b"d/%d" % number, b"x" * (number + 1)) for number in range(40)))
    assert ahead([many], limits=LayerLimits(folder_entries=41))[0] == emitted(merged(many), [many])
    with pytest.raises(layer_stream.GuessedWrong):
        ahead([many], limits=LayerLimits(folder_entries=39))
    implied = tar(*(file(b"%d/f" % number, b"") for number in range(40)))
    with pytest.raises(layer_stream.GuessedWrong):
        ahead([implied], limits=LayerLimits(folder_entries=39))
    alike = tar(*(file(b"%d" % number, b"same") for number in range(40)))
    assert ahead([alike], most_comparisons=1600)[0] == emitted(merged(alike), [alike])
    with pytest.raises(layer_stream.GuessedWrong):
        ahead([alike], most_comparisons=1599)
    assert merged(alike).comparisons() == 1600


def test_what_hpcenv_adds_is_left_out_ahead() -> None:
    each = [tar(file(b".singularity.d", b"x"), file(b"a/b", b"y"), file(b"c", b"z"), file(b"etc/hosts", b"h"))]
    extra = [
        (TreeEntry(path=b".singularity.d", kind="directory", mode=0o755), b""),
        (
            TreeEntry(path=b".singularity.d/run", kind="file", mode=0o755, size=3, blake3=blake3(b"own").hexdigest()),
            b"own",
        ),
        (TreeEntry(path=b"a", kind="symlink", mode=0o777, target=b"c"), b""),
        (TreeEntry(path=b"c/d", kind="file", mode=0o755, size=3, blake3=blake3(b"own").hexdigest()), b"own"),
    ]
    assert ahead(each, extra=extra)[0] == emitted(merged(*each), each, extra=extra)


def test_a_root_that_its_layer_names_first_is_known_ahead() -> None:
    plain, named = tar(file(b"a", b"x")), tar(directory(b"./", mode=0o711, uid=3, mtime=-5), file(b"a", b"x"))
    for each in ([plain, plain], [plain, named], [named, plain], [named, named]):
        indexes = [index(layer) for layer in each]
        root = layers.storable(layers.merge(indexes).root())

        def opened(at: int, each: list[bytes] = each) -> contextlib.AbstractContextManager[io.BytesIO]:
            return contextlib.nullcontext(io.BytesIO(each[at]))

        assert layer_stream.likely_root(2, lambda _: None, opened) == root
        assert layer_stream.likely_root(2, indexes.__getitem__, opened) == root


def test_extra_entries_replace_and_add() -> None:
    each = [base()]
    whole = merged(*each)
    extra = [
        (TreeEntry(path=b"etc", kind="directory", mode=0o711, mtime=3), b""),
        (TreeEntry(path=b"etc/app.d", kind="file", mode=0o600, size=3, blake3=blake3(b"own").hexdigest()), b"own"),
        (TreeEntry(path=b"lib", kind="directory", mode=0o755), b""),
        (TreeEntry(path=b"lib/in", kind="symlink", mode=0o777, target=b"../bin"), b""),
        (TreeEntry(path=b"n/e/w", kind="file", mode=0o644, blake3=blake3(b"").hexdigest()), b""),
    ]
    before = list(whole.entries())
    written = list(whole.written(extra=extra))
    assert list(whole.entries()) == before
    assert tree.compare(written, from_tar(emitted(whole, each, extra=extra), whole.root()), exact=True) == ()
    found = {entry.path: entry for entry in written}
    assert found[b"etc"].mode == 0o711
    assert found[b"etc/app.conf"].size == 4
    assert found[b"etc/app.d"].size == 3
    assert b"etc/app.d/one" not in found
    assert found[b"lib/in"].target == b"../bin"
    assert found[b"n/e"].mode == 0o755


def test_times_are_limited_and_held_within_squashfs() -> None:
    layer = CASES["times"].layers()
    whole = merged(*layer)
    limited = {entry.path: entry.mtime for entry in whole.written(mtime_limit=1000)}
    assert max(limited.values()) == 1000
    free = {entry.path: entry.mtime for entry in whole.written()}
    assert (free[b"before-1970"], free[b"in-2038"], free[b"in-2106"]) == (0, 2**31, 2**32 - 1)
    data = emitted(whole, layer, mtime_limit=1000)
    assert {member.mtime for member in tar_stream.Reader([data])} == {0, 1000}


def test_a_stream_that_ends_early_is_noticed() -> None:
    layer = tar(file(b"a", b"x" * 100_000), file(b"b", b"y" * 100_000))
    whole = merged(layer)
    for end in (700, 60_000, 130_000):
        with pytest.raises(ImageMismatch, match="truncated"):
            emitted(whole, [layer[:end]])


def test_a_pipe_that_takes_little_at_a_time_gets_everything() -> None:
    each, reading, writing = [tar(file(b"a", os.urandom(3_000_000)), file(b"b", b"x" * 70_000))], *os.pipe()
    got = []

    def drain() -> None:
        with open(reading, "rb") as stream:
            got.append(stream.read())

    reader = threading.Thread(target=drain)
    reader.start()
    counts: list[int] = []
    with open(writing, "wb", buffering=0) as out:
        layer_stream.emit(
            merged(*each), lambda at: contextlib.nullcontext(io.BytesIO(each[at])), out, on_bytes=counts.append
        )
    reader.join(timeout=30)
    assert got == [emitted(merged(*each), each)]
    assert counts == sorted(counts)
    assert counts[-1] == len(got[0])


def test_a_reader_that_goes_away_is_the_callers_to_explain() -> None:
    each, reading, writing = [tar(file(b"a", bytes(3_000_000)))], *os.pipe()
    os.close(reading)
    with open(writing, "wb", buffering=0) as out, pytest.raises(BrokenPipeError):
        layer_stream.emit(merged(*each), lambda at: contextlib.nullcontext(io.BytesIO(each[at])), out)


@pytest.mark.skipif(shutil.which("mksquashfs") is None, reason="mksquashfs is not installed")
@pytest.mark.parametrize(
    "name", ["names", "hard-links", "xattrs", "owners", "symlink-targets", "sparse-gnu", "devices-and-fifos"]
)
def test_squashfs_tools_read_the_stream_exactly(name: str, made: Callable, tmp_path: Path) -> None:
    """What tar.c of squashfs-tools could misread: long names, odd bytes, binary attributes, large numbers."""
    if os.geteuid() != 0:
        pytest.skip("unpacking devices and owners needs root")
    each, whole = made(name)
    argv = ["mksquashfs", "-", str(tmp_path / "q"), "-tar", "-no-progress", "-quiet", "-comp", "gzip"]
    subprocess.run(argv, input=emitted(whole, each), check=True, capture_output=True, timeout=60)
    argv = ["unsquashfs", "-n", "-q", "-d", str(tmp_path / "root"), str(tmp_path / "q")]
    subprocess.run(argv, check=True, capture_output=True, timeout=60)
    found = from_folder(tmp_path / "root")
    assert [entry for entry in tree.compare(whole.written(), found, exact=True) if entry.path] == []


# -- hostile layers -----------------------------------------------------------------------


def convert(hostile: Hostile, folder: Path, limits: LayerLimits) -> tuple[MergedTree, list[Path]]:
    files, indexes = [], []
    for at, (blob, diff_id) in enumerate(hostile.blobs()):
        files.append(folder / str(at))
        files[-1].write_bytes(blob)
        with layers.open_blob(files[-1]) as stream:
            indexes.append(layers.index_layer(stream, diff_id=diff_id, limits=limits))
    return layers.merge(indexes, limits=limits), files


@pytest.mark.parametrize("name", [name for name, hostile in HOSTILE.items() if hostile.says])
def test_hostile_images_are_refused(name: str, tmp_path: Path) -> None:
    hostile = HOSTILE[name]
    with pytest.raises(ImageMismatch) as refusal:
        convert(hostile, tmp_path, LayerLimits().raised(hostile.limits))
    assert refusal.match(hostile.says)
    assert refusal.value.hint
    assert all(character.isprintable() or character == "\n" for character in str(refusal.value))


@pytest.mark.parametrize("name", [name for name, hostile in HOSTILE.items() if hostile.contained])
def test_images_that_point_outside_stay_inside(name: str, tmp_path: Path) -> None:
    hostile = HOSTILE[name]
    whole, files = convert(hostile, tmp_path, LayerLimits())
    found = {entry.path: entry for entry in whole.entries()}
    for path, content in hostile.contained.items():
        assert found[path].blake3 == blake3(content).hexdigest()
    out = io.BytesIO()
    layer_stream.emit(whole, lambda at: layers.open_blob(files[at]), out)
    assert (
        hostile.contained.items()
        <= {
            member.name: out.getvalue()[member.offset : member.offset + member.stored]
            for member in tar_stream.Reader([out.getvalue()])
        }.items()
    )
    assert not Path("/tmp/hpcenv-escape").exists()


def test_a_bomb_is_refused_early(tmp_path: Path) -> None:
    """Not more comes out of a blob than the limit and the chunks that are under way."""
    (blob, diff_id) = bomb(96 * 1024 * 1024)[0]
    path = tmp_path / "bomb"
    path.write_bytes(blob)
    read: list[int] = []
    limits = LayerLimits(ratio_from=10 * 1024 * 1024, ratio=10)
    with layers.open_blob(path) as stream, pytest.raises(ImageMismatch, match="times as many"):
        layers.index_layer(stream, diff_id=diff_id, limits=limits, on_bytes=read.append)
    assert read[-1] <= limits.ratio_from + 1024 * 1024
    with layers.open_blob(path) as stream, pytest.raises(ImageMismatch, match="`ratio`"):
        layers.index_layer(stream, diff_id=diff_id, limits=LayerLimits(ratio_from=1))


def test_the_hint_for_a_limit_works_the_first_time(tmp_path: Path) -> None:
    """Image trial 2: a limit was raised to the double of what had been seen so far, and refused again."""
    (blob, diff_id) = bomb(96 * 1024 * 1024)[0]
    path = tmp_path / "zeros"
    path.write_bytes(blob)
    limits = LayerLimits(ratio_from=1, ratio=2)
    with layers.open_blob(path) as stream, pytest.raises(ImageMismatch, match="`ratio`") as refusal:
        layers.index_layer(stream, diff_id=diff_id, limits=limits)
    words = [part for part in refusal.value.hint_parts if isinstance(part, Command)]
    assert words == [Command("hpcenv", "image", "build", "--limit", "ratio=none")]
    with layers.open_blob(path) as stream:
        assert layers.index_layer(stream, diff_id=diff_id, limits=limits.raised([words[0][-1]])).unpacked > 96 << 20


def test_holes_of_sparse_files_are_no_data_for_the_ratio() -> None:
    """Image trial 3: a legal sparse file of 6 GiB with 1 KiB of data."""
    size = 64 << 20
    records = [
        (b"GNU.sparse.major", b"1"),
        (b"GNU.sparse.minor", b"0"),
        (b"GNU.sparse.name", b"big"),
        (b"GNU.sparse.realsize", b"%d" % size),
    ]
    stored = padded(b"1\n%d\n%d\n" % (size - 1024, 1024)) + bytes(1024)
    layer = pax(records) + header(b"GNUSparseFile.0/big", b"0", size=len(stored)) + stored + END
    limits = LayerLimits(ratio_from=1 << 20, ratio=10)
    index = layers.index_layer(io.BytesIO(layer), diff_id=digest_of(layer), compressed_size=300, limits=limits)
    assert index.unpacked > size
    with pytest.raises(ImageMismatch, match="`unpacked_bytes`"):  # they are packed as zeros
        layers.index_layer(io.BytesIO(layer), diff_id=digest_of(layer), limits=LayerLimits(unpacked_bytes=size))


@pytest.mark.parametrize("window", [27, 28, 31])
def test_a_zstd_window_that_is_too_large_is_no_damage(window: int, tmp_path: Path) -> None:
    """Image trial 4."""
    layer = tar(file(b"a", b"content"))
    parameters = zstandard.ZstdCompressionParameters(window_log=window, compression_level=1)
    path = tmp_path / "layer"
    engine = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path.write_bytes(engine.compress(layer) + engine.flush())
    with layers.open_blob(path) as stream:
        if window == 27:
            assert stream.read(len(layer)) == layer
            return
        with pytest.raises(ImageMismatch, match="needs too much memory") as refusal:
            stream.read(len(layer))
    assert (refusal.value.why or "").startswith(f"its zstd window has {1 << (window - 20):,} MiB; ")
    assert "--long=27" in (refusal.value.hint or "")


def test_limits_hold_for_all_layers_together() -> None:
    each = [index(tar(*(file(b"%d-%d" % (layer, at)) for at in range(100)))) for layer in range(3)]
    with pytest.raises(ImageMismatch, match="`entries`") as refusal:
        layers.merge(each, limits=LayerLimits(entries=250))
    assert "--limit entries=none" in str(refusal.value.hint)
    assert len(list(layers.merge(each, limits=LayerLimits(entries=300)).entries())) == 301
    with pytest.raises(ImageMismatch, match="`unpacked_bytes`"):
        layers.merge(each, limits=LayerLimits(unpacked_bytes=120_000))


@pytest.mark.parametrize("word", ["entries", "entries=", "entries=-1", "entries=0", "size=3", "ratio=1e9", "entries=٣"])
def test_a_limit_that_is_none(word: str) -> None:
    with pytest.raises(UsageError, match="is not a limit"):
        LayerLimits().raised([word])


def test_a_raised_limit_lets_an_image_through() -> None:
    layer = tar(*(file(b"%d" % at) for at in range(50)))
    with pytest.raises(ImageMismatch):
        index(layer, LayerLimits(entries=49))
    assert len(index(layer, LayerLimits(entries=49).raised(["entries=50"]))) == 50


def test_limits_are_changed_by_words() -> None:
    changed = LayerLimits().raised(["entries=50", "folder_entries=7", "metadata_bytes=none"])
    assert changed == LayerLimits(entries=50, folder_entries=7, metadata_bytes=changed.metadata_bytes)
    assert changed.metadata_bytes == 2**62 - 1


def test_a_folder_counts_as_it_is_in_the_end() -> None:
    """What lower layers had in it and a whiteout hid is not packed; what others add is."""
    many = index(tar(*(file(b"d/%d" % at) for at in range(30))))
    more = index(tar(*(file(b"d/m%d" % at) for at in range(30))))
    tight = LayerLimits(folder_entries=40)
    with pytest.raises(ImageMismatch, match="60 entries.*`folder_entries`"):
        layers.merge([many, more], limits=tight)
    hidden = index(tar(whiteout(b"d")))
    assert len(list(layers.merge([many, hidden, more], limits=tight).entries())) == 32


def test_a_refusal_names_the_layer() -> None:
    first, second = index(base()), index(tar(file(b"bin/tool/x")))
    with pytest.raises(ImageMismatch) as refusal:
        layers.merge([first, second])
    assert second.diff_id in str(refusal.value)
    with pytest.raises(ImageMismatch) as refusal:
        index(tar(file(b"../x")))
    assert digest_of(tar(file(b"../x"))) in str(refusal.value)


def test_a_layer_of_another_diff_id_is_refused_even_if_it_is_a_tar() -> None:
    with pytest.raises(ImageMismatch, match="digest") as refusal:
        layers.index_layer(io.BytesIO(base()), diff_id=digest_of(b"other"))
    assert digest_of(base()) in str(refusal.value)
    # Bytes after the end of the archive belong to the digest, and to nothing else.
    assert index(base() + END) != index(base())


def test_threads_end_with_the_call(tmp_path: Path) -> None:
    before = threading.active_count()
    for name in ("cut-gzip", "checksum-wrong", "name-climbs"):
        with pytest.raises(ImageMismatch):
            convert(HOSTILE[name], tmp_path, LayerLimits())
    layer = tar(file(b"early", b"x"), file(b"late", bytes(20_000_000)))
    whole = merged(layer, tar(whiteout(b"late")))
    emitted(whole, [layer, b""])
    assert threading.active_count() == before


def test_a_blob_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileUnusable, match="cannot be read"), layers.open_blob(tmp_path / "none"):
        pass
    (tmp_path / "e").write_bytes(b"")
    with (
        pytest.raises(ImageMismatch, match="encrypted"),
        layers.open_blob(tmp_path / "e", "application/vnd.oci.image.layer.v1.tar+gzip+encrypted"),
    ):
        pass


# -- kept indexes -------------------------------------------------------------------------


def test_a_damaged_or_foreign_index_is_refused() -> None:
    layer = base()
    good = index(layer)
    kept = good.to_bytes()
    damaged = [b"", b"hello", kept[:-1], kept[: len(kept) // 2], kept + b"x", kept.replace(b"index 2", b"index 9", 1)]
    chance = random.Random(4)
    for _ in range(60):
        at = chance.randrange(len(kept))
        damaged.append(kept[:at] + bytes([kept[at] ^ (1 << chance.randrange(8))]) + kept[at + 1 :])
    for data in damaged:
        with pytest.raises(RecordInvalid) as refusal:
            LayerIndex.from_bytes(data, diff_id=good.diff_id)
        assert "again" in str(refusal.value.hint)
    with pytest.raises(RecordInvalid, match="another layer"):
        LayerIndex.from_bytes(kept, diff_id=digest_of(b"other"))
    with pytest.raises(RecordInvalid, match="limits"):
        LayerIndex.from_bytes(kept, diff_id=good.diff_id, limits=LayerLimits(entries=3))


def test_an_index_with_a_right_checksum_and_wrong_content_is_refused() -> None:
    """Somebody else wrote it into the shared cache: it must not crash anything later."""

    def forged(change: Callable[[LayerIndex], None]) -> bytes:
        made = index(CASES["devices-and-fifos"].layers()[0])
        change(made)
        return made.to_bytes()

    def path(new: bytes) -> Callable[[LayerIndex], None]:
        return lambda made: setattr(made, "paths", made.paths.replace(b"elsewhere", new))

    changes: list[Callable[[LayerIndex], None]] = [
        path(b"../climbs"),
        path(b"/absolute"),
        path(b"a//b"),
        path(b"a/./b"),
        path(b"two\0paths"),
        lambda made: setattr(made, "kinds", b"x" + made.kinds[1:]),
        lambda made: setattr(made, "kinds", made.kinds[:-1]),
        lambda made: made.modes.__setitem__(0, 0o17777),
        lambda made: made.devices.clear(),
        lambda made: made.devices.__setitem__(2, (-1, 2**40)),
        lambda made: made.devices.__setitem__(999, (1, 2)),
        lambda made: made.sparse.__setitem__(0, ((0, 1),)),
        lambda made: made.uids.append(1),
        lambda made: setattr(made, "unpacked", "many"),
        lambda made: setattr(made, "blake3", b""),
    ]
    wanted = index(CASES["devices-and-fifos"].layers()[0]).diff_id
    assert LayerIndex.from_bytes(forged(lambda _: None), diff_id=wanted)
    for change in changes:
        with pytest.raises(RecordInvalid):
            LayerIndex.from_bytes(forged(change), diff_id=wanted)


def test_a_forged_index_that_squeezes_a_bomb() -> None:
    import zlib

    good = index(base())
    packed = b"%d\n" % 10**12 + zlib.compress(bytes(10_000_000))
    head = good.to_bytes().split(b"\n", 1)[0] + b"\n"
    with pytest.raises(RecordInvalid, match="claims to have"):
        LayerIndex.from_bytes(head + hashlib.sha256(packed).hexdigest().encode() + b"\n" + packed, diff_id=good.diff_id)
