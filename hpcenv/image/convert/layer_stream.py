"""Write the merged tree of an image's layers as one tar stream for mksquashfs.

Runs on: LOGIN NODE.

    files of the topmost layer, ..., files of the lowest    each layer in its own order, read once
    directories, symbolic links, devices, fifos             sorted by path
    files that hpcenv adds, hard links

The stream depends only on the tree. A file of a layer survives (it is in the merged tree) if no layer above it hides or
replaces the file. So with this order, hpcenv can begin to write before the tree is known: `Ahead` writes the files of a
layer while the layer is indexed, beginning with the topmost layer. Entries that depend on all layers together are
written at the end. Then the files that `Ahead` wrote are compared with the merged tree.

mksquashfs accepts a directory after its content (tar.c of 4.6.1 to 4.7.5; seen with 4.6.1: the result
has the same bytes as with directories first).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import BinaryIO

from hpcenv.image.content import tar_stream
from hpcenv.image.content.tree import TreeEntry
from hpcenv.image.convert.layer_index import (
    DIRECTORY,
    FILE,
    LETTERS,
    OPAQUE,
    LayerIndex,
    LayerLimits,
    normal_path,
    read_ahead,
)
from hpcenv.image.convert.layers import MergedTree, storable

__all__ = ["Ahead", "GuessedWrong", "OpenLayer", "emit", "likely_root", "same_root"]

OpenLayer = Callable[[int], AbstractContextManager[BinaryIO]]
OnBytes = Callable[[int], None]

_CHUNK = 1024 * 1024
# Packing time grows with the sum of the squares of the folders' entries (see `squashfs`). While hpcenv does not know
# yet whether an image will be refused, it packs folders with at most this sum. This takes some seconds. An image with
# torch has a sum of 50 million.
_MOST_SQUARES = 200_000_000
# A directory that has no member itself, but occurs in the paths of other members; see `layers.merge`.
_IMPLIED = TreeEntry(path=b"", kind="directory", mode=0o755)


class GuessedWrong(Exception):
    """The files that were written are not the files of the merged tree; pack again with the merged tree."""


class _Writer:
    """Collects small writes, and repeats writes that a pipe accepted only in part."""

    def __init__(self, out: BinaryIO, on_bytes: OnBytes | None) -> None:
        self._out = out
        self._on_bytes = on_bytes
        # All writes use one buffer. Allocating a new buffer for each write would cost as much time as the copying.
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
            collected, self._used = self._buffer[: self._used], 0
            self._send(collected)

    def _send(self, rest: memoryview) -> None:
        while rest:
            count = self._out.write(rest)
            self.written += count
            rest = rest[count:]
        if self._on_bytes is not None:
            self._on_bytes(self.written)


# -- with a merged tree -------------------------------------------------------------------


def emit(
    merged: MergedTree,
    open_layer: OpenLayer,
    out: BinaryIO,
    *,
    extra: Sequence[tuple[TreeEntry, bytes]] = (),
    mtime_limit: int | None = None,
    on_bytes: OnBytes | None = None,
) -> None:
    """Write the merged tree as one tar stream for sqfstar or `mksquashfs - OUT -tar`.

    Each layer is read at most once, and only up to its last surviving file. A layer without a surviving file is not
    opened. The root directory is not in the stream: see `MergedTree.root`.

    Args:
        merged: the result of `merge`.
        open_layer: opens the uncompressed stream of the layer with this position. The stream must have the bytes that
            were indexed.
        out: where to write.
        extra: entries with their content. Each entry replaces the image's entry at the same path. A directory keeps
            the content that it has in the image.
        mtime_limit: the latest time that an entry may have, in seconds since 1970; a later time becomes this time.
        on_bytes: called from time to time with the number of bytes that were written so far.

    Raises:
        ImageMismatch: a layer ends before its last file.
        OSError: writing to `out` failed. The error is raised unchanged, because only the caller knows which program
            reads `out`, and why it stopped.
    """
    writer = _Writer(out, on_bytes)
    plan = _Plan(merged.with_extra(extra), mtime_limit)
    for layer in reversed(range(len(merged.layers))):
        if any(plan.files[layer]):
            with open_layer(layer) as stream:
                plan.copy(layer, stream, writer)
    plan.finish(writer)


class _Plan:
    """The order of the stream: first the files, by their layers, then all other entries."""

    def __init__(self, merged: MergedTree, mtime_limit: int | None = None) -> None:
        self._merged = merged
        self._limit = mtime_limit
        self._directories: list[tuple[bytes, int]] = []
        self._specials: list[tuple[bytes, int]] = []
        self._links: list[tuple[bytes, bytes, int]] = []
        # Files whose path is not the path of their member, because of symbolic links or because a file has several
        # names.
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
            # Prefer the member's own name, so that the path of the file depends only on its own layer.
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

    def _entry(self, path: bytes, code: int) -> TreeEntry:
        return storable(self._merged.entry_of(path, code, path), self._limit)

    def copy(self, layer: int, stream: BinaryIO, writer: _Writer) -> None:
        """Copy a layer's surviving files from its stream."""
        index, base = self._merged.layers[layer], self._merged.bases[layer]

        def header(at: int) -> bytes:
            return tar_stream.encode(self._entry(self.elsewhere.get(base + at) or index.path(at), base + at))

        _copy(index, self.files[layer], header, stream, writer)

    def finish(self, writer: _Writer) -> None:
        """Write everything except the files of the layers."""
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


