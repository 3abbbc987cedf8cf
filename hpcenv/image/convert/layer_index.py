"""Read one layer of an image: decompress it, read its members, and make an index of them.

Runs on: LOGIN NODE. `layers` merges the indexes.

An index depends only on the layer's diff_id, so all images with this layer share the index. The index has columns with
one value per member, and no Python object per member. In an index of a million members, each member takes less than 250
bytes. An index of 37,000 members loads in some hundredths of a second.

Layers are untrusted. `LayerLimits` limits the memory, disk space and time that layers may take. Every fault in a layer
raises ImageMismatch.
"""

from __future__ import annotations

import hashlib
import json
import queue
import re
import sys
import threading
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Protocol, cast

from hpcenv.errors import Command, FileUnusable, ImageMismatch, RecordInvalid, UsageError
from hpcenv.image.content import tar_stream
from hpcenv.image.content.tar_stream import PULL_AGAIN
from hpcenv.image.content.tree import FileKind, TreeEntry, content_hash

__all__ = ["FORMAT", "FileSink", "LayerIndex", "LayerLimits", "index_layer", "normal_path", "open_blob", "read_ahead"]

# Version of the format. Increase it if the recorded fields or their meaning change; old indexes are then replaced.
FORMAT = 2

# The word that switches a limit off, and the value that the limit then has.
NO_LIMIT = "none"
_UNLIMITED = 2**62 - 1

_MAGIC = b"hpcenv layer index %d\n" % FORMAT
_CHUNK = 1024 * 1024
_GIB = 1024**3
# The largest window that the zstd program decompresses without an option (zstd --long=27), and the message of libzstd
# for a larger window (zstd_errors.h, 1.5.7).
_LARGEST_WINDOW = 1 << 27
_NEEDS_MEMORY = "requires too much memory"
_NAME_BYTES = 255
_PREFIX = b".wh."
_OPAQUE_NAME = b".wh..wh..opq"
# Attributes that belong to the security policy of a different host, or to a different overlay file system. The kernel
# would apply the overlay attributes if this image gets an overlay. umoci 0.4.7 omits the same attributes.
_DROPPED_XATTRS = (b"security.selinux", b"trusted.overlay.")
# Finds an empty, `.` or `..` component.
_ODD = re.compile(rb"(?:^|/)\.{0,2}(?:/|\Z)")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")

# One letter per member. The path of a whiteout is the path that it hides; the path of an opaque whiteout is its
# directory.
LETTERS: dict[str, int] = {
    "file": ord("f"),
    "directory": ord("d"),
    "symlink": ord("l"),
    "hard-link": ord("h"),
    "character-device": ord("c"),
    "block-device": ord("b"),
    "fifo": ord("p"),
}
FILE, DIRECTORY, SYMLINK, HARD_LINK = b"fdlh"
WHITEOUT, OPAQUE = b"wo"
KIND_OF = cast("dict[int, FileKind]", {letter: kind for kind, letter in LETTERS.items()})
_ALL_LETTERS = bytes(sorted([*LETTERS.values(), WHITEOUT, OPAQUE]))


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class LayerLimits:
    """Limits on what an image may contain; real images need much less.

    Attributes:
        entries: members of all layers, and directories that exist only in paths of members. A conversion needs about 1
            KiB of memory for each entry (488 MiB for 500,000 empty files, squashfs-tools 4.6.1), so the default needs
            less than 768 MiB including buffers.
        folder_entries: the number of entries of the largest folder. For several large folders, the limit is for the
            square root of the sum of the squares of their numbers of entries. The time for packing is proportional to
            this sum (see `squashfs`): 41 s of processor time for 60,000 empty files, some minutes for the default.
        unpacked_bytes: uncompressed size of all layers, in bytes; holes of sparse files count, because they are packed
            as zeros.
        ratio: the ratio of uncompressed to compressed bytes of one layer. Holes of sparse files do not count. The ratio
            is checked only if the layer has more than `ratio_from` uncompressed bytes. Deflate can reach 1030; layers
            of programs and libraries have 2 to 6, text has less than 20.
        ratio_from: uncompressed bytes that a layer may have without a check of the ratio.
        metadata_bytes: names, link targets, xattrs and sparse maps of all layers.
        path_bytes, header_bytes, xattr_bytes: limits for one member, see `tar_stream.Bounds`.
    """

    entries: int = 500_000
    folder_entries: int = 100_000
    unpacked_bytes: int = 256 * _GIB
    ratio: int = 100
    ratio_from: int = _GIB
    metadata_bytes: int = 128 * 1024 * 1024
    path_bytes: int = 4095
    header_bytes: int = 1024 * 1024
    xattr_bytes: int = 64 * 1024

    def raised(self, words: Iterable[str]) -> LayerLimits:
        """Return these limits, changed by `NAME=NUMBER` and `NAME=none` options.

        Raises:
            UsageError: a name is unknown, or a number is not positive.
        """
        known = [entry.name for entry in fields(self)]
        changed = {}
        for word in words:
            name, _, number = word.partition("=")
            if name in known and number == NO_LIMIT:
                changed[name] = _UNLIMITED
                continue
            if name not in known or not number.isascii() or not number.isdigit() or not 0 < int(number[:19]) < 2**62:
                raise UsageError(
                    f"`{word}` is not a limit",
                    why="the form of a limit is NAME=NUMBER or NAME=none; the names are "
                    + ", ".join(f"`{entry}`" for entry in known),
                    hint="for example `--limit entries=2000000`",
                )
            changed[name] = int(number)
        return replace(self, **changed)


