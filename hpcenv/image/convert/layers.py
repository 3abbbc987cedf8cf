"""Merge the indexes of an image's layers into one tree.

Runs on: LOGIN NODE. The rules are those of OCI image-spec 1.1, layer.md ("Applying Changesets", "Whiteouts"). Cases
that the specification does not define are treated as in umoci 0.4.7, which `apptainer build` uses to unpack.

    open_blob ─▶ index_layer ─▶ LayerIndex ─┐
    open_blob ─▶ index_layer ─▶ LayerIndex ─┴▶ merge ─▶ MergedTree ─▶ entries (the tree)
                                                         └──────▶ layer_stream.emit (one tar stream)

Nothing is unpacked to a disk, so a path of an image cannot reach a path of the host, and symbolic links are followed
only within the image's tree.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import isqrt
from typing import cast

from hpcenv.errors import ImageMismatch
from hpcenv.image.content.tree import TreeEntry
from hpcenv.image.convert.layer_index import (
    DIRECTORY,
    FILE,
    HARD_LINK,
    OPAQUE,
    SYMLINK,
    WHITEOUT,
    LayerIndex,
    LayerLimits,
    exceeded,
    index_layer,
    located,
    open_blob,
    refused,
    shown,
)

__all__ = ["LayerIndex", "LayerLimits", "MergedTree", "index_layer", "merge", "open_blob", "storable"]

# Linux follows at most 40 symbolic links in one path (MAXSYMLINKS).
_MOST_SYMLINKS = 40
# Limit for the parts of link targets that a merge follows; real images need some thousands.
_MOST_FOLLOWED = 20_000_000
_LATEST = 2**32 - 1
# squashfs can store only attributes with these prefixes (Linux fs/squashfs/xattr.c). It cannot store, for example,
# system.posix_acl_*.
_KEPT_XATTRS = (b"user.", b"trusted.", b"security.")


# -- merging ------------------------------------------------------------------------------


class _Directory:
    """A directory of the merged tree.

    Attributes:
        children: name -> a directory, or the number of a member. The members of all layers are numbered together.
        code: the number of the directory's own member; -1 if the directory occurs only in the paths of other members.
    """

    __slots__ = ("children", "code")

    def __init__(self, code: int = -1) -> None:
        self.code = code
        self.children: dict[bytes, _Directory | int] = {}


_PathNode = _Directory | int


def merge(indexes: Sequence[LayerIndex], *, limits: LayerLimits | None = None) -> MergedTree:
    """Apply the layers on top of each other, beginning with the lowest.

    Rules, from OCI image-spec 1.1 layer.md:
    - a layer's whiteouts are applied before its entries, independent of their position ("regardless
      of the ordering"), so they hide only lower layers; a whiteout that hides nothing is allowed;
    - if a directory is added where a directory exists, the children stay and the attributes are replaced;
      every other entry replaces the old entry and everything below it;
    - if a layer has two members with the same path, the later member counts (the specification
      forbids two such members; tar extracts them in this way);
    - a hard link names the file that is at its target when the link is applied, with the attributes of that
      file; it still names this file if the target is replaced or hidden later;
    - a path through a symbolic link is resolved within the image, where `/` is the image's
      root, and `..` of the root is the root;
    - directories without an entry have mode 0755, owner 0:0 and mtime 0.

    Args:
        indexes: the indexes of the image's layers, in order.
        limits: see `LayerLimits`.

    Raises:
        ImageMismatch: a layer has a hard link to nothing or to a directory, a path below a file, or circular symbolic
            links; or a limit is exceeded.
    """
    limits = limits or LayerLimits()
    tree = _Tree(indexes, limits)
    for layer, index in enumerate(indexes):
        try:
            tree.apply(layer)
        except ImageMismatch as error:
            raise located(error, index.diff_id) from error.__cause__
    return tree.finish()


class _Tree:
    """Builds the merged tree."""

    def __init__(self, indexes: Sequence[LayerIndex], limits: LayerLimits) -> None:
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
        # Cache: parent path -> its directory. Cleared when a directory or symbolic link is replaced.
        self._known: dict[bytes, _Directory] = {}

    def _check_totals(self) -> None:
        limits = self._limits
        if self._bases[-1] + self._implied > limits.entries:
            exceeded("entries", limits.entries, f"the image has {self._bases[-1] + self._implied:,} entries")
        unpacked = sum(index.unpacked for index in self._layers)
        if unpacked > limits.unpacked_bytes:
            exceeded("unpacked_bytes", limits.unpacked_bytes, f"the image has {unpacked:,} uncompressed bytes")
        metadata = sum(index.metadata_bytes for index in self._layers)
        if metadata > limits.metadata_bytes:
            what = f"the names and attributes of the image take {metadata:,} bytes"
            exceeded("metadata_bytes", limits.metadata_bytes, what)

    def finish(self) -> MergedTree:
        self._check_folders()
        return MergedTree(self._layers, tuple(self._bases), self._root, frozenset(self._shared))

    def _check_folders(self) -> None:
        """Refuse folders that take hours to pack: the time grows with the square of their entries."""
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
                what = f"the image's folders take as long to pack as one folder of {isqrt(squares):,} entries"
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

        A layer may rename a file with a hard link and a whiteout. The layer may contain the hard link and the whiteout
        in any order.
        """
        files = {}
        for at in index.linked():
            node = self._look_up(index.targets[at])
            if isinstance(node, int):
                files[index.targets[at]] = node
        return files

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
        existing = children.get(name)
        if isinstance(existing, _Directory):
            existing.code = code
        else:
            self._forget(existing)
            children[name] = _Directory(code)

    def _add_link(self, path: bytes, target: bytes, hidden: dict[bytes, int]) -> None:
        node = self._look_up(target)
        if node is None:
            node = hidden.get(target)
        if not isinstance(node, int):
            what = "is not in the image" if node is None else "is a directory"
            raise ImageMismatch(
                f"a layer has a hard link `{shown(path)}` to `{shown(target)}`, which {what}",
                why="the layers of an image must contain the targets of their hard links (OCI image-spec, layer.md)",
                hint="build the image again; the program that built it has lost a file",
            )
        self._shared.add(node)
        self._add(path, node)

    def _forget(self, node: _PathNode | None) -> None:
        """Clear the cache of parents if a directory or symbolic link is replaced."""
        if isinstance(node, _Directory) or (node is not None and self._letter(node) == SYMLINK):
            self._known.clear()

    def _letter(self, code: int) -> int:
        layer = bisect_right(self._bases, code) - 1
        return self._layers[layer].kinds[code - self._bases[layer]]

    def _target(self, code: int) -> bytes:
        layer = bisect_right(self._bases, code) - 1
        return self._layers[layer].targets[code - self._bases[layer]]

    def _look_up(self, path: bytes) -> _PathNode | None:
        """Return the node at a path; a symbolic link at its end is not followed."""
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
                raise refused("its path has circular symbolic links", path)
            if target.startswith(b"/"):
                del trail[1:]
            parts = target.split(b"/")
            self._followed += len(parts)
            if self._followed > _MOST_FOLLOWED:
                raise refused("its paths use too many symbolic links", path)
            todo += parts[::-1]
        return trail[-1]

    def _imply(self, parent: _Directory, name: bytes) -> _Directory:
        self._implied += 1
        if self._bases[-1] + self._implied > self._limits.entries:
            exceeded("entries", self._limits.entries, "the image has more entries")
        directory = _Directory()
        parent.children[name] = directory
        return directory

    @staticmethod
    def _blocked(path: bytes, part: bytes) -> ImageMismatch:
        return ImageMismatch(
            f"a layer has entries in `{shown(path)}`, but `{shown(part)}` is not a directory",
            why="a layer must replace a file by a directory before it adds entries in it (OCI image-spec, layer.md)",
            hint="build the image again; no container runtime can unpack this image",
        )


