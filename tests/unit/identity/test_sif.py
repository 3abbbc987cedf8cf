"""sif: what is read from whole files, and what is refused in hostile ones."""

import hashlib
import json
import os
import struct
from pathlib import Path

import pytest

from hpcenv.errors import EnvironmentUnreadable, FileUnusable, ImageMismatch, UsageError
from hpcenv.identity import sif

HEADER = struct.Struct("<32s10s3s3s16s8q")
DESCRIPTOR = struct.Struct("<iBIIIqqqqqqq128s384s")
TABLE = 4096
FIRST = 32176
DEFAULT = 48


def squashfs(payload=b"files", *, magic=b"hsqs", used=None, version=(4, 0)):
    body = struct.pack("<4sIIIIHHHHHHQQ", magic, 7, 1700000000, 131072, 2, 6, 17, 0, 1, *version, 0, 0)
    body = body.ljust(96, b"\0") + payload
    return body[:40] + struct.pack("<Q", len(body) if used is None else used) + body[48:]


def write_sif(
    path,
    objects=None,
    *,
    magic=b"SIF_MAGIC\0",
    version=b"01\0",
    total=DEFAULT,
    table=TABLE,
    table_size=None,
    identity=b"\x07" * 16,
    now=1795166127,
    cut=None,
):
    """Write a SIF of (kind, name, bytes, extra) objects, byte by byte as Apptainer does."""
    if objects is None:
        meta = json.dumps({"data": {"attributes": {"labels": {"a": "b"}}}}).encode()
        objects = [
            (0x4001, "", b"bootstrap: docker\n", b""),
            (0x4006, "inspect-metadata.json", meta, b""),
            (0x4004, "", squashfs(), struct.pack("<ii3s", 1, 2, b"02\0")),
        ]
    data, rows = b"", b""
    for number, (kind, name, body, extra) in enumerate(objects, 1):
        rows += DESCRIPTOR.pack(
            kind, 1, number, 0xF0000001, 0, FIRST + len(data), len(body), len(body), now, now, 0, 0,
            name.encode(), extra,
        )  # fmt: skip
        data += body
    size = DEFAULT * DESCRIPTOR.size if table_size is None else table_size
    head = HEADER.pack(
        b"#!/usr/bin/env run-singularity\n", magic, version, b"02\0", identity, now, now,
        DEFAULT - len(objects), total, table, size, FIRST, len(data),
    )  # fmt: skip
    whole = head.ljust(TABLE, b"\0") + rows
    whole = whole.ljust(FIRST, b"\0") + data
    path.write_bytes(whole[:cut])
    return path


@pytest.fixture
def image(tmp_path):
    return write_sif(tmp_path / "a.sif")


def test_header_and_objects_are_read(image):
    header = sif.read_header(image)
    assert (header.architecture, header.created, header.signed) == ("amd64", 1795166127, False)
    assert header.uuid == "07070707-0707-0707-0707-070707070707"
    assert [entry.kind for entry in header.objects] == ["definition-file", "json", "partition"]
    assert header.runs.partition == sif.Partition(filesystem="squashfs", role="primary-system", architecture="amd64")
    assert sif.read_object(image, header.objects[0]) == b"bootstrap: docker\n"
    assert sif.labels(image) == {"a": "b"}


def test_superblock_facts(image):
    block = sif.superblock(image)
    assert (block.inodes, block.compression, block.block_size) == (7, "zstd", 131072)
    assert block.bytes_used == sif.read_header(image).runs.size


def test_digests_are_of_partition_and_file(image):
    seen = []
    assert sif.partition_sha256(image) == hashlib.sha256(squashfs()).hexdigest()
    assert sif.file_sha256(image, seen.append) == hashlib.sha256(image.read_bytes()).hexdigest()
    assert sum(seen) == image.stat().st_size


def test_an_open_descriptor_is_read_without_moving_it(image):
    fd = os.open(image, os.O_RDONLY)
    try:
        os.lseek(fd, 5, os.SEEK_SET)
        assert sif.file_sha256(fd) == sif.file_sha256(image)
        assert sif.labels(fd) == {"a": "b"}
        assert os.lseek(fd, 0, os.SEEK_CUR) == 5
    finally:
        os.close(fd)


