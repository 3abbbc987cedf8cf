"""The tar reader against archives of real tools and the standard library; the writer against both."""

from __future__ import annotations

import io
import os
import random
import subprocess
import tarfile
from pathlib import Path

import pytest
from layer_cases import CASES, END, TIME, header, pax, record, tar

from hpcenv.errors import ImageMismatch
from hpcenv.image.content import tar_stream
from hpcenv.image.content.tar_stream import Bounds, Member, Reader
from hpcenv.image.content.tree import TreeEntry


def chunked(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def members(data: bytes, size: int = 65_536) -> list[tuple[Member, bytes]]:
    """All members with the content a program would read."""
    reader, found = Reader(chunked(data, size)), []
    for member in reader:
        pieces = reader.stored()
        if member.sparse is not None:
            pieces = tar_stream.expand(pieces, member.size, member.sparse)
        found.append((member, b"".join(pieces)))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files for real tars: long and odd names, links, a hole, every permission bit."""
    top = tmp_path_factory.mktemp("real")
    deep = top / ("d" * 90) / ("e" * 90)
    deep.mkdir(parents=True)
    (deep / "file").write_bytes(b"deep" * 1000)
    os.link(deep / "file", top / "linked")
    os.symlink("x" * 150, top / "long-link")
    (top / os.fsdecode(b"caf\xe9\n")).write_bytes(b"1")
    (top / "strict").write_bytes(b"")
    os.chmod(top / "strict", 0o4711)
    os.mkfifo(top / "pipe")
    for path in [*top.rglob("*"), top]:
        os.utime(path, (TIME, TIME), follow_symlinks=False)
    return top


@pytest.mark.parametrize(
    "words",
    [
        ["--format=gnu"],
        ["--format=pax"],
        ["--format=posix", "--pax-option=globexthdr.name=g,globexthdr.comment=x,comment=all"],
    ],
)
def test_real_tars_are_read_as_the_standard_library_reads_them(words: list[str], folder: Path) -> None:
    argv = ["tar", *words, "-C", str(folder), "-c", "."]
    data = subprocess.run(argv, capture_output=True, check=True, timeout=30).stdout
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8", errors="surrogateescape") as archive:
        expected = [
            (
                os.fsencode(info.name), info.mode, info.uid, info.gid, int(info.mtime), os.fsencode(info.linkname),
                archive.extractfile(info).read() if info.isreg() else b"",
            )
            for info in archive
        ]  # fmt: skip
    found = [
        (member.name.rstrip(b"/") or b".", member.mode, member.uid, member.gid, member.mtime, member.target, content)
        for member, content in members(data)
    ]
    assert found == expected


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_standard_librarys_forms(form: int) -> None:
    info = tarfile.TarInfo("n" * 60 + "/" + "m" * 80)
    info.size, info.mtime, info.mode, info.uid, info.gid = 5, TIME, 0o640, 1000, 2_000_000
    data = tar((info, b"hello"), form=form)
    [(member, content)] = members(data)
    assert (member.name, content) == (os.fsencode(info.name), b"hello")
    assert (member.mode, member.uid, member.gid, member.mtime) == (0o640, 1000, 2_000_000, TIME)


@pytest.mark.parametrize("size", [1, 7, 511, 512, 513, 4096])
@pytest.mark.parametrize("name", ["pax-records", "sparse-gnu", "sparse-pax-1.0", "headers-of-every-form"])
def test_chunks_of_any_size_give_the_same_members(name: str, size: int) -> None:
    data = CASES[name].layers()[0]
    data = data[:40_000] if name.startswith("sparse") and size < 512 else data
    try:
        expected = members(data)
    except ImageMismatch as error:
        with pytest.raises(ImageMismatch) as again:
            members(data, size)
        assert str(again.value) == str(error)
        return
    assert members(data, size) == expected


@pytest.mark.parametrize("name", ["sparse-gnu", "sparse-pax-0.0", "sparse-pax-0.1", "sparse-pax-1.0"])
def test_sparse_files_of_a_real_tar_are_expanded(name: str) -> None:
    found = {member.name: (member, content) for member, content in members(CASES[name].layers()[0])}
    member, content = found[b"./many"]
    assert member.size == len(content) == 4_194_304
    assert member.stored < 500_000
    assert len(member.sparse or ()) >= 64
    for at in range(0, 4_194_304, 65_536):
        assert content[at : at + 128] == b"%08d" % at * 16
        assert not content[at + 4096 : at + 65_536].strip(b"\0")
    assert found[b"./hole"][1] == bytes(300_000)
    assert found[b"./middle"][1].rstrip(b"\0") == bytes(131_072) + b"%08d" % 131_072 * 16


def test_members_that_are_not_read_are_skipped() -> None:
    data = tar(*((_info(b"%d" % at, 10_000), bytes([at]) * 10_000) for at in range(10)))
    reader = Reader(chunked(data, 3000))
    names = []
    for at, member in enumerate(reader):
        names.append(member.name)
        if at % 2:
            assert bytes(next(reader.stored()))[:1] == bytes([at])
    assert names == [b"%d" % at for at in range(10)]
    assert reader.offset == len(data)


def _info(name: bytes, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(os.fsdecode(name))
    info.size = size
    return info


def test_an_archive_may_end_in_the_padding_of_its_last_member() -> None:
    """Image trial 8: Go's archive/tar, umoci and apptainer build accept it."""
    data = tar((_info(b"a", 3), b"aaa"), (_info(b"b", 700), b"b" * 700))
    end = 512 + 512 + 512 + 700
    for length in (end, end + 1, end + 323, end + 324):
        assert [member.name for member in Reader(chunked(data[:length], 100))] == [b"a", b"b"]
    for length in (end - 1, end - 700, 512 + 2):
        with pytest.raises(ImageMismatch, match="truncated"):
            list(Reader(chunked(data[:length], 100)))


def test_go_to_finds_data_again() -> None:
    data = tar(*((_info(b"%d" % at, at * 700), bytes([at]) * at * 700) for at in range(10)))
    places = [(member.offset, member.stored) for member in Reader([data])]
    reader = Reader(chunked(data, 1000))
    for at in (2, 3, 7):
        reader.go_to(*places[at])
        assert b"".join(reader.stored()) == bytes([at]) * at * 700
    with pytest.raises(ImageMismatch, match="not where they were"):
        reader.go_to(*places[1])
    with pytest.raises(ImageMismatch, match="truncated"):
        reader.go_to(len(data) + 5, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (b"0000017\0", 15),
        (b"     17\0", 15),
        (b"17 \0\0\0\0\0", 15),
        (b"\0\0\0\0\0\0\0\0", 0),
        (b"00000017", 15),
        (b"17\0junk\0", 15),
        (b"\x80\0\0\0\0\0\0\x0f", 15),
        (b"\x80\0\0\0\xff\xff\xff\xff", 2**32 - 1),
    ],
)
def test_numbers_in_headers(field: bytes, value: int) -> None:
    [(member, _)] = members(header(b"a", b"0", magic=b"ustar  \0", uid=field) + END)
    assert member.uid == value