def exceeded(name: str, limit: int, what: str, *, enough: int | None = None) -> NoReturn:
    """Raise the error for an exceeded limit.

    Args:
        name: the limit.
        limit: its value.
        what: the beginning of the message, such as `a layer has 5 uncompressed bytes`.
        enough: a value that is sufficient for this image; None if the value is unknown, because hpcenv stopped reading.
    """
    raise ImageMismatch(
        f"{what}, more than the limit `{name}` of {limit:,}",
        why="a hostile image can fill memory or disks; hpcenv stops before that happens",
        # `cli/image/` replaces this command by the command that the user typed.
        hint=(
            "if you trust this image: ",
            Command("hpcenv", "image", "build", "--limit", f"{name}={NO_LIMIT if enough is None else enough}"),
        ),
    )


# -- a layer's bytes ----------------------------------------------------------------------


class _Blob:
    """The uncompressed stream of a layer; errors of the decompressor become ImageMismatch."""

    def __init__(self, source: Any, *, path: Path, how: str, bad: tuple[type[BaseException], ...]) -> None:
        self._source = source
        self._path = path
        self._how = how
        self._bad = bad
        self.compressed_size = path.stat().st_size

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes; empty at the end.

        Raises:
            ImageMismatch: the compressed data are damaged or incomplete.
            FileUnusable: the file cannot be read.
        """
        try:
            return cast("bytes", self._source.read(size))
        except self._bad as error:
            if _NEEDS_MEMORY in str(error):
                raise _window_too_large(self._path) from error
            raise ImageMismatch(
                f"the layer `{self._path.name}` cannot be decompressed: {error or type(error).__name__}",
                why=f"it is compressed with {self._how}, and its data are damaged or incomplete",
                hint=PULL_AGAIN,
            ) from error
        except OSError as error:
            raise _unreadable(self._path, error) from error


def _window_too_large(path: Path) -> ImageMismatch:
    return ImageMismatch(
        f"the layer `{path.name}` needs too much memory to be decompressed",
        why=f"{_window(path)}; hpcenv and the zstd program decompress at most {_LARGEST_WINDOW >> 20} MiB",
        hint="the layer is not damaged. Compress it with a smaller window: `zstd --long=27`, or copy the image with "
        "`skopeo copy --dest-compress-format gzip`",
    )


def _window(path: Path) -> str:
    """Return the window of a layer's first zstd frame, for a message."""
    import zstandard

    try:
        with path.open("rb") as file:
            size = zstandard.get_frame_parameters(file.read(tar_stream.BLOCK)).window_size
    except (OSError, zstandard.ZstdError):
        size = 0
    return f"its zstd window has {size >> 20:,} MiB" if size > _LARGEST_WINDOW else "a zstd window in it is larger"


def _unreadable(path: Path, error: OSError) -> FileUnusable:
    return FileUnusable(
        f"the layer `{path}` cannot be read",
        why=error.strerror or str(error),
        hint=PULL_AGAIN,
    )