def test_normalise_makes_files_with_the_same_objects_equal(tmp_path):
    one = write_sif(tmp_path / "one.sif", identity=b"1" * 16, now=1)
    two = write_sif(tmp_path / "two.sif", identity=b"2" * 16, now=2**40)
    before = sif.partition_sha256(one)
    for path in (one, two):
        sif.normalise(path)
    assert one.read_bytes() == two.read_bytes()
    assert sif.partition_sha256(one) == before
    header = sif.read_header(one)
    assert header.uuid == "00000000-0000-0000-0000-000000000000"
    assert {header.created, header.modified, *(o.created for o in header.objects)} == {0}


def test_normalise_refuses_a_signed_file(tmp_path):
    partition = (0x4004, "", squashfs(), struct.pack("<ii3s", 1, 2, b"02\0"))
    image = write_sif(tmp_path / "a.sif", [partition, (0x4005, "", b"signature", b"")])
    before = image.read_bytes()
    with pytest.raises(ImageMismatch, match="not a SIF that can be used") as error:
        sif.normalise(image)
    assert "signature covers" in error.value.why
    assert image.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"magic": b"NOT_MAGIC\0"}, "magic number"),
        ({"version": b"02\0"}, "format version"),
        ({"total": 0}, "counts 0 object"),
        ({"total": -1}, "counts -1 object"),
        ({"total": 2**62}, "object descriptors"),
        ({"total": 4096}, "does not fit"),
        ({"table": 0}, "does not fit"),
        ({"table": -4096}, "does not fit"),
        ({"table": 2**62}, "does not fit"),
        ({"table_size": 2**62}, "does not fit"),
        ({"table_size": 1}, "does not fit"),
        ({"objects": []}, "0 primary system partitions"),
        ({"objects": [(0x4004, "", b"x", struct.pack("<ii3s", 1, 2, b"02\0"))] * 2}, "2 primary"),
        ({"cut": 0}, "128 bytes are missing"),
        ({"cut": 127}, "1 bytes are missing"),
        ({"cut": 5000}, "does not fit"),
        ({"cut": -1}, "ends at"),
    ],
)
def test_damaged_files_are_refused_with_a_reason(tmp_path, change, why):
    image = write_sif(tmp_path / "bad.sif", **change)
    with pytest.raises(ImageMismatch) as error:
        sif.read_header(image)
    assert why in error.value.why
    assert str(image) in error.value.what


@pytest.mark.parametrize("text", [b"hello\n", b"x" * 40, b"x" * 10_000, b"#!/bin/sh\n"])
def test_another_file_is_not_called_a_truncated_sif(tmp_path, text):
    other = tmp_path / "text.sif"
    other.write_bytes(text)
    with pytest.raises(ImageMismatch, match="it is no SIF file"):
        sif.read_header(other)


@pytest.mark.parametrize(("offset", "size"), [(-1, 10), (0, 10), (FIRST, -5), (2**62, 2**62), (FIRST, 2**62)])
def test_an_object_outside_the_file_is_refused(image, offset, size):
    with image.open("r+b") as file:
        file.seek(TABLE + 17)
        file.write(struct.pack("<qq", offset, size))
    with pytest.raises(ImageMismatch):
        sif.read_header(image)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (squashfs(magic=b"hsqt"), "superblock"),
        (squashfs(version=(5, 0)), "superblock"),
        (squashfs(used=2**60), "needs"),
        (b"hsqs", "too few"),
    ],
)
def test_a_partition_that_is_no_squashfs_is_refused(tmp_path, body, why):
    extra = struct.pack("<ii3s", 1, 2, b"02\0")
    image = write_sif(tmp_path / "a.sif", [(0x4004, "", body, extra)])
    with pytest.raises(ImageMismatch) as error:
        sif.superblock(image)
    assert why in error.value.why


