"""Write the tree that an image's layers make as one tar stream, which mksquashfs reads exactly.

Runs on: LOGIN NODE (and the compute node of `--on-cluster`).

    files of the highest layer, ..., files of the lowest    each layer as it comes out, once
    directories, symbolic links, devices, fifos             sorted by path
    files of hpcenv's own, hard links

The stream is a function of the tree alone. Its order allows to begin with it before the tree is
known: what of a layer survives is said by the layers above it, so that `Ahead` writes files while
the very pass that indexes their layer reads them, the highest layer first. What only all layers
together can say comes at the end, and there the guess is compared with the tree.

mksquashfs takes a directory's attributes also behind what is in it (tar.c of 4.6.1 to 4.7.5; seen
with 4.6.1: the same bytes as with directories in front).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import BinaryIO

from hpcenv.adapters import tar_stream
from hpcenv.adapters.layer_index import (
    DIRECTORY,
    FILE,
    LETTERS,
    OPAQUE,
    LayerIndex,
    Limits,
    normal_path,
    read_ahead,
)
from hpcenv.adapters.layers import Merged, storable
from hpcenv.model.tree import Entry

__all__ = ["Ahead", "GuessedWrong", "OpenLayer", "emit", "likely_root", "same_root"]

OpenLayer = Callable[[int], AbstractContextManager[BinaryIO]]
OnBytes = Callable[[int], None]

_CHUNK = 1024 * 1024
# Squares of folders' entries, which is what they cost a packer (see `squashfs`), that are risked on an image of
# which nobody knows yet whether it is refused: seconds. An image with torch has some 50 million.
_RISKED = 200_000_000
# A directory that no layer names; see `layers.merge`.
_IMPLIED = Entry(path=b"", kind="directory", mode=0o755)


class GuessedWrong(Exception):
    """What was written ahead is not what the layers say together: pack again when they are known."""


class _Writer:
    """Gathers small writes; a pipe may take a part of a large one only."""

    def __init__(self, out: BinaryIO, on_bytes: OnBytes | None) -> None:
        self._out = out
        self._on_bytes = on_bytes
        # One piece of memory for all the time: what grows and goes a thousand times costs as much as the copying.
        self._buffer = memoryview(bytearray(_CHUNK))
        self._used = 0
        self.written = 0

    def write(self, data: bytes | memoryview) -> None:
        end = self._used + len(data)
        if end > _CHUNK:
            self.flush()
            if len(data) >= _CHUNK // 8:
                self._send(memoryview(data))
                return
            end = len(data)
        self._buffer[self._used : end] = data
        self._used = end

    def flush(self) -> None:
        if self._used:
            gathered, self._used = self._buffer[: self._used], 0
            self._send(gathered)

    def _send(self, rest: memoryview) -> None:
        while rest:
            count = self._out.write(rest)
            self.written += count
            rest = rest[count:]
        if self._on_bytes is not None:
            self._on_bytes(self.written)


# -- the tree is known --------------------------------------------------------------------


def emit(
    merged: Merged,
    open_layer: OpenLayer,
    out: BinaryIO,
    *,
    extra: Sequence[tuple[Entry, bytes]] = (),
    mtime_limit: int | None = None,
    on_bytes: OnBytes | None = None,
) -> None:
    """Write the merged tree as one tar stream that sqfstar and `mksquashfs - OUT -tar` read exactly.

    Each layer is read at most once and only as far as needed, one without a surviving file is
    not opened. The root directory is not in the stream: see `Merged.root`.

    Args:
        merged: from `merge`.
        open_layer: opens the uncompressed stream of the layer with this position, again
            the one that was indexed.
        out: takes the stream.
        extra: entries with their content that replace what the image has at their paths;
            directories keep what the image has in them.
        mtime_limit: no time is later than this, in seconds since 1970.
        on_bytes: told now and then how many bytes were written so far.

    Raises:
        ImageMismatch: a layer ends before its last file.
        OSError: from `out`, as it comes: the caller knows who reads it and why it stopped.
    """
    writer = _Writer(out, on_bytes)
    plan = _Plan(merged.with_extra(extra), mtime_limit)
    for layer in reversed(range(len(merged.layers))):
        if any(plan.files[layer]):
            with open_layer(layer) as stream:
                plan.copy(layer, stream, writer)
    plan.finish(writer)


class _Plan:
    """What is written, and where: files by their layers, the rest at the end."""

    def __init__(self, merged: Merged, mtime_limit: int | None = None) -> None:
        self._merged = merged
        self._limit = mtime_limit
        self._directories: list[tuple[bytes, int]] = []
        self._specials: list[tuple[bytes, int]] = []
        self._links: list[tuple[bytes, bytes, int]] = []
        # Files whose path is not that of their member: below symbolic links, or under another of their names.
        self.elsewhere: dict[int, bytes] = {}
        self.files = [bytearray(len(index)) for index in merged.layers]
        self.files.append(bytearray(len(merged.extra)))
        shared: dict[int, list[bytes]] = {}
        for path, code in merged.paths():
            if code in merged.shared:
                shared.setdefault(code, []).append(path)
            elif path:
                self._sort(path, code)
        for code, paths in shared.items():
            # Under its own name, if it still has that one: a single layer then says where a file goes.
            own = self._own(code)
            first = own if own in paths else paths[0]
            self._sort(first, code)
            self._links += [(path, first, code) for path in paths if path != first]
        self._links.sort()
        self._specials.sort()

    def _own(self, code: int) -> bytes:
        layer, at = self._merged.place(code)
        layers = self._merged.layers
        return layers[layer].path(at) if layer < len(layers) else self._merged.extra[at][0].path

    def _sort(self, path: bytes, code: int) -> None:
        merged = self._merged
        if code < 0:
            self._directories.append((path, code))
            return
        layer, at = merged.place(code)
        kind = LETTERS[merged.extra[at][0].kind] if layer == len(merged.layers) else merged.layers[layer].kinds[at]
        if kind == DIRECTORY:
            self._directories.append((path, code))
        elif kind == FILE:
            self.files[layer][at] = 1
            if self._own(code) != path:
                self.elsewhere[code] = path
        else:
            self._specials.append((path, code))

    def _entry(self, path: bytes, code: int) -> Entry:
        return storable(self._merged.entry_of(path, code, path), self._limit)

    def copy(self, layer: int, stream: BinaryIO, writer: _Writer) -> None:
        """Copy a layer's surviving files from its stream."""
        index, base = self._merged.layers[layer], self._merged.bases[layer]

        def header(at: int) -> bytes:
            return tar_stream.encode(self._entry(self.elsewhere.get(base + at) or index.path(at), base + at))

        _copy(index, self.files[layer], header, stream, writer)

    def finish(self, writer: _Writer) -> None:
        """Write everything that is not a layer's file."""
        merged = self._merged
        for path, code in (*self._directories, *self._specials):
            writer.write(tar_stream.encode(self._entry(path, code)))
        for at, wanted in enumerate(self.files[-1]):
            if wanted:
                entry, content = merged.extra[at]
                assert len(content) == entry.size, entry.path
                writer.write(tar_stream.encode(self._entry(entry.path, merged.bases[-2] + at)))
                writer.write(content + bytes(tar_stream.padding(entry.size)))
        for path, first, code in self._links:
            writer.write(tar_stream.encode(self._entry(path, code), link=first))
        writer.write(tar_stream.END)
        writer.flush()


