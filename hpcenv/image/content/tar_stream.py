"""Read the members of a tar stream, strictly and fast, and write members for squashfs-tools.

Runs on: LOGIN NODE. Standard library only. The standard library's tarfile is not used: it takes four times as long for
a layer of 37,000 entries, it guesses how to continue in damaged archives, and it does not give the position of a
member's data.

These formats are read: v7; POSIX ustar and pax (POSIX.1-2001 pax, "pax Interchange Format"); and GNU (tar 1.34 manual,
"Basic Tar Format", "Storing Sparse Files") with long names, base-256 numbers and the four sparse forms. xattrs are read
from `SCHILY.xattr.NAME`. Ambiguous archives are read as Go's archive/tar reads them, because Docker, containerd, Podman
and umoci use this package. Damage that Go ignores is an error here. Global pax headers are valid until the end of the
archive, as in POSIX.

GNU headers are written, because tar.c of squashfs-tools 4.5.1 and 4.6.1 expects a fraction in a pax `mtime`, and
4.5.1 removes `/` and `../` from the front of a pax `linkpath` even for symbolic links. tar.c reads GNU's long names and
base-256 numbers correctly. A pax header is written only for xattrs.

The stream is untrusted: every number is checked before use, `Bounds` limits the memory, and every fault raises
ImageMismatch.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn

from hpcenv.errors import Command, ImageMismatch
from hpcenv.image.content.tree import TreeEntry

# The hint for a damaged layer. `cli/image/` replaces the command in this hint by the command that the user typed.
PULL_AGAIN = (
    "run ",
    Command("hpcenv", "image", "build"),
    " again; if the error remains, the image itself is damaged: build it again",
)

__all__ = ["BLOCK", "END", "Bounds", "Member", "Reader", "encode", "expand", "padding"]

MemberKind = Literal["file", "directory", "symlink", "hard-link", "character-device", "block-device", "fifo"]

BLOCK = 512
# Two blocks of zeros end an archive.
END = bytes(2 * BLOCK)

_HEADER = struct.Struct("100s8s8s8s12s12s8sc100s8s32s32s8s8s155s12s")
_ZEROS = bytes(BLOCK)
_KINDS: dict[bytes, MemberKind] = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",  # "contiguous": an ordinary file on every system
    b"S": "file",  # GNU sparse
    b"1": "hard-link",
    b"2": "symlink",
    b"3": "character-device",
    b"4": "block-device",
    b"5": "directory",
    b"6": "fifo",
}
_OCTAL = re.compile(rb"[ \0]*([0-7]*)[ \0]*\Z")
_DECIMAL = re.compile(rb"-?[0-9]{1,19}\Z")
_TIME = re.compile(rb"(-?)([0-9]{1,18})(?:\.([0-9]{0,64}))?\Z")
_LARGEST = 2**62
# These keys would give all later members the same name or size. POSIX allows them, but they make no sense.
_NOT_GLOBAL = (b"path", b"linkpath", b"size", b"GNU.sparse.")
_XATTR = b"SCHILY.xattr."
_SPARSE_TEXT = 1024 * 1024
_ZERO_RUN = bytes(1024 * 1024)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits for one member.

    Attributes:
        path_bytes: the length of a name or link target (Linux: PATH_MAX 4096 with the final NUL).
        header_bytes: the size of all extension headers of one member (Go's limit is 1 MiB for each header).
        xattr_bytes: the size of one attribute's value (Linux: XATTR_SIZE_MAX, 64 KiB).
    """

    path_bytes: int = 4095
    header_bytes: int = 1024 * 1024
    xattr_bytes: int = 64 * 1024


class Member(NamedTuple):
    """One member of an archive; its name and its link target are not checked yet.

    Attributes:
        size: size of the file in bytes, including holes.
        offset: the position in the stream at which the file's data begin.
        stored: size of the file's data in the stream, in bytes.
        sparse: the stored pieces of a sparse file, as (offset in the file, length); None if the file is not sparse.
    """

    name: bytes
    kind: MemberKind
    mode: int
    uid: int
    gid: int
    mtime: int
    size: int
    target: bytes
    device: tuple[int, int] | None
    xattrs: tuple[tuple[bytes, bytes], ...]
    offset: int
    stored: int
    sparse: tuple[tuple[int, int], ...] | None


