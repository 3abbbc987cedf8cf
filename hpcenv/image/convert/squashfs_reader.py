"""Read a squashfs 4.0 as a list of entries, without mounting or unpacking it.

Runs on: LOGIN NODE, or a compute node that converts. Needs the package `zstandard` for
images that are compressed with zstd; everything else is the standard library.

Format: Linux Documentation/filesystems/squashfs.rst and fs/squashfs/squashfs_fs.h, version
4.0; checked against files of squashfs-tools 4.5.1 and 4.6.1. All numbers are little endian.
Tables are chains of metadata blocks of at most 8 KiB. A position in a table has two parts: the block's
offset from the beginning of the table, and the offset in the uncompressed block.

The file is untrusted input. Every position and count is checked before its use. A folder that is reached twice is
refused, so loops are impossible. Paths, entries and uncompressed bytes have limits. Wrong bytes raise `ImageMismatch`;
`EnvironmentUnreadable` means that the operating system denies access.
"""

from __future__ import annotations

import contextlib
import heapq
import lzma
import os
import stat
import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from hpcenv.errors import EnvironmentUnreadable, ImageMismatch, ToolMissing
from hpcenv.image.content.tree import FileKind, TreeEntry, content_hash

__all__ = ["LARGEST_CONTENT", "LONGEST_PATH", "MOST_ENTRIES", "read_file", "read_tree"]

# Limits. The largest images of NGC have about 600,000 entries and 30 GB.
MOST_ENTRIES = 8_000_000
LARGEST_CONTENT = 512 << 30
LONGEST_PATH = 16 * 1024
_LARGEST_TABLE = 256 << 20
_LARGEST_LISTING = 64 << 20
_LARGEST_XATTR = 64 * 1024
_LARGEST_XATTRS = 1 << 20
_LARGEST_SYMLINK = 64 * 1024
# Limit for `read_file`, which reads small files.
_LARGEST_FILE = 16 << 20

_METADATA = 8192
_BATCH_BYTES = 8 << 20
_BATCH_FILES = 512
_KEPT_BLOCKS = 256
_KEPT_FRAGMENTS = 4
_KEPT_XATTRS = 64

_SUPERBLOCK = struct.Struct("<4sIIIIHHHHHHQQQQQQQQ")
_COMMON = struct.Struct("<HHHHII")
_DIRECTORY_HEADER = struct.Struct("<III")
_DIRECTORY_ENTRY = struct.Struct("<HhHH")
_FRAGMENT = struct.Struct("<QII")
_XATTR_TABLE = struct.Struct("<QII")
_XATTR_ID = struct.Struct("<QII")
_XATTR_KEY = struct.Struct("<HH")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_BASIC = {
    1: struct.Struct("<IIHHI"),
    2: struct.Struct("<IIII"),
    8: struct.Struct("<IIIIHHI"),
    9: struct.Struct("<QQQIIII"),
}
_TWO = struct.Struct("<II")

_NONE = 0xFFFFFFFF
_NO_TABLE = 0xFFFFFFFFFFFFFFFF
_RAW_METADATA = 0x8000
_RAW_DATA = 1 << 24
_OUT_OF_LINE = 0x100
_PREFIXES = {0: b"user.", 1: b"trusted.", 2: b"security."}
_COMPRESSIONS = {1: "gzip", 2: "lzma", 3: "lzo", 4: "xz", 5: "lz4", 6: "zstd"}
_KINDS: dict[int, FileKind] = {
    1: "directory",
    2: "file",
    3: "symlink",
    4: "block-device",
    5: "character-device",
    6: "fifo",
    7: "socket",
}

_SquashfsFile = int | str | os.PathLike[str]


# --- what callers use --------------------------------------------------------------------