def _copy(
    index: LayerIndex, wanted: bytearray, header: Callable[[int], bytes], stream: BinaryIO, writer: _Writer
) -> None:
    """Copy the wanted files of an indexed layer from its stream."""
    with read_ahead(stream) as chunks:
        reader = tar_stream.Reader(chunks)
        at = wanted.find(1)
        while at >= 0:
            writer.write(header(at))
            reader.go_to(index.offsets[at], index.stored(at))
            pieces: Iterable[memoryview] = reader.stored()
            if at in index.sparse:
                pieces = tar_stream.expand(pieces, index.sizes[at], index.sparse[at])
            for piece in pieces:
                writer.write(piece)
            writer.write(bytes(tar_stream.padding(index.sizes[at])))
            at = wanted.find(1, at + 1)


# -- the tree is not known yet ------------------------------------------------------------


def likely_root(layers: int, known: Callable[[int], LayerIndex | None], open_layer: OpenLayer) -> Entry:
    """Return what the root directory will be if, as usual, a layer that names it does so first.

    Args:
        layers: how many there are.
        known: gives a layer's index where there is one.
        open_layer: opens the uncompressed stream of the layer with this position.

    Raises:
        ImageMismatch, FileUnusable: the begin of a layer cannot be read.
    """
    for layer in reversed(range(layers)):
        index = known(layer)
        if index is not None:
            if len(index) and not index.path(0) and index.kinds[0] == DIRECTORY:
                return storable(index.entry(0, DIRECTORY, b"", b""))
            continue
        with open_layer(layer) as stream:
            member = tar_stream.Reader(iter(lambda: stream.read(tar_stream.BLOCK), b"")).next_member()
        if member is not None and member.kind == "directory" and not normal_path(member.name):
            mode, uid, gid, mtime = member.mode, member.uid, member.gid, member.mtime
            return storable(Entry(path=b"", kind="directory", mode=mode, uid=uid, gid=gid, mtime=mtime))
    return _IMPLIED


