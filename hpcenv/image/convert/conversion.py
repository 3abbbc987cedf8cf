"""Convert a resolved image to a SIF in the store: fetch, read, merge, pack, compare with the layers, publish.

Runs on: LOGIN NODE.

    blobs ─▶ indexes ─▶ merged tree ─▶ one tar stream ─▶ mksquashfs ─▶ squashfs inside the SIF
                             └────────────── compared with the tree in the SIF ────────┘

A layer without an index is read once: the same pass makes its index and writes its files to the
stream (see `layer_stream`). Nothing is unpacked to a disk, and nothing is published before all layers
are checked. The bytes of a SIF depend only on the image's manifest digest, FORMAT and the version of
squashfs-tools; they do not depend on the reference, user, host, time or number of cores.
Without a suitable squashfs-tools, `apptainer build` converts the same verified blobs.
"""

from __future__ import annotations

import dataclasses
import functools
import getpass
import os
import platform as machine
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Literal

from hpcenv.container import apptainer, runtime
from hpcenv.errors import FileUnusable, HpcenvError, ImageMismatch, RecordInvalid, ToolFailed, ToolMissing
from hpcenv.identity import sif
from hpcenv.image.content import tree
from hpcenv.image.content.tree import TreeEntry
from hpcenv.image.convert import (
    apptainer_build,
    layer_stream,
    layers,
    linked_library,
    squashfs,
    squashfs_reader,
    temporary_folder,
)
from hpcenv.image.convert.layer_index import FileSink
from hpcenv.image.convert.layer_stream import Ahead, GuessedWrong
from hpcenv.image.convert.layers import LayerIndex, LayerLimits, MergedTree
from hpcenv.image.convert.mount_points import unusable_mount_points
from hpcenv.image.convert.runtime_files import RuntimeFiles, RuntimeMember, additions, runtime_files
from hpcenv.image.convert.squashfs import Compression, Packer, PackResult
from hpcenv.image.registry import blobs, oci_layout
from hpcenv.image.registry.blobs import BlobSource, BlobSpec
from hpcenv.image.registry.manifests import Layer, ResolvedImage
from hpcenv.image.store.lease import Lease
from hpcenv.image.store.sif_record import ImageRecord, Provenance, SifFacts, utc_now
from hpcenv.image.store.store import Store
from hpcenv.progress import Event, OnEvent

Builder = Literal["auto", "hpcenv", "apptainer"]
OpenBlobs = Callable[[], BlobSource]

# Version of the files that hpcenv adds to a SIF. Increase this number if a change of hpcenv gives different bytes for
# the same image.
FORMAT = "2"
FORMAT_LABEL = "hpcenv.format"