@pytest.mark.parametrize("meta", [b"", b"[]", b"{", b'{"data":1}', b"\xff", b"[" * 100000])
def test_damaged_labels_are_refused(tmp_path, meta):
    partition = (0x4004, "", squashfs(), struct.pack("<ii3s", 1, 2, b"02\0"))
    image = write_sif(tmp_path / "a.sif", [partition, (0x4006, "inspect-metadata.json", meta, b"")])
    with pytest.raises(ImageMismatch, match="not a SIF"):
        sif.labels(image)


def test_no_labels_object_is_no_labels(tmp_path):
    partition = (0x4004, "", squashfs(), struct.pack("<ii3s", 1, 2, b"02\0"))
    assert sif.labels(write_sif(tmp_path / "a.sif", [partition])) == {}


def test_a_large_object_is_not_read_into_memory(image):
    header = sif.read_header(image)
    with pytest.raises(ImageMismatch):
        sif.read_object(image, header.runs, limit=10)


def test_what_cannot_be_opened_is_unreadable_not_wrong(tmp_path):
    with pytest.raises(EnvironmentUnreadable, match="cannot be read"):
        sif.read_header(tmp_path / "none.sif")
    with pytest.raises(EnvironmentUnreadable):
        sif.file_sha256(987654)


def test_a_folder_or_fifo_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(ImageMismatch) as error:
            sif.read_header(path)
        assert error.value.why == "it is not a regular file"


def test_unknown_numbers_get_a_name(tmp_path):
    partition = (0x4004, "", squashfs(), struct.pack("<ii3s", 99, 2, b"77\0"))
    image = write_sif(tmp_path / "a.sif", [partition, (0x4999, "x", b"", b"")])
    header = sif.read_header(image)
    assert header.runs.partition.filesystem == "unknown-99"
    assert header.runs.partition.architecture == "unknown-77"
    assert header.objects[1].kind == "unknown-0x4999"


def test_any_single_changed_byte_of_the_table_is_survived(tmp_path):
    whole = write_sif(tmp_path / "a.sif").read_bytes()
    target = tmp_path / "b.sif"
    for position in [*range(128), *range(TABLE, TABLE + 3 * 585, 3)]:
        changed = bytearray(whole)
        changed[position] ^= 0xFF
        target.write_bytes(changed)
        try:
            sif.labels(target)
            sif.superblock(target)
        except (ImageMismatch, EnvironmentUnreadable):
            pass


def test_paths_may_be_text_or_path(image):
    assert sif.read_header(str(image)) == sif.read_header(Path(image))


# --- writing -----------------------------------------------------------------------------

OBJECTS = [
    ("definition-file", "", b"bootstrap: docker\n"),
    ("json", "inspect-metadata.json", json.dumps({"data": {"attributes": {"labels": {"a": "b"}}}}).encode()),
    ("json", "oci-config.json", b"{}"),
    ("generic", sif.EMBEDDED_LOCK, b"schema = 1\n"),
]


def packed(path, offset):
    path.write_bytes(bytes(offset) + squashfs(b"f" * 4000))
    return path


def write(path, objects=OBJECTS, **changes):
    offset = sif.squashfs_offset_for(objects)
    sif.write(
        packed(path, offset), **{"architecture": "amd64", "squashfs_offset": offset, "objects": objects, **changes}
    )
    return path


def test_what_is_written_is_read_again(tmp_path):
    image = write(tmp_path / "a.sif")
    header = sif.read_header(image)
    assert [(entry.kind, entry.name) for entry in header.objects] == [
        *((kind, name) for kind, name, _data in OBJECTS),
        ("partition", ""),
    ]
    assert [sif.read_object(image, entry) for entry in header.objects[:-1]] == [data for _kind, _name, data in OBJECTS]
    assert [entry.id for entry in header.objects] == [1, 2, 3, 4, 5]
    assert header.runs.partition == sif.Partition(filesystem="squashfs", role="primary-system", architecture="amd64")
    assert (header.runs.offset, header.runs.offset + header.runs.size) == (40960, image.stat().st_size)
    assert (header.launch, header.architecture) == ("#!/usr/bin/env run-singularity\n", "amd64")
    assert sif.superblock(image).compression == "zstd"
    assert sif.labels(image) == {"a": "b"}
    assert sif.embedded_lock(image) == b"schema = 1\n"
    assert sif.embedded_lock(write(tmp_path / "b.sif", OBJECTS[:2])) is None