class Reader:
    """Reads the members of an archive that arrives in chunks.

    `next_member` skips unread data of the previous member. After the last member the rest of the stream is read to its
    end, because the digest of the layer also covers this rest. The stream may end inside the padding of its last
    member.

    Args:
        chunks: the uncompressed stream in pieces of any size.
        bounds: see `Bounds`.
        start: the position of the first chunk in the archive; all positions count from the beginning of the archive.
    """

    def __init__(self, chunks: Iterable[bytes], bounds: Bounds | None = None, *, start: int = 0) -> None:
        self._chunks = iter(chunks)
        self._bounds = bounds or Bounds()
        self._buffer = b""
        self._at = 0
        self._before = start  # bytes of the stream that come before the buffer
        self._left = 0  # bytes of the current member's data that were not read yet, without padding
        self._pad = 0
        self._global: dict[bytes, bytes] = {}

    @property
    def offset(self) -> int:
        """Position in the stream, in bytes."""
        return self._before + self._at

    def __iter__(self) -> Iterator[Member]:
        """Yield the members in order.

        Raises:
            ImageMismatch: the archive is damaged, truncated or exceeds a limit.
        """
        while (member := self.next_member()) is not None:
            yield member

    def next_member(self) -> Member | None:
        """Return the next member, or None at the end.

        Raises:
            ImageMismatch: see `__iter__`.
        """
        self._skip(self._left)
        self._left = 0
        if not self._skip_padding():
            return None
        extended = _Extended()
        while True:
            block = self._block(may_end=extended.empty)
            if block is None:
                return None
            if block == _ZEROS:
                if not extended.empty:
                    _damaged("the archive ends between a member's headers", self.offset)
                self._finish()
                return None
            fields = _HEADER.unpack(block)
            _check(block, fields[6], self.offset - BLOCK)
            flag = fields[7]
            if flag in b"xgLK":
                self._extension(flag, _number(fields[4], "size", self.offset - BLOCK), extended)
                continue
            return self._member(block, fields, extended)

    def stored(self) -> Iterator[memoryview]:
        """Yield the current member's stored bytes in pieces.

        Raises:
            ImageMismatch: the archive is truncated.
        """
        while self._left:
            if self._at == len(self._buffer):
                self._fill()
            piece = memoryview(self._buffer)[self._at : self._at + self._left]
            self._at += len(piece)
            self._left -= len(piece)
            yield piece

    def go_to(self, offset: int, stored: int) -> None:
        """Skip to the data of a member whose position is known; then call `stored`.

        Raises:
            ImageMismatch: the archive ends before `offset`, or the reader is already past it.
        """
        if offset < self.offset:
            _damaged("its members are not where they were before", offset)
        self._skip(offset - self.offset)
        self._left, self._pad = stored, 0

    def _fill(self) -> None:
        """Read the next chunk into the buffer."""
        self._before += len(self._buffer)
        self._at = 0
        for chunk in self._chunks:
            if chunk:
                self._buffer = chunk
                return
        self._buffer = b""
        _damaged("the archive is truncated", self._before)

    def _take(self, count: int) -> bytes:
        at = self._at
        if at + count <= len(self._buffer):
            self._at = at + count
            return self._buffer[at : at + count]
        pieces = []
        while count:
            if self._at == len(self._buffer):
                self._fill()
            piece = self._buffer[self._at : self._at + count]
            self._at += len(piece)
            count -= len(piece)
            pieces.append(piece)
        return b"".join(pieces)

    def _skip(self, count: int) -> None:
        while count > len(self._buffer) - self._at:
            count -= len(self._buffer) - self._at
            self._fill()
        self._at += count

    def _skip_padding(self) -> bool:
        """Skip a member's padding.

        Return False if the stream ends in this padding. This is not an error, as in Go and GNU tar.
        """
        while self._pad > len(self._buffer) - self._at:
            self._pad -= len(self._buffer) - self._at
            if not self._more():
                self._pad = 0
                return False
        self._at += self._pad
        self._pad = 0
        return True

    def _block(self, *, may_end: bool) -> bytes | None:
        """Return the next header block; None if the stream ends without the two zero blocks."""
        if self._at == len(self._buffer) and may_end and not self._more():
            return None
        return self._take(BLOCK)

    def _more(self) -> bool:
        self._before += len(self._buffer)
        self._at = 0
        self._buffer = next((chunk for chunk in self._chunks if chunk), b"")
        return bool(self._buffer)

    def _finish(self) -> None:
        """Check the second block of zeros and read the rest."""
        block = self._block(may_end=True)
        if block is not None and block != _ZEROS:
            _damaged("there is a single block of zeros between members", self.offset - BLOCK)
        self._at = len(self._buffer)
        while self._more():
            self._at = len(self._buffer)

    def _extension(self, flag: bytes, size: int, extended: _Extended) -> None:
        at = self.offset
        extended.bytes += size
        if extended.bytes > self._bounds.header_bytes:
            raise ImageMismatch(
                f"a member of a tar archive has {extended.bytes:,} bytes of extension headers at byte {at:,}",
                why=f"hpcenv reads at most {self._bounds.header_bytes:,}; real layers have a few hundred",
                hint="rebuild the image with another tool, or look at the archive with `tar -tv`",
            )
        data = self._take(size + padding(size))[:size]
        if flag == b"x":
            extended.merge(_records(data, at))
        elif flag == b"g":
            records = _records(data, at)
            bad = next((key for key, _ in records if key.startswith(_NOT_GLOBAL)), None)
            if bad is not None:
                _damaged(f"a global pax header sets `{bad.decode('utf-8', 'backslashreplace')}` for all members", at)
            for key, value in records:
                self._global[key] = value
            if len(self._global) > 1024:
                _damaged("global pax headers have more than 1,024 keys", at)
        elif flag == b"L":
            extended.name = data.split(b"\0", 1)[0]
        else:
            extended.target = data.split(b"\0", 1)[0]

    def _member(self, block: bytes, fields: tuple[bytes, ...], extended: _Extended) -> Member:
        at = self.offset - BLOCK
        name, mode, uid, gid, size, mtime, _, flag, target, magic, _, _, major, minor, prefix, trailer = fields
        kind = _KINDS.get(flag)
        if kind is None:
            _damaged(f"a member is of the unknown type {flag!r}", at)
        name = name.split(b"\0", 1)[0]
        # Only POSIX headers have a prefix; GNU headers have times and sparse maps there.
        if magic[:6] == b"ustar\0" and prefix[0]:
            # In the format of the program star the prefix is shorter.
            prefix = (prefix[:131] if trailer[-4:] == b"tar\0" else prefix).split(b"\0", 1)[0]
            name = prefix + b"/" + name
        target = target.split(b"\0", 1)[0]
        number_size = _number(size, "size", at)
        pax = {**self._global, **extended.records} if self._global else extended.records
        values = [_number(mode, "mode", at) & 0o7777, 0, 0, 0]
        xattrs: tuple[tuple[bytes, bytes], ...] = ()
        if pax:
            values[1] = _decimal(pax, b"uid", at) if pax.get(b"uid") else _number(uid, "uid", at)
            values[2] = _decimal(pax, b"gid", at) if pax.get(b"gid") else _number(gid, "gid", at)
            values[3] = _time(pax[b"mtime"], at) if pax.get(b"mtime") else _signed(mtime, "mtime", at)
            number_size = _decimal(pax, b"size", at) if pax.get(b"size") else number_size
            name = pax.get(b"path") or name
            target = pax.get(b"linkpath") or target
            xattrs = self._xattrs(pax, at)
        else:
            values[1:] = _number(uid, "uid", at), _number(gid, "gid", at), _signed(mtime, "mtime", at)
        name = name if extended.name is None else extended.name
        target = target if extended.target is None else extended.target
        if flag == b"\0" and name.endswith(b"/"):
            kind = "directory"  # v7
        device = None
        if flag in b"34":
            device = (_number(major, "major device number", at), _number(minor, "minor device number", at))
            if device[0] > 0xFFF or device[1] > 0xFFFFF:
                _damaged(f"a device has the number {device[0]}:{device[1]}, which is impossible on Linux", at)
        if not 0 <= max(values[1], values[2]) <= 0xFFFFFFFF or min(values[1], values[2]) < 0:
            _damaged(f"a member belongs to user {values[1]} and group {values[2]}, which is impossible on Linux", at)
        self._named(name, "name", at)
        self._named(target, "link target", at)
        # Members of other kinds have no data, even if their header has a size. Go, GNU tar and libarchive do the same.
        self._left = number_size if kind == "file" else 0
        self._pad = padding(self._left)
        logical, sparse = self._left, None
        if kind == "file" and (flag == b"S" or any(key.startswith(b"GNU.sparse.") for key in pax)):
            name, logical, sparse = self._sparse(block, flag, name, extended.all_records, pax, at)
        return Member(
            name, kind, values[0], values[1], values[2], values[3], logical,
            target if kind in {"symlink", "hard-link"} else b"",
            device, xattrs, self.offset, self._left, sparse,
        )  # fmt: skip

    def _named(self, text: bytes, what: str, at: int) -> None:
        if len(text) > self._bounds.path_bytes:
            raise ImageMismatch(
                f"a member of a tar archive has a {what} of {len(text):,} bytes at byte {at:,}",
                why=f"the limit of Linux is {self._bounds.path_bytes:,} bytes",
                hint="rebuild the image without it",
            )
        if b"\0" in text:
            _damaged(f"a member's {what} has a NUL byte in it", at)

    def _xattrs(self, pax: dict[bytes, bytes], at: int) -> tuple[tuple[bytes, bytes], ...]:
        # An empty value removes a record (POSIX pax), so an attribute cannot be empty.
        xattrs = sorted((key[len(_XATTR) :], value) for key, value in pax.items() if value and key.startswith(_XATTR))
        for name, value in xattrs:
            if not 0 < len(name) <= 255 or b"\0" in name:
                _damaged("an extended attribute has no name, or a name of more than 255 bytes", at)
            if len(value) > self._bounds.xattr_bytes:
                raise ImageMismatch(
                    f"an extended attribute of a member has {len(value):,} bytes at byte {at:,}",
                    why=f"Linux stores at most {self._bounds.xattr_bytes:,}",
                    hint="rebuild the image without it",
                )
        return tuple(xattrs)

    def _sparse(
        self,
        block: bytes,
        flag: bytes,
        name: bytes,
        records: Sequence[tuple[bytes, bytes]],
        pax: dict[bytes, bytes],
        at: int,
    ) -> tuple[bytes, int, tuple[tuple[int, int], ...]]:
        """Read the map of a sparse file in any of its four forms; after that, the stream is at the data."""
        name = pax.get(b"GNU.sparse.name") or name
        self._named(name, "name", at)
        if flag == b"S":
            size, pieces = self._sparse_gnu(block, at)
        elif pax.get(b"GNU.sparse.major") or pax.get(b"GNU.sparse.minor"):
            version = (pax.get(b"GNU.sparse.major"), pax.get(b"GNU.sparse.minor"))
            if version != (b"1", b"0"):
                _damaged("a sparse file is in a form newer than 1.0", at)
            size = _decimal(pax, b"GNU.sparse.realsize", at)
            pieces = self._sparse_1_0(at)
        elif b"GNU.sparse.map" in pax:
            size = _decimal(pax, b"GNU.sparse.size", at)
            pieces = _numbers(pax[b"GNU.sparse.map"].split(b",") if pax[b"GNU.sparse.map"] else [], at)
        else:
            size = _decimal(pax, b"GNU.sparse.size", at)
            keys = (b"GNU.sparse.offset", b"GNU.sparse.numbytes")
            pairs = [(key, value) for key, value in records if key in keys]
            if any(key != keys[position % 2] for position, (key, _) in enumerate(pairs)):
                _damaged("a sparse file's map is not in pairs", at)
            pieces = _numbers([value for _, value in pairs], at)
        return name, size, _checked_map(pieces, size, self._left, at)

    def _sparse_gnu(self, block: bytes, at: int) -> tuple[int, list[int]]:
        size = _number(block[483:495], "real size", at)
        fields = [block[start : start + 12] for start in range(386, 386 + 8 * 12, 12)]
        more = block[482]
        while more:
            following = self._take(BLOCK)
            fields += [following[start : start + 12] for start in range(0, 42 * 12, 12)]
            more = following[504]
            if len(fields) * 12 > _SPARSE_TEXT:
                _damaged("a sparse file's map is larger than 1 MiB", at)
        # An entry whose number of bytes is an empty field ends the map (GNU tar 1.34, sparse.c).
        used = []
        for offset, count in zip(fields[::2], fields[1::2], strict=True):
            if not count.strip(b"\0 "):
                break
            used += [_number(offset, "sparse offset", at), _number(count, "sparse length", at)]
        return size, used

    def _sparse_1_0(self, at: int) -> list[int]:
        """Read the map before the data: decimal lines, padded to a block."""
        text = b""
        wanted = None
        while True:
            if self._left < BLOCK or len(text) > _SPARSE_TEXT:
                _damaged("a sparse file's map does not end", at)
            text += self._take(BLOCK)
            self._left -= BLOCK
            if wanted is None and b"\n" in text:
                wanted = _numbers([text.split(b"\n", 1)[0]], at)[0]
                if not 0 <= wanted <= _SPARSE_TEXT:
                    _damaged("a sparse file's map has no sensible number of pieces", at)
            if wanted is not None and text.count(b"\n") >= 2 * wanted + 1:
                return _numbers(text.split(b"\n")[1 : 2 * wanted + 1], at)