_SECONDS = 4 * 3600.0
# mksquashfs 4.6.1 compares files of equal size: 498,000 files of one size took 15 minutes, and 36,000 files of
# different sizes took a negligible time.
_MOST_COMPARISONS = 10**9
# A squashfs is larger than its layers by at most this number of bytes, even if the data cannot be compressed.
_SLACK = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A SIF in the store; `reused` is true if the SIF existed before this call."""

    image: ResolvedImage
    path: Path
    record: ImageRecord
    reused: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _UnpublishedSif:
    """A finished SIF that is not published yet, and how it was made.

    Attributes:
        warnings: warnings of the packer.
        extra: the files that hpcenv added to the image.
    """

    builder: Literal["hpcenv", "apptainer"]
    tools: dict[str, str]
    arguments: tuple[str, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    extra: tuple[RuntimeMember, ...] = ()
    libraries: dict[str, str] = field(default_factory=dict)


def convert(
    image: ResolvedImage,
    open_blobs: OpenBlobs,
    *,
    store: Store,
    environ: Mapping[str, str],
    on_event: OnEvent,
    builder: Builder = "auto",
    compression: Compression = "zstd",
    prove: bool = True,
    limits: LayerLimits | None = None,
) -> Converted:
    """Return the image's SIF; convert the image if the store has no SIF of it.

    On all machines that share the store, only one process at a time converts an image. The other processes wait and use
    its result. After a failure or ^C no incomplete file has a final name, and the next call uses the layers that have
    arrived.

    Args:
        image: the resolved image.
        open_blobs: gives access to the image's blobs; called only if some blobs are missing in the store.
        store: the store for the layers and the SIF.
        environ: the user's environment, for tools and temporary folders.
        on_event: called with the progress.
        builder: `hpcenv` streams the layers into mksquashfs. `apptainer` uses `apptainer build`. `auto` streams if a
            suitable squashfs-tools is on PATH, and otherwise uses `apptainer build`.
        compression: the compression of a new SIF. If gzip is requested, a stored SIF with zstd is converted again.
        prove: whether to read the SIF and compare it with the layers, path by path.
        limits: limits on what the image may contain.

    Raises:
        ImageUnavailable: a blob cannot be fetched.
        ImageMismatch: the layers are damaged or hostile, or the SIF differs from the layers.
        ToolMissing, ToolFailed: no tool here can make the SIF, or the tool failed.
        FileUnusable: too little space or quota, or the store cannot be written to.
    """
    limits = limits or LayerLimits()
    existing = ready(image, store, prove, compression)
    if existing is not None:
        return existing
    purpose = f"converts {image.manifest_digest[:19]}"
    with store.lease(image.manifest_digest, purpose=purpose, timeout=_SECONDS, on_event=on_event) as held:
        existing = ready(image, store, prove, compression)
        if existing is not None:
            return existing
        _set_aside_unreadable(image, store, compression, on_event)
        source = _Layers(image=image, open_blobs=open_blobs, store=store, limits=limits, on_event=on_event)
        job = _Job(source=source, environ=environ, builder=builder, compression=compression, prove=prove)
        existing = job.prove_existing()
        if existing is not None:
            return existing
        try:
            return job.work(held)
        except (ImageMismatch, ToolFailed) as error:
            # If the indexes are from an earlier call, this call has not read the layers before. So damage is noticed
            # only now.
            if not source.forget_damaged(error):
                raise
        return job.work(held)


def ready(image: ResolvedImage, store: Store, prove: bool, compression: Compression = "zstd") -> Converted | None:
    """Return the SIF in the store, if it meets the request.

    The result is None if the SIF is missing, if `prove` is set and the SIF was not compared with the layers, or if
    gzip is requested and the SIF has zstd.
    """
    stored = store.find_image(image.manifest_digest)
    if stored is None or stored.record is None or (prove and stored.record.tree_sha256 is None):
        return None
    if _is_unreadable(stored.record, compression):
        return None
    store.remember(image.manifest_digest, reference=image.reference, index_digest=image.index_digest)
    if store.writable:
        store.clean_leftovers()  # files of a process that was killed just after it had published the SIF
    return Converted(image=image, path=stored.path, record=stored.record, reused=True, notes=stored.record.notes)


def _is_unreadable(record: ImageRecord, compression: Compression) -> bool:
    return compression == "gzip" and "zstd" in record.made.arguments


def _set_aside_unreadable(image: ResolvedImage, store: Store, compression: Compression, on_event: OnEvent) -> None:
    stored = store.find_image(image.manifest_digest)
    if stored is not None and stored.record is not None and _is_unreadable(stored.record, compression):
        note = "the stored SIF is compressed with zstd, which SingularityCE does not read; converting again with gzip"
        on_event(Event(phase="note", what=note))
        store.set_aside(image.manifest_digest)


# -- the layers -----------------------------------------------------------------------------


def merged_layers(
    image: ResolvedImage, open_blobs: OpenBlobs, store: Store, limits: LayerLimits, on_event: OnEvent
) -> MergedTree:
    """Fetch all layers into the store, read the layers without an index, and merge all layers."""
    source = _Layers(image=image, open_blobs=open_blobs, store=store, limits=limits, on_event=on_event)
    source.fetch()
    return source.merged()


def fetch(image: ResolvedImage, open_blobs: OpenBlobs, store: Store, on_event: OnEvent) -> None:
    """Fetch the image's manifest, configuration and layers into the store; layers of a local layout stay in the layout.

    Raises:
        ImageUnavailable, FileUnusable: see `blobs.fetch_all`.
    """
    for digest, data in ((image.manifest_digest, image.manifest), (image.config_digest, image.config_bytes)):
        blobs.put(store.blobs, digest, data)
    missing = [layer for layer in image.layers if oci_layout.layer_file(image, layer) is None]
    wanted = [BlobSpec(digest=layer.digest, size=layer.size) for layer in missing]
    if all(blobs.cached(store.blobs, spec) for spec in wanted):
        return
    source = open_blobs()
    try:
        blobs.fetch_all(wanted, source, store.blobs, leases=store.leases, on_event=on_event)
    finally:
        source.close()


@dataclass(frozen=True, kw_only=True)
class _Layers:
    """An image's layers in the store, and their indexes."""

    image: ResolvedImage
    open_blobs: OpenBlobs
    store: Store
    limits: LayerLimits
    on_event: OnEvent
    _indexes: dict[str, LayerIndex] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.image.layers)

    def fetch(self) -> None:
        """Fetch all blobs into the store, with the function `fetch` of this module."""
        fetch(self.image, self.open_blobs, self.store, self.on_event)

    def open(self, position: int) -> AbstractContextManager[BinaryIO]:
        """Open a layer's uncompressed stream."""
        layer = self.image.layers[position]
        return layers.open_blob(layer_path(self.image, layer, self.store), layer.media_type)

    def known(self, position: int) -> LayerIndex | None:
        """Return the stored index of a layer; None if the store has no valid index."""
        diff_id = self.image.layers[position].diff_id
        if diff_id not in self._indexes:
            try:
                data = self.store.index_path(diff_id).read_bytes()
                self._indexes[diff_id] = LayerIndex.from_bytes(data, diff_id=diff_id, limits=self.limits)
            except (OSError, RecordInvalid):
                return None  # the index is missing or damaged, and can be made again
        return self._indexes[diff_id]

    def index(self, position: int, sink: FileSink | None = None) -> LayerIndex:
        """Return the index of a layer; if the store has none, read the layer and store its index.

        Args:
            position: the layer's position in the image.
            sink: receives the files of a layer that has no index yet.

        Raises:
            GuessedWrong: the stored layer is damaged, and the sink has received a part of it.
        """
        known = self.known(position)
        if known is not None:
            return known
        layer = self.image.layers[position]
        try:
            index = self._read(position, sink)
        except (ImageMismatch, FileUnusable) as error:
            # The blob had the right digest when it arrived. If the digest is wrong now, the disk has damaged the blob.
            if not self._discard([layer], error):
                raise
            self.fetch()
            if sink is not None:
                raise GuessedWrong("a part of a damaged layer was packed") from error
            index = self._read(position, None)
        self.store.keep_index(layer.diff_id, index.to_bytes())
        self._indexes[layer.diff_id] = index
        return index

    def _read(self, position: int, sink: FileSink | None) -> LayerIndex:
        layer = self.image.layers[position]

        def count(done: int) -> None:
            self.on_event(Event(phase="index", what=layer.digest, done=done, unit="bytes"))

        before = sum(map(len, self._indexes.values()))
        with self.open(position) as stream:
            index = layers.index_layer(
                stream, diff_id=layer.diff_id, limits=self.limits, on_bytes=count, sink=sink, before=before
            )
        done = index.unpacked
        self.on_event(Event(phase="index", what=layer.digest, done=done, total=done, unit="bytes"))
        return index

    def merged(self) -> MergedTree:
        """Read the layers without an index, and merge all layers."""
        indexes = [self.index(position) for position in range(len(self))]
        what = f"{len(indexes)} layers"
        self.on_event(Event(phase="merge", what=what, total=1))
        merged = layers.merge(indexes, limits=self.limits)
        self.on_event(Event(phase="merge", what=what, done=1, total=1))
        return merged

    def forget_damaged(self, error: HpcenvError) -> bool:
        """Remove damaged stored layers, if they can be the cause of the error; return whether a layer was removed."""
        if isinstance(error, ToolFailed) and not any("apptainer" in word for word in error.argv[:1]):
            return False  # mksquashfs does not read the layers
        return self._discard(self.image.layers, error)

    def _discard(self, wanted: Sequence[Layer], error: HpcenvError) -> bool:
        folder = self.store.blobs
        damaged = [layer for layer in wanted if self._in_store(layer) and self._is_damaged(layer)]
        for layer in damaged:
            blobs.discard(blobs.blob_path(folder, layer.digest))
            note = f"the stored layer {layer.digest[:19]} is damaged ({error.what}); fetching it again"
            self.on_event(Event(phase="note", what=note))
        return bool(damaged)

    def _in_store(self, layer: Layer) -> bool:
        """Return whether a layer is read from the store, not from a layout of the user."""
        stored = blobs.blob_path(self.store.blobs, layer.digest)
        return os.path.realpath(layer_path(self.image, layer, self.store)) == os.path.realpath(stored)

    def _is_damaged(self, layer: Layer) -> bool:
        return _sha256(layer_path(self.image, layer, self.store)) != layer.digest

    def require_same_bytes(self) -> None:
        """Hash the layers of a local layout that already have an index, because later reads do not hash them.

        Raises:
            ImageMismatch: somebody changed a layer.
        """
        for position, layer in enumerate(self.image.layers):
            if self._in_store(layer) or self.known(position) is None or not self._is_damaged(layer):
                continue
            raise ImageMismatch(
                f"the layer {layer.digest} of `{self.image.reference}` has other bytes",
                why=f"{layer_path(self.image, layer, self.store)} does not have the digest in its name",
                hint="make the layout again, for example with skopeo copy",
            )


