"""Read a SIF file's header, objects and digests, and write them, without Apptainer.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

A SIF has a 128-byte header, a table of descriptors, and the objects that the descriptors point to. The object that runs
is the primary system partition, a squashfs. The layout is taken from sylabs/sif and apptainer/sif v2 (`pkg/sif/sif.go`,
`descriptor.go`; format version "01", unchanged since 2018), and was checked on files of Apptainer 1.4.5. Everything is
little endian and packed.

The file is untrusted input: every count, offset and size is checked against the file's
real size before it is used. There are two kinds of error: `ImageMismatch` means that the bytes are not a complete SIF,
and `EnvironmentUnreadable` means that the operating system does not let us read them.

Functions take a path or an open file descriptor. With a descriptor, exactly the checked file can be run through
`/proc/self/fd/N`. The position of a descriptor does not change.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hpcenv.errors import EnvironmentUnreadable, FileUnusable, ImageMismatch, UsageError

__all__ = [
    "EMBEDDED_LOCK",
    "Header",
    "Object",
    "Partition",
    "Superblock",
    "embedded_lock",
    "file_sha256",
    "labels",
    "normalise",
    "partition_sha256",
    "read_header",
    "read_object",
    "squashfs_offset_for",
    "superblock",
    "write",
]

SifSource = str | os.PathLike[str] | int

_HEADER = struct.Struct("<32s10s3s3s16sqqqqqqqq")
_DESCRIPTOR = struct.Struct("<iBIIIqqqqqqq128s384s")
_PARTITION = struct.Struct("<ii3s")
_SUPERBLOCK = struct.Struct("<4sIIIIHHHHHHQQ")
# The places where `normalise` writes zeros: the UUID and the two times of the header, and the two times of a
# descriptor.
_HEADER_VOLATILE = (48, 32)
_DESCRIPTOR_VOLATILE = (41, 16)

_MAGIC = b"SIF_MAGIC\0"
_MAGIC_AT = 32
_VERSION = b"01\0"
# Apptainer writes a table of 48 descriptors; a signed image with many objects has far fewer descriptors than this
# limit.
_MOST_DESCRIPTORS = 4096
_OBJECT_LIMIT = 16 * 1024 * 1024
# The layout that Apptainer 1.4.5 writes. The table, with space for 48 objects, is after the first page. Then follow the
# objects, and then the squashfs, which begins at a page boundary.
_LAUNCH = b"#!/usr/bin/env run-singularity\n"
_TABLE_AT = 4096
_TABLE_ROWS = 48
_PAGE = 4096
_FIRST_SQUASHFS = 40960
# hpcenv writes at most this many objects, so `apptainer sif add` can add signatures and other objects later.
_MOST_WRITTEN = 16
_IN_DEFAULT_GROUP = 0xF0000001
# The name of the object that contains the lockfile of a SIF.
EMBEDDED_LOCK = "hpcenv.lock.toml"
_CHUNK = 1024 * 1024

_KINDS = {
    0x4001: "definition-file",
    0x4002: "environment",
    0x4003: "labels",
    0x4004: "partition",
    0x4005: "signature",
    0x4006: "json",
    0x4007: "generic",
    0x4008: "encrypted-message",
    0x4009: "sbom",
    0x400A: "oci-root-index",
    0x400B: "oci-blob",
}
_FILESYSTEMS = {
    1: "squashfs",
    2: "ext3",
    3: "archive",
    4: "raw",
    5: "encrypted-squashfs",
    6: "gocryptfs-squashfs",
}
_ROLES = {1: "system", 2: "primary-system", 3: "data", 4: "overlay"}
_ARCHITECTURES = {
    "01": "386",
    "02": "amd64",
    "03": "arm",
    "04": "arm64",
    "05": "ppc64",
    "06": "ppc64le",
    "07": "mips",
    "08": "mipsle",
    "09": "mips64",
    "10": "mips64le",
    "11": "s390x",
    "12": "riscv64",
}
# Linux Documentation/filesystems/squashfs.rst and fs/squashfs/squashfs_fs.h, version 4.0.
_COMPRESSIONS = {1: "gzip", 2: "lzma", 3: "lzo", 4: "xz", 5: "lz4", 6: "zstd"}


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The values in a partition's descriptor in addition to the common fields."""

    filesystem: str
    role: str
    architecture: str


