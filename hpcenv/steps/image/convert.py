"""Make the SIF of a resolved image in the store: fetch, read, merge, pack, prove, publish.

Runs on: LOGIN NODE, or the compute node of `--on-cluster`.

    blobs ─▶ indexes ─▶ merged tree ─▶ one tar stream ─▶ mksquashfs ─▶ squashfs inside the SIF
                             └────────────── compared with what is read back ──────────┘

Layers that no index knows yet are read once: what their index is made from goes into the stream
at the same time (see `layer_stream`). Nothing is unpacked to a disk, and nothing is published
before every layer was checked. The bytes of a SIF follow from the image's manifest digest,
FORMAT and the version of squashfs-tools: not from reference, user, host, time or cores.
Where no squashfs-tools can do it, `apptainer build` converts from the same verified blobs.
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

from hpcenv.adapters import apptainer, blobs, layer_stream, layers, loaded, sif, squashfs, squashfs_reader
from hpcenv.adapters.blobs import BlobSource, BlobSpec
from hpcenv.adapters.layer_index import FileSink
from hpcenv.adapters.layer_stream import Ahead, GuessedWrong
from hpcenv.adapters.layers import LayerIndex, Limits, Merged
from hpcenv.adapters.lease import Lease
from hpcenv.adapters.manifests import Layer, ResolvedImage
from hpcenv.adapters.squashfs import Packer, PackResult
from hpcenv.adapters.store import Store, utc_now
from hpcenv.errors import FileUnusable, HpcenvError, ImageMismatch, RecordInvalid, ToolFailed, ToolMissing
from hpcenv.model import tree
from hpcenv.model.image_record import ImageRecord, Provenance, SifFacts
from hpcenv.model.progress import Event, OnEvent
from hpcenv.model.runtime_files import Member, RuntimeFiles, additions, runtime_files
from hpcenv.model.tree import Entry

Builder = Literal["auto", "hpcenv", "apptainer"]
OpenBlobs = Callable[[], BlobSource]

# Of what hpcenv itself puts into a SIF; a new number where the same image gives other bytes.
FORMAT = "2"
FORMAT_LABEL = "hpcenv.format"

_SECONDS = 4 * 3600.0
# 498,000 files of one size took mksquashfs 4.6.1 a quarter of an hour, 36,000 of all sizes nothing.
_MOST_COMPARISONS = 10**9
# A squashfs is not larger than the layers by more than this, however badly they compress.
_SLACK = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A SIF of the store, and whether this call made it."""

    image: ResolvedImage
    path: Path
    record: ImageRecord
    reused: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Made:
    """A finished file that is not in its place yet; `said` is what the packer complained of.

    `extra` is what hpcenv itself put beside the image's files.
    """

    builder: Literal["hpcenv", "apptainer"]
    tools: dict[str, str]
    arguments: tuple[str, ...]
    notes: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    extra: tuple[Member, ...] = ()
    libraries: dict[str, str] = field(default_factory=dict)


def convert(
    image: ResolvedImage,
    open_blobs: OpenBlobs,
    *,
    store: Store,
    environ: Mapping[str, str],
    on_event: OnEvent,
    builder: Builder = "auto",
    prove: bool = True,
    limits: Limits | None = None,
) -> Converted:
    """Return the image's SIF, made now if the store does not have it.

    Only one process converts an image at a time, on all machines that see the store; the
    others wait and take its result. A failure or ^C at any moment leaves nothing under a
    final name; layers that have arrived stay for the next call.

    Args:
        open_blobs: opens the image's blobs; called only when some are missing.
        builder: `auto` streams the layers if a packer is found and takes `apptainer build` else.
        prove: read the SIF back and compare it with the layers, path by path.

    Raises:
        ImageUnavailable: a blob cannot be had.
        ImageMismatch: the layers are damaged, hostile, or the SIF does not hold what they hold.
        ToolMissing, ToolFailed: nothing can pack the image here, or it failed.
        FileUnusable: no space, no quota, or the store cannot be written to.
    """
    limits = limits or Limits()
    there = ready(image, store, prove)
    if there is not None:
        return there
    purpose = f"converts {image.manifest_digest[:19]}"
    with store.lease(image.manifest_digest, purpose=purpose, timeout=_SECONDS, on_event=on_event) as held:
        there = ready(image, store, prove)
        if there is not None:
            return there
        source = _Layers(image=image, open_blobs=open_blobs, store=store, limits=limits, on_event=on_event)
        job = _Job(source=source, environ=environ, builder=builder, prove=prove)
        kept = job.proved_now()
        if kept is not None:
            return kept
        try:
            return job.work(held)
        except (ImageMismatch, ToolFailed) as error:
            # Indexes were kept from an earlier call, so nothing has read the whole layers in this one.
            if not source.forget_damaged(error):
                raise
        return job.work(held)