def read_tree(
    source: _SquashfsFile,
    *,
    offset: int,
    size: int,
    content: bool = True,
    on_bytes: Callable[[int], None] | None = None,
    threads: int | None = None,
    largest_content: int = LARGEST_CONTENT,
) -> Iterator[TreeEntry]:
    """Yield all entries of a squashfs, sorted by path, the root first.

    Before the first entry is yielded, all file contents are read and hashed, in the order of their
    positions in the file.

    Args:
        source: path or open descriptor of the file; the position of a descriptor does not change.
        offset, size: position and size of the squashfs in the file, in bytes.
        content: whether to read the contents of files; if False, `blake3` is None.
        on_bytes: called from time to time, in this thread, with the number of content bytes hashed since the last call.
        threads: number of threads that decompress and hash; None uses one per processor of this process, at most 8.
        largest_content: the most bytes that all files together may have.

    Raises:
        ImageMismatch: the file is not a complete squashfs 4.0, is damaged, exceeds a limit, or uses
            an unsupported compression.
        EnvironmentUnreadable: the operating system denies access.
        ToolMissing: the Python package for the compression of this squashfs is not installed.
    """
    with _opened(source) as (fd, name):
        image = _Image(fd, name, offset, size)
        digests: dict[int, bytes] = {}
        if content:
            digests = _hash_all(image, threads or min(8, len(os.sched_getaffinity(0))), largest_content, on_bytes)
        yield from _entries(image, digests if content else None)


def read_file(source: _SquashfsFile, path: bytes, *, offset: int, size: int, limit: int = _LARGEST_FILE) -> bytes:
    """Return the content of one regular file; symbolic links are not followed.

    Args:
        source: path or open descriptor of the file.
        path: relative to the root, without a leading slash.
        offset, size: position and size of the squashfs in the file, in bytes.
        limit: the most bytes that the file may have.

    Raises:
        ImageMismatch: the image has no regular file at this path, the file is larger than `limit`, or the image is
            damaged.
        EnvironmentUnreadable, ToolMissing: see `read_tree`.
    """
    with _opened(source) as (fd, name):
        image = _Image(fd, name, offset, size)
        node = image.inode(image.root)
        for part in path.split(b"/"):
            if node.basic != 1:
                raise image.damaged(f"it has no file {path!r}")
            child = next((at for found, at, *_rest in image.listing(node) if found == part), None)
            if child is None:
                raise image.damaged(f"it has no file {path!r}")
            node = image.inode(image.position(child))
        if node.basic != 2:
            raise image.damaged(f"{path!r} is not a regular file")
        if node.size > limit:
            raise image.damaged(f"{path!r} has {node.size} bytes, more than the limit of {limit}")
        return b"".join(_content(image, node, threading.Event()))


# --- the image ---------------------------------------------------------------------------


@dataclass(slots=True)
class _Inode:
    """One inode, with the fields of its type filled in."""

    basic: int
    mode: int
    uid: int
    gid: int
    mtime: int
    number: int
    links: int = 1
    size: int = 0
    xattr: int = _NONE
    # Files: the first block, the fragment, the list of block sizes in the inode table.
    start: int = 0
    fragment: int = _NONE
    fragment_offset: int = 0
    blocks_at: int = 0
    blocks: int = 0
    # Directories: the listing's block in the directory table and the offset in it.
    listing: tuple[int, int] = (0, 0)
    target: bytes = b""
    device: int = 0
    end: int = 0