# -- before the merged tree is known ------------------------------------------------------


def likely_root(layers: int, known: Callable[[int], LayerIndex | None], open_layer: OpenLayer) -> TreeEntry:
    """Guess the root directory of the merged tree from the first members of the layers.

    A layer that has the root directory usually begins with it.

    Args:
        layers: the number of layers.
        known: returns the index of a layer, or None.
        open_layer: opens the uncompressed stream of the layer with this position.

    Raises:
        ImageMismatch, FileUnusable: the beginning of a layer cannot be read.
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
            return storable(TreeEntry(path=b"", kind="directory", mode=mode, uid=uid, gid=gid, mtime=mtime))
    return _IMPLIED


def same_root(one: TreeEntry, other: TreeEntry) -> bool:
    """Return whether two root directories give the same options for mksquashfs."""
    one, other = storable(one), storable(other)
    return (one.mode, one.uid, one.gid, one.mtime) == (other.mode, other.uid, other.gid, other.mtime)


class Ahead:
    """Writes the stream of `emit` while the layers are read for the first time.

    For each layer, from the topmost to the lowest, first call `begin_layer`. Then pass this object to `index_layer` as
    the sink, or call `copy` if the layer has an index. Then call `end_layer`. At the end call `finish`, which compares
    the written files with the merged tree and writes the rest.

    Args:
        out: where to write.
        extra: entries that replace the image's entries at their paths.
        limits: as for `merge`; here they only decide when to stop writing.
        most_comparisons: the writing also stops above this number; see `MergedTree.comparisons`.
        on_bytes: called from time to time with the number of bytes that were written so far.
    """

    def __init__(
        self,
        out: BinaryIO,
        *,
        extra: Iterable[TreeEntry],
        limits: LayerLimits,
        most_comparisons: int,
        on_bytes: OnBytes | None = None,
    ) -> None:
        self._writer = _Writer(out, on_bytes)
        self._above = _Above(extra)
        self._cost = _Cost(min(limits.folder_entries**2, _MOST_SQUARES), most_comparisons)
        self._files: list[bytearray] = []
        self._before: LayerIndex | None = None
        self._pad = 0

    def begin_layer(self) -> None:
        """Begin the next lower layer."""
        if self._before is not None:
            self._above.add(self._before)
        self._files.append(bytearray())

    def begin_file(self, index: LayerIndex, at: int, path: bytes) -> bool:
        """Write a file's header if the file survives.

        If the result is True, call `write` with the content, then `end_file`.
        """
        if self._above.hides(path) or not self._cost.allows(path, index.sizes[at]):
            return False
        files = self._files[-1]
        files += bytes(at - len(files))
        files.append(1)
        self._writer.write(self._header(index, at, path))
        return True

    def write(self, piece: memoryview) -> None:
        """Write a piece of the file's content."""
        self._writer.write(piece)

    def end_file(self) -> None:
        """Write the padding after the file's content."""
        self._writer.write(bytes(self._pad))

    def copy(self, index: LayerIndex, open_layer: Callable[[], AbstractContextManager[BinaryIO]]) -> None:
        """Write the surviving files of a layer that already has an index.

        Raises:
            GuessedWrong: packing could take too long, so it must wait for the merged tree.
            ImageMismatch: the layer ends before its last file.
        """
        self._files[-1] = wanted = bytearray(len(index))
        for at, letter in enumerate(index.kinds):
            if letter == FILE and not self._above.hides(path := index.path(at)):
                wanted[at] = self._cost.allows(path, index.sizes[at])
        self._cost.check()
        if any(wanted):
            with open_layer() as stream:
                _copy(index, wanted, lambda at: self._header(index, at, index.path(at)), stream, self._writer)

    def end_layer(self, index: LayerIndex) -> None:
        """Record which paths of the lower layers this layer hides.

        Raises:
            GuessedWrong: packing could take too long, so it must wait for the merged tree.
        """
        self._cost.check()
        self._files[-1] += bytes(len(index) - len(self._files[-1]))
        self._before = index

    def finish(self, merged: MergedTree, extra: Sequence[tuple[TreeEntry, bytes]]) -> None:
        """Compare the written files with the merged tree, and write the rest of the stream.

        Args:
            merged: the merged tree of the same layers.
            extra: as for `emit`.

        Raises:
            GuessedWrong: `emit` would write different files.
        """
        self._above = _Above(())
        plan = _Plan(merged.with_extra(extra))
        if plan.elsewhere or plan.files[:-1] != self._files[::-1]:
            raise GuessedWrong("other files survive in the merged tree")
        plan.finish(self._writer)

    def _header(self, index: LayerIndex, at: int, path: bytes) -> bytes:
        self._pad = tar_stream.padding(index.sizes[at])
        return tar_stream.encode(storable(index.entry(at, FILE, path, path)))


