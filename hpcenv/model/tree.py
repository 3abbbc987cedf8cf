"""A root file system as a list of entries: its digest, and what differs between two.

Runs on: LOGIN NODE. Pure. Paths are bytes: file names of Linux are bytes, not text.
Trees come as entries sorted by the bytes of their whole paths, so that two of a million
paths are compared without holding either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, Protocol, TypeVar

Kind = Literal["file", "directory", "symlink", "character-device", "block-device", "fifo", "socket"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One path of a root file system.

    Attributes:
        path: relative to the root, no leading slash, no `.` or `..`; `b""` is the root itself.
        mode: permission bits with setuid, setgid and sticky (07777).
        uid, gid: owner.
        mtime: seconds since 1970.
        size: bytes of a file, else 0.
        blake3: hexadecimal BLAKE3 (256 bits) of a file's content; None for all else.
        target: what a symbolic link says.
        device: major and minor of a device.
        xattrs: extended attributes with their full names, sorted by name.
        inode: for a file with several hard links the smallest of its paths; else its own path.
    """

    path: bytes
    kind: Kind
    mode: int
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    size: int = 0
    blake3: str | None = None
    target: bytes = b""
    device: tuple[int, int] | None = None
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    inode: bytes = b""


DIGEST_FORMAT = b"hpcenv-tree-v1"

# Seen on SIFs of Apptainer 1.4.5, built by root and by an ordinary user, umask 022 and 077:
# what it adds, replaces or empties whatever the image has,
_WRITTEN = frozenset({
    b".exec", b".run", b".shell", b".singularity.d", b".test", b"environment", b"singularity",
    b"etc/hosts", b"etc/resolv.conf",
})  # fmt: skip
# and the directories it makes, with mode 0755, where the image has nothing of that name.
_MADE = (b"dev", b"etc", b"home", b"proc", b"root", b"sys", b"tmp", b"var", b"var/tmp")

# BLAKE3 of nothing.
_EMPTY = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
# All but the write bits.
_COUNTED_MODE = 0o7555

# What an exact comparison looks at, in the order it is told.
_EXACT = ("mode", "uid", "gid", "mtime", "size", "blake3", "target", "device", "xattrs", "inode")


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One field of one path in which two trees differ.

    `field` is `path` where one side lacks it: then that side is None and the other the
    kind of the entry. Else it is an attribute's name and both sides say its value.
    """

    path: bytes
    field: str
    expected: str | None
    found: str | None


class _Line(NamedTuple):
    """What the digest counts of a path."""

    path: bytes
    kind: str
    mode: int
    size: int
    blake3: str
    target: bytes


_LETTERS = {"file": b"f", "directory": b"d", "symlink": b"l", "fifo": b"p", "socket": b"s"}


class ContentHash(Protocol):
    """What hashes a file's content, as `hashlib` objects do."""

    def update(self, data: bytes | bytearray | memoryview, /) -> object:
        """Take more of the content."""

    def digest(self) -> bytes:
        """Return the 32 bytes."""

    def hexdigest(self) -> str:
        """Return them in hexadecimal."""


def content_hash() -> ContentHash:
    """Return a new hash for one file's content: BLAKE3, 256 bits.

    Every byte of an image is hashed three times on its way from layer to proven SIF. SHA-256
    does 0.36 GB/s on processors without SHA instructions (Intel before Ice Lake), BLAKE3 5 GB/s
    (measured on a 2.5 GHz Xeon of that kind); digests of layers stay what OCI says.
    """
    return _blake3()()


@cache
def _blake3() -> Callable[[], ContentHash]:
    from blake3 import blake3

    return blake3


def belongs_to_apptainer(path: bytes) -> bool:
    """Tell whether a path is one that Apptainer writes itself, so that no digest counts it."""
    return path in _WRITTEN or path.startswith(b".singularity.d/")


def tree_digest(entries: Iterable[Entry]) -> str:
    r"""Return the portable identity of a root file system: what a program can read in it.

    Equal for hpcenv's conversion of an image and for `apptainer build` of it by root or by
    an ordinary user, on any machine, by any squashfs-tools. How to compute it (version
    `hpcenv-tree-v1`; NUL is the byte 0, numbers are ASCII):

    1. Leave out the paths `.exec`, `.run`, `.shell`, `.singularity.d` and all below it,
       `.test`, `environment`, `singularity`, `etc/hosts`, `etc/resolv.conf`.
    2. Add each of the directories `dev etc home proc root sys tmp var var/tmp` that is
       missing, with mode 0755; `var/tmp` only if `var` is a directory. Give the root
       directory, whose path is empty, the permissions 0700 in addition to its own.
    3. Take a block or character device for an empty file of the same mode.
    4. Sort by the bytes of the path, relative to the root and without a leading slash.
    5. sha256 over `hpcenv-tree-v1` NUL and, for each path,
       LETTER NUL MODE NUL SIZE NUL CONTENT NUL PATH NUL with LETTER `f` file, `d`
       directory, `l` symbolic link, `p` fifo, `s` socket; MODE the permission bits and
       set-user-id, set-group-id and sticky, without the three write bits (mode & 07555),
       in octal without leading zeros, and 0 for a symbolic link; SIZE in bytes of a file,
       else 0; CONTENT the hexadecimal BLAKE3 of a file, the target of a symbolic link, or
       nothing.

    Not counted, and why: owners, times, xattrs and device numbers, which an unprivileged
    `apptainer build` loses; which files are hard links of each other, since that changes
    nothing that is read; write bits, which mean nothing in a read-only image and which the
    umask of `apptainer build` (0002) decides for directories that no layer names.
    An unprivileged Apptainer 1.4.5 writes files that their owner may not read as empty
    files and drops such directories without saying so: those SIFs are different, and so
    is their digest.

    Args:
        entries: sorted by path.

    Raises:
        ValueError: the entries are not sorted, or a file comes without its blake3.
    """
    digest = hashlib.sha256(DIGEST_FORMAT + b"\0")
    for line in _portable(entries):
        said = line.blake3.encode() if line.kind == "file" else line.target
        digest.update(b"%s\0%o\0%d\0%s\0%s\0" % (_LETTERS[line.kind], line.mode, line.size, said, line.path))
    return f"sha256:{digest.hexdigest()}"