def ready(image: ResolvedImage, store: Store, prove: bool) -> Converted | None:
    """Return the SIF that is in the store already, if it is what was asked for."""
    found = store.find_image(image.manifest_digest)
    if found is None or found.record is None or (prove and found.record.tree_sha256 is None):
        return None
    store.remember(image.manifest_digest, reference=image.reference, index_digest=image.index_digest)
    if store.writable:
        store.clean_leftovers()  # of one that was killed just after it had published
    return Converted(image=image, path=found.path, record=found.record, reused=True)


# -- the layers -----------------------------------------------------------------------------


def merged_layers(
    image: ResolvedImage, open_blobs: OpenBlobs, store: Store, limits: Limits, on_event: OnEvent
) -> Merged:
    """Have every layer in the store, read those that no index knows yet, and merge them."""
    source = _Layers(image=image, open_blobs=open_blobs, store=store, limits=limits, on_event=on_event)
    source.fetch()
    return source.merged()


def fetch(image: ResolvedImage, open_blobs: OpenBlobs, store: Store, on_event: OnEvent) -> None:
    """Have the image's manifest, configuration and layers in the store.

    Raises:
        ImageUnavailable, FileUnusable: as `blobs.fetch_all`.
    """
    for digest, data in ((image.manifest_digest, image.manifest), (image.config_digest, image.config_bytes)):
        blobs.put(store.blobs, digest, data)
    wanted = [BlobSpec(digest=layer.digest, size=layer.size) for layer in image.layers]
    if all(blobs.cached(store.blobs, spec) for spec in wanted):
        return
    source = open_blobs()
    try:
        blobs.fetch_all(wanted, source, store.blobs, on_event=on_event)
    finally:
        source.close()


@dataclass(frozen=True, kw_only=True)
class _Layers:
    """An image's layers in the store, and their indexes."""

    image: ResolvedImage
    open_blobs: OpenBlobs
    store: Store
    limits: Limits
    on_event: OnEvent
    _indexes: dict[str, LayerIndex] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.image.layers)

    def fetch(self) -> None:
        """Have all blobs in the store; see `fetch`."""
        fetch(self.image, self.open_blobs, self.store, self.on_event)

    def open(self, position: int) -> AbstractContextManager[BinaryIO]:
        """Open a layer's uncompressed stream."""
        layer = self.image.layers[position]
        return layers.open_blob(blobs.blob_path(self.store.blobs, layer.digest), layer.media_type)

    def known(self, position: int) -> LayerIndex | None:
        """Return a layer's index if it is kept."""
        diff_id = self.image.layers[position].diff_id
        if diff_id not in self._indexes:
            try:
                data = self.store.index_path(diff_id).read_bytes()
                self._indexes[diff_id] = LayerIndex.from_bytes(data, diff_id=diff_id, limits=self.limits)
            except (OSError, RecordInvalid):
                return None  # none yet, or one that was damaged: it can be had again
        return self._indexes[diff_id]

    def index(self, position: int, sink: FileSink | None = None) -> LayerIndex:
        """Return a layer's index: the one that is kept, or a new one, which is kept then.

        Args:
            sink: is given the files of a layer that has no index yet.

        Raises:
            GuessedWrong: the store's disk had lost the layer, and the sink has a part of it.
        """
        known = self.known(position)
        if known is not None:
            return known
        layer = self.image.layers[position]
        try:
            index = self._read(position, sink)
        except (ImageMismatch, FileUnusable) as error:
            # The blob had its digest when it arrived. If it has not now, the store's disk lost it.
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

        with self.open(position) as stream:
            index = layers.index_layer(stream, diff_id=layer.diff_id, limits=self.limits, on_bytes=count, sink=sink)
        done = index.unpacked
        self.on_event(Event(phase="index", what=layer.digest, done=done, total=done, unit="bytes"))
        return index

    def merged(self) -> Merged:
        """Read the layers that no index knows yet, and merge all."""
        indexes = [self.index(position) for position in range(len(self))]
        what = f"{len(indexes)} layers"
        self.on_event(Event(phase="merge", what=what, total=1))
        merged = layers.merge(indexes, limits=self.limits)
        self.on_event(Event(phase="merge", what=what, done=1, total=1))
        return merged

    def forget_damaged(self, error: HpcenvError) -> bool:
        """Remove the layers that the store's disk has lost since they arrived, if they can be the error's cause."""
        if isinstance(error, ToolFailed) and not any("apptainer" in word for word in error.argv[:1]):
            return False  # the streaming packer never sees the layers
        return self._discard(self.image.layers, error)

    def _discard(self, wanted: Sequence[Layer], error: HpcenvError) -> bool:
        folder = self.store.blobs
        damaged = [layer for layer in wanted if _sha256(blobs.blob_path(folder, layer.digest)) != layer.digest]
        for layer in damaged:
            blobs.discard(blobs.blob_path(folder, layer.digest))
            said = f"the kept layer {layer.digest[:19]} is damaged ({error.what}); fetching it anew"
            self.on_event(Event(phase="note", what=said))
        return bool(damaged)