class _Extended:
    """The extension headers of one member."""

    __slots__ = ("all_records", "bytes", "name", "records", "target")

    def __init__(self) -> None:
        self.records: dict[bytes, bytes] = {}
        self.all_records: list[tuple[bytes, bytes]] = []
        self.name: bytes | None = None
        self.target: bytes | None = None
        self.bytes = 0

    @property
    def empty(self) -> bool:
        """Whether the next member has no extension header so far; global headers do not count."""
        return not self.records and self.name is None and self.target is None

    def merge(self, records: list[tuple[bytes, bytes]]) -> None:
        self.records.update(records)
        self.all_records += records


def expand(pieces: Iterable[memoryview], size: int, sparse: Sequence[tuple[int, int]]) -> Iterator[memoryview]:
    """Yield a sparse file's content with zeros for holes.

    Args:
        pieces: the stored bytes of the file.
        size: the size of the file, including holes.
        sparse: the positions of the stored bytes, checked by the reader.
    """
    source = iter(pieces)
    piece = memoryview(b"")
    done = 0
    for start, length in sparse:
        yield from _zeros(start - done)
        done = start + length
        left = length
        while left:
            if not piece:
                piece = next(source)
                continue
            part = piece[:left]
            piece = piece[len(part) :]
            left -= len(part)
            yield part
    yield from _zeros(size - done)