def compare(expected: Iterable[Entry], found: Iterable[Entry], *, exact: bool) -> tuple[Difference, ...]:
    """List what differs between two trees, sorted by path.

    Args:
        expected, found: sorted by path.
        exact: compare every attribute of every path. Else only what `tree_digest` counts,
            as it counts it: there are no differences exactly where the digests are equal.

    Raises:
        ValueError: as for `tree_digest`.
    """
    if exact:
        return tuple(_pairs(_ordered(expected), _ordered(found), _EXACT))
    return tuple(_pairs(_portable(expected), _portable(found), ("mode", "size", "blake3", "target")))


def compare_and_digest(expected: Iterable[Entry], found: Iterable[Entry]) -> tuple[tuple[Difference, ...], str]:
    """Compare every attribute of every path, and return the digest of what is expected, too.

    The same as `compare(..., exact=True)` and `tree_digest(expected)`, in one walk.

    Raises:
        ValueError: as for `tree_digest`.
    """
    differences: list[Difference] = []
    digest = tree_digest(_compared(expected, _ordered(found), differences))
    return tuple(differences), digest


def _compared(expected: Iterable[Entry], found: Iterator[Entry], differences: list[Difference]) -> Iterator[Entry]:
    """Pass what is expected on, and note where the other tree differs."""
    two = next(found, None)
    for one in expected:
        while two is not None and two.path < one.path:
            differences.append(Difference(path=two.path, field="path", expected=None, found=two.kind))
            two = next(found, None)
        if two is None or two.path != one.path:
            differences.append(Difference(path=one.path, field="path", expected=one.kind, found=None))
        else:
            if one != two:
                differences += _fields(one, two, _EXACT)
            two = next(found, None)
        yield one
    while two is not None:
        differences.append(Difference(path=two.path, field="path", expected=None, found=two.kind))
        two = next(found, None)


_Thing = TypeVar("_Thing", Entry, _Line)


def _pairs(expected: Iterator[_Thing], found: Iterator[_Thing], names: tuple[str, ...]) -> Iterator[Difference]:
    one, two = next(expected, None), next(found, None)
    while one is not None or two is not None:
        if two is None or (one is not None and one.path < two.path):
            assert one is not None
            yield Difference(path=one.path, field="path", expected=one.kind, found=None)
            one = next(expected, None)
        elif one is None or two.path < one.path:
            yield Difference(path=two.path, field="path", expected=None, found=two.kind)
            two = next(found, None)
        else:
            if one != two:
                yield from _fields(one, two, names)
            one, two = next(expected, None), next(found, None)


def _fields(one: _Thing, two: _Thing, names: tuple[str, ...]) -> Iterator[Difference]:
    if one.kind != two.kind:
        yield Difference(path=one.path, field="kind", expected=one.kind, found=two.kind)
        return
    for name in names:
        left, right = getattr(one, name), getattr(two, name)
        if left != right:
            yield Difference(path=one.path, field=name, expected=_said(name, left), found=_said(name, right))


def _said(name: str, value: object) -> str:
    """Return a value as a person reads it, of bounded length."""
    if name == "mode":
        return f"{value:04o}"
    if isinstance(value, bytes):
        return value[:1000].decode("utf-8", "backslashreplace")
    if name == "device" and isinstance(value, tuple):
        return ":".join(map(str, value))
    if name == "xattrs" and isinstance(value, tuple):
        return " ".join(f"{_said('', key)}=0x{content[:64].hex()}" for key, content in value[:16])
    return "" if value is None else str(value)


def _ordered(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Pass entries on and check that paths rise."""
    before: bytes | None = None
    for entry in entries:
        if before is not None and entry.path <= before:
            raise ValueError(f"entries are not sorted by path: {entry.path!r} after {before!r}")
        before = entry.path
        yield entry


def _portable(entries: Iterable[Entry]) -> Iterator[_Line]:
    """Turn entries into what the digest counts."""
    missing = list(_MADE[::-1])
    var = "directory"
    for entry in _ordered(entries):
        while missing and missing[-1] < entry.path:
            yield from _made(missing.pop(), var)
        if missing and missing[-1] == entry.path:
            missing.pop()
            var = entry.kind if entry.path == b"var" else var
        if not belongs_to_apptainer(entry.path):
            yield _line(entry)
    while missing:
        yield from _made(missing.pop(), var)


def _made(path: bytes, var: str) -> Iterator[_Line]:
    if path != b"var/tmp" or var == "directory":
        yield _Line(path, "directory", 0o755 & _COUNTED_MODE, 0, "", b"")


def _line(entry: Entry) -> _Line:
    kind, mode = entry.kind, entry.mode & _COUNTED_MODE
    if kind == "file":
        if entry.blake3 is None:
            raise ValueError(f"a file comes without its blake3: {entry.path!r}")
        return _Line(entry.path, kind, mode, entry.size, entry.blake3, b"")
    if kind == "symlink":
        return _Line(entry.path, kind, 0, 0, "", entry.target)
    if kind in {"character-device", "block-device"}:
        return _Line(entry.path, "file", mode, 0, _EMPTY, b"")
    return _Line(entry.path, kind, mode | 0o500 if not entry.path else mode, 0, "", b"")