def _sha256(path: Path) -> str | None:
    try:
        return f"sha256:{sif.file_sha256(path)}"
    except HpcenvError:
        return None


# -- the SIF --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One conversion of an image; this process holds the lease of the image."""

    source: _Layers
    environ: Mapping[str, str]
    builder: Builder
    compression: Compression
    prove: bool

    @property
    def _image(self) -> ResolvedImage:
        return self.source.image

    @property
    def _on_event(self) -> OnEvent:
        return self.source.on_event

    @cached_property
    def _files(self) -> RuntimeFiles:
        return _files(self._image)

    def prove_existing(self) -> Converted | None:
        """Compare the stored SIF with the layers for the first time.

        Returns:
            The SIF, or None if the store has no SIF of the image or if this SIF is damaged.
        """
        image, store = self._image, self.source.store
        stored = store.find_image(image.manifest_digest)
        if stored is None or stored.record is None:
            return None
        self.source.fetch()
        merged = self.source.merged()
        extra = additions(self._files, merged.find)
        try:
            digest = _prove(stored.path, merged, extra, stored.record.made.builder, self._on_event)
        except ImageMismatch as error:
            note = f"the stored SIF is damaged ({error.what}); converting again"
            self._on_event(Event(phase="note", what=note))
            store.set_aside(image.manifest_digest)
            return None
        record = dataclasses.replace(stored.record, tree_sha256=digest)
        store.update_record(record)
        return Converted(image=image, path=stored.path, record=record, reused=True, notes=record.notes)

    def work(self, held: Lease) -> Converted:
        """Make the SIF, compare it with the layers, and publish it."""
        image, store = self._image, self.source.store
        self.source.fetch()
        if not self.prove:
            self.source.require_same_bytes()
        need = sum(layer.size for layer in image.layers) + _SLACK
        with store.scratch(need) as folder:
            finished = folder / "image.sif"
            made, proof, sha256 = self._make_and_prove(finished)
            record = _record(image, finished, made, proof, sha256)
            if not held.still_mine():
                note = "another process has taken over this conversion; publishing is still safe"
                self._on_event(Event(phase="note", what=note))
            self._on_event(Event(phase="publish", what=image.manifest_digest, total=1))
            stored = store.publish_image(finished, record)
            self._on_event(Event(phase="publish", what=image.manifest_digest, done=1, total=1))
        assert stored.record is not None
        return Converted(image=image, path=stored.path, record=stored.record, reused=False, notes=made.notes)

    def _make_and_prove(self, finished: Path) -> tuple[_UnpublishedSif, str | None, str]:
        """Make the SIF and compare it with the layers; try once more if mksquashfs made an error.

        mksquashfs up to 4.7.5 has races in tar hard links and in its search for duplicates, and
        still ends with exit status 0 (seen with 4.7.5; squashfs-tools commit a0445779). So if mksquashfs printed a
        warning, the SIF is compared even without `prove`.

        Returns:
            How the SIF was made, the digest of its tree (None if it was not compared), and the sha256 of the file.
        """
        merged, made = self._make(finished)
        try:
            return self._checked(finished, merged, made)
        except ImageMismatch as error:
            if made.builder == "apptainer":
                raise
            self._on_event(Event(phase="note", what=f"{error.what}: packing once more"))
        finished.unlink(missing_ok=True)
        merged, made = self._make(finished)
        return self._checked(finished, merged, made)

    def _checked(
        self, finished: Path, merged: MergedTree, made: _UnpublishedSif
    ) -> tuple[_UnpublishedSif, str | None, str]:
        # Compute the file's digest in parallel to the comparison, because neither of them uses all processors.
        with ThreadPoolExecutor(max_workers=1) as pool:
            whole = pool.submit(sif.file_sha256, finished)
            proof = None
            if self.prove or made.warnings:
                proof = _prove(finished, merged, made.extra, made.builder, self._on_event)
            notes = (*made.notes, *unusable_mount_points(merged.find))
            return dataclasses.replace(made, notes=notes), proof, whole.result()

    def _make(self, finished: Path) -> tuple[MergedTree, _UnpublishedSif]:
        if self.builder != "apptainer":
            try:
                packer = squashfs.find_packer(self.environ.get("PATH"), folder=finished.parent)
            except ToolMissing as error:
                if self.builder == "hpcenv":
                    raise
                slow = f"{error.what} ({error.why}): using `apptainer build`, which is slower; {error.hint}"
                self._on_event(Event(phase="note", what=slow))
                merged = self.source.merged()
                return merged, self._build(merged, finished, notes=(slow,))
            return self._pack_ahead(packer, finished) or self._pack_merged(packer, finished)
        merged = self.source.merged()
        return merged, self._build(merged, finished, notes=())

    def _pack_merged(self, packer: Packer, finished: Path) -> tuple[MergedTree, _UnpublishedSif]:
        """Pack the merged tree of the layers."""
        merged = self.source.merged()
        extra = additions(self._files, merged.find)

        def write(out: BinaryIO) -> None:
            layer_stream.emit(merged, self.source.open, out, extra=extra)

        result = self._pack(
            packer,
            finished,
            write,
            root=merged.root(),
            duplicates=merged.comparisons() <= _MOST_COMPARISONS,
            total=merged.size()[1],
        )
        return merged, self._describe(packer, result, extra)

    def _pack_ahead(self, packer: Packer, finished: Path) -> tuple[MergedTree, _UnpublishedSif] | None:
        """Pack the layers while they are read for the first time, beginning with the topmost layer.

        The result is None if all layers have an index, or if the packed tree differs from the merged tree.
        """
        source = self.source
        if all(source.known(position) is not None for position in range(len(source))):
            return None
        results: list[tuple[MergedTree, tuple[RuntimeMember, ...]]] = []

        def write(out: BinaryIO) -> None:
            own = [entry for entry, _ in self._files.members]
            ahead = Ahead(out, extra=own, limits=source.limits, most_comparisons=_MOST_COMPARISONS)
            for position in reversed(range(len(source))):
                ahead.begin_layer()
                index = source.known(position)
                if index is None:
                    index = source.index(position, ahead)
                else:
                    ahead.copy(index, functools.partial(source.open, position))
                ahead.end_layer(index)
            merged = source.merged()
            if not layer_stream.same_root(root, merged.root()):
                raise GuessedWrong("the root directory has other attributes")
            extra = additions(self._files, merged.find)
            ahead.finish(merged, extra)
            results.append((merged, extra))

        try:
            root = layer_stream.likely_root(len(source), source.known, source.open)
        except (ImageMismatch, FileUnusable):
            return None  # the caller then reads the whole layer, which reports the fault or repairs it
        try:
            result = self._pack(packer, finished, write, root=root, duplicates=True, total=None)
        except GuessedWrong:
            return None
        except ToolFailed as error:
            # mksquashfs may have failed because of a wrong guess. If a signal ended it, the guess is not the cause.
            if error.status is None or error.status < 0:
                raise
            return None
        [(merged, extra)] = results
        return merged, self._describe(packer, result, extra)

    def _pack(
        self,
        packer: Packer,
        finished: Path,
        write: squashfs.Write,
        *,
        root: TreeEntry,
        duplicates: bool,
        total: int | None,
    ) -> PackResult:
        """Make a squashfs from a tar stream, and write a SIF header before it."""
        objects = (
            ("definition-file", "", self._files.definition),
            ("json", "inspect-metadata.json", self._files.inspection),
            ("json", "oci-config.json", self._files.oci_config),
        )
        offset = sif.squashfs_offset_for(objects)
        result = squashfs.pack(
            packer,
            finished,
            offset=offset,
            write=write,
            epoch=_epoch(self._image, self._on_event),
            root=root,
            duplicates=duplicates,
            compression=self.compression,
            total=total,
            on_event=self._on_event,
            timeout=_SECONDS,
        )
        sif.write(finished, architecture=_architecture(self._image), squashfs_offset=offset, objects=objects)
        return result

    def _describe(self, packer: Packer, result: PackResult, extra: tuple[RuntimeMember, ...]) -> _UnpublishedSif:
        return _UnpublishedSif(
            builder="hpcenv",
            tools={"hpcenv-format": FORMAT, packer.kind: ".".join(map(str, packer.version))},
            arguments=result.arguments,
            notes=self._files.notes,
            warnings=result.notes,
            extra=extra,
            # The version of this library also determines the bytes.
            libraries=_compressor(packer, self.compression),
        )

    def _build(self, merged: MergedTree, finished: Path, *, notes: tuple[str, ...]) -> _UnpublishedSif:
        """Convert with `apptainer build`, from an OCI layout of the same blobs."""
        image, environ, on_event = self._image, self.environ, self._on_event
        need = apptainer_build.space_needed(sum(layer.size for layer in image.layers), merged.size()[1])
        made = apptainer_build.build_layout(
            apptainer=runtime.find_builder(environ.get("PATH")),
            manifest_digest=image.manifest_digest,
            blobs=stored_blobs(image, self.source.store),
            architecture=_architecture(image),
            epoch=_epoch(image, on_event),
            # Without this label, `image verify` knows that `apptainer build` made the SIF.
            labels={name: value for name, value in _labels(image).items() if name != FORMAT_LABEL},
            files=self._files,
            entries=merged.entries(),
            destination=finished,
            temporary=temporary_folder.choose_temporary(temporary_folder.candidates(environ), need),
            on_line=lambda line: on_event(Event(phase="build", what=line)),
            environ=environ,
            timeout=_SECONDS,
        )
        return _UnpublishedSif(
            builder="apptainer", tools={"apptainer": made.apptainer_version}, arguments=made.arguments, notes=notes
        )