def _zeros(count: int) -> Iterator[memoryview]:
    whole = memoryview(_ZERO_RUN)
    while count > 0:
        yield whole[: min(count, len(whole))]
        count -= len(whole)


def padding(size: int) -> int:
    """Return how many zeros pad `size` bytes to whole blocks."""
    return -size % BLOCK


# -- writing ------------------------------------------------------------------------------


def encode(entry: TreeEntry, *, link: bytes | None = None) -> bytes:
    """Return the header blocks of a member.

    After the header of a file the caller writes `entry.size` bytes of content and
    `padding(entry.size)` zeros. The header depends only on the arguments.

    Args:
        entry: the member; its `inode` is ignored; its `mtime` must be from 0 to 2^32-1.
        link: write a hard link to this path instead of the entry's content.
    """
    blocks = b""
    if entry.xattrs and link is None:
        records = b"".join(_record(_XATTR + name, value) for name, value in entry.xattrs)
        blocks += _raw(b"pax", b"x", size=len(records)) + records + bytes(padding(len(records)))
    target = link if link is not None else entry.target
    for flag, text in ((b"K", target), (b"L", entry.path)):
        if len(text) > 100:
            data = text + b"\0"
            blocks += _raw(b"././@LongLink", flag, size=len(data)) + data + bytes(padding(len(data)))
    flag = b"1" if link is not None else _FLAGS[entry.kind]
    return blocks + _raw(
        entry.path[:100],
        flag,
        mode=entry.mode,
        uid=entry.uid,
        gid=entry.gid,
        mtime=entry.mtime,
        size=entry.size if flag == b"0" else 0,
        target=target[:100],
        device=entry.device or (0, 0),
    )