@dataclass(frozen=True, kw_only=True)
class Object:
    """One object of a SIF; `position` is the position of its descriptor in the file."""

    id: int
    kind: str
    name: str
    group: int
    link: int
    offset: int
    size: int
    created: int
    modified: int
    position: int
    partition: Partition | None


@dataclass(frozen=True, kw_only=True)
class Header:
    """A SIF's header with the objects that are in use, in table order.

    `runs` is the primary system partition: the root file system of the container.
    """

    launch: str
    architecture: str
    uuid: str
    created: int
    modified: int
    file_size: int
    objects: tuple[Object, ...]
    runs: Object

    def named(self, name: str) -> Object | None:
        """Return the first object with this name; None if the SIF has no such object."""
        return next((entry for entry in self.objects if entry.name == name), None)

    @property
    def signed(self) -> bool:
        """True if a signature object is present (it is not verified here)."""
        return any(entry.kind == "signature" for entry in self.objects)


@dataclass(frozen=True, kw_only=True)
class Superblock:
    """Facts from the squashfs superblock."""

    inodes: int
    created: int
    block_size: int
    fragments: int
    compression: str
    bytes_used: int


def read_header(source: SifSource) -> Header:
    """Read the header and the object table, and check that the file contains all objects in the table.

    The check takes two small reads, independent of the file's size.

    Args:
        source: path or open descriptor of a regular file.

    Raises:
        ImageMismatch: the file is not a SIF, is damaged or truncated, or has no partition to run.
        EnvironmentUnreadable: the file is missing or not readable.
    """
    with _opened(source) as (fd, name):
        file_size = os.fstat(fd).st_size
        if file_size and not _begins_as_sif(fd, name, file_size):
            raise _damaged(name, "it does not have a SIF's magic number", "it is no SIF file")
        raw = _read(fd, name, 0, _HEADER.size)
        launch, _magic, version, arch, identity, *numbers = _HEADER.unpack(raw)
        created, modified, _free, total, table, table_size, _data, _data_size = numbers
        if version != _VERSION:
            raise _damaged(name, f"its SIF format version is {version!r}, hpcenv knows 01")
        objects = _read_objects(fd, name, file_size, total, table, table_size)
        return Header(
            launch=_text(launch),
            architecture=_architecture(arch),
            uuid=_as_uuid(identity),
            created=created,
            modified=modified,
            file_size=file_size,
            objects=objects,
            runs=_primary(name, objects),
        )


def _as_uuid(identity: bytes) -> str:
    """Return 16 bytes in the text form of a UUID (RFC 9562, section 4)."""
    digits = identity.hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _begins_as_sif(fd: int, name: str, file_size: int) -> bool:
    """Return whether the file has the magic number, or, because the file is cut off, only a part of this number."""
    begin = _read(fd, name, 0, min(file_size, _MAGIC_AT + len(_MAGIC)))
    return _MAGIC.startswith(begin[_MAGIC_AT:]) and (file_size > _MAGIC_AT or _LAUNCH.startswith(begin.rstrip(b"\0")))


def _read_objects(fd: int, name: str, file_size: int, total: int, table: int, table_size: int) -> tuple[Object, ...]:
    if not 0 < total <= _MOST_DESCRIPTORS:
        raise _damaged(name, f"its header counts {total} object descriptors")
    if table < _HEADER.size or table_size < total * _DESCRIPTOR.size or table + table_size > file_size:
        raise _damaged(
            name,
            f"its object table ({table_size} bytes at {table}) does not fit the file of {file_size} bytes",
        )
    raw = _read(fd, name, table, total * _DESCRIPTOR.size)
    found = []
    for index in range(total):
        begin = index * _DESCRIPTOR.size
        if raw[begin + 4]:
            found.append(_read_descriptor(raw[begin : begin + _DESCRIPTOR.size], table + begin))
    for entry in found:
        if entry.offset < _HEADER.size or entry.size < 0:
            raise _damaged(name, f"object {entry.id} claims {entry.size} bytes at {entry.offset}")
        if entry.offset + entry.size > file_size:
            raise ImageMismatch(
                f"`{name}` is truncated",
                why=f"the file has {file_size} bytes, object {entry.id} ends at {entry.offset + entry.size}",
                hint="copy or build it again; a full disk or quota cuts files off",
            )
    return tuple(found)