@pytest.mark.parametrize(
    "field", [b"18\0\0\0\0\0\0", b"0x11\0\0\0\0", b"1_0\0\0\0\0\0", b"+7\0\0\0\0\0\0", b"\xff" * 8, b"1 7\0\0\0\0\0"]
)
def test_numbers_that_are_none(field: bytes) -> None:
    with pytest.raises(ImageMismatch, match="octal|negative"):
        members(header(b"a", b"0", magic=b"ustar  \0", uid=field) + END)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (b"0", 0),
        (b"1700000000.999999999", 1_700_000_000),
        (b"-1", -1),
        (b"-1.0", -1),
        (b"-1.5", -2),
        (b"-0.000000001", -1),
        (b"5.", 5),
    ],
)
def test_times_are_rounded_down(text: bytes, seconds: int) -> None:
    [(member, _)] = members(pax([(b"mtime", text)]) + header(b"a", b"0") + END)
    assert member.mtime == seconds


def test_base_256_times_may_be_negative() -> None:
    [(member, _)] = members(header(b"a", b"0", magic=b"ustar  \0", mtime=b"\xff" * 11 + b"\xfe") + END)
    assert member.mtime == -2


def test_pax_headers_override_in_order_and_globals_last_longest() -> None:
    data = (
        pax([(b"mtime", b"7"), (b"uid", b"9")], b"g")
        + pax([(b"uid", b"1"), (b"uid", b"2")])
        + header(b"a", b"0")
        + header(b"b", b"0")
        + pax([(b"uid", b"")])
        + header(b"c", b"0", uid=b"0000003\0")
        + END
    )
    assert [(member.name, member.uid, member.mtime) for member, _ in members(data)] == [
        (b"a", 2, 7),
        (b"b", 9, 7),
        (b"c", 3, 7),
    ]


