"""One layer of an image, read once: its bytes, its members, and the index that is kept of them.

Runs on: LOGIN NODE (and the compute node of `--on-cluster`). `layers` merges the indexes.

An index depends on the layer's diff_id only, so every image that has the layer uses it
again. It holds one position per member in columns, not an object per member: a million
members stay below 250 bytes each, and 37,000 load in some hundredths of a second.

Layers are untrusted. `Limits` bounds what they may cost; whatever is wrong with them is an
ImageMismatch.
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

from hpcenv.adapters import tar_stream
from hpcenv.errors import FileUnusable, ImageMismatch, RecordInvalid, UsageError
from hpcenv.model.tree import Entry, Kind, content_hash

__all__ = ["FORMAT", "FileSink", "LayerIndex", "Limits", "index_layer", "normal_path", "open_blob", "read_ahead"]

# Raise it when what is recorded of a member, or its meaning, changes: kept indexes are then made again.
FORMAT = 2

_MAGIC = b"hpcenv layer index %d\n" % FORMAT
_CHUNK = 1024 * 1024
_GIB = 1024**3
_NAME_BYTES = 255
_PREFIX = b".wh."
_OPAQUE_NAME = b".wh..wh..opq"
# Labels of another host's policy, and orders to an overlay that lay over another tree: an
# overlay over this image would obey them. umoci 0.4.7 leaves out the same.
_DROPPED_XATTRS = (b"security.selinux", b"trusted.overlay.")
# An empty, `.` or `..` component.
_ODD = re.compile(rb"(?:^|/)\.{0,2}(?:/|\Z)")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")

# One letter per member; a whiteout is kept with the path it hides, an opaque one with its directory.
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
KIND_OF = cast("dict[int, Kind]", {letter: kind for kind, letter in LETTERS.items()})
_ALL_LETTERS = bytes(sorted([*LETTERS.values(), WHITEOUT, OPAQUE]))


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What an image may cost before it is refused; generous for real ones.

    Attributes:
        entries: members of all layers, and directories that only their paths imply. A
            conversion takes about 1 KiB of memory for each (488 MiB for 500,000 empty files,
            squashfs-tools 4.6.1), so that the default stays below 768 MiB with all buffers.
        folder_entries: of the merged tree's one large folder; of several, the root of the sum of
            their squares, since that is what packing costs (see `squashfs`): 41 s of processor
            time for 60,000 empty files, and some minutes for as many as the default.
        unpacked_bytes: of all layers, holes of sparse files counted as zeros.
        ratio: unpacked to compressed bytes of one layer, asked only when more than
            `ratio_from` bytes came out of it. Deflate can reach 1030; layers of programs
            and libraries lie between 2 and 6, of text below 20.
        ratio_from: bytes that may come out of any layer.
        metadata_bytes: names, link targets, xattrs and sparse maps of all layers.
        path_bytes, header_bytes, xattr_bytes: of one member, see `tar_stream.Bounds`.
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

    def raised(self, words: Iterable[str]) -> Limits:
        """Return these limits with `NAME=NUMBER` words applied, as a person types them.

        Raises:
            UsageError: an unknown name, or no positive number.
        """
        known = [entry.name for entry in fields(self)]
        changed = {}
        for word in words:
            name, _, number = word.partition("=")
            if name not in known or not number.isascii() or not number.isdigit() or not 0 < int(number[:19]) < 2**62:
                raise UsageError(
                    f"`{word}` is no limit",
                    why="a limit is written NAME=NUMBER; names are " + ", ".join(f"`{entry}`" for entry in known),
                    hint="for example `--limit entries=2000000`",
                )
            changed[name] = int(number)
        return replace(self, **changed)

    def words(self) -> list[str]:
        """Return what differs from the defaults, as `raised` takes it."""
        usual = Limits()
        return [
            f"{entry.name}={getattr(self, entry.name)}"
            for entry in fields(self)
            if getattr(self, entry.name) != getattr(usual, entry.name)
        ]


def exceeded(name: str, limit: int, what: str, *, enough: int = 0) -> NoReturn:
    """Refuse an image that costs too much; `enough` is a limit known to let it go on."""
    raise ImageMismatch(
        f"{what}, more than the limit `{name}` of {limit:,}",
        why="an image may be made to fill memory or disks; hpcenv stops before that happens",
        hint=f"if you trust this image, raise it: `hpcenv image pull --limit {name}={max(2 * limit, enough)}`; "
        "`hpcenv image build` takes the same for a project",
    )


# -- a layer's bytes ----------------------------------------------------------------------


class _Blob:
    """A layer's uncompressed stream; errors of the decompressor become ImageMismatch."""

    def __init__(self, source: Any, *, path: Path, how: str, bad: tuple[type[BaseException], ...]) -> None:
        self._source = source
        self._path = path
        self._how = how
        self._bad = bad
        self.compressed_size = path.stat().st_size

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes; none at the end.

        Raises:
            ImageMismatch: the compressed data are damaged or cut off.
            FileUnusable: the operating system could not read the file.
        """
        try:
            return cast("bytes", self._source.read(size))
        except self._bad as error:
            raise ImageMismatch(
                f"the layer `{self._path.name}` cannot be unpacked: {error or type(error).__name__}",
                why=f"it is compressed with {self._how}, and its data are damaged or cut off",
                hint="`hpcenv image pull` the image again; if this stays, it was pushed like that: build it again",
            ) from error
        except OSError as error:
            raise _unreadable(self._path, error) from error


def _unreadable(path: Path, error: OSError) -> FileUnusable:
    return FileUnusable(
        f"the layer `{path}` cannot be read",
        why=error.strerror or str(error),
        hint="`hpcenv image pull` the image again",
    )


@contextmanager
def open_blob(path: Path, media_type: str = "") -> Iterator[BinaryIO]:
    """Open a layer's file and give its uncompressed bytes.

    The compression is seen from the first bytes: media types are wrong often enough, and
    docker's schema 2 has none for zstd. gzip members and zstd frames may follow each other.

    Args:
        path: the blob as it was fetched.
        media_type: only for what cannot be opened: encrypted layers.

    Raises:
        ImageMismatch: a compression that OCI does not know; while reading, damaged data.
        FileUnusable: the operating system could not read the file.
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
    # A tar whose first name looks like something else is still a tar.
    if start[257:262] == b"ustar":
        return "nothing"
    if start[:2] == b"\x1f\x8b":
        return "gzip"
    # A frame, or a frame to be skipped (RFC 8878 3.1.2).
    if start[:4] == b"\x28\xb5\x2f\xfd" or (start[1:4] == b"\x2a\x4d\x18" and start[0] >> 4 == 5):
        return "zstd"
    for magic, name in ((b"BZh", "bzip2"), (b"\xfd7zXZ\0", "xz"), (b"\x04\x22\x4d\x18", "lz4")):
        if start.startswith(magic):
            raise ImageMismatch(
                f"the layer `{path.name}` is compressed with {name}",
                why="OCI image-spec 1.1 knows plain, gzip and zstd layers only",
                hint="convert it: `skopeo copy --dest-compress-format gzip` writes the image again",
            )
    return "nothing"