def _read_descriptor(raw: bytes, position: int) -> Object:
    kind, _used, number, group, link, offset, size, _padded, created, modified, _uid, _gid, name, extra = (
        _DESCRIPTOR.unpack(raw)
    )
    partition = None
    if kind == 0x4004:
        filesystem, role, arch = _PARTITION.unpack_from(extra)
        partition = Partition(
            filesystem=_FILESYSTEMS.get(filesystem, f"unknown-{filesystem}"),
            role=_ROLES.get(role, f"unknown-{role}"),
            architecture=_architecture(arch),
        )
    return Object(
        id=number,
        kind=_KINDS.get(kind, f"unknown-{kind & 0xFFFFFFFF:#x}"),
        name=_text(name),
        # The top four bits only mean "this is a group".
        group=group & 0x0FFFFFFF,
        link=link & 0x0FFFFFFF,
        offset=offset,
        size=size,
        created=created,
        modified=modified,
        position=position,
        partition=partition,
    )


def _primary(name: str, objects: tuple[Object, ...]) -> Object:
    primary = [o for o in objects if o.partition is not None and o.partition.role == "primary-system"]
    if len(primary) != 1:
        raise _damaged(name, f"it has {len(primary)} primary system partitions, it must have one")
    return primary[0]


def read_object(source: SifSource, entry: Object, *, limit: int = _OBJECT_LIMIT) -> bytes:
    """Return the content of a small object (definition file, JSON, signature).

    Args:
        entry: one of `read_header(source).objects`.
        limit: the maximum number of bytes that are read into memory.

    Raises:
        ImageMismatch: the object is larger than `limit`, or the file is shorter than its table says.
        EnvironmentUnreadable: the file is not readable.
    """
    with _opened(source) as (fd, name):
        if entry.size > limit:
            raise _damaged(name, f"object {entry.id} ({entry.kind}) has {entry.size} bytes")
        return _read(fd, name, entry.offset, entry.size)