class _Above:
    """Records which paths of a layer are hidden by the layers above it."""

    def __init__(self, extra: Iterable[TreeEntry]) -> None:
        # `_taken`: a file at one of these paths is hidden. `_closed`: everything below one of these paths is hidden.
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
    """Yield a path and all its parent folders up to the root."""
    while path:
        yield path
        path = path.rpartition(b"/")[0]
    yield b""


class _Cost:
    """Stops the packing of an image that takes too long.

    `merge` refuses such an image, but only after the packing began.
    """

    def __init__(self, folders: int, comparisons: int) -> None:
        self._folders = folders
        self._comparisons = comparisons
        self._entries: dict[bytes, int] = {}
        self._sizes: dict[int, int] = {}

    def allows(self, path: bytes, size: int) -> bool:
        """Count one more file; return False if the image is now too expensive to pack."""
        if self._folders < 0 or self._comparisons < 0:
            return False
        if size:
            alike = self._sizes.get(size, 0)
            self._sizes[size] = alike + 1
            self._comparisons -= 2 * alike + 1
        while path:
            path = path.rpartition(b"/")[0]
            count = self._entries.get(path, 0)
            self._entries[path] = count + 1
            self._folders -= 2 * count + 1
            if count:
                break
        return self._folders >= 0 and self._comparisons >= 0

    def check(self) -> None:
        if self._folders < 0 or self._comparisons < 0:
            raise GuessedWrong("it has very large folders, or too many files of the same size")