_FLAGS = {
    "file": b"0",
    "symlink": b"2",
    "character-device": b"3",
    "block-device": b"4",
    "directory": b"5",
    "fifo": b"6",
}


def _raw(
    name: bytes,
    flag: bytes,
    *,
    size: int,
    mode: int = 0,
    uid: int = 0,
    gid: int = 0,
    mtime: int = 0,
    target: bytes = b"",
    device: tuple[int, int] = (0, 0),
) -> bytes:
    if uid < 8**7 and gid < 8**7 and size < 8**11:
        numbers = b"%07o\0%07o\0%07o\0%011o\0%011o\0" % (mode, uid, gid, size, mtime)
    else:
        numbers = b"%07o\0%b%b%b%011o\0" % (mode, _field(uid, 8), _field(gid, 8), _field(size, 12), mtime)
    # The checksum counts its own field as spaces.
    front, back = name.ljust(100, b"\0") + numbers, flag + target.ljust(100, b"\0") + b"ustar  \0".ljust(72, b"\0")
    back += (_field(device[0], 8) + _field(device[1], 8) if any(device) else _NO_DEVICE).ljust(183, b"\0")
    # The lower half of Adler-32 is the sum of the bytes plus one. This sum cannot reach 65,521 here.
    return front + b"%06o\0 " % ((zlib.adler32(front + b" " * 8 + back) & 0xFFFF) - 1) + back