def test_xattrs_are_sorted_and_empty_values_take_back() -> None:
    data = pax([(b"SCHILY.xattr.user.b", b"\0=\n"), (b"SCHILY.xattr.user.a", b"1"), (b"SCHILY.xattr.user.c", b"")])
    [(member, _)] = members(data + header(b"a", b"0") + END)
    assert member.xattrs == ((b"user.a", b"1"), (b"user.b", b"\0=\n"))


def test_other_kinds_carry_no_data_whatever_their_size_says() -> None:
    data = header(b"d", b"5", size=5000) + header(b"l", b"2", size=99, link=b"d") + header(b"f", b"0") + END
    assert [(member.name, member.size) for member, _ in members(data)] == [(b"d", 0), (b"l", 0), (b"f", 0)]


def test_an_old_checksum_of_signed_bytes_is_accepted() -> None:
    block = header(b"caf\xe9", b"0")
    bare = block[:148] + b" " * 8 + block[156:]
    signed = sum(byte - 256 if byte > 127 else byte for byte in bare)
    [(member, _)] = members(block[:148] + b"%06o\0 " % signed + block[156:] + END)
    assert member.name == b"caf\xe9"


def test_every_flipped_bit_of_a_header_is_noticed() -> None:
    block = header(b"name", b"0")
    for at in {*range(512)} - {155}:  # what follows the NUL of the checksum means nothing
        broken = bytearray(block)
        broken[at] ^= 1
        with pytest.raises(ImageMismatch):
            members(bytes(broken) + END)


def test_bounds_hold() -> None:
    long = pax([(b"path", b"p" * 300)]) + header(b"a", b"0") + END
    assert next(iter(Reader([long]))).name == b"p" * 300
    with pytest.raises(ImageMismatch, match="300 bytes"):
        next(iter(Reader([long], Bounds(path_bytes=299))))
    with pytest.raises(ImageMismatch, match="extension headers"):
        next(iter(Reader([long], Bounds(header_bytes=300))))
    with pytest.raises(ImageMismatch, match="extended attribute"):
        next(iter(Reader([pax([(b"SCHILY.xattr.user.a", b"x" * 11)]) + header(b"a", b"0")], Bounds(xattr_bytes=10))))


@pytest.mark.parametrize(
    "bad", [b"path=x\n", b"0 a=b\n", b"2 a=b\n", b" 6 a=b\n", b"6 a=b ", b"5 =b\n", b"4 a\n", b"\n"]
)
def test_records_that_are_none(bad: bytes) -> None:
    """One without a length, behind a good one, was once taken for the good one for ever."""
    data = record(b"comment", b"good") + bad
    with pytest.raises(ImageMismatch, match="wrong length"):
        members(header(b"pax", b"x", size=len(data)) + data.ljust(512, b"\0") + header(b"a", b"0") + END)


def test_many_small_extension_headers_count_together() -> None:
    data = pax([(b"comment", b"x" * 60_000)]) * 20 + header(b"a", b"0") + END
    with pytest.raises(ImageMismatch, match="extension headers"):
        members(data)


# -- writing ------------------------------------------------------------------------------

_ODD = [b"a", b"n" * 100, b"n" * 101, b"d/" * 120 + b"e", b"\xff\n", b"-x", b" ", "é".encode() * 80]


def entries() -> list[TreeEntry]:
    made = [TreeEntry(path=path, kind="file", mode=0o644, size=0, mtime=TIME) for path in _ODD]
    made += [TreeEntry(path=b"l%d" % at, kind="symlink", mode=0o777, target=target) for at, target in enumerate(_ODD)]
    made += [
        TreeEntry(path=b"dir", kind="directory", mode=0o7777, uid=2**32 - 2, gid=2_097_152, mtime=2**32 - 1),
        TreeEntry(path=b"c", kind="character-device", mode=0o600, device=(0x1FF, 0x3FFFF)),
        TreeEntry(path=b"b", kind="block-device", mode=0o600, device=(8, 1)),
        TreeEntry(path=b"p", kind="fifo", mode=0),
        TreeEntry(
            path=b"x",
            kind="file",
            mode=0o755,
            xattrs=((b"security.capability", bytes(range(256))), (b"user.x", b"=\n")),
        ),
    ]
    return made