def stored_blobs(image: ResolvedImage, store: Store) -> dict[str, Path]:
    """Return the files of all blobs of a fetched image, by digest."""
    own = {digest: blobs.blob_path(store.blobs, digest) for digest in (image.manifest_digest, image.config_digest)}
    return own | {layer.digest: layer_path(image, layer, store) for layer in image.layers}


def layer_path(image: ResolvedImage, layer: Layer, store: Store) -> Path:
    """Return the file of a fetched layer: in the folder of a local layout, or else in the store."""
    return oci_layout.layer_file(image, layer) or blobs.blob_path(store.blobs, layer.digest)


def _files(image: ResolvedImage) -> RuntimeFiles:
    return runtime_files(image.config, labels=_labels(image), architecture=_architecture(image), epoch=_epoch(image))


def added(image: ResolvedImage, merged: MergedTree) -> tuple[RuntimeFiles, tuple[RuntimeMember, ...]]:
    """Return the files that hpcenv adds to the files of the image."""
    files = _files(image)
    return files, additions(files, merged.find)


def _labels(image: ResolvedImage) -> dict[str, str]:
    return {
        FORMAT_LABEL: FORMAT,
        "hpcenv.source.manifest-digest": image.manifest_digest,
        "hpcenv.source.config-digest": image.config_digest,
        "hpcenv.source.chain-id": image.rootfs_chain_id,
    }