class _Image:
    """The tables of a squashfs, read and checked when they are needed."""

    def __init__(self, fd: int, name: str, offset: int, size: int) -> None:
        self.fd = fd
        self.name = name
        self._base = offset
        self.local = threading.local()
        self._metadata: OrderedDict[int, tuple[bytes, int]] = OrderedDict()
        self._xattr_bytes = 0
        self._listed = 0
        self._xattrs: dict[int, tuple[tuple[bytes, bytes], ...]] = {}
        self.used = min(_SUPERBLOCK.size, size)
        if offset < 0 or size < _SUPERBLOCK.size:
            raise self.damaged(f"{size} bytes are too few for a squashfs")
        raw = _SUPERBLOCK.unpack(self.read(0, _SUPERBLOCK.size))
        magic, self.inodes, _time, self.block_size, fragments, compression, log, _flags, ids, major, minor = raw[:11]
        root, used, id_table, xattr_table, inode_table, directory_table, fragment_table, _export = raw[11:]
        if magic != b"hsqs" or (major, minor) != (4, 0):
            raise self.damaged("it does not begin with a squashfs 4.0 superblock")
        if not _SUPERBLOCK.size <= used <= size:
            raise self.damaged(f"its squashfs needs {used} bytes, but only {size} exist")
        if not 12 <= log <= 20 or self.block_size != 1 << log:
            raise self.damaged(f"it has two block sizes, {self.block_size} and 2^{log}")
        self.used = used
        self._unpack = _unpacker(_COMPRESSIONS.get(compression, f"number {compression}"), name)
        self._directory_table = directory_table
        self._xattr_table = xattr_table
        self.table, self._places = self._inode_table(inode_table, directory_table)
        self.ids = [number for (number,) in _U32.iter_unpack(self._rows(id_table, ids, _U32.size))]
        self._fragments = self._rows(fragment_table, fragments, _FRAGMENT.size)
        self._xattr_begin, self._xattr_ids = self._open_xattrs()
        self.root = self.position(root)

    def damaged(self, why: str) -> ImageMismatch:
        return ImageMismatch(
            f"the file system in `{self.name}` cannot be used", why=why, hint="build or copy the image again"
        )

    # reading

    def read(self, at: int, size: int) -> bytes:
        """Return bytes of the squashfs; `at` counts from the beginning of the squashfs."""
        if at < 0 or size < 0 or at + size > self.used:
            raise self.damaged(f"it refers to {size} bytes at {at}, but ends at {self.used}")
        try:
            data = os.pread(self.fd, size, self._base + at)
            while len(data) < size:
                more = os.pread(self.fd, size - len(data), self._base + at + len(data))
                if not more:
                    raise self.damaged(f"the file ends {size - len(data)} bytes too early")
                data += more
        except OSError as error:
            raise _unreadable(self.name, error) from error
        return data

    def unpack(self, data: bytes, most: int) -> bytes:
        """Return the uncompressed bytes of one block, at most `most`."""
        try:
            found = self._unpack(self.local, data, most)
        except (zlib.error, lzma.LZMAError, ValueError, EOFError) as error:
            raise self.damaged(f"a block cannot be decompressed: {error}") from error
        if len(found) > most:
            raise self.damaged(f"a block of {len(data)} bytes has more than {most} uncompressed bytes")
        return found

    def _block(self, at: int) -> tuple[bytes, int]:
        """Return a metadata block's uncompressed bytes and the position of the next block."""
        (head,) = _U16.unpack(self.read(at, 2))
        size = head & ~_RAW_METADATA
        if not 0 < size <= _METADATA:
            raise self.damaged(f"a metadata block at {at} claims {size} bytes")
        data = self.read(at + 2, size)
        if not head & _RAW_METADATA:
            data = self.unpack(data, _METADATA)
        if not data:
            raise self.damaged(f"the metadata block at {at} is empty")
        return data, at + 2 + size

    def metadata(self, at: int) -> tuple[bytes, int]:
        """Return a metadata block like `_block`; the last blocks are cached."""
        found = self._metadata.get(at)
        if found is not None:
            self._metadata.move_to_end(at)
            return found
        found = self._metadata[at] = self._block(at)
        if len(self._metadata) > _KEPT_BLOCKS:
            self._metadata.popitem(last=False)
        return found

    def stretch(self, at: int, offset: int, size: int) -> bytes:
        """Return `size` uncompressed bytes, beginning at `offset` in the metadata block at `at`."""
        parts = []
        while size:
            data, at = self.metadata(at)
            if offset >= len(data):
                raise self.damaged(f"it refers to byte {offset} of a metadata block of {len(data)}")
            part = data[offset : offset + size]
            parts.append(part)
            size -= len(part)
            offset = 0
        return b"".join(parts)

    # tables

    def _inode_table(self, begin: int, end: int) -> tuple[bytearray, dict[int, int]]:
        """Return the uncompressed inode table, and where each block begins in this uncompressed table."""
        if not _SUPERBLOCK.size <= begin < end <= self.used:
            raise self.damaged(f"its inode table reaches from {begin} to {end}")
        table, places, at = bytearray(), {}, begin
        while at < end:
            places[at - begin] = len(table)
            data, at = self._block(at)
            table += data
            if len(table) > _LARGEST_TABLE:
                raise self.damaged(f"its inode table is larger than {_LARGEST_TABLE >> 20} MiB")
        if not 0 < self.inodes <= min(MOST_ENTRIES, len(table) // _COMMON.size):
            raise self.damaged(f"its {self.inodes} inodes do not fit into a table of {len(table)} bytes")
        return table, places

    def position(self, place: int) -> int:
        """Convert an inode's position in the file (block and offset) to an index of `table`."""
        begin = self._places.get(place >> 16)
        if begin is None or begin + (place & 0xFFFF) >= len(self.table):
            raise self.damaged(f"it refers to an inode at {place >> 16}:{place & 0xFFFF}, which does not exist")
        return begin + (place & 0xFFFF)

    def _rows(self, table: int, count: int, size: int) -> bytes:
        """Return the rows of a table. At the table's position is a list with the positions of the table's blocks."""
        # An inode uses at most one row; mksquashfs leaves some rows unused.
        if count > self.inodes + 0x10000:
            raise self.damaged(f"a table at {table} has {count} rows for {self.inodes} inodes")
        per_block = _METADATA // size
        found = bytearray()
        for (at,) in _U64.iter_unpack(self.read(table, 8 * -(-count // per_block)) if count else b""):
            needed = min(_METADATA, count * size - len(found))
            data, _next = self._block(at)
            if len(data) < needed:
                raise self.damaged(f"a table's block at {at} has {len(data)} bytes, {needed} are needed")
            found += data[:needed]
        return bytes(found)

    def _open_xattrs(self) -> tuple[int, bytes]:
        if self._xattr_table == _NO_TABLE:
            return 0, b""
        begin, count, _unused = _XATTR_TABLE.unpack(self.read(self._xattr_table, _XATTR_TABLE.size))
        return begin, self._rows(self._xattr_table + _XATTR_TABLE.size, count, _XATTR_ID.size)

    # inodes

    def inode(self, at: int) -> _Inode:
        """Parse the inode at index `at` of the inode table."""
        try:
            kind, mode, uid, gid, mtime, number = _COMMON.unpack_from(self.table, at)
            if not 1 <= kind <= 14:
                raise self.damaged(f"an inode is of the unknown type {kind}")
            basic = kind if kind < 8 else kind - 7
            node = _Inode(basic, mode & 0o7777, self.ids[uid], self.ids[gid], mtime, number)
            _PARSERS[basic](self, node, kind > 7, at + _COMMON.size)
        except (struct.error, IndexError) as error:
            raise self.damaged(f"an inode at {at} is incomplete or has an unknown owner") from error
        if not 0 < number <= self.inodes:
            raise self.damaged(f"an inode has the number {number}, but there are {self.inodes}")
        return node

    def listing(self, node: _Inode) -> Iterator[tuple[bytes, int, int, int]]:
        """Yield name, position of the inode, type and inode number of each entry of a folder."""
        left = node.size - 3
        if left <= 0:
            return
        self._listed += left
        if left > _LARGEST_LISTING or self._listed > 2 * _LARGEST_TABLE:
            raise self.damaged(f"the listing of a folder, or all listings together, are too large: {left} bytes")
        block, offset = node.listing
        data = self.stretch(self._directory_table + block, offset, left)
        at, before = 0, b""
        while at < left:
            if at + _DIRECTORY_HEADER.size > left:
                raise self.damaged("a folder's listing is incomplete")
            count, start, base = _DIRECTORY_HEADER.unpack_from(data, at)
            at += _DIRECTORY_HEADER.size
            if count >= 256:
                raise self.damaged(f"a folder's listing claims {count + 1} entries in one run")
            for _ in range(count + 1):
                if at + _DIRECTORY_ENTRY.size > left:
                    raise self.damaged("a folder's listing is incomplete")
                inside, delta, kind, length = _DIRECTORY_ENTRY.unpack_from(data, at)
                at += _DIRECTORY_ENTRY.size
                name = data[at : at + length + 1]
                at += length + 1
                if at > left or length >= 256:
                    raise self.damaged("a name in a folder's listing is cut off or too long")
                if name <= before or name in (b".", b"..") or b"/" in name or b"\0" in name:
                    raise self.damaged(f"a folder has an entry {name!r} that is repeated, not sorted, or not allowed")
                before = name
                yield name, start << 16 | inside, kind, base + delta

    def fragment(self, number: int) -> tuple[int, int]:
        """Return the position of a fragment block, and its size field."""
        if number >= len(self._fragments) // _FRAGMENT.size:
            raise self.damaged(f"a file ends in fragment {number}, which is not in the table")
        at, word, _unused = _FRAGMENT.unpack_from(self._fragments, number * _FRAGMENT.size)
        return at, word

    def xattrs(self, number: int) -> tuple[tuple[bytes, bytes], ...]:
        """Return the extended attributes with this number, sorted by name."""
        if number == _NONE:
            return ()
        known = self._xattrs.get(number)
        if known is None:
            if number >= len(self._xattr_ids) // _XATTR_ID.size:
                raise self.damaged(f"an inode has the extended attributes {number}, which are not in the table")
            known = self._read_xattrs(*_XATTR_ID.unpack_from(self._xattr_ids, number * _XATTR_ID.size))
            if len(self._xattrs) >= _KEPT_XATTRS:
                self._xattrs.clear()
            self._xattrs[number] = known
        return known

    def _read_xattrs(self, place: int, count: int, size: int) -> tuple[tuple[bytes, bytes], ...]:
        if count > _LARGEST_XATTRS // _XATTR_KEY.size or size > _LARGEST_XATTRS:
            raise self.damaged(f"an inode has {count} extended attributes of {size} bytes")
        stream = _Stream(self, self._xattr_begin + (place >> 16), place & 0xFFFF)
        found, total = {}, 0
        for _ in range(count):
            kind, length = _XATTR_KEY.unpack(stream.take(_XATTR_KEY.size))
            prefix = _PREFIXES.get(kind & 0xFF)
            if prefix is None or not 0 < length <= 255:
                raise self.damaged(f"an extended attribute has prefix {kind & 0xFF} and a name of {length} bytes")
            name = prefix + stream.take(length)
            value = self._value(stream)
            if kind & _OUT_OF_LINE:
                (elsewhere,) = _U64.unpack(value.ljust(8, b"\0")[:8])
                value = self._value(_Stream(self, self._xattr_begin + (elsewhere >> 16), elsewhere & 0xFFFF))
            total += len(name) + len(value)
            if name in found or total > _LARGEST_XATTRS:
                raise self.damaged(f"an inode has the extended attribute {name!r} twice, or too many")
            found[name] = value
        self._xattr_bytes += total
        if self._xattr_bytes > _LARGEST_TABLE:
            raise self.damaged(f"its extended attributes are larger than {_LARGEST_TABLE >> 20} MiB")
        return tuple(sorted(found.items()))

    def _value(self, stream: _Stream) -> bytes:
        (length,) = _U32.unpack(stream.take(4))
        if length > _LARGEST_XATTR:
            raise self.damaged(f"an extended attribute has {length} bytes")
        return stream.take(length)


class _Stream:
    """Reads through consecutive metadata blocks."""

    def __init__(self, image: _Image, at: int, offset: int) -> None:
        self._image = image
        self._at = at
        self._offset = offset

    def take(self, size: int) -> bytes:
        parts = []
        while size:
            data, after = self._image.metadata(self._at)
            part = data[self._offset : self._offset + size]
            if part:
                parts.append(part)
                size -= len(part)
                self._offset += len(part)
            elif self._offset > len(data):
                raise self._image.damaged("it points past the end of a metadata block")
            else:
                self._at, self._offset = after, 0
        return b"".join(parts)


# --- inodes by type ----------------------------------------------------------------------


def _directory(image: _Image, node: _Inode, extended: bool, at: int) -> None:
    if extended:
        node.links, node.size, block, _parent, indexes, offset, node.xattr = _BASIC[8].unpack_from(image.table, at)
        at += _BASIC[8].size
        for _ in range(indexes):
            (length,) = _U32.unpack_from(image.table, at + 8)
            if length >= 256:
                raise image.damaged(f"a folder's index has a name of {length + 1} bytes")
            at += 12 + length + 1
        node.end = at
    else:
        block, node.links, node.size, offset, _parent = _BASIC[1].unpack_from(image.table, at)
        node.end = at + _BASIC[1].size
    node.listing = (block, offset)


def _regular(image: _Image, node: _Inode, extended: bool, at: int) -> None:
    if extended:
        node.start, node.size, _sparse, node.links, node.fragment, node.fragment_offset, node.xattr = _BASIC[
            9
        ].unpack_from(image.table, at)
        node.blocks_at = at + _BASIC[9].size
    else:
        node.start, node.fragment, node.fragment_offset, node.size = _BASIC[2].unpack_from(image.table, at)
        node.blocks_at = at + _BASIC[2].size
    whole, rest = divmod(node.size, image.block_size)
    node.blocks = whole + (1 if rest and node.fragment == _NONE else 0)
    node.end = node.blocks_at + 4 * node.blocks
    if node.end > len(image.table):
        raise image.damaged(f"a file of {node.size} bytes has no room for its list of blocks")


def _symlink(image: _Image, node: _Inode, extended: bool, at: int) -> None:
    node.links, length = _TWO.unpack_from(image.table, at)
    begin = at + _TWO.size
    node.end = begin + length
    if length > _LARGEST_SYMLINK or node.end > len(image.table):
        raise image.damaged(f"a symbolic link has {length} bytes")
    node.target = bytes(image.table[begin : node.end])
    _extended_tail(image, node, extended)


def _device(image: _Image, node: _Inode, extended: bool, at: int) -> None:
    node.links, node.device = _TWO.unpack_from(image.table, at)
    node.end = at + _TWO.size
    _extended_tail(image, node, extended)


def _pipe_or_socket(image: _Image, node: _Inode, extended: bool, at: int) -> None:
    (node.links,) = _U32.unpack_from(image.table, at)
    node.end = at + 4
    _extended_tail(image, node, extended)


def _extended_tail(image: _Image, node: _Inode, extended: bool) -> None:
    if extended:
        (node.xattr,) = _U32.unpack_from(image.table, node.end)
        node.end += 4


_PARSERS: dict[int, Callable[[_Image, _Inode, bool, int], None]] = {
    1: _directory,
    2: _regular,
    3: _symlink,
    4: _device,
    5: _device,
    6: _pipe_or_socket,
    7: _pipe_or_socket,
}


# --- the tree ----------------------------------------------------------------------------


# The path, the index of its inode, the type and number in its folder's listing, and the rest of that folder's entries.
_Next = tuple[bytes, int, int, int, Iterator[Any]]


def _children(image: _Image, folder: bytes, node: _Inode) -> Iterator[_Next]:
    """Yield a folder's entries. Each entry contains this iterator, which yields the following entries."""
    prefix = folder + b"/" if folder else b""

    def each() -> Iterator[_Next]:
        for name, place, kind, number in image.listing(node):
            if len(prefix) + len(name) > LONGEST_PATH:
                raise image.damaged(f"it has a path of more than {LONGEST_PATH} bytes")
            yield prefix + name, image.position(place), kind, number, me

    me = each()
    return me


def _entries(image: _Image, digests: dict[int, bytes] | None) -> Iterator[TreeEntry]:
    """Yield the entries in the order of whole paths: always the smallest next path of all open folders.

    A listing is sorted by name, but `a-b` sorts between `a` and `a/c`. So several folders are open at the same time,
    but their number stays small.
    """
    waiting: list[_Next] = [(b"", image.root, 1, image.inode(image.root).number, iter(()))]
    met = bytearray(image.inodes + 1)
    first: dict[int, bytes] = {}
    count = 0
    while waiting:
        path, at, kind, number, after = waiting[0]
        following = next(after, None)
        if following is None:
            heapq.heappop(waiting)
        else:
            heapq.heapreplace(waiting, following)
        node = image.inode(at)
        if node.basic != kind or node.number != number:
            raise image.damaged(f"{path!r} refers to inode {node.number} of type {node.basic}, not {number}, {kind}")
        if met[number] and (kind == 1 or node.links < 2 or at not in first):
            raise image.damaged(f"inode {number} occurs a second time, as {path!r}")
        met[number] = 1
        count += 1
        if count > MOST_ENTRIES:
            raise image.damaged(f"it has more than {MOST_ENTRIES} entries")
        own = path
        if kind == 1:
            child = next(_children(image, path, node), None)
            if child is not None:
                heapq.heappush(waiting, child)
        elif node.links > 1:
            own = first.setdefault(at, path)
        yield _entry(image, node, path, own, None if digests is None or kind != 2 else digests.get(at))


def _entry(image: _Image, node: _Inode, path: bytes, inode: bytes, digest: bytes | None) -> TreeEntry:
    device = None
    if node.basic in (4, 5):
        # The kernel's encoding of device numbers in 32 bits (include/linux/kdev_t.h).
        device = ((node.device >> 8) & 0xFFF, node.device & 0xFF | node.device >> 12 & 0xFFF00)
    return TreeEntry(
        path=path,
        kind=_KINDS[node.basic],
        mode=node.mode,
        uid=node.uid,
        gid=node.gid,
        mtime=node.mtime,
        size=node.size if node.basic == 2 else 0,
        blake3=None if digest is None else digest.hex(),
        target=node.target,
        device=device,
        xattrs=image.xattrs(node.xattr),
        inode=inode,
    )


# --- contents ----------------------------------------------------------------------------


def _hash_all(image: _Image, threads: int, most: int, on_bytes: Callable[[int], None] | None) -> dict[int, bytes]:
    """Return the BLAKE3 of every file's content, by the inode's index in the table.

    Files are read in the order of their positions in the image. Files with the same blocks are read once, because
    mksquashfs stores duplicate files once.
    """
    groups, total = _files(image)
    if total > most:
        raise image.damaged(f"its files have {total} bytes together, more than the limit of {most}")
    digests: dict[int, bytes] = {}
    for batch, batch_digests in _hashed(image, _batches(groups), threads):
        for group, digest in zip(batch, batch_digests, strict=True):
            digests.update(dict.fromkeys(group.inodes, digest))
        if on_bytes is not None:
            on_bytes(sum(group.size for group in batch))
    return digests


def _hashed(image: _Image, batches: Iterator[list[_Group]], threads: int) -> Iterator[tuple[list[_Group], list[bytes]]]:
    """Yield batches with their digests, in the order of completion."""
    stop = threading.Event()
    if threads == 1:
        for batch in batches:
            yield batch, _hash_batch(image, batch, stop)
        return
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="squashfs") as pool:
        try:
            yield from _ahead(pool, lambda batch: _hash_batch(image, batch, stop), batches, 2 * threads)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


class _Group(NamedTuple):
    """Files with the same content: its position and size, and the files' inodes. Other fields are as in `_Inode`."""

    block: int
    inside: int
    size: int
    inodes: list[int]
    start: int
    blocks_at: int
    blocks: int
    fragment: int
    fragment_offset: int


def _files(image: _Image) -> tuple[list[_Group], int]:
    """Return the files in the order of their data, and the sum of their sizes; shared content counts once."""
    alike: dict[tuple[int, int, int, int, bytes], _Group] = {}
    at = 0
    for _ in range(image.inodes):
        node = image.inode(at)
        if node.basic == 2:
            sizes = bytes(image.table[node.blocks_at : node.end])
            start = node.start if node.blocks else 0
            fragment, inside = (node.fragment, node.fragment_offset) if node.fragment != _NONE else (_NONE, 0)
            key = (node.size, start, fragment, inside, sizes)
            group = alike.get(key)
            if group is not None:
                group.inodes.append(at)
            else:
                place = (start, 0) if sizes or fragment == _NONE else (image.fragment(fragment)[0], inside)
                alike[key] = _Group(
                    *place,
                    node.size,
                    [at],
                    node.start,
                    node.blocks_at,
                    node.blocks,
                    node.fragment,
                    node.fragment_offset,
                )
        at = node.end
    groups = sorted(alike.values())
    return groups, sum(group.size for group in groups)


def _batches(groups: Iterable[_Group]) -> Iterator[list[_Group]]:
    batch: list[_Group] = []
    room = _BATCH_BYTES
    for group in groups:
        batch.append(group)
        room -= group.size
        if room <= 0 or len(batch) == _BATCH_FILES:
            yield batch
            batch, room = [], _BATCH_BYTES
    if batch:
        yield batch


def _ahead(
    pool: ThreadPoolExecutor,
    work: Callable[[list[_Group]], list[bytes]],
    batches: Iterator[list[_Group]],
    depth: int,
) -> Iterator[tuple[list[_Group], list[bytes]]]:
    """Yield each batch with its result when the batch is complete; at most `depth` batches are in progress."""
    under_way: dict[Future[list[bytes]], list[_Group]] = {}
    while True:
        for batch in islice(batches, depth - len(under_way)):
            under_way[pool.submit(work, batch)] = batch
        if not under_way:
            return
        done, _ = wait(under_way, return_when=FIRST_COMPLETED)
        for future in done:
            yield under_way.pop(future), future.result()


def _hash_batch(image: _Image, batch: list[_Group], stop: threading.Event) -> list[bytes]:
    found = []
    for group in batch:
        digest = content_hash()
        for piece in _content(image, group, stop):
            digest.update(piece)
        found.append(digest.digest())
    return found


def _content(image: _Image, node: _Inode | _Group, stop: threading.Event) -> Iterator[bytes]:
    """Yield the content of a file block by block."""
    left, at = node.size, node.start
    for index in range(node.blocks):
        if stop.is_set():
            return
        (word,) = _U32.unpack_from(image.table, node.blocks_at + 4 * index)
        size = min(left, image.block_size)
        packed = word & (_RAW_DATA - 1)
        if packed == 0:
            yield bytes(size)
        else:
            yield _data_block(image, at, word, size)
        at += packed
        left -= size
    if left:
        data = _fragment(image, node.fragment)
        if node.fragment_offset + left > len(data):
            raise image.damaged(f"a file's end is at {node.fragment_offset} of a fragment of {len(data)} bytes")
        yield data[node.fragment_offset : node.fragment_offset + left]


def _data_block(image: _Image, at: int, word: int, size: int | None) -> bytes:
    """Return one uncompressed block; `size` is its required size, None for a fragment block."""
    packed = word & (_RAW_DATA - 1)
    if packed > image.block_size or word >> 25:
        raise image.damaged(f"a block at {at} claims {packed} bytes, blocks have {image.block_size}")
    data = image.read(at, packed)
    if not word & _RAW_DATA:
        data = image.unpack(data, image.block_size)
    if size is not None and len(data) != size:
        raise image.damaged(f"the block at {at} has {len(data)} bytes, but must have {size}")
    return data


def _fragment(image: _Image, number: int) -> bytes:
    """Return a fragment block; this thread's last blocks are cached, because many files share a block."""
    kept: OrderedDict[int, bytes] | None = getattr(image.local, "fragments", None)
    if kept is None:
        kept = image.local.fragments = OrderedDict()
    found = kept.get(number)
    if found is None:
        at, word = image.fragment(number)
        found = kept[number] = _data_block(image, at, word, None)
        if len(kept) > _KEPT_FRAGMENTS:
            kept.popitem(last=False)
    return found


# --- compressions ------------------------------------------------------------------------

_Unpack = Callable[[threading.local, bytes, int], bytes]


def _unpacker(compression: str, name: str) -> _Unpack:
    if compression == "gzip":
        return _unpack_gzip
    if compression in ("xz", "lzma"):
        return _unpack_xz
    if compression != "zstd":
        raise ImageMismatch(
            f"the file system in `{name}` cannot be read here",
            why=f"its blocks are compressed with {compression}; hpcenv reads gzip, lzma, xz and zstd",
            hint="build the image again with `apptainer build --mksquashfs-args '-comp zstd'`",
        )
    try:
        import zstandard
    except ImportError as error:
        raise ToolMissing(
            "the Python package `zstandard` is not installed",
            why=f"the blocks of `{name}` are compressed with zstd",
            hint="python3 -m pip install zstandard",
        ) from error

    def unpack(local: threading.local, data: bytes, most: int) -> bytes:
        # Two threads must not share a context, and it is too slow to create a context for each block.
        context: zstandard.ZstdDecompressor | None = getattr(local, "zstd", None)
        if context is None:
            context = local.zstd = zstandard.ZstdDecompressor()
        try:
            # `decompress` trusts the size that the frame claims, and then ignores `max_output_size`.
            if zstandard.frame_content_size(data) > most:
                raise ValueError(f"it claims more than {most} bytes")
            return context.decompress(data, max_output_size=most)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error

    return unpack


def _unpack_gzip(_local: threading.local, data: bytes, most: int) -> bytes:
    worker = zlib.decompressobj()
    found = worker.decompress(data, most + 1)
    if not worker.eof and len(found) <= most:
        raise ValueError("it is incomplete")
    return found


def _unpack_xz(_local: threading.local, data: bytes, most: int) -> bytes:
    # The dictionary has at most the size of a block, 1 MiB; the decoder needs little additional memory.
    worker = lzma.LZMADecompressor(memlimit=64 << 20)
    found = worker.decompress(data, most + 1)
    if not worker.eof and len(found) <= most:
        raise ValueError("it is incomplete")
    return found


# --- opening -----------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(source: _SquashfsFile) -> Iterator[tuple[int, str]]:
    """Context manager: an open descriptor of a regular file, and its name for messages."""
    if isinstance(source, int):
        try:
            name = os.readlink(f"/proc/self/fd/{source}")
        except OSError:
            name = f"file descriptor {source}"
        yield source, name
        return
    name = os.fspath(source)
    try:
        # O_NONBLOCK: opening a FIFO must not block.
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise _unreadable(name, error) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ImageMismatch(f"`{name}` is not a regular file", hint="name a SIF file")
        yield fd, name
    finally:
        os.close(fd)


def _unreadable(name: str, error: Exception) -> EnvironmentUnreadable:
    return EnvironmentUnreadable(
        f"`{name}` cannot be read",
        why=getattr(error, "strerror", None) or str(error),
        hint="check the path and its permissions, on the node that reported this",
    )