def test_what_is_written_is_normal_already(tmp_path):
    image = write(tmp_path / "a.sif")
    before = image.read_bytes()
    sif.normalise(image)
    assert image.read_bytes() == before
    assert write(tmp_path / "b.sif").read_bytes() == before


def test_the_table_is_as_apptainer_makes_it(image, tmp_path):
    """Field by field against a file laid out as Apptainer 1.4.5 does it, but for times and UUID."""
    objects = [(o.kind, o.name, sif.read_object(image, o)) for o in sif.read_header(image).objects[:-1]]
    sif.normalise(image)
    mine = write(tmp_path / "mine.sif", objects).read_bytes()
    theirs = image.read_bytes()
    assert HEADER.unpack_from(mine)[:-2] == HEADER.unpack_from(theirs)[:-2]
    for number in range(2):
        at = TABLE + number * DESCRIPTOR.size
        assert DESCRIPTOR.unpack_from(mine, at) == DESCRIPTOR.unpack_from(theirs, at)
    *_begin, offset, size, padded = DESCRIPTOR.unpack_from(mine, TABLE + 2 * DESCRIPTOR.size)[:8]
    assert (offset, offset + size) == (40960, len(mine))
    end_of_objects = FIRST + sum(len(data) for _kind, _name, data in objects)
    assert padded == size + offset - end_of_objects


@pytest.mark.parametrize("size", [0, 8783, 8784, 8785, 100_000])
def test_the_squashfs_begins_at_a_page_behind_the_objects(tmp_path, size):
    objects = [("generic", "x", b"x" * size)] if size else []
    offset = sif.squashfs_offset_for(objects)
    assert offset % 4096 == 0
    assert max(40960, FIRST + size) <= offset < max(40960, FIRST + size) + 4096
    image = write(tmp_path / "a.sif", objects)
    assert sif.read_header(image).runs.offset == offset
    assert image.read_bytes()[offset:] == squashfs(b"f" * 4000)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architecture": "z80"}, "z80"),
        ({"architecture": ""}, "architecture"),
        ({"squashfs_offset": 36864}, "40960"),
        ({"squashfs_offset": 40961}, "40960"),
        ({"objects": [("partition", "x", b"x")]}, "`x`"),
        ({"objects": [("signature", "x", b"x")]}, "`x`"),
        ({"objects": [("json", "n" * 128, b"x")]}, "nnn"),
        ({"objects": [("json", "x", b"")]}, "0 bytes"),
        ({"objects": [("json", "x", b"x")] * 17}, "too many"),
    ],
)
def test_what_a_sif_cannot_hold_is_refused_before_anything_is_written(tmp_path, changes, says):
    image = packed(tmp_path / "a.sif", 40960)
    before = image.read_bytes()
    with pytest.raises(UsageError) as error:
        sif.write(image, **{"architecture": "amd64", "squashfs_offset": 40960, "objects": OBJECTS, **changes})
    assert says in str(error.value)
    assert image.read_bytes() == before


def test_nothing_is_written_in_front_of_no_squashfs(tmp_path):
    image = tmp_path / "a.sif"
    image.write_bytes(bytes(50_000))
    with pytest.raises(ImageMismatch, match="not a SIF") as error:
        sif.write(image, architecture="amd64", squashfs_offset=40960, objects=[])
    assert "no squashfs at byte 40960" in error.value.why
    assert image.read_bytes() == bytes(50_000)
    (tmp_path / "link").symlink_to(image)
    for path in (tmp_path / "none", tmp_path / "link", tmp_path):
        with pytest.raises(FileUnusable, match="cannot be written"):
            sif.write(path, architecture="amd64", squashfs_offset=40960, objects=[])