def _architecture(image: ResolvedImage) -> str:
    return image.platform.split("/")[1]


def _epoch(image: ResolvedImage, on_event: OnEvent | None = None) -> int:
    history = image.config.get("history")
    entries = history if isinstance(history, list) else []
    moments = [entry.get("created") for entry in entries if isinstance(entry, dict)]

    def report(line: str) -> None:
        if on_event is not None:
            on_event(Event(phase="note", what=line))

    return apptainer.source_date_epoch(image.created, [m for m in moments if isinstance(m, str)], report)


# -- the proof ------------------------------------------------------------------------------


def _compressor(packer: Packer, compression: Compression) -> dict[str, str]:
    """Return the version of the compression library, because it also determines the bytes of the SIF."""
    name = {"zstd": "zstd", "gzip": "z"}[compression]
    return {f"lib{name}": linked_library.library_version(packer.path, name, env=squashfs.environment(None))}


def _prove(
    file: Path,
    merged: MergedTree,
    extra: tuple[RuntimeMember, ...],
    builder: Literal["hpcenv", "apptainer"],
    on_event: OnEvent,
) -> str:
    """Compare the tree in a SIF with the tree of the layers; return the digest of the tree.

    Raises:
        ImageMismatch: the trees differ; the error lists the first differences.
    """
    if builder == "hpcenv":
        # One pass gives the differences and the digest, because the digest does not cover the files that hpcenv adds
        # (see `tree.tree_digest`).
        expected = merged.written(extra=extra)
        differences, digest = tree.compare_and_digest(expected, _read_back(file, merged, on_event))
    else:
        differences = compare_sif(file, merged, extra, builder=builder, on_event=on_event)
        digest = tree.tree_digest(merged.entries())
    if differences:
        raise ImageMismatch(
            f"the SIF that {builder} made differs from the image's layers",
            why="\n".join(shown(difference) for difference in differences[:20]),
            hint="this is a bug in hpcenv or in the packer; please report it. Until then: --builder apptainer"
            if builder == "hpcenv"
            else "convert it with squashfs-tools 4.6 or newer on PATH",
        )
    return digest


