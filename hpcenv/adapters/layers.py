"""Merge the indexes of an image's layers into the tree that they make.

Runs on: LOGIN NODE (and the compute node of `--on-cluster`). Rules: OCI image-spec 1.1,
layer.md ("Applying Changesets", "Whiteouts"); where it is silent, what umoci 0.4.7 does,
since `apptainer build` unpacks with it.

    open_blob ─▶ index_layer ─▶ LayerIndex ─┐
    open_blob ─▶ index_layer ─▶ LayerIndex ─┴▶ merge ─▶ Merged ─▶ entries (the tree)
                                                         └──────▶ layer_stream.emit (one tar stream)

Nothing is ever unpacked to a disk: a path of an image cannot reach a path of the host, and
a symbolic link is followed inside the image's own tree.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import isqrt
from typing import cast

from hpcenv.adapters.layer_index import (
    DIRECTORY,
    FILE,
    HARD_LINK,
    OPAQUE,
    SYMLINK,
    WHITEOUT,
    LayerIndex,
    Limits,
    exceeded,
    index_layer,
    located,
    open_blob,
    refused,
    shown,
)
from hpcenv.errors import ImageMismatch
from hpcenv.model.tree import Entry

__all__ = ["LayerIndex", "Limits", "Merged", "index_layer", "merge", "open_blob", "storable"]

# Linux follows at most 40 symbolic links in one path (MAXSYMLINKS): what needs more works nowhere.
_MOST_SYMLINKS = 40
# Parts of link targets walked through while an image is merged; real ones need some thousands.
_MOST_FOLLOWED = 20_000_000
_LATEST = 2**32 - 1
# What squashfs can hold (Linux fs/squashfs/xattr.c); others, system.posix_acl_* among them, it cannot.
_KEPT_XATTRS = (b"user.", b"trusted.", b"security.")


# -- merging ------------------------------------------------------------------------------


class _Directory:
    """A directory of the merged tree: children are directories, or the code of a member.

    `code` counts members through all layers; -1 is a directory that only paths imply.
    """

    __slots__ = ("children", "code")

    def __init__(self, code: int = -1) -> None:
        self.code = code
        self.children: dict[bytes, _Directory | int] = {}


_Node = _Directory | int


def merge(indexes: Sequence[LayerIndex], *, limits: Limits | None = None) -> Merged:
    """Apply the layers one over the other, lowest first.

    Rules, with their origin in OCI image-spec 1.1 layer.md:
    - a layer's whiteouts are applied before its entries, wherever they stand ("regardless
      of the ordering"), so they hide lower layers only; one that hides nothing is no error;
    - a directory over a directory keeps the children and takes the new attributes;
      everything else replaces what was there, with all below it;
    - of two members with one path in one layer the later one counts (the specification
      forbids them; tar extracts them so);
    - a hard link takes the file that its target is at that moment and the file's own
      attributes; it keeps that file when the target is replaced or hidden later;
    - a path through a symbolic link is resolved inside the image, where `/` is the image's
      root and `..` stops there;
    - directories that no entry names have mode 0755, owner 0:0 and mtime 0.

    Args:
        indexes: of the image's layers in order.
        limits: see `Limits`.

    Raises:
        ImageMismatch: a hard link to nothing or to a directory, a path below a file, a
            circle of symbolic links, or a limit is exceeded.
    """
    limits = limits or Limits()
    tree = _Tree(indexes, limits)
    for layer, index in enumerate(indexes):
        try:
            tree.apply(layer)
        except ImageMismatch as error:
            raise located(error, index.diff_id) from error.__cause__
    return tree.finish()


class _Tree:
    """The tree while it is built."""

    def __init__(self, indexes: Sequence[LayerIndex], limits: Limits) -> None:
        self._layers = tuple(indexes)
        self._limits = limits
        self._bases = [0]
        for index in indexes:
            self._bases.append(self._bases[-1] + len(index))
        self._implied = 0
        self._followed = 0
        self._check_totals()
        self._root = _Directory()
        self._shared: set[int] = set()
        # Parent path -> its directory, as long as no directory or symbolic link is replaced.
        self._known: dict[bytes, _Directory] = {}

    def _check_totals(self) -> None:
        limits = self._limits
        if self._bases[-1] + self._implied > limits.entries:
            exceeded("entries", limits.entries, f"the image has {self._bases[-1] + self._implied:,} entries")
        unpacked = sum(index.unpacked for index in self._layers)
        if unpacked > limits.unpacked_bytes:
            exceeded("unpacked_bytes", limits.unpacked_bytes, f"the image unpacks to {unpacked:,} bytes")
        metadata = sum(index.metadata_bytes for index in self._layers)
        if metadata > limits.metadata_bytes:
            what = f"the names and attributes of the image take {metadata:,} bytes"
            exceeded("metadata_bytes", limits.metadata_bytes, what)

    def finish(self) -> Merged:
        self._check_folders()
        return Merged(self._layers, tuple(self._bases), self._root, frozenset(self._shared))

    def _check_folders(self) -> None:
        """Refuse what would be packed for hours: a folder costs the square of its entries."""
        squares = largest = 0
        todo = [self._root]
        while todo:
            children = todo.pop().children
            squares += len(children) ** 2
            largest = max(largest, len(children))
            todo += [node for node in children.values() if isinstance(node, _Directory)]
        limit = self._limits.folder_entries
        if squares > limit**2:
            what = f"a folder of the image has {largest:,} entries"
            if largest <= limit:
                what = f"the image's folders take as long to pack as one of {isqrt(squares):,} entries"
            exceeded("folder_entries", limit, what, enough=isqrt(squares) + 1)

    def apply(self, layer: int) -> None:
        index, base = self._layers[layer], self._bases[layer]
        hidden: dict[bytes, int] = {}
        if WHITEOUT in index.kinds or OPAQUE in index.kinds:
            hidden = self._targets(index)
            self._whiteouts(index)
        for at, letter in enumerate(index.kinds):
            if letter in b"wo":
                continue
            path = index.path(at)
            if letter == DIRECTORY:
                self._add_directory(path, base + at)
            elif letter == HARD_LINK:
                self._add_link(path, index.targets[at], hidden)
            else:
                self._add(path, base + at)

    def _targets(self, index: LayerIndex) -> dict[bytes, int]:
        """Return the files that the layer's hard links name, before its whiteouts hide them.

        A file that is renamed by link and whiteout is legal in one order of the members
        only, and the order means nothing for whiteouts.
        """
        found = {}
        for at in index.linked():
            node = self._look_up(index.targets[at])
            if isinstance(node, int):
                found[index.targets[at]] = node
        return found

    def _whiteouts(self, index: LayerIndex) -> None:
        for at, letter in enumerate(index.kinds):
            if letter == WHITEOUT:
                parent, _, name = index.path(at).rpartition(b"/")
                directory = self._walk(parent, create=False)
                if directory is not None:
                    directory.children.pop(name, None)
            elif letter == OPAQUE:
                directory = self._walk(index.path(at), create=False)
                if directory is not None:
                    directory.children.clear()
        self._known.clear()

    def _add(self, path: bytes, code: int) -> None:
        parent, _, name = path.rpartition(b"/")
        children = self._parent(parent).children
        self._forget(children.get(name))
        children[name] = code

    def _add_directory(self, path: bytes, code: int) -> None:
        if not path:
            self._root.code = code
            return
        parent, _, name = path.rpartition(b"/")
        children = self._parent(parent).children
        there = children.get(name)
        if isinstance(there, _Directory):
            there.code = code
        else:
            self._forget(there)
            children[name] = _Directory(code)

    def _add_link(self, path: bytes, target: bytes, hidden: dict[bytes, int]) -> None:
        node = self._look_up(target)
        if node is None:
            node = hidden.get(target)
        if not isinstance(node, int):
            what = "is not in the image" if node is None else "is a directory"
            raise ImageMismatch(
                f"a layer has a hard link `{shown(path)}` to `{shown(target)}`, which {what}",
                why="the layers of an image must hold whatever their hard links name (OCI image-spec, layer.md)",
                hint="build the image again; a builder that loses files has pushed it",
            )
        self._shared.add(node)
        self._add(path, node)

    def _forget(self, node: _Node | None) -> None:
        """Drop remembered parents when something that a path can lead through goes away."""
        if isinstance(node, _Directory) or (node is not None and self._letter(node) == SYMLINK):
            self._known.clear()

    def _letter(self, code: int) -> int:
        layer = bisect_right(self._bases, code) - 1
        return self._layers[layer].kinds[code - self._bases[layer]]

    def _target(self, code: int) -> bytes:
        layer = bisect_right(self._bases, code) - 1
        return self._layers[layer].targets[code - self._bases[layer]]

    def _look_up(self, path: bytes) -> _Node | None:
        """Return what lies at a path; a symbolic link at its end is not followed."""
        parent, _, name = path.rpartition(b"/")
        directory = self._walk(parent, create=False) if path else None
        return None if directory is None else directory.children.get(name)

    def _parent(self, path: bytes) -> _Directory:
        known = self._known.get(path)
        if known is None:
            known = self._walk(path, create=True)
            assert known is not None
            self._known[path] = known
        return known

    def _walk(self, path: bytes, *, create: bool) -> _Directory | None:
        """Follow a path through directories and symbolic links, never above the root."""
        trail = [self._root]
        todo = path.split(b"/")[::-1] if path else []
        links = 0
        while todo:
            part = todo.pop()
            if part in {b"", b"."}:
                continue
            if part == b"..":
                if len(trail) > 1:
                    trail.pop()
                continue
            node = trail[-1].children.get(part)
            if node is None:
                if not create:
                    return None
                node = self._imply(trail[-1], part)
            if isinstance(node, _Directory):
                trail.append(node)
                continue
            if self._letter(node) != SYMLINK:
                if not create:
                    return None
                raise self._blocked(path, part)
            links += 1
            target = self._target(node)
            if links > _MOST_SYMLINKS:
                if not create:
                    return None
                raise refused("symbolic links on its way run in a circle", path)
            if target.startswith(b"/"):
                del trail[1:]
            parts = target.split(b"/")
            self._followed += len(parts)
            if self._followed > _MOST_FOLLOWED:
                raise refused("its paths lead through too many symbolic links", path)
            todo += parts[::-1]
        return trail[-1]

    def _imply(self, parent: _Directory, name: bytes) -> _Directory:
        self._implied += 1
        if self._bases[-1] + self._implied > self._limits.entries:
            exceeded("entries", self._limits.entries, "the image has more entries")
        made = _Directory()
        parent.children[name] = made
        return made

    @staticmethod
    def _blocked(path: bytes, part: bytes) -> ImageMismatch:
        return ImageMismatch(
            f"a layer has entries in `{shown(path)}`, of which `{shown(part)}` is not a directory",
            why="what becomes a directory must be named as one before the entries in it (OCI image-spec, layer.md)",
            hint="build the image again; no runtime unpacks this one",
        )


class Merged:
    """The root file system that the layers make."""

    def __init__(
        self,
        layers: tuple[LayerIndex, ...],
        bases: tuple[int, ...],
        root: _Directory,
        shared: frozenset[int],
        extra: tuple[tuple[Entry, bytes], ...] = (),
    ) -> None:
        self.layers = layers
        self.bases = bases
        self._root = root
        self.shared = shared
        self.extra = extra

    def entries(self) -> Iterator[Entry]:
        """Yield every path sorted by its bytes, the root `b""` first, as the layers say it."""
        first: dict[int, bytes] = {}
        for path, code in self.paths():
            inode = path
            if code in self.shared:
                inode = first.setdefault(code, path)
            yield self.entry_of(path, code, inode)

    def written(self, *, extra: Sequence[tuple[Entry, bytes]] = (), mtime_limit: int | None = None) -> Iterator[Entry]:
        """Yield what a squashfs made of `emit` with these arguments must hold, sorted alike.

        squashfs has times from 1970 to 2106 and xattrs of user, trusted and security only.
        """
        for entry in self.with_extra(extra).entries():
            yield storable(entry, mtime_limit)

    def root(self) -> Entry:
        """Return the root directory, which is not a member of the stream: packers take it as options."""
        return self.entry_of(b"", self._root.code, b"")

    def size(self) -> tuple[int, int]:
        """Return how many entries there are, and the bytes of all files, hard links counted once."""
        entries, sizes = self._counted
        return entries, sum(size * count for size, count in sizes.items())

    def comparisons(self) -> int:
        """Return what it costs to look for equal files: all of one size are compared with each other."""
        return sum(count * count for size, count in self._counted[1].items() if size)

    @cached_property
    def _counted(self) -> tuple[int, Counter[int]]:
        """How many paths there are, and how many files of each size."""
        entries = 0
        sizes: Counter[int] = Counter()
        seen: set[int] = set()
        for code in self._codes():
            entries += 1
            if code < 0 or code in seen:
                continue
            if code in self.shared:
                seen.add(code)
            layer, at = self.place(code)
            if layer < len(self.layers) and self.layers[layer].kinds[at] == FILE:
                sizes[self.layers[layer].sizes[at]] += 1
        return entries, sizes

    def _codes(self) -> Iterator[int]:
        """Yield the codes of all paths in no order that means anything."""
        todo = [self._root]
        yield self._root.code
        while todo:
            for node in todo.pop().children.values():
                if isinstance(node, int):
                    yield node
                else:
                    yield node.code
                    todo.append(node)

    def find(self, path: bytes) -> Entry | None:
        """Return what lies at a path, no symbolic link followed; `inode` is not that of `entries`."""
        node: _Node | None = self._root
        for part in path.split(b"/") if path else ():
            if not isinstance(node, _Directory):
                return None
            node = node.children.get(part)
        if node is None:
            return None
        return self.entry_of(path, node if isinstance(node, int) else node.code, path)

    def place(self, code: int) -> tuple[int, int]:
        """Return the layer and the position in it of a member; `extra` counts as the last layer."""
        layer = bisect_right(self.bases, code) - 1
        return layer, code - self.bases[layer]

    def entry_of(self, path: bytes, code: int, inode: bytes) -> Entry:
        """Return a member as an entry at `path`."""
        if code < 0:
            return Entry(path=path, kind="directory", mode=0o755, inode=inode)
        layer, at = self.place(code)
        if layer == len(self.layers):
            return replace(self.extra[at][0], path=path, inode=inode)
        index = self.layers[layer]
        return index.entry(at, index.kinds[at], path, inode)

    def paths(self) -> Iterator[tuple[bytes, int]]:
        """Yield each path and its member's code, sorted by the bytes of the whole path.

        `a-b` lies between `a` and `a/c`, so a directory is sorted twice: by its name for
        itself, and by its name and a slash for what is in it.
        """
        yield b"", self._root.code
        stack = [(b"", self._root.children, _sorted_names(self._root))]
        while stack:
            prefix, children, names = stack[-1]
            for name in names:
                if name.endswith(b"/"):
                    below = cast("_Directory", children[name[:-1]])
                    stack.append((prefix + name, below.children, _sorted_names(below)))
                    break
                node = children[name]
                yield prefix + name, node if isinstance(node, int) else node.code
            else:
                stack.pop()

    def with_extra(self, extra: Sequence[tuple[Entry, bytes]]) -> Merged:
        """Return this tree with `extra` over it as one more layer; this one stays as it is."""
        if not extra:
            return self
        base = self.bases[-1]
        root = _Directory(self._root.code)
        root.children = dict(self._root.children)
        own = {id(root)}
        for at, (entry, _) in enumerate(extra):
            *parents, name = entry.path.split(b"/")
            directory = root
            for part in parents:
                directory = _own_child(directory, part, own)
            if entry.kind == "directory":
                _own_child(directory, name, own).code = base + at
            else:
                directory.children[name] = base + at
        bases = (*self.bases, base + len(extra))
        return Merged(self.layers, bases, root, self.shared, tuple(extra))


def _own_child(directory: _Directory, name: bytes, own: set[int]) -> _Directory:
    """Return a child that may be changed: a copy, or a new directory where none was."""
    child = directory.children.get(name)
    if not isinstance(child, _Directory) or id(child) not in own:
        copied = _Directory(child.code if isinstance(child, _Directory) else -1)
        copied.children = dict(child.children) if isinstance(child, _Directory) else {}
        own.add(id(copied))
        directory.children[name] = child = copied
    return child


def _sorted_names(directory: _Directory) -> Iterator[bytes]:
    names = list(directory.children)
    names += [
        name + b"/" for name, node in directory.children.items() if isinstance(node, _Directory) and node.children
    ]
    names.sort()
    return iter(names)


def storable(entry: Entry, mtime_limit: int | None = None) -> Entry:
    """Return the entry as squashfs can hold it."""
    mtime = max(0, min(entry.mtime, _LATEST if mtime_limit is None else min(mtime_limit, _LATEST)))
    xattrs = entry.xattrs
    if xattrs:
        xattrs = tuple(pair for pair in xattrs if pair[0].startswith(_KEPT_XATTRS))
    if mtime == entry.mtime and xattrs == entry.xattrs:
        return entry
    return replace(entry, mtime=mtime, xattrs=xattrs)
