"""A root file system as a list of entries: its digest, and the differences between two file systems.

Runs on: LOGIN NODE. Pure. Paths are bytes, because file names of Linux are bytes, not text. Entries are sorted by the
bytes of their whole paths, so two trees with a million paths can be compared although neither tree is kept in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, Protocol, TypeVar

FileKind = Literal["file", "directory", "symlink", "character-device", "block-device", "fifo", "socket"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeEntry:
    """One path of a root file system.

    Attributes:
        path: relative to the root, no leading slash, no `.` or `..`; `b""` is the root itself.
        mode: permission bits with setuid, setgid and sticky (07777).
        uid, gid: the ids of the owner and the group.
        mtime: seconds since 1970.
        size: size of a file in bytes; 0 for other kinds.
        blake3: hexadecimal BLAKE3 (256 bits) of a file's content; None for other kinds.
        target: the target of a symbolic link.
        device: major and minor of a device.
        xattrs: extended attributes with their full names, sorted by name.
        inode: for a file with several hard links, the smallest of its paths; for any other file, its only path.
    """

    path: bytes
    kind: FileKind
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

# Seen on SIFs of Apptainer 1.4.5, built by root and by an ordinary user, umask 022 and 077.
# Paths that Apptainer adds, replaces or empties in every image:
_WRITTEN = frozenset({
    b".exec", b".run", b".shell", b".singularity.d", b".test", b"environment", b"singularity",
    b"etc/hosts", b"etc/resolv.conf",
})  # fmt: skip
# Directories that Apptainer creates with mode 0755 if the image does not have the path:
_MADE = (b"dev", b"etc", b"home", b"proc", b"root", b"sys", b"tmp", b"var", b"var/tmp")

# BLAKE3 of an empty file.
_EMPTY = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
# All bits except the write bits.
_COUNTED_MODE = 0o7555

# Fields of an exact comparison, in the order in which they are reported.
_EXACT = ("mode", "uid", "gid", "mtime", "size", "blake3", "target", "device", "xattrs", "inode")


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeDifference:
    """One field of one path in which two trees differ.

    If only one tree has the path, `field` is `path`, the value of this tree is the kind of the entry, and the other
    value is None. If both trees have the path, `field` is the name of an attribute, and the values are the values of
    this attribute.
    """

    path: bytes
    field: str
    expected: str | None
    found: str | None


class _TreeLine(NamedTuple):
    """The part of an entry that the digest covers."""

    path: bytes
    kind: str
    mode: int
    size: int
    blake3: str
    target: bytes


_LETTERS = {"file": b"f", "directory": b"d", "symlink": b"l", "fifo": b"p", "socket": b"s"}


class ContentHash(Protocol):
    """A hash of a file's content, with the methods of `hashlib` objects."""

    def update(self, data: bytes | bytearray | memoryview, /) -> object:
        """Add content."""

    def digest(self) -> bytes:
        """Return the digest, 32 bytes."""

    def hexdigest(self) -> str:
        """Return the digest in hexadecimal."""


def content_hash() -> ContentHash:
    """Return a new, empty hash object for the content of one file: BLAKE3, 256 bits.

    A conversion hashes each byte of an image three times. On processors without SHA instructions
    (Intel before Ice Lake) SHA-256 reaches 0.36 GB/s and BLAKE3 5 GB/s (measured on such a 2.5 GHz
    Xeon). The digests of layers are SHA-256, as OCI requires.
    """
    return _blake3()()


@cache
def _blake3() -> Callable[[], ContentHash]:
    from blake3 import blake3

    return blake3


def belongs_to_apptainer(path: bytes) -> bool:
    """Return whether Apptainer itself writes a path; the digest does not cover such paths."""
    return path in _WRITTEN or path.startswith(b".singularity.d/")