def same_root(one: Entry, other: Entry) -> bool:
    """Tell whether two root directories are the same to a packer, which takes them as options."""
    one, other = storable(one), storable(other)
    return (one.mode, one.uid, one.gid, one.mtime) == (other.mode, other.uid, other.gid, other.mtime)


class Ahead:
    """Writes the stream of `emit` while its layers are read for the first time.

    From the highest layer to the lowest: `begin_layer`; its files, as `index_layer` gives them (or
    `copy`, where it was indexed before); `end_layer`. At last `finish`, which compares and writes the rest.

    Args:
        out: takes the stream.
        extra: what lies over the image whatever the image has there.
        limits: as for `merge`; here they only say when to stop writing.
        most_comparisons: stop writing beyond it, too; see `Merged.comparisons`.
        on_bytes: told now and then how many bytes were written so far.
    """

    def __init__(
        self,
        out: BinaryIO,
        *,
        extra: Iterable[Entry],
        limits: Limits,
        most_comparisons: int,
        on_bytes: OnBytes | None = None,
    ) -> None:
        self._writer = _Writer(out, on_bytes)
        self._above = _Above(extra)
        self._cost = _Cost(min(limits.folder_entries**2, _RISKED), most_comparisons)
        self._files: list[bytearray] = []
        self._before: LayerIndex | None = None
        self._pad = 0

    def begin_layer(self) -> None:
        """Go on to the next lower layer."""
        if self._before is not None:
            self._above.add(self._before)
        self._files.append(bytearray())

    def begin_file(self, index: LayerIndex, at: int, path: bytes) -> bool:
        """Write the header of a layer's file if it survives: `write` its content then, and call `end_file`."""
        if self._above.hides(path) or not self._cost.bears(path, index.sizes[at]):
            return False
        files = self._files[-1]
        files += bytes(at - len(files))
        files.append(1)
        self._writer.write(self._header(index, at, path))
        return True

    def write(self, piece: memoryview) -> None:
        """Take a piece of the content of the file that was begun."""
        self._writer.write(piece)

    def end_file(self) -> None:
        """Fill the last block of the file's content."""
        self._writer.write(bytes(self._pad))

    def copy(self, index: LayerIndex, open_layer: Callable[[], AbstractContextManager[BinaryIO]]) -> None:
        """Take the files of a layer that was indexed before.

        Raises:
            GuessedWrong: such an image is not packed ahead.
            ImageMismatch: the layer ends before its last file.
        """
        self._files[-1] = wanted = bytearray(len(index))
        for at, letter in enumerate(index.kinds):
            if letter == FILE and not self._above.hides(path := index.path(at)):
                wanted[at] = self._cost.bears(path, index.sizes[at])
        self._cost.check()
        if any(wanted):
            with open_layer() as stream:
                _copy(index, wanted, lambda at: self._header(index, at, index.path(at)), stream, self._writer)

    def end_layer(self, index: LayerIndex) -> None:
        """Take note of what the layer hides in those below.

        Raises:
            GuessedWrong: such an image is not packed ahead.
        """
        self._cost.check()
        self._files[-1] += bytes(len(index) - len(self._files[-1]))
        self._before = index

    def finish(self, merged: Merged, extra: Sequence[tuple[Entry, bytes]]) -> None:
        """Compare what was written with the tree, and write what is not a layer's file.

        Args:
            merged: of the same layers.
            extra: as for `emit`.

        Raises:
            GuessedWrong: it is not what `emit` writes.
        """
        self._above = _Above(())
        plan = _Plan(merged.with_extra(extra))
        if plan.elsewhere or plan.files[:-1] != self._files[::-1]:
            raise GuessedWrong("other files survive than the layers said one by one")
        plan.finish(self._writer)

    def _header(self, index: LayerIndex, at: int, path: bytes) -> bytes:
        self._pad = tar_stream.padding(index.sizes[at])
        return tar_stream.encode(storable(index.entry(at, FILE, path, path)))