def _sha256(path: Path) -> str | None:
    try:
        return f"sha256:{sif.file_sha256(path)}"
    except HpcenvError:
        return None


# -- making ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One conversion of an image whose lease this process holds."""

    source: _Layers
    environ: Mapping[str, str]
    builder: Builder
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

    def proved_now(self) -> Converted | None:
        """Compare a SIF that is there, but never was compared, with the layers; None if there is none, or no more."""
        image, store = self._image, self.source.store
        kept = store.find_image(image.manifest_digest)
        if kept is None or kept.record is None:
            return None
        self.source.fetch()
        merged = self.source.merged()
        extra = additions(self._files, merged.find)
        try:
            digest = _prove(kept.path, merged, extra, kept.record.made.builder, self._on_event)
        except ImageMismatch as error:
            said = f"the kept SIF is damaged ({error.what}); converting again"
            self._on_event(Event(phase="note", what=said))
            store.set_aside(image.manifest_digest)
            return None
        record = dataclasses.replace(kept.record, tree_sha256=digest)
        store.update_record(record)
        return Converted(image=image, path=kept.path, record=record, reused=True)

    def work(self, held: Lease) -> Converted:
        """Make the SIF, prove it, and publish it."""
        image, store = self._image, self.source.store
        self.source.fetch()
        need = sum(layer.size for layer in image.layers) + _SLACK
        with store.scratch(need) as place:
            finished = place / "image.sif"
            made, proof, sha256 = self._make_and_prove(finished)
            record = _record(image, finished, made, proof, sha256)
            if not held.still_mine():
                said = "another process took this conversion over; publishing is safe"
                self._on_event(Event(phase="note", what=said))
            self._on_event(Event(phase="publish", what=image.manifest_digest, total=1))
            stored = store.publish_image(finished, record)
            self._on_event(Event(phase="publish", what=image.manifest_digest, done=1, total=1))
        assert stored.record is not None
        return Converted(image=image, path=stored.path, record=stored.record, reused=False, notes=made.notes)

    def _make_and_prove(self, finished: Path) -> tuple[_Made, str | None, str]:
        """Make the SIF and compare it with the layers; once more if a packer went wrong.

        Returns what was made, the tree's digest if it was proved, and the file's sha256.

        mksquashfs up to 4.7.5 has races in tar hard links and in its search for duplicates, and
        ends with 0 all the same (seen with 4.7.5; squashfs-tools commit a0445779). A packer that had
        something to say is therefore checked also where no proof was asked for.
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

    def _checked(self, finished: Path, merged: Merged, made: _Made) -> tuple[_Made, str | None, str]:
        # The file's own digest is computed beside the proof: neither fills all processors.
        with ThreadPoolExecutor(max_workers=1) as pool:
            whole = pool.submit(sif.file_sha256, finished)
            proof = None
            if self.prove or made.said:
                proof = _prove(finished, merged, made.extra, made.builder, self._on_event)
            return made, proof, whole.result()

    def _make(self, finished: Path) -> tuple[Merged, _Made]:
        if self.builder != "apptainer":
            try:
                packer = squashfs.find_packer(self.environ.get("PATH"), folder=finished.parent)
            except ToolMissing as error:
                if self.builder == "hpcenv":
                    raise
                slow = f"{error.what} ({error.why}): `apptainer build` converts, slower; {error.hint}"
                self._on_event(Event(phase="note", what=slow))
                merged = self.source.merged()
                return merged, self._build(merged, finished, notes=(slow,))
            return self._pack_ahead(packer, finished) or self._pack_merged(packer, finished)
        merged = self.source.merged()
        return merged, self._build(merged, finished, notes=())

    def _pack_merged(self, packer: Packer, finished: Path) -> tuple[Merged, _Made]:
        """Pack the merged layers as they stream by."""
        merged = self.source.merged()
        extra = additions(self._files, merged.find)

        def write(out: BinaryIO) -> None:
            layer_stream.emit(merged, self.source.open, out, extra=extra)

        said = self._pack(
            packer,
            finished,
            write,
            root=merged.root(),
            duplicates=merged.comparisons() <= _MOST_COMPARISONS,
            total=merged.size()[1],
        )
        return merged, self._made(packer, said, extra)

    def _pack_ahead(self, packer: Packer, finished: Path) -> tuple[Merged, _Made] | None:
        """Pack the layers while they are read for the first time, the highest first.

        None where that cannot be done: there is an index of every layer, or what was packed is not
        what the layers say together.
        """
        source = self.source
        if all(source.known(position) is not None for position in range(len(source))):
            return None
        found: list[tuple[Merged, tuple[Member, ...]]] = []

        def write(out: BinaryIO) -> None:
            over = [entry for entry, _ in self._files.members]
            ahead = Ahead(out, extra=over, limits=source.limits, most_comparisons=_MOST_COMPARISONS)
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
            found.append((merged, extra))

        try:
            root = layer_stream.likely_root(len(source), source.known, source.open)
        except (ImageMismatch, FileUnusable):
            return None  # who reads the whole layer says what is wrong, or mends it
        try:
            said = self._pack(packer, finished, write, root=root, duplicates=True, total=None)
        except GuessedWrong:
            return None
        except ToolFailed as error:
            # What was guessed may be what it did not like; where it was stopped, it was not.
            if error.status is None or error.status < 0:
                raise
            return None
        [(merged, extra)] = found
        return merged, self._made(packer, said, extra)

    def _pack(
        self,
        packer: Packer,
        finished: Path,
        write: squashfs.Write,
        *,
        root: Entry,
        duplicates: bool,
        total: int | None,
    ) -> PackResult:
        """Make a squashfs of a tar stream, and put a SIF's header in front."""
        objects = (
            ("definition-file", "", self._files.definition),
            ("json", "inspect-metadata.json", self._files.inspection),
            ("json", "oci-config.json", self._files.oci_config),
        )
        offset = sif.squashfs_offset_for(objects)
        said = squashfs.pack(
            packer,
            finished,
            offset=offset,
            write=write,
            epoch=_epoch(self._image, self._on_event),
            root=root,
            duplicates=duplicates,
            total=total,
            on_event=self._on_event,
            timeout=_SECONDS,
        )
        sif.write(finished, architecture=_architecture(self._image), squashfs_offset=offset, objects=objects)
        return said

    def _made(self, packer: Packer, said: PackResult, extra: tuple[Member, ...]) -> _Made:
        return _Made(
            builder="hpcenv",
            tools={"hpcenv-format": FORMAT, packer.kind: ".".join(map(str, packer.version))},
            arguments=said.arguments,
            notes=self._files.notes,
            said=said.notes,
            extra=extra,
            # It decides the bytes as much as the packer's own version does.
            libraries={"libzstd": loaded.library_version(packer.path, "zstd", env=squashfs.environment(None))},
        )

    def _build(self, merged: Merged, finished: Path, *, notes: tuple[str, ...]) -> _Made:
        """Convert with `apptainer build`, from an OCI layout of the same blobs."""
        from hpcenv.adapters import apptainer_build, temporary

        image, environ, on_event = self._image, self.environ, self._on_event
        need = apptainer_build.space_needed(sum(layer.size for layer in image.layers), merged.size()[1])
        made = apptainer_build.build_layout(
            apptainer=apptainer.find(environ.get("PATH")),
            manifest_digest=image.manifest_digest,
            blobs=stored_blobs(image, self.source.store),
            architecture=_architecture(image),
            epoch=_epoch(image, on_event),
            # Its absence tells that this SIF is one of `apptainer build` (see verify).
            labels={name: value for name, value in _labels(image).items() if name != FORMAT_LABEL},
            files=self._files,
            entries=merged.entries(),
            destination=finished,
            temporary=temporary.choose_temporary(temporary.candidates(environ), need),
            on_line=lambda line: on_event(Event(phase="build", what=line)),
            environ=environ,
            timeout=_SECONDS,
        )
        return _Made(
            builder="apptainer", tools={"apptainer": made.apptainer_version}, arguments=made.arguments, notes=notes
        )