def _decompressor(file: BinaryIO, how: str) -> tuple[Any, tuple[type[BaseException], ...]]:
    """Return something to read from and the errors that mean damaged data."""
    if how == "gzip":
        try:
            from isal import igzip as fast
            from isal import isal_zlib
        except ImportError:
            import gzip

            return gzip.GzipFile(fileobj=file, mode="rb"), (gzip.BadGzipFile, EOFError, zlib.error)
        igzip: Any = fast  # its type hints say less than it does
        bad = (igzip.BadGzipFile, EOFError, cast("type[Exception]", isal_zlib.error), zlib.error)
        return igzip.IGzipFile(fileobj=file, mode="rb"), bad
    if how == "zstd":
        import zstandard

        # A window of 128 MiB is what RFC 8878 asks a decoder for at most in practice (zstd --long=27).
        decoder = zstandard.ZstdDecompressor(max_window_size=1 << 27)
        return decoder.stream_reader(file, read_across_frames=True, closefd=False), (zstandard.ZstdError, EOFError)
    return file, ()


@contextmanager
def read_ahead(stream: _Readable) -> Iterator[Iterator[bytes]]:
    """Read a stream in a thread, a few chunks ahead of the caller; decompressors release the GIL."""
    chunks: queue.Queue[bytes | BaseException] = queue.Queue(4)
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                chunk = stream.read(_CHUNK)
                chunks.put(chunk)
                if not chunk:
                    return
        except BaseException as error:  # noqa: BLE001 - it is raised again where it is waited for
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
    """sha256 of a stream in a thread of its own."""

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
    """What one layer holds, in columns: one position per member, in the order of the tar.

    Attributes:
        diff_id: digest of the uncompressed layer.
        unpacked: bytes of its stream, with sparse files' holes.
        kinds: a letter per member.
        sizes: of files, holes included.
        offsets: where a file's data begin in the uncompressed stream.
        blake3: 32 bytes per member, of files.
        paths: relative to the root, normalised, separated by NUL.
        ends: where each path ends in `paths`.
        targets, devices, xattrs, sparse: of the members that have them.
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
        """Return how many bytes of the stream a file's data take."""
        pieces = self.sparse.get(position)
        return self.sizes[position] if pieces is None else sum(length for _, length in pieces)

    def entry(self, position: int, letter: int, path: bytes, inode: bytes) -> Entry:
        """Return a member, whose kind is `letter`, as an entry at `path`."""
        return Entry(
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
        """Bytes of names and the like, as `Limits.metadata_bytes` counts them."""
        return (
            len(self.paths)
            + sum(map(len, self.targets.values()))
            + sum(len(name) + len(value) for pairs in self.xattrs.values() for name, value in pairs)
            + sum(16 * len(pieces) for pieces in self.sparse.values())
        )

    def to_bytes(self) -> bytes:
        """Return the index as a file's content, for `from_bytes`."""
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
    def from_bytes(cls, data: bytes, *, diff_id: str, limits: Limits | None = None) -> LayerIndex:
        """Read an index that was kept.

        Args:
            data: the file's content.
            diff_id: of the layer that is wanted.
            limits: as for `index_layer`.

        Raises:
            RecordInvalid: damaged, of another layer, or of another version of hpcenv. Index
                the layer again.
        """
        try:
            return _loaded(data, diff_id, limits or Limits())
        except (ValueError, TypeError, KeyError, LookupError, OverflowError, RecursionError, zlib.error) as error:
            raise RecordInvalid(
                f"the kept index of the layer `{diff_id}` cannot be used",
                why=str(error) or type(error).__name__,
                hint="nothing to do: `hpcenv image pull` indexes the layer again",
            ) from error


_COLUMNS = ("modes", "uids", "gids", "mtimes", "sizes", "offsets")


def _little(column: array[int]) -> array[int]:
    """Return the column with the byte order of the file format."""
    if sys.byteorder == "little":
        return column
    swapped = array(column.typecode, column)
    swapped.byteswap()
    return swapped


def _loaded(data: bytes, diff_id: str, limits: Limits) -> LayerIndex:
    if not data.startswith(_MAGIC):
        raise ValueError(f"it does not begin as an index of format {FORMAT} does")
    told, _, packed = data[len(_MAGIC) :].partition(b"\n")
    if hashlib.sha256(packed).hexdigest().encode() != told:
        raise ValueError("its checksum is wrong")
    size, _, squeezed = packed.partition(b"\n")
    most = 8 * limits.metadata_bytes + 128 * limits.entries
    if not size.isdigit() or len(size) > 12 or int(size) > most:
        raise ValueError(f"it says that it unpacks to {size[:20]!r} bytes")
    unpacker = zlib.decompressobj()
    payload = unpacker.decompress(squeezed, int(size) + 1)
    if len(payload) != int(size):
        raise ValueError("its size is not what it says")
    head, _, body = payload.partition(b"\n")
    parsed = json.loads(head)
    if parsed["diff_id"] != diff_id:
        raise ValueError("it is of another layer")
    lengths = parsed["sections"]
    if len(lengths) != 5 + len(_COLUMNS) or any(type(n) is not int or n < 0 for n in lengths):
        raise ValueError("its sections are not those of the format")
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
    """Tell whether paths with NULs between them have no slash too many, no `.` and no `..`."""
    if paths.startswith(b"/") or paths.endswith(b"/") or any(bad in paths for bad in (b"\0/", b"/\0", b"//")):
        return False
    framed = b"/" + paths.replace(b"\0", b"/") + b"/"
    return b"/./" not in framed and b"/../" not in framed


def _check_index(index: LayerIndex, limits: Limits) -> None:
    """Refuse what `merge` and `emit` could stumble over; whether it is true shows in the proof."""
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
        raise ValueError("it has modes that are none")
    for rare, letters in ((index.devices, b"cb"), (index.sparse, b"f"), (index.xattrs, _ALL_LETTERS)):
        if any(type(at) is not int or not 0 <= at < count or index.kinds[at] not in letters for at in rare):
            raise ValueError("it speaks of members that are not there")
    if any(letter in b"cb" and at not in index.devices for at, letter in enumerate(index.kinds)):
        raise ValueError("it has devices without numbers")
    numbers = [number for pair in index.devices.values() for number in pair]
    if any(type(number) is not int or not 0 <= number <= 0xFFFFF for number in numbers):
        raise ValueError("it has device numbers that are none")
    _check_places(index)


def _check_places(index: LayerIndex) -> None:
    """Check that files' data follow each other in the stream."""
    end = 0
    for at, letter in enumerate(index.kinds):
        if letter != FILE:
            continue
        size, start = index.sizes[at], 0
        for offset, length in index.sparse.get(at, ()):
            if type(offset) is not int or type(length) is not int or offset < start or length < 0:
                raise ValueError("it has a sparse file that is none")
            start = offset + length
        if size < start or index.offsets[at] < end:
            raise ValueError("it has files that overlap")
        end = index.offsets[at] + index.stored(at)


class FileSink(Protocol):
    """Takes files out of a layer while it is indexed."""

    def begin_file(self, index: LayerIndex, at: int, path: bytes) -> bool:
        """Say whether this file's content is wanted; all but its digest is in the index."""

    def write(self, piece: memoryview, /) -> None:
        """Take a piece of the content, holes as zeros."""

    def end_file(self) -> None:
        """Know that the content is over."""


def index_layer(
    stream: _Readable,
    *,
    diff_id: str,
    compressed_size: int | None = None,
    limits: Limits | None = None,
    on_bytes: Callable[[int], None] | None = None,
    sink: FileSink | None = None,
) -> LayerIndex:
    """Read a layer once and record its members, with the BLAKE3 of each file's content.

    Two threads of its own decompress and hash beside the caller's, so that two cores are
    used; all three hold 10 MiB together.

    Args:
        stream: the uncompressed layer, as from `open_blob`.
        diff_id: what the image's config says its sha256 is (`sha256:HEX`).
        compressed_size: bytes of the blob, for `Limits.ratio`; known for streams of `open_blob`.
        limits: see `Limits`.
        on_bytes: told now and then how many uncompressed bytes were read so far.
        sink: is given the files before anybody knows whether the layer is what it should be.

    Raises:
        ImageMismatch: the bytes are not those of the diff_id, the archive is damaged or
            hostile, or a limit is exceeded.
        FileUnusable: the operating system could not read the file.
        Exception: what `sink` raises.
    """
    if not _DIGEST.match(diff_id):
        raise ImageMismatch(
            f"the image's config names a layer `{diff_id[:100]}`",
            why="a diff_id is sha256: and 64 hexadecimal digits",
            hint="`hpcenv image pull` the image again; if this stays, it was pushed like that: build it again",
        )
    if compressed_size is None:
        compressed_size = getattr(stream, "compressed_size", None)
    builder = _Builder(diff_id, limits or Limits(), compressed_size, sink)
    wrong: ImageMismatch | None = None
    hasher = _Hasher()
    try:
        builder.read(stream, hasher, on_bytes)
    except ImageMismatch as error:
        wrong = error
    finally:
        found = hasher.finish()
    if wrong is not None:
        raise located(wrong, diff_id)
    if found != diff_id:
        raise ImageMismatch(
            f"a layer's content has the digest `{found}`",
            why=f"the image's config says it must be `{diff_id}`",
            hint="`hpcenv image pull` the image again; if this stays, it was pushed like that: build it again",
        )
    return builder.finish()


class _Builder:
    """Collects an index while the members pass by."""

    def __init__(self, diff_id: str, limits: Limits, compressed: int | None, sink: FileSink | None) -> None:
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
        """Take all members of a layer, and pass its bytes on to be hashed."""

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
        """Count bytes that came out, before they are worked on."""
        self.index.unpacked += count
        unpacked, limits = self.index.unpacked, self._limits
        if unpacked > limits.unpacked_bytes:
            exceeded("unpacked_bytes", limits.unpacked_bytes, f"a layer unpacks to {unpacked:,} bytes")
        if self._compressed is not None and unpacked > max(limits.ratio_from, limits.ratio * self._compressed):
            times = unpacked // max(self._compressed, 1)
            what = f"a layer of {self._compressed:,} bytes unpacks to {times:,} times that or more"
            exceeded("ratio", limits.ratio, what, enough=2 * times)

    def _add(self, member: tar_stream.Member, reader: tar_stream.Reader) -> None:
        kind, path = _what_and_where(member)
        if kind is None:
            return
        index, at = self.index, len(self._kinds)
        if at >= self._limits.entries:
            exceeded("entries", self._limits.entries, "a layer has more members")
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
            kept = tuple(pair for pair in member.xattrs if not pair[0].startswith(_DROPPED_XATTRS))
            if kept:
                index.xattrs[at] = kept
        self._count(member, path)
        self._kinds.append(kind)
        self._paths += b"\0" + path if at else path
        index.ends.append(len(self._paths))
        # Linux has no permissions of symbolic links: they are always 0777.
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


def _what_and_where(member: tar_stream.Member) -> tuple[int | None, bytes]:
    """Return a member's letter and path; no letter for what a file system never shows."""
    path = normal_path(member.name, "name")
    kind = LETTERS[member.kind]
    if not path and kind != DIRECTORY:
        raise refused("the root of a layer is no directory", member.name)
    if _PREFIX not in path:
        return kind, path
    parent, _, name = path.rpartition(b"/")
    if (b"/" + parent).find(b"/" + _PREFIX) >= 0:
        return None, path
    if not name.startswith(_PREFIX):
        return kind, path
    if name == _OPAQUE_NAME:
        return OPAQUE, parent
    # AUFS kept its own files under such names (.wh..wh.plnk); nobody shows them.
    if name.startswith(_PREFIX + _PREFIX):
        return None, path
    hidden = name[len(_PREFIX) :]
    if hidden in {b"", b".", b".."}:
        raise refused("a whiteout names no file", member.name)
    return WHITEOUT, parent + b"/" + hidden if parent else hidden


def normal_path(name: bytes, what: str = "name") -> bytes:
    """Return a member's path relative to the root: no `.`, no `..`, no slash at either end."""
    path = name.removeprefix(b"./").strip(b"/")
    if _ODD.search(path):
        parts: list[bytes] = []
        for part in path.split(b"/"):
            if part == b"..":
                if not parts:
                    raise refused(f"a member's {what} climbs out of the image", name)
                parts.pop()
            elif part not in {b"", b"."}:
                parts.append(part)
        path = b"/".join(parts)
    if len(path) > _NAME_BYTES and max(map(len, path.split(b"/"))) > _NAME_BYTES:
        raise refused(f"a member's {what} has a part of more than {_NAME_BYTES} bytes, which Linux cannot have", name)
    return path


def located(error: ImageMismatch, diff_id: str) -> ImageMismatch:
    """Return the error with the layer that it is about."""
    error.why = f"{error.why}\nit is the layer with the diff_id {diff_id}"
    return error


def refused(what: str, name: bytes) -> ImageMismatch:
    """Return the error for a member that no honest image has."""
    return ImageMismatch(
        f"a layer is refused: {what}",
        why=f"the member is called `{shown(name)}`",
        hint="do not use this image unless you know how it was made; look at it with `tar -tv`",
    )


def shown(name: bytes) -> str:
    """Return a name of any bytes as one short printable line."""
    text = name[:200].decode("utf-8", "backslashreplace")
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text)