def compare_sif(
    file: Path,
    merged: MergedTree,
    extra: tuple[RuntimeMember, ...],
    *,
    builder: Literal["hpcenv", "apptainer"],
    on_event: OnEvent,
) -> tuple[tree.TreeDifference, ...]:
    """Return the differences between a SIF and the merged layers.

    If hpcenv made the SIF, all fields are compared. If `apptainer build` made the SIF, only those fields are compared
    that Apptainer preserves for an ordinary user (see `tree.tree_digest`).

    Raises:
        ImageMismatch, EnvironmentUnreadable: the SIF cannot be read.
    """
    found = _read_back(file, merged, on_event)
    if builder == "hpcenv":
        return tree.compare(merged.written(extra=extra), found, exact=True)
    return tree.compare(merged.entries(), found, exact=False)


def _read_back(file: Path, merged: MergedTree, on_event: OnEvent) -> Iterator[TreeEntry]:
    """Yield the entries of a SIF, and report the progress."""
    header = sif.read_header(file)
    total = merged.size()[1]
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        on_event(Event(phase="verify", what=file.name, done=min(done, total - 1), total=total, unit="bytes"))

    yield from squashfs_reader.read_tree(file, offset=header.runs.offset, size=header.runs.size, on_bytes=count)
    on_event(Event(phase="verify", what=file.name, done=total, total=total, unit="bytes"))