def tree_digest(entries: Iterable[TreeEntry]) -> str:
    r"""Return the portable identity of a root file system: a digest of everything that a program can read in it.

    The digest is the same if hpcenv converts an image, or if root or an ordinary user converts it with `apptainer
    build`, on any machine, with any squashfs-tools. The digest is computed as follows (version `hpcenv-tree-v1`; NUL is
    the byte 0, numbers are ASCII):

    1. Omit the paths `.exec`, `.run`, `.shell`, `.singularity.d` and all below it,
       `.test`, `environment`, `singularity`, `etc/hosts`, `etc/resolv.conf`.
    2. Add each of the directories `dev etc home proc root sys tmp var var/tmp` that is
       missing, with mode 0755; `var/tmp` only if `var` is a directory. Add the
       permissions 0700 to the mode of the root directory, whose path is empty.
    3. Treat a block or character device as an empty file of the same mode.
    4. Sort by the bytes of the path, relative to the root and without a leading slash.
    5. sha256 over `hpcenv-tree-v1` NUL and, for each path,
       LETTER NUL MODE NUL SIZE NUL CONTENT NUL PATH NUL. LETTER is `f` file, `d` directory,
       `l` symbolic link, `p` fifo, `s` socket. MODE is the permission bits with setuid, setgid
       and sticky, without the three write bits (mode & 07555), in octal without leading zeros,
       and 0 for a symbolic link. SIZE is in bytes for a file, and 0 for other kinds. CONTENT is
       the hexadecimal BLAKE3 of a file, the target of a symbolic link, or nothing.

    The digest does not cover owners, times, xattrs and device numbers, because an unprivileged `apptainer build` loses
    them. The digest does not cover hard links, because they do not change the content that is read. The digest does not
    cover write bits, because they have no effect in a read-only image. Also, the umask of `apptainer build` (0002)
    decides the write bits of directories that no layer contains. If the owner of a file cannot read it, an unprivileged
    Apptainer 1.4.5 writes an empty file. This Apptainer also omits directories that their owner cannot read, without a
    message. The content of SIFs that are made in this way is different, so their digest is different too.

    Args:
        entries: sorted by path.

    Raises:
        ValueError: the entries are not sorted, or a file has no blake3.
    """
    digest = hashlib.sha256(DIGEST_FORMAT + b"\0")
    for line in _portable(entries):
        content = line.blake3.encode() if line.kind == "file" else line.target
        digest.update(b"%s\0%o\0%d\0%s\0%s\0" % (_LETTERS[line.kind], line.mode, line.size, content, line.path))
    return f"sha256:{digest.hexdigest()}"


def compare(expected: Iterable[TreeEntry], found: Iterable[TreeEntry], *, exact: bool) -> tuple[TreeDifference, ...]:
    """Return the differences between two trees, sorted by path.

    Args:
        expected, found: the entries of the two trees, sorted by path.
        exact: whether to compare every attribute of every path. If `exact` is false, only the fields that `tree_digest`
            covers are compared. Then the result is empty if and only if the digests are equal.

    Raises:
        ValueError: see `tree_digest`.
    """
    if exact:
        return tuple(_pairs(_ordered(expected), _ordered(found), _EXACT))
    return tuple(_pairs(_portable(expected), _portable(found), ("mode", "size", "blake3", "target")))


def compare_and_digest(
    expected: Iterable[TreeEntry], found: Iterable[TreeEntry]
) -> tuple[tuple[TreeDifference, ...], str]:
    """Compare every attribute of every path, and compute the digest of the expected tree.

    The results are the same as those of `compare(..., exact=True)` and `tree_digest(expected)`, but the entries are
    read only once.

    Raises:
        ValueError: see `tree_digest`.
    """
    differences: list[TreeDifference] = []
    digest = tree_digest(_compared(expected, _ordered(found), differences))
    return tuple(differences), digest