def labels(source: SifSource, header: Header | None = None) -> dict[str, str]:
    """Return the image's labels, as `apptainer build` writes them; {} if the image has no labels.

    Apptainer keeps the labels in the JSON object `inspect-metadata.json`, below data.attributes.labels (`apptainer
    inspect --json`, seen with 1.4.5).

    Raises:
        ImageMismatch: the object with the labels exists but is damaged.
        EnvironmentUnreadable: the file is not readable.
    """
    with _opened(source) as (fd, name):
        entry = (header or read_header(fd)).named("inspect-metadata.json")
        if entry is None:
            return {}
        try:
            table = json.loads(read_object(fd, entry))["data"]["attributes"].get("labels") or {}
            return {str(key): str(value) for key, value in table.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _damaged(name, f"its labels cannot be read: {type(error).__name__}") from error


def superblock(source: SifSource, header: Header | None = None) -> Superblock:
    """Return facts of the primary partition's squashfs, and check that it fits into the partition.

    Raises:
        ImageMismatch: the partition is not a squashfs 4.0, or the squashfs is longer than the partition.
        EnvironmentUnreadable: the file is not readable.
    """
    with _opened(source) as (fd, name):
        entry = (header or read_header(fd)).runs
        if entry.size < _SUPERBLOCK.size:
            raise _damaged(name, f"its partition has {entry.size} bytes, too few for a squashfs")
        raw = _read(fd, name, entry.offset, _SUPERBLOCK.size)
        magic, inodes, created, block, fragments, comp, _log, _flags, _ids, major, minor, _root, used = (
            _SUPERBLOCK.unpack(raw)
        )
        if magic != b"hsqs" or (major, minor) != (4, 0):
            raise _damaged(name, "its partition does not begin with a squashfs 4.0 superblock")
        if used > entry.size:
            raise _damaged(name, f"its squashfs needs {used} bytes, its partition has {entry.size}")
        return Superblock(
            inodes=inodes,
            created=created,
            block_size=block,
            fragments=fragments,
            compression=_COMPRESSIONS.get(comp, f"unknown-{comp}"),
            bytes_used=used,
        )


def partition_sha256(
    source: SifSource, header: Header | None = None, on_bytes: Callable[[int], None] | None = None
) -> str:
    """Return the SHA-256 of the primary partition, in hexadecimal.

    This hash equals the objectDigest that `apptainer sign` stores for the partition.

    Args:
        on_bytes: called with the number of bytes of each piece read, for progress.

    Raises:
        ImageMismatch: the file is not a whole SIF.
        EnvironmentUnreadable: the file is not readable.
    """
    with _opened(source) as (fd, name):
        entry = (header or read_header(fd)).runs
        return _sha256(fd, name, entry.offset, entry.size, on_bytes)


def file_sha256(source: SifSource, on_bytes: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of the whole file, in hexadecimal.

    Raises:
        ImageMismatch: the file shrank while it was read.
        EnvironmentUnreadable: the file is missing or not readable.
    """
    with _opened(source) as (fd, name):
        return _sha256(fd, name, 0, os.fstat(fd).st_size, on_bytes)


def normalise(path: str | os.PathLike[str]) -> None:
    """Write zeros over the UUID and every time in the header and the object table, in place.

    Only these fields differ between two files with the same objects (seen with Apptainer
    1.4.5). Call this function before the SIF is published, because other processes must not see the file change.

    Raises:
        ImageMismatch: the file is not a complete SIF, or is signed (signatures cover these fields).
        EnvironmentUnreadable: the file is not writable.
    """
    header = read_header(path)
    if header.signed:
        raise _damaged(str(path), "it is signed, and its signature covers the fields to be zeroed")
    begin, length = _DESCRIPTOR_VOLATILE
    places = [_HEADER_VOLATILE, *((entry.position + begin, length) for entry in header.objects)]
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            for offset, size in places:
                os.pwrite(fd, bytes(size), offset)
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise _unreadable(str(path), error) from error


def embedded_lock(source: SifSource, header: Header | None = None) -> bytes | None:
    """Return the lockfile in the SIF; None without a lockfile. This function does not check the lockfile.

    Raises:
        ImageMismatch: the file is not a whole SIF, or the object is larger than a lockfile can be.
        EnvironmentUnreadable: the file is not readable.
    """
    with _opened(source) as (fd, _name):
        entry = (header or read_header(fd)).named(EMBEDDED_LOCK)
        return None if entry is None else read_object(fd, entry)


# --- writing -----------------------------------------------------------------------------

NewObject = tuple[str, str, bytes]


def squashfs_offset_for(objects: Sequence[NewObject]) -> int:
    """Return the offset at which the squashfs must begin, so that `write` can put `objects` before it.

    Args:
        objects: kind, name and bytes of each object, as for `write`.
    """
    end = _objects_at() + sum(len(data) for _kind, _name, data in objects)
    return max(_FIRST_SQUASHFS, end + -end % _PAGE)


def write(
    path: str | os.PathLike[str],
    *,
    architecture: str,
    squashfs_offset: int,
    objects: Sequence[NewObject],
) -> None:
    """Put header, table and small objects in front of a squashfs, in place, and sync the file.

    The UUID and the times are zero, as after `normalise`, so the bytes depend only on the arguments and the squashfs.
    The squashfs becomes the primary system partition, which reaches to the end of the file. Do not call this function
    for a file that other processes can already see.

    Args:
        path: a file with a squashfs at `squashfs_offset`.
        architecture: name of the architecture in Go and OCI, for example `amd64`.
        objects: kind (`definition-file`, `json`, `generic` ...), name and bytes of each object, in order.

    Raises:
        UsageError: a SIF has no code for the kind or the architecture, or the space before the squashfs is too small.
        ImageMismatch: there is no squashfs at `squashfs_offset`.
        FileUnusable: the file is not writable, or the disk is full.
    """
    name = os.fspath(path)
    codes = {known: code for code, known in _ARCHITECTURES.items()}
    if architecture not in codes:
        raise UsageError(
            f"a SIF cannot be made for the architecture `{architecture}`",
            why=f"the format knows {', '.join(sorted(codes))}",
        )
    if squashfs_offset % _PAGE or squashfs_offset < squashfs_offset_for(objects):
        raise UsageError(f"the objects need the squashfs at {squashfs_offset_for(objects)}, not at {squashfs_offset}")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size = os.fstat(fd).st_size
            if os.pread(fd, 4, squashfs_offset) != b"hsqs":
                raise _damaged(name, f"there is no squashfs at byte {squashfs_offset}")
            _write_at(fd, 0, _front(codes[architecture].encode(), squashfs_offset, size, objects))
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise FileUnusable(f"`{name}` cannot be written", why=error.strerror, hint="check space and quota") from error


def _objects_at() -> int:
    return _TABLE_AT + _TABLE_ROWS * _DESCRIPTOR.size


def _front(arch: bytes, squashfs_offset: int, file_size: int, objects: Sequence[NewObject]) -> bytes:
    """Return everything before the squashfs, as bytes."""
    kinds = {known: code for code, known in _KINDS.items() if known not in ("partition", "signature")}
    if len(objects) > _MOST_WRITTEN:
        raise UsageError(f"{len(objects)} objects are too many for one SIF")
    at = _objects_at()
    rows, body = [], []
    for number, (kind, name, data) in enumerate(objects, 1):
        if kind not in kinds or len(name.encode()) > 127 or not data:
            raise UsageError(f"a SIF cannot hold the object `{name}` of {len(data)} bytes as `{kind}`")
        rows.append(_row(kinds[kind], number, at, len(data), len(data), name.encode(), b""))
        body.append(data)
        at += len(data)
    size = file_size - squashfs_offset
    partition = _PARTITION.pack(1, 2, arch)
    rows.append(_row(0x4004, len(rows) + 1, squashfs_offset, size, squashfs_offset - at + size, b"", partition))
    table = b"".join(rows).ljust(_TABLE_ROWS * _DESCRIPTOR.size, b"\0")
    free = _TABLE_ROWS - len(rows)
    data_at = _objects_at()
    header = _HEADER.pack(
        *(_LAUNCH, _MAGIC, _VERSION, arch, bytes(16), 0, 0),
        *(free, _TABLE_ROWS, _TABLE_AT, len(table), data_at, file_size - data_at),
    )
    return (header.ljust(_TABLE_AT, b"\0") + table + b"".join(body)).ljust(squashfs_offset, b"\0")


def _row(kind: int, number: int, at: int, size: int, padded: int, name: bytes, extra: bytes) -> bytes:
    return _DESCRIPTOR.pack(kind, 1, number, _IN_DEFAULT_GROUP, 0, at, size, padded, 0, 0, 0, 0, name, extra)


def _write_at(fd: int, offset: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        count = os.pwrite(fd, left, offset)
        offset, left = offset + count, left[count:]


# --- reading -----------------------------------------------------------------------------


@contextmanager
def _opened(source: SifSource) -> Iterator[tuple[int, str]]:
    """Context manager: an open descriptor of a regular file, and its name for messages."""
    if isinstance(source, int):
        name, fd, mine = _name_of(source), source, False
    else:
        name, mine = os.fspath(source), True
        try:
            # O_NONBLOCK is used because opening must not hang if the file is a FIFO.
            fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise _unreadable(name, error) from error
    try:
        if not stat.S_ISREG(_status(fd, name).st_mode):
            raise _damaged(name, "it is not a regular file")
        yield fd, name
    finally:
        if mine:
            os.close(fd)


def _name_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"file descriptor {fd}"


def _status(fd: int, name: str) -> os.stat_result:
    try:
        return os.fstat(fd)
    except OSError as error:
        raise _unreadable(name, error) from error


def _pieces(fd: int, name: str, offset: int, size: int) -> Iterator[bytes]:
    end = offset + size
    while offset < end:
        try:
            piece = os.pread(fd, min(_CHUNK, end - offset), offset)
        except OSError as error:
            raise _unreadable(name, error) from error
        if not piece:
            raise ImageMismatch(
                f"`{name}` is truncated",
                why=f"it ends at byte {offset}, {end - offset} bytes are missing",
                hint="copy or build it again",
            )
        yield piece
        offset += len(piece)


def _read(fd: int, name: str, offset: int, size: int) -> bytes:
    return b"".join(_pieces(fd, name, offset, size))


def _sha256(fd: int, name: str, offset: int, size: int, on_bytes: Callable[[int], None] | None) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(fd, name, offset, size):
        digest.update(piece)
        if on_bytes is not None:
            on_bytes(len(piece))
    return digest.hexdigest()


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode(errors="replace")


def _architecture(raw: bytes) -> str:
    code = _text(raw)
    return _ARCHITECTURES.get(code, f"unknown-{code}")


def _damaged(name: str, why: str, what: str = "it is not a SIF that can be used") -> ImageMismatch:
    return ImageMismatch(f"`{name}`: {what}", why=why, hint="build or copy it again")


def _unreadable(name: str, error: Exception) -> EnvironmentUnreadable:
    return EnvironmentUnreadable(
        f"`{name}` cannot be read",
        why=getattr(error, "strerror", None) or str(error),
        hint="check the path and its permissions, on the node that reported this",
    )