_NO_DEVICE = b"0000000\0" * 2


def _field(value: int, width: int) -> bytes:
    """Return a number in octal, or in GNU's base 256 if it is too large."""
    if value < 8 ** (width - 1):
        return b"%0*o\0" % (width - 1, value)
    return b"\x80" + value.to_bytes(width - 1, "big")


def _record(key: bytes, value: bytes) -> bytes:
    """Return a pax record; the length at its start also counts the digits of the length."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    if len(str(length)) != len(str(rest)):
        length = rest + len(str(length))
    return b"%d %s=%s\n" % (length, key, value)


# -- numbers ------------------------------------------------------------------------------


def _damaged(what: str, at: int) -> NoReturn:
    raise ImageMismatch(
        f"a tar archive is damaged: {what}",
        why=f"at byte {at:,} of its uncompressed stream",
        hint=PULL_AGAIN,
    )


def _check(block: bytes, field: bytes, at: int) -> None:
    """Check a header's checksum; accept sums of signed bytes too, because some old programs wrote such sums."""
    expected = _number(field, "checksum", at)
    # The lower half of Adler-32 is the sum of the bytes plus one, modulo 65,521. Adler-32 is much faster than sum().
    if not ((zlib.adler32(block) & 0xFFFF) - 1 - sum(field) + 8 * 32 - expected) % 65521:
        return
    total = sum(block) - sum(field) + 8 * 32
    if expected != total:
        signed = total - 256 * sum(byte > 127 for byte in block) + 256 * sum(byte > 127 for byte in field)
        if expected != signed:
            _damaged("a header's checksum is wrong", at)