def stored_blobs(image: ResolvedImage, store: Store) -> dict[str, Path]:
    """Return the file of every blob of a fetched image, by digest."""
    digests = (image.manifest_digest, image.config_digest, *(layer.digest for layer in image.layers))
    return {digest: blobs.blob_path(store.blobs, digest) for digest in digests}


def _files(image: ResolvedImage) -> RuntimeFiles:
    return runtime_files(image.config, labels=_labels(image), architecture=_architecture(image), epoch=_epoch(image))


def added(image: ResolvedImage, merged: Merged) -> tuple[RuntimeFiles, tuple[Member, ...]]:
    """Return what hpcenv adds to the image's own files."""
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

    def say(line: str) -> None:
        if on_event is not None:
            on_event(Event(phase="note", what=line))

    return apptainer.source_date_epoch(image.created, [m for m in moments if isinstance(m, str)], say)


# -- proving --------------------------------------------------------------------------------


def _prove(
    file: Path, merged: Merged, extra: tuple[Member, ...], builder: Literal["hpcenv", "apptainer"], on_event: OnEvent
) -> str:
    """Compare what is in a SIF with what is in the layers; return the digest of the tree.

    Raises:
        ImageMismatch: they differ; the first differences are listed.
    """
    if builder == "hpcenv":
        # What hpcenv adds is not in the digest (see `tree.tree_digest`), so that one walk does for both.
        expected = merged.written(extra=extra)
        differences, digest = tree.compare_and_digest(expected, _read_back(file, merged, on_event))
    else:
        differences = compare_sif(file, merged, extra, builder=builder, on_event=on_event)
        digest = tree.tree_digest(merged.entries())
    if differences:
        raise ImageMismatch(
            f"the SIF that {builder} made does not hold what the image's layers hold",
            why="\n".join(shown(difference) for difference in differences[:20]),
            hint="this is a bug in hpcenv or in the packer; please report it. Until then: --builder apptainer"
            if builder == "hpcenv"
            else "convert it with squashfs-tools 4.6 or newer on PATH",
        )
    return digest