@contextmanager
def open_blob(path: Path, media_type: str = "") -> Iterator[BinaryIO]:
    """Context manager: the uncompressed bytes of a layer's file.

    The compression is recognised by the first bytes, because media types are often wrong, and docker's schema 2 has no
    media type for zstd. Several gzip members or zstd frames may follow each other.

    Args:
        path: the blob.
        media_type: the layer's media type; used only to recognise encrypted layers.

    Raises:
        ImageMismatch: the layer is encrypted, or OCI does not define its compression. While the bytes are read: the
            data are damaged.
        FileUnusable: the file cannot be read.
    """
    if media_type.endswith("+encrypted"):
        raise ImageMismatch(
            f"the layer `{path.name}` is encrypted",
            why=f"its media type is `{media_type}`",
            hint="decrypt the image first, for example with `skopeo copy --decryption-key`",
        )
    try:
        file = path.open("rb")
    except OSError as error:
        raise _unreadable(path, error) from error
    with file:
        how = _compression(file, path)
        source, bad = _decompressor(file, how)
        with source:
            yield cast("BinaryIO", _Blob(source, path=path, how=how, bad=bad))


def _compression(file: BinaryIO, path: Path) -> str:
    try:
        start = file.read(tar_stream.BLOCK)
        file.seek(0)
    except OSError as error:
        raise _unreadable(path, error) from error
    # Check for tar first, because the first name in a tar archive can look like the start of a different format.
    if start[257:262] == b"ustar":
        return "nothing"
    if start[:2] == b"\x1f\x8b":
        return "gzip"
    # zstd data begin with a frame, or with a skippable frame (RFC 8878 3.1.2).
    if start[:4] == b"\x28\xb5\x2f\xfd" or (start[1:4] == b"\x2a\x4d\x18" and start[0] >> 4 == 5):
        return "zstd"
    for magic, name in ((b"BZh", "bzip2"), (b"\xfd7zXZ\0", "xz"), (b"\x04\x22\x4d\x18", "lz4")):
        if start.startswith(magic):
            raise ImageMismatch(
                f"the layer `{path.name}` is compressed with {name}",
                why="OCI image-spec 1.1 defines only uncompressed, gzip and zstd layers",
                hint="convert the image: skopeo copy --dest-compress-format gzip",
            )
    return "nothing"


def _decompressor(file: BinaryIO, how: str) -> tuple[Any, tuple[type[BaseException], ...]]:
    """Return a decompressor, and the exceptions that it raises for damaged data."""
    if how == "gzip":
        try:
            from isal import igzip as fast
            from isal import isal_zlib
        except ImportError:
            import gzip

            return gzip.GzipFile(fileobj=file, mode="rb"), (gzip.BadGzipFile, EOFError, zlib.error)
        igzip: Any = fast  # the type hints of this package are incomplete
        bad = (igzip.BadGzipFile, EOFError, cast("type[Exception]", isal_zlib.error), zlib.error)
        return igzip.IGzipFile(fileobj=file, mode="rb"), bad
    if how == "zstd":
        import zstandard

        decoder = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
        return decoder.stream_reader(file, read_across_frames=True, closefd=False), (zstandard.ZstdError, EOFError)
    return file, ()


@contextmanager
def read_ahead(stream: _Readable) -> Iterator[Iterator[bytes]]:
    """Context manager: read a stream in a thread, a few chunks ahead. Decompressors release the GIL."""
    chunks: queue.Queue[bytes | BaseException] = queue.Queue(4)
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                chunk = stream.read(_CHUNK)
                chunks.put(chunk)
                if not chunk:
                    return
        except BaseException as error:  # noqa: BLE001 - raised again in the reader's thread
            chunks.put(error)

    def arrive() -> Iterator[bytes]:
        while True:
            chunk = chunks.get()
            if isinstance(chunk, BaseException):
                raise chunk
            if not chunk:
                return
            yield chunk

    worker = threading.Thread(target=read, name="hpcenv-layer", daemon=True)
    worker.start()
    try:
        yield arrive()
    finally:
        stop.set()
        while worker.is_alive():
            with suppress(queue.Empty):
                chunks.get(timeout=0.02)
        worker.join()