def _number(field: bytes, what: str, at: int) -> int:
    """Parse an octal or base-256 number that is not negative."""
    value = _signed(field, what, at)
    if value < 0:
        _damaged(f"a member's {what} is negative", at)
    return value


def _signed(field: bytes, what: str, at: int) -> int:
    value = _parsed.get(field)
    if value is None:
        value = _parse(field, what, at)
        if len(_parsed) > 10_000:
            _parsed.clear()
        _parsed[field] = value
    return value


# Cache: the same modes, owners and times occur thousands of times.
_parsed: dict[bytes, int] = {}


def _parse(field: bytes, what: str, at: int) -> int:
    first = field[0]
    if first & 0x80:
        # Base 256: the bit below the marker is the sign (GNU tar; star; libarchive).
        value = int.from_bytes(field, "big") & ~(0x80 << (8 * len(field) - 8))
        if first & 0x40:
            value -= 1 << (8 * len(field) - 1)
        if abs(value) > _LARGEST:
            _damaged(f"a member's {what} is {value}", at)
        return value
    match = _OCTAL.match(field)
    if match is None:
        # Bytes after the first NUL are not part of the number.
        match = _OCTAL.match(field.split(b"\0", 1)[0])
        if match is None:
            _damaged(f"a member's {what} is {field!r}, which is not an octal number", at)
    digits = match[1]
    return int(digits, 8) if digits else 0


def _decimal(pax: dict[bytes, bytes], key: bytes, at: int) -> int:
    text = pax.get(key, b"")
    if not _DECIMAL.match(text) or not 0 <= int(text) <= _LARGEST:
        _damaged(f"a pax header has `{key.decode()}={text[:40].decode('utf-8', 'backslashreplace')}`", at)
    return int(text)


def _numbers(texts: Sequence[bytes], at: int) -> list[int]:
    if not all(_DECIMAL.match(text) for text in texts):
        _damaged("a sparse file's map has an entry that is not a number", at)
    return [int(text) for text in texts]


def _time(text: bytes, at: int) -> int:
    """Return the decimal time of a pax header in whole seconds, rounded down."""
    match = _TIME.match(text)
    if match is None:
        _damaged(f"a pax header has `mtime={text[:40].decode('utf-8', 'backslashreplace')}`", at)
    seconds = int(match[2])
    if match[1]:
        return -seconds - bool((match[3] or b"").strip(b"0"))
    return seconds


def _records(data: bytes, at: int) -> list[tuple[bytes, bytes]]:
    """Split the records of a pax header: LENGTH, a space, KEY=VALUE, a line feed."""
    records = []
    start = 0
    while start < len(data):
        space = data.find(b" ", start, start + 20)
        digits = data[start : max(space, start)]
        length = int(digits) if digits.isdigit() else 0
        if length <= len(digits):
            _damaged("a pax header's record has a wrong length", at)
        record = data[space + 1 : start + length]
        key, equals, value = record[:-1].partition(b"=")
        if start + length > len(data) or record[-1:] != b"\n" or not equals or not key:
            _damaged("a pax header's record has a wrong length", at)
        records.append((key, value))
        start += length
    return records


def _checked_map(numbers: list[int], size: int, stored: int, at: int) -> tuple[tuple[int, int], ...]:
    if len(numbers) % 2:
        _damaged("a sparse file's map is not in pairs", at)
    pieces = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    end = 0
    for offset, length in pieces:
        if offset < end or length < 0 or offset + length > size:
            _damaged("a sparse file's pieces overlap or are outside the file", at)
        end = offset + length
    if sum(length for _, length in pieces) != stored:
        _damaged("a sparse file's map does not fit its data", at)
    return pieces