def test_what_is_written_is_read_again() -> None:
    data = b"".join(map(tar_stream.encode, entries())) + tar_stream.END
    for entry, (member, _) in zip(entries(), members(data), strict=True):
        assert member.name == entry.path
        assert (member.kind, member.mode, member.uid, member.gid, member.mtime) == (
            entry.kind, entry.mode, entry.uid, entry.gid, entry.mtime,
        )  # fmt: skip
        assert (member.target, member.device, member.xattrs) == (entry.target, entry.device, entry.xattrs)


def test_the_standard_library_reads_what_is_written() -> None:
    data = b"".join(map(tar_stream.encode, entries())) + tar_stream.END
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8", errors="surrogateescape") as archive:
        infos = archive.getmembers()
    for entry, info in zip(entries(), infos, strict=True):
        assert os.fsencode(info.name) == entry.path
        assert (info.mode, info.uid, info.gid, info.mtime) == (entry.mode, entry.uid, entry.gid, entry.mtime)
        assert os.fsencode(info.linkname) == entry.target


def test_gnu_tar_unpacks_what_is_written(tmp_path: Path) -> None:
    content = os.urandom(70_000)
    first = TreeEntry(path=b"f/" + b"n" * 120, kind="file", mode=0o640, size=len(content), mtime=TIME)
    again = TreeEntry(path=b"g" * 130, kind="file", mode=0o640, mtime=TIME)
    data = tar_stream.encode(TreeEntry(path=b"f", kind="directory", mode=0o755))
    data += tar_stream.encode(first) + content + bytes(tar_stream.padding(len(content)))
    data += tar_stream.encode(again, link=first.path) + tar_stream.END
    subprocess.run(["tar", "-x", "-C", str(tmp_path)], input=data, check=True, timeout=30)
    one, two = tmp_path / "f" / ("n" * 120), tmp_path / ("g" * 130)
    assert one.read_bytes() == content
    assert one.samefile(two)
    assert (one.stat().st_mode & 0o7777, one.stat().st_mtime) == (0o640, TIME)


def test_sizes_of_many_gigabytes() -> None:
    entry = TreeEntry(path=b"big", kind="file", mode=0o644, size=2**40)
    member = Reader([tar_stream.encode(entry)]).next_member()
    assert member is not None
    assert member.size == 2**40


@pytest.mark.parametrize("length", [1, 3, 4, 5, 85, 93, 94, 95, 986, 987, 988, 9985, 9986])
def test_records_count_their_own_length(length: int) -> None:
    value = b"v" * length
    entry = TreeEntry(path=b"a", kind="file", mode=0, xattrs=((b"user.a", value),))
    data = tar_stream.encode(entry)
    assert record(b"SCHILY.xattr.user.a", value) in data
    [(member, _)] = members(data + END)
    assert member.xattrs == ((b"user.a", value),)


def test_random_archives_come_through() -> None:
    chance = random.Random(7)
    for _ in range(60):
        made = []
        for at in range(chance.randint(0, 8)):
            path = b"%d" % at + bytes(chance.choices(range(1, 256), k=chance.randint(0, 200)))
            content = chance.randbytes(chance.choice([0, 1, 511, 512, 513, 3000]))
            entry = TreeEntry(
                path=path, kind="file", mode=chance.randrange(0o10000), uid=chance.randrange(2**32),
                gid=chance.randrange(2**32), mtime=chance.randrange(2**32), size=len(content),
            )  # fmt: skip
            made.append((entry, content))
        data = b"".join(tar_stream.encode(e) + c + bytes(tar_stream.padding(len(c))) for e, c in made) + tar_stream.END
        found = members(data, chance.choice([100, 512, 5000]))
        assert [(m.name, m.mode, m.uid, m.gid, m.mtime, c) for m, c in found] == [
            (e.path, e.mode, e.uid, e.gid, e.mtime, c) for e, c in made
        ]