def _compared(
    expected: Iterable[TreeEntry], found: Iterator[TreeEntry], differences: list[TreeDifference]
) -> Iterator[TreeEntry]:
    """Yield the expected entries, and collect the differences between them and the other tree."""
    two = next(found, None)
    for one in expected:
        while two is not None and two.path < one.path:
            differences.append(TreeDifference(path=two.path, field="path", expected=None, found=two.kind))
            two = next(found, None)
        if two is None or two.path != one.path:
            differences.append(TreeDifference(path=one.path, field="path", expected=one.kind, found=None))
        else:
            if one != two:
                differences += _fields(one, two, _EXACT)
            two = next(found, None)
        yield one
    while two is not None:
        differences.append(TreeDifference(path=two.path, field="path", expected=None, found=two.kind))
        two = next(found, None)


_Item = TypeVar("_Item", TreeEntry, _TreeLine)


def _pairs(expected: Iterator[_Item], found: Iterator[_Item], names: tuple[str, ...]) -> Iterator[TreeDifference]:
    one, two = next(expected, None), next(found, None)
    while one is not None or two is not None:
        if two is None or (one is not None and one.path < two.path):
            assert one is not None
            yield TreeDifference(path=one.path, field="path", expected=one.kind, found=None)
            one = next(expected, None)
        elif one is None or two.path < one.path:
            yield TreeDifference(path=two.path, field="path", expected=None, found=two.kind)
            two = next(found, None)
        else:
            if one != two:
                yield from _fields(one, two, names)
            one, two = next(expected, None), next(found, None)


def _fields(one: _Item, two: _Item, names: tuple[str, ...]) -> Iterator[TreeDifference]:
    if one.kind != two.kind:
        yield TreeDifference(path=one.path, field="kind", expected=one.kind, found=two.kind)
        return
    for name in names:
        left, right = getattr(one, name), getattr(two, name)
        if left != right:
            yield TreeDifference(path=one.path, field=name, expected=_shown(name, left), found=_shown(name, right))


def _shown(name: str, value: object) -> str:
    """Return a value for messages, of limited length."""
    if name == "mode":
        return f"{value:04o}"
    if isinstance(value, bytes):
        return value[:1000].decode("utf-8", "backslashreplace")
    if name == "device" and isinstance(value, tuple):
        return ":".join(map(str, value))
    if name == "xattrs" and isinstance(value, tuple):
        return " ".join(f"{_shown('', key)}=0x{content[:64].hex()}" for key, content in value[:16])
    return "" if value is None else str(value)


def _ordered(entries: Iterable[TreeEntry]) -> Iterator[TreeEntry]:
    """Yield the entries, and check that they are sorted."""
    before: bytes | None = None
    for entry in entries:
        if before is not None and entry.path <= before:
            raise ValueError(f"entries are not sorted by path: {entry.path!r} after {before!r}")
        before = entry.path
        yield entry


def _portable(entries: Iterable[TreeEntry]) -> Iterator[_TreeLine]:
    """Return the part of the entries that the digest covers."""
    missing = list(_MADE[::-1])
    var = "directory"
    for entry in _ordered(entries):
        while missing and missing[-1] < entry.path:
            yield from _created(missing.pop(), var)
        if missing and missing[-1] == entry.path:
            missing.pop()
            var = entry.kind if entry.path == b"var" else var
        if not belongs_to_apptainer(entry.path):
            yield _line(entry)
    while missing:
        yield from _created(missing.pop(), var)


def _created(path: bytes, var: str) -> Iterator[_TreeLine]:
    if path != b"var/tmp" or var == "directory":
        yield _TreeLine(path, "directory", 0o755 & _COUNTED_MODE, 0, "", b"")


def _line(entry: TreeEntry) -> _TreeLine:
    kind, mode = entry.kind, entry.mode & _COUNTED_MODE
    if kind == "file":
        if entry.blake3 is None:
            raise ValueError(f"a file has no blake3: {entry.path!r}")
        return _TreeLine(entry.path, kind, mode, entry.size, entry.blake3, b"")
    if kind == "symlink":
        return _TreeLine(entry.path, kind, 0, 0, "", entry.target)
    if kind in {"character-device", "block-device"}:
        return _TreeLine(entry.path, "file", mode, 0, _EMPTY, b"")
    return _TreeLine(entry.path, kind, mode | 0o500 if not entry.path else mode, 0, "", b"")