class _Hasher:
    """Computes the sha256 of a stream in another thread."""

    def __init__(self) -> None:
        self._chunks: queue.Queue[bytes] = queue.Queue(4)
        self._sum = hashlib.sha256()
        self._error: BaseException | None = None
        self._worker = threading.Thread(target=self._work, name="hpcenv-sha256", daemon=True)
        self._worker.start()

    def _work(self) -> None:
        try:
            while chunk := self._chunks.get():
                self._sum.update(chunk)
        except BaseException as error:  # noqa: BLE001 - it is raised again by `finish`
            self._error = error
            while self._chunks.get():
                pass

    def update(self, chunk: bytes) -> None:
        self._chunks.put(chunk)

    def finish(self) -> str:
        self._chunks.put(b"")
        self._worker.join()
        if self._error is not None:
            raise self._error
        return f"sha256:{self._sum.hexdigest()}"


# -- the index of one layer ---------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class LayerIndex:
    """The members of one layer, in columns with one value per member, in the order of the tar.

    Attributes:
        diff_id: digest of the uncompressed layer.
        unpacked: size of the uncompressed layer in bytes, including holes of sparse files.
        kinds: a letter per member.
        sizes: the sizes of files, including holes.
        offsets: where a file's data begin in the uncompressed stream.
        blake3: 32 bytes per member; these bytes have a meaning only for files.
        paths: relative to the root, normalised, separated by NUL.
        ends: where each path ends in `paths`.
        targets, devices, xattrs, sparse: the values by the position of the member; only for members that have such a
            value.
    """

    diff_id: str
    unpacked: int = 0
    kinds: bytes = b""
    modes: array[int] = field(default_factory=lambda: array("H"))
    uids: array[int] = field(default_factory=lambda: array("I"))
    gids: array[int] = field(default_factory=lambda: array("I"))
    mtimes: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))
    offsets: array[int] = field(default_factory=lambda: array("q"))
    blake3: bytes = b""
    paths: bytes = b""
    ends: array[int] = field(default_factory=lambda: array("q"))
    targets: dict[int, bytes] = field(default_factory=dict)
    devices: dict[int, tuple[int, int]] = field(default_factory=dict)
    xattrs: dict[int, tuple[tuple[bytes, bytes], ...]] = field(default_factory=dict)
    sparse: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.kinds)

    def path(self, position: int) -> bytes:
        """Return a member's path."""
        return self.paths[self.ends[position - 1] + 1 if position else 0 : self.ends[position]]

    def stored(self, position: int) -> int:
        """Return how many bytes of the stream are a file's data."""
        pieces = self.sparse.get(position)
        return self.sizes[position] if pieces is None else sum(length for _, length in pieces)

    def entry(self, position: int, letter: int, path: bytes, inode: bytes) -> TreeEntry:
        """Return a member of kind `letter` as an entry at `path`."""
        return TreeEntry(
            path=path,
            kind=KIND_OF[letter],
            mode=self.modes[position],
            uid=self.uids[position],
            gid=self.gids[position],
            mtime=self.mtimes[position],
            size=self.sizes[position],
            blake3=self.blake3[32 * position : 32 * position + 32].hex() if letter == FILE else None,
            target=self.targets[position] if letter == SYMLINK else b"",
            device=self.devices.get(position),
            xattrs=self.xattrs.get(position, ()),
            inode=inode,
        )

    def linked(self) -> Iterator[int]:
        """Yield the positions of hard links."""
        return (at for at in self.targets if self.kinds[at] == HARD_LINK)

    @property
    def metadata_bytes(self) -> int:
        """Bytes of names and other metadata, as `LayerLimits.metadata_bytes` counts them."""
        return (
            len(self.paths)
            + sum(map(len, self.targets.values()))
            + sum(len(name) + len(value) for pairs in self.xattrs.values() for name, value in pairs)
            + sum(16 * len(pieces) for pieces in self.sparse.values())
        )

    def to_bytes(self) -> bytes:
        """Return the content of the index file, for `from_bytes`."""
        columns = [_little(getattr(self, name)).tobytes() for name in _COLUMNS]
        targets = b"\0".join(self.targets[at] for at in sorted(self.targets))
        rare = {
            "devices": [[at, *numbers] for at, numbers in self.devices.items()],
            "xattrs": [[at, [[name.hex(), value.hex()] for name, value in pairs]] for at, pairs in self.xattrs.items()],
            "sparse": [[at, [list(piece) for piece in pieces]] for at, pieces in self.sparse.items()],
        }
        sections = [self.kinds, *columns, self.blake3, self.paths, targets, json.dumps(rare).encode()]
        head = {
            "diff_id": self.diff_id,
            "unpacked": self.unpacked,
            "sections": [len(section) for section in sections],
        }
        payload = b"".join([json.dumps(head).encode(), b"\n", *sections])
        packed = b"%d\n" % len(payload) + zlib.compress(payload, 1)
        return _MAGIC + hashlib.sha256(packed).hexdigest().encode() + b"\n" + packed

    @classmethod
    def from_bytes(cls, data: bytes, *, diff_id: str, limits: LayerLimits | None = None) -> LayerIndex:
        """Read an index file.

        Args:
            data: the content of the file.
            diff_id: the layer's diff_id.
            limits: see `index_layer`.

        Raises:
            RecordInvalid: the index is damaged, or was made for another layer or by another version of hpcenv. The
                caller must index the layer again.
        """
        try:
            return _load(data, diff_id, limits or LayerLimits())
        except (ValueError, TypeError, KeyError, LookupError, OverflowError, RecursionError, zlib.error) as error:
            raise RecordInvalid(
                f"the stored index of the layer `{diff_id}` cannot be used",
                why=str(error) or type(error).__name__,
                hint=(
                    "no action is needed: ",
                    Command("hpcenv", "image", "pull", "REFERENCE"),
                    " indexes the layer again",
                ),
            ) from error