class MergedTree:
    """The merged root file system."""

    def __init__(
        self,
        layers: tuple[LayerIndex, ...],
        bases: tuple[int, ...],
        root: _Directory,
        shared: frozenset[int],
        extra: tuple[tuple[TreeEntry, bytes], ...] = (),
    ) -> None:
        self.layers = layers
        self.bases = bases
        self._root = root
        self.shared = shared
        self.extra = extra

    def entries(self) -> Iterator[TreeEntry]:
        """Yield all entries, sorted by the bytes of their paths; the root `b""` comes first."""
        first: dict[int, bytes] = {}
        for path, code in self.paths():
            inode = path
            if code in self.shared:
                inode = first.setdefault(code, path)
            yield self.entry_of(path, code, inode)

    def written(
        self, *, extra: Sequence[tuple[TreeEntry, bytes]] = (), mtime_limit: int | None = None
    ) -> Iterator[TreeEntry]:
        """Yield the entries that a squashfs has if `emit` wrote its stream with these arguments.

        The order is the same as in `entries`. squashfs supports times from 1970 to 2106, and only xattrs of user,
        trusted and security.
        """
        for entry in self.with_extra(extra).entries():
            yield storable(entry, mtime_limit)

    def root(self) -> TreeEntry:
        """Return the root directory, which is not in the stream; mksquashfs gets its attributes as options."""
        return self.entry_of(b"", self._root.code, b"")

    def size(self) -> tuple[int, int]:
        """Return the number of entries, and the bytes of all files; hard links count once."""
        entries, sizes = self._counted
        return entries, sum(size * count for size, count in sizes.items())

    def comparisons(self) -> int:
        """Return the cost of the search for equal files. The search compares all files of one size with each other."""
        return sum(count * count for size, count in self._counted[1].items() if size)

    @cached_property
    def _counted(self) -> tuple[int, Counter[int]]:
        """The number of paths, and the number of files of each size."""
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
        """Yield the codes of all paths in an arbitrary order."""
        todo = [self._root]
        yield self._root.code
        while todo:
            for node in todo.pop().children.values():
                if isinstance(node, int):
                    yield node
                else:
                    yield node.code
                    todo.append(node)

    def find(self, path: bytes) -> TreeEntry | None:
        """Return the entry at a path without following symbolic links; `entries` gives it a different `inode`."""
        node: _PathNode | None = self._root
        for part in path.split(b"/") if path else ():
            if not isinstance(node, _Directory):
                return None
            node = node.children.get(part)
        if node is None:
            return None
        return self.entry_of(path, node if isinstance(node, int) else node.code, path)

    def place(self, code: int) -> tuple[int, int]:
        """Return the layer of a member, and the member's position in this layer; `extra` counts as the last layer."""
        layer = bisect_right(self.bases, code) - 1
        return layer, code - self.bases[layer]

    def entry_of(self, path: bytes, code: int, inode: bytes) -> TreeEntry:
        """Return a member as an entry at `path`."""
        if code < 0:
            return TreeEntry(path=path, kind="directory", mode=0o755, inode=inode)
        layer, at = self.place(code)
        if layer == len(self.layers):
            return replace(self.extra[at][0], path=path, inode=inode)
        index = self.layers[layer]
        return index.entry(at, index.kinds[at], path, inode)

    def paths(self) -> Iterator[tuple[bytes, int]]:
        """Yield each path and its member's code, sorted by the bytes of the whole path.

        `a-b` sorts between `a` and `a/c`. So a directory is sorted twice: by its name for
        itself, and by its name with a slash for its content.
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

    def with_extra(self, extra: Sequence[tuple[TreeEntry, bytes]]) -> MergedTree:
        """Return a tree with `extra` as one more layer; this tree does not change."""
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
        return MergedTree(self.layers, bases, root, self.shared, tuple(extra))


def _own_child(directory: _Directory, name: bytes, own: set[int]) -> _Directory:
    """Return a child directory that may be changed: a copy of the child, or a new directory."""
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


def storable(entry: TreeEntry, mtime_limit: int | None = None) -> TreeEntry:
    """Return the entry with only those attributes that squashfs can store."""
    mtime = max(0, min(entry.mtime, _LATEST if mtime_limit is None else min(mtime_limit, _LATEST)))
    xattrs = entry.xattrs
    if xattrs:
        xattrs = tuple(pair for pair in xattrs if pair[0].startswith(_KEPT_XATTRS))
    if mtime == entry.mtime and xattrs == entry.xattrs:
        return entry
    return replace(entry, mtime=mtime, xattrs=xattrs)