def shown(difference: tree.TreeDifference) -> str:
    """Return a difference as one line."""
    path = "/" + difference.path.decode("utf-8", "backslashreplace").replace("\n", "\\n")
    if difference.field == "path":
        return f"{path}: {'only in the SIF' if difference.expected is None else 'missing in the SIF'}"
    return f"{path}: {difference.field} {difference.expected or 'none'}, in the SIF {difference.found or 'none'}"


# -- the record -----------------------------------------------------------------------------


def _record(
    image: ResolvedImage, file: Path, made: _UnpublishedSif, tree_sha256: str | None, sha256: str
) -> ImageRecord:
    header = sif.read_header(file)
    return ImageRecord(
        digest=image.manifest_digest,
        references=(image.reference,),
        index_digest=image.index_digest,
        manifest_digest=image.manifest_digest,
        config_digest=image.config_digest,
        chain_id=image.rootfs_chain_id,
        platform=image.platform,
        tree_sha256=tree_sha256,
        layers=tuple(layer.digest for layer in image.layers),
        diff_ids=tuple(layer.diff_id for layer in image.layers),
        sif=SifFacts(
            sha256=sha256,
            size=header.file_size,
            partition_sha256=None,
            partition_size=header.runs.size,
            compression=sif.superblock(file, header).compression,
            architecture=header.architecture,
        ),
        made=Provenance(
            builder=made.builder,
            tools=made.tools,
            libraries=made.libraries,
            arguments=made.arguments,
            epoch=_epoch(image),
            created=utc_now(),
            user=_user(),
            host=machine.node(),
        ),
        notes=made.notes,
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