_COLUMNS = ("modes", "uids", "gids", "mtimes", "sizes", "offsets")


def _little(column: array[int]) -> array[int]:
    """Return the column in the byte order of the file format."""
    if sys.byteorder == "little":
        return column
    swapped = array(column.typecode, column)
    swapped.byteswap()
    return swapped


def _load(data: bytes, diff_id: str, limits: LayerLimits) -> LayerIndex:
    if not data.startswith(_MAGIC):
        raise ValueError(f"it does not begin like an index of format {FORMAT}")
    checksum, _, packed = data[len(_MAGIC) :].partition(b"\n")
    if hashlib.sha256(packed).hexdigest().encode() != checksum:
        raise ValueError("its checksum is wrong")
    size, _, squeezed = packed.partition(b"\n")
    most = 8 * limits.metadata_bytes + 128 * limits.entries
    if not size.isdigit() or len(size) > 12 or int(size) > most:
        raise ValueError(f"it claims to have {size[:20]!r} uncompressed bytes")
    unpacker = zlib.decompressobj()
    payload = unpacker.decompress(squeezed, int(size) + 1)
    if len(payload) != int(size):
        raise ValueError("it does not have the size in its header")
    head, _, body = payload.partition(b"\n")
    parsed = json.loads(head)
    if parsed["diff_id"] != diff_id:
        raise ValueError("it belongs to another layer")
    lengths = parsed["sections"]
    if len(lengths) != 5 + len(_COLUMNS) or any(type(n) is not int or n < 0 for n in lengths):
        raise ValueError("its sections are not the sections of the format")
    if sum(lengths) != len(body):
        raise ValueError("its sections do not add up")
    sections = []
    at = 0
    for length in lengths:
        sections.append(body[at : at + length])
        at += length
    index = LayerIndex(diff_id=diff_id, unpacked=parsed["unpacked"], kinds=sections[0])
    for name, section in zip(_COLUMNS, sections[1:-4], strict=True):
        column = getattr(index, name)
        column.frombytes(section)
        setattr(index, name, _little(column))
    index.blake3, index.paths = sections[-4:-2]
    index.ends = _ends(index.paths, len(index))
    holders = [at for at, letter in enumerate(index.kinds) if letter in b"lh"]
    targets = sections[-2].split(b"\0") if holders else []
    index.targets = dict(zip(holders, targets, strict=True))
    rare = json.loads(sections[-1])
    index.devices = {at: (major, minor) for at, major, minor in rare["devices"]}
    index.xattrs = {
        at: tuple((bytes.fromhex(name), bytes.fromhex(value)) for name, value in pairs) for at, pairs in rare["xattrs"]
    }
    index.sparse = {at: tuple((start, length) for start, length in pieces) for at, pieces in rare["sparse"]}
    _check_index(index, limits)
    return index