def compare_sif(
    file: Path,
    merged: Merged,
    extra: tuple[Member, ...],
    *,
    builder: Literal["hpcenv", "apptainer"],
    on_event: OnEvent,
) -> tuple[tree.Difference, ...]:
    """Return what differs between a SIF and the merged layers.

    A SIF that hpcenv made is compared in every field; one of `apptainer build` in those that
    it keeps for an ordinary user (see `tree.tree_digest`).

    Raises:
        ImageMismatch, EnvironmentUnreadable: the SIF cannot be read.
    """
    found = _read_back(file, merged, on_event)
    if builder == "hpcenv":
        return tree.compare(merged.written(extra=extra), found, exact=True)
    return tree.compare(merged.entries(), found, exact=False)


def _read_back(file: Path, merged: Merged, on_event: OnEvent) -> Iterator[Entry]:
    """Yield what is in a SIF, and say how far it was read."""
    header = sif.read_header(file)
    total = merged.size()[1]
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        on_event(Event(phase="verify", what=file.name, done=min(done, total - 1), total=total, unit="bytes"))

    yield from squashfs_reader.read_tree(file, offset=header.runs.offset, size=header.runs.size, on_bytes=count)
    on_event(Event(phase="verify", what=file.name, done=total, total=total, unit="bytes"))


def shown(difference: tree.Difference) -> str:
    """Return a difference as one line."""
    path = "/" + difference.path.decode("utf-8", "backslashreplace").replace("\n", "\\n")
    if difference.field == "path":
        return f"{path}: {'only in the SIF' if difference.expected is None else 'missing in the SIF'}"
    return f"{path}: {difference.field} {difference.expected or 'none'}, in the SIF {difference.found or 'none'}"


# -- the record -----------------------------------------------------------------------------


def _record(image: ResolvedImage, file: Path, made: _Made, tree_sha256: str | None, sha256: str) -> ImageRecord:
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
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