class _Above:
    """What the layers above hide of a layer."""

    def __init__(self, extra: Iterable[Entry]) -> None:
        # A file at one of these paths is hidden, and whatever lies below one of those.
        self._taken: set[bytes] = set()
        self._closed: set[bytes] = set()
        self._folders: dict[bytes, bool] = {}
        for entry in extra:
            self._taken.update(_ancestors(entry.path))
            if entry.kind != "directory":
                self._closed.add(entry.path)

    def add(self, index: LayerIndex) -> None:
        self._folders.clear()
        for at, letter in enumerate(index.kinds):
            path = index.path(at)
            if letter != OPAQUE:
                self._taken.add(path)
            if letter != DIRECTORY:
                self._closed.add(path)

    def hides(self, path: bytes) -> bool:
        if path in self._taken:
            return True
        folder = path.rpartition(b"/")[0]
        known = self._folders.get(folder)
        if known is None:
            known = self._folders[folder] = not self._closed.isdisjoint(_ancestors(folder))
        return known


def _ancestors(path: bytes) -> Iterator[bytes]:
    """Yield a path, what it lies in, and so on up to the root."""
    while path:
        yield path
        path = path.rpartition(b"/")[0]
    yield b""


class _Cost:
    """Stops what would be packed for long before `merge` can refuse it."""

    def __init__(self, folders: int, comparisons: int) -> None:
        self._folders = folders
        self._comparisons = comparisons
        self._entries: dict[bytes, int] = {}
        self._sizes: dict[int, int] = {}

    def bears(self, path: bytes, size: int) -> bool:
        """Count one more file; tell whether it is not too much yet."""
        if self._folders < 0 or self._comparisons < 0:
            return False
        if size:
            alike = self._sizes.get(size, 0)
            self._sizes[size] = alike + 1
            self._comparisons -= 2 * alike + 1
        while path:
            path = path.rpartition(b"/")[0]
            there = self._entries.get(path, 0)
            self._entries[path] = there + 1
            self._folders -= 2 * there + 1
            if there:
                break
        return self._folders >= 0 and self._comparisons >= 0

    def check(self) -> None:
        if self._folders < 0 or self._comparisons < 0:
            raise GuessedWrong("it has folders too large, or too many files of one size")