def _ends(paths: bytes, count: int) -> array[int]:
    ends = array("q")
    at = -1
    for _ in range(count - 1):
        at = paths.index(b"\0", at + 1)
        ends.append(at)
    if count:
        ends.append(len(paths))
    if paths.count(b"\0") != max(count - 1, 0):
        raise ValueError("it has more paths than members")
    return ends


def _normalised(paths: bytes) -> bool:
    """Return whether NUL-separated paths have no redundant slash, no `.` and no `..`."""
    if paths.startswith(b"/") or paths.endswith(b"/") or any(bad in paths for bad in (b"\0/", b"/\0", b"//")):
        return False
    framed = b"/" + paths.replace(b"\0", b"/") + b"/"
    return b"/./" not in framed and b"/../" not in framed


def _check_index(index: LayerIndex, limits: LayerLimits) -> None:
    """Refuse an index with which `merge` or `emit` would fail. Wrong content is found when the SIF is compared."""
    count = len(index)
    if count > limits.entries or index.metadata_bytes > limits.metadata_bytes:
        raise ValueError("it is larger than the limits allow")
    if any(len(getattr(index, name)) != count for name in _COLUMNS) or len(index.blake3) != 32 * count:
        raise ValueError("its columns are of different lengths")
    if index.kinds.strip(_ALL_LETTERS):
        raise ValueError("it has members of an unknown kind")
    if type(index.unpacked) is not int or index.unpacked < 0:
        raise ValueError("it has no size")
    if not _normalised(index.paths) or not all(_normalised(index.targets[at]) for at in index.linked()):
        raise ValueError("it has paths that are not normalised")
    if max(index.modes, default=0) > 0o7777:
        raise ValueError("it has invalid modes")
    for rare, letters in ((index.devices, b"cb"), (index.sparse, b"f"), (index.xattrs, _ALL_LETTERS)):
        if any(type(at) is not int or not 0 <= at < count or index.kinds[at] not in letters for at in rare):
            raise ValueError("it has attributes of members that do not exist")
    if any(letter in b"cb" and at not in index.devices for at, letter in enumerate(index.kinds)):
        raise ValueError("it has devices without numbers")
    numbers = [number for pair in index.devices.values() for number in pair]
    if any(type(number) is not int or not 0 <= number <= 0xFFFFF for number in numbers):
        raise ValueError("it has invalid device numbers")
    _check_offsets(index)


def _check_offsets(index: LayerIndex) -> None:
    """Check that the data of files do not overlap in the stream."""
    end = 0
    for at, letter in enumerate(index.kinds):
        if letter != FILE:
            continue
        size, start = index.sizes[at], 0
        for offset, length in index.sparse.get(at, ()):
            if type(offset) is not int or type(length) is not int or offset < start or length < 0:
                raise ValueError("it has an invalid sparse file")
            start = offset + length
        if size < start or index.offsets[at] < end:
            raise ValueError("it has files that overlap")
        end = index.offsets[at] + index.stored(at)


class FileSink(Protocol):
    """Receives the files of a layer while the layer is indexed."""

    def begin_file(self, index: LayerIndex, at: int, path: bytes) -> bool:
        """Return True to receive this file's content. `index` has all fields of the file except its hash."""

    def write(self, piece: memoryview, /) -> None:
        """Receive a piece of the content; holes are zeros."""

    def end_file(self) -> None:
        """Note that the content of the file is complete."""


def index_layer(
    stream: _Readable,
    *,
    diff_id: str,
    compressed_size: int | None = None,
    limits: LayerLimits | None = None,
    on_bytes: Callable[[int], None] | None = None,
    sink: FileSink | None = None,
    before: int = 0,
) -> LayerIndex:
    """Read a layer once and record its members, with the BLAKE3 of each file's content.

    Two more threads decompress and hash in parallel to the caller's thread. These two threads together use 10 MiB of
    memory.

    Args:
        stream: the uncompressed layer, for example from `open_blob`.
        diff_id: the sha256 of the layer, from the image's config (`sha256:HEX`).
        compressed_size: size of the blob in bytes, for `LayerLimits.ratio`. If None, the size comes from `stream`,
            which must be a stream of `open_blob`.
        limits: see `LayerLimits`.
        on_bytes: called from time to time with the number of uncompressed bytes so far.
        sink: receives the files, before the digest of the layer is checked.
        before: the number of members of the layers that were read before this layer; `LayerLimits.entries` counts them
            too.

    Raises:
        ImageMismatch: the bytes do not have the diff_id, the archive is damaged or hostile, or a limit is exceeded.
        FileUnusable: the file cannot be read.
        Exception: an error of `sink`.
    """
    if not _DIGEST.match(diff_id):
        raise ImageMismatch(
            f"the image's config names a layer `{diff_id[:100]}`",
            why="a diff_id is sha256: and 64 hexadecimal digits",
            hint=PULL_AGAIN,
        )
    if compressed_size is None:
        compressed_size = getattr(stream, "compressed_size", None)
    builder = _Builder(diff_id, limits or LayerLimits(), compressed_size, sink, before)
    wrong: ImageMismatch | None = None
    hasher = _Hasher()
    try:
        builder.read(stream, hasher, on_bytes)
    except ImageMismatch as error:
        wrong = error
    finally:
        digest = hasher.finish()
    if wrong is not None:
        raise located(wrong, diff_id) from wrong
    if digest != diff_id:
        raise ImageMismatch(
            f"a layer's content has the digest `{digest}`",
            why=f"in the image's config it is `{diff_id}`",
            hint=PULL_AGAIN,
        )
    return builder.finish()


class _Builder:
    """Builds the index from the members of a layer."""

    def __init__(
        self, diff_id: str, limits: LayerLimits, compressed: int | None, sink: FileSink | None, before: int
    ) -> None:
        self._before = before
        self.index = LayerIndex(diff_id=diff_id)
        self._holes = 0
        self._limits = limits
        self._compressed = compressed
        self._sink = sink
        self._kinds = bytearray()
        self._sums = bytearray()
        self._paths = bytearray()
        self._metadata = 0

    def read(self, stream: _Readable, hasher: _Hasher, on_bytes: Callable[[int], None] | None) -> None:
        """Read all members of a layer, and pass its bytes to the hasher."""

        def pass_on(chunks: Iterator[bytes]) -> Iterator[bytes]:
            for chunk in chunks:
                hasher.update(chunk)
                self._grow(len(chunk))
                if on_bytes is not None:
                    on_bytes(self.index.unpacked - self._holes)
                yield chunk

        limits = self._limits
        bounds = tar_stream.Bounds(
            path_bytes=limits.path_bytes, header_bytes=limits.header_bytes, xattr_bytes=limits.xattr_bytes
        )
        with read_ahead(stream) as chunks:
            reader = tar_stream.Reader(pass_on(chunks), bounds)
            for member in reader:
                self._add(member, reader)

    def _grow(self, count: int) -> None:
        """Add to the number of uncompressed bytes of the layer; refuse the layer if it has too many."""
        self.index.unpacked += count
        unpacked, limits = self.index.unpacked, self._limits
        if unpacked > limits.unpacked_bytes:
            exceeded("unpacked_bytes", limits.unpacked_bytes, f"a layer has {unpacked:,} uncompressed bytes")
        data = unpacked - self._holes
        if self._compressed is not None and data > max(limits.ratio_from, limits.ratio * self._compressed):
            times = data // max(self._compressed, 1)
            what = f"a layer of {self._compressed:,} bytes has at least {times:,} times as many uncompressed bytes"
            exceeded("ratio", limits.ratio, what)

    def _add(self, member: tar_stream.Member, reader: tar_stream.Reader) -> None:
        kind, path = _kind_and_path(member)
        if kind is None:
            return
        index, at = self.index, len(self._kinds)
        if self._before + at >= self._limits.entries:
            exceeded("entries", self._limits.entries, "the image has more entries")
        if kind == FILE:
            if member.sparse is not None:
                index.sparse[at] = member.sparse
        elif kind == SYMLINK:
            index.targets[at] = member.target
        elif kind == HARD_LINK:
            index.targets[at] = normal_path(member.target, "link target")
        elif member.device is not None:
            index.devices[at] = member.device
        if member.xattrs and kind not in b"hwo":
            xattrs = tuple(pair for pair in member.xattrs if not pair[0].startswith(_DROPPED_XATTRS))
            if xattrs:
                index.xattrs[at] = xattrs
        self._count(member, path)
        self._kinds.append(kind)
        self._paths += b"\0" + path if at else path
        index.ends.append(len(self._paths))
        # On Linux the mode of a symbolic link is always 0777.
        index.modes.append(0o777 if kind == SYMLINK else member.mode)
        index.uids.append(member.uid)
        index.gids.append(member.gid)
        index.mtimes.append(member.mtime)
        index.sizes.append(member.size if kind == FILE else 0)
        index.offsets.append(member.offset)
        self._sums += self._content(member, reader, at, path) if kind == FILE else _ZERO_SUM

    def _content(self, member: tar_stream.Member, reader: tar_stream.Reader, at: int, path: bytes) -> bytes:
        """Return the digest of a file's content."""
        pieces: Iterable[memoryview] = reader.stored()
        if member.sparse is not None:
            self._holes += member.size - member.stored
            self._grow(member.size - member.stored)
            pieces = tar_stream.expand(pieces, member.size, member.sparse)
        summed = content_hash()
        sink = self._sink
        if sink is None or not sink.begin_file(self.index, at, path):
            for piece in pieces:
                summed.update(piece)
            return summed.digest()
        for piece in pieces:
            summed.update(piece)
            sink.write(piece)
        sink.end_file()
        return summed.digest()

    def _count(self, member: tar_stream.Member, path: bytes) -> None:
        self._metadata += len(path) + len(member.target) + 1
        if member.xattrs:
            self._metadata += sum(len(name) + len(value) for name, value in member.xattrs)
        if member.sparse:
            self._metadata += 16 * len(member.sparse)
        if self._metadata > self._limits.metadata_bytes:
            what = f"the names and attributes of a layer take {self._metadata:,} bytes"
            exceeded("metadata_bytes", self._limits.metadata_bytes, what)

    def finish(self) -> LayerIndex:
        self.index.kinds = bytes(self._kinds)
        self.index.blake3 = bytes(self._sums)
        self.index.paths = bytes(self._paths)
        return self.index


_ZERO_SUM = bytes(32)


def _kind_and_path(member: tar_stream.Member) -> tuple[int | None, bytes]:
    """Return a member's letter and path; the letter is None for a member that must be ignored."""
    path = normal_path(member.name, "name")
    kind = LETTERS[member.kind]
    if not path and kind != DIRECTORY:
        raise refused("the root of a layer is not a directory", member.name)
    if _PREFIX not in path:
        return kind, path
    parent, _, name = path.rpartition(b"/")
    if (b"/" + parent).find(b"/" + _PREFIX) >= 0:
        return None, path
    if not name.startswith(_PREFIX):
        return kind, path
    if name == _OPAQUE_NAME:
        return OPAQUE, parent
    # AUFS used names such as .wh..wh.plnk for its own files; ignore these files.
    if name.startswith(_PREFIX + _PREFIX):
        return None, path
    hidden = name[len(_PREFIX) :]
    if hidden in {b"", b".", b".."}:
        raise refused("a whiteout names no file", member.name)
    return WHITEOUT, parent + b"/" + hidden if parent else hidden


def normal_path(name: bytes, what: str = "name") -> bytes:
    """Return a member's path relative to the root, without `.`, `..` and slashes at its ends."""
    path = name.removeprefix(b"./").strip(b"/")
    if _ODD.search(path):
        parts: list[bytes] = []
        for part in path.split(b"/"):
            if part == b"..":
                if not parts:
                    raise refused(f"a member's {what} points outside the image", name)
                parts.pop()
            elif part not in {b"", b"."}:
                parts.append(part)
        path = b"/".join(parts)
    if len(path) > _NAME_BYTES and max(map(len, path.split(b"/"))) > _NAME_BYTES:
        raise refused(f"a member's {what} has a part of more than {_NAME_BYTES} bytes, the limit of Linux", name)
    return path


def located(error: ImageMismatch, diff_id: str) -> ImageMismatch:
    """Return the same error with the diff_id of the layer."""
    return error.changed(why=f"{error.why}\nit is the layer with the diff_id {diff_id}")


def refused(what: str, name: bytes) -> ImageMismatch:
    """Return the error for a member that occurs only in damaged or hostile images."""
    return ImageMismatch(
        f"a layer is refused: {what}",
        why=f"the name of the member is `{shown(name)}`",
        hint="use this image only if you know how it was made; list its members with `tar -tv`",
    )


def shown(name: bytes) -> str:
    """Return a name as one short printable line."""
    text = name[:200].decode("utf-8", "backslashreplace")
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text)
