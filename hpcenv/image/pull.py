"""`hpcenv image pull`: convert an image to a SIF in the store.

Runs on: LOGIN NODE.

For a tag, hpcenv always asks the registry. A digest names the same bytes forever. So for a digest, hpcenv uses the
bytes in the store and asks the registry only for missing bytes. Therefore compute nodes without internet access can use
a store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpcenv.container import runtime
from hpcenv.errors import Command, ImageUnavailable
from hpcenv.image import free_space
from hpcenv.image.convert.conversion import Builder, Converted, OpenBlobs, convert
from hpcenv.image.convert.layer_index import LayerLimits
from hpcenv.image.reference import LayeredImage, Platform, Reference
from hpcenv.image.registry import source as sources
from hpcenv.image.registry.manifests import ResolvedImage
from hpcenv.image.registry.source import Access
from hpcenv.image.store.sif_record import ImageRecord
from hpcenv.image.store.store import Store
from hpcenv.image.store.store_folder import open_place, place_exists
from hpcenv.progress import Event, OnEvent
from hpcenv.project.store_config import StorePlace


@dataclass(frozen=True, kw_only=True)
class BuiltImage:
    """A SIF that hpcenv made or found.

    Attributes:
        reused: whether the SIF existed before this call.
        read: whether this call read the bytes of the SIF, and found that they fit the record.
        notes: sentences that the user should read.
    """

    path: Path
    record: ImageRecord
    reused: bool
    read: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ImageRequest:
    """Which image the user wants.

    Attributes:
        source: the image.
        platform: selects one image of a multi-platform image.
        access: how to connect to the registry of the image.
        allow_floating: whether to accept the tag `latest`, or a reference without a tag.
    """

    source: LayeredImage
    platform: Platform = field(default_factory=Platform)
    access: Access = field(default_factory=Access)
    allow_floating: bool = False


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """How to convert an image to a SIF.

    Attributes:
        builder: the program that writes the SIF; see `convert`.
        compression: compression of the SIF. `auto` means gzip if only SingularityCE starts containers here, else zstd.
        prove: whether to read the SIF again and compare it with the layers.
        limits: limits on what the image may contain.
    """

    builder: Builder = "auto"
    compression: Literal["auto", "zstd", "gzip"] = "auto"
    prove: bool = True
    limits: LayerLimits = field(default_factory=LayerLimits)


def pull(
    request: ImageRequest,
    options: ConvertOptions,
    *,
    place: StorePlace,
    environ: Mapping[str, str],
    on_event: OnEvent,
) -> BuiltImage:
    """Return the image's SIF in the store; convert the image if the store has no SIF of it.

    Args:
        request: the image.
        options: how to convert the image.
        place: the store; it is created if it does not exist.
        environ: the user's environment, for tools and temporary folders.
        on_event: called with the progress.

    Raises:
        SpecError: the reference has no tag, or the tag `latest`.
        FileUnusable: other users could change the SIF in the store.
        HpcenvError: the image cannot be resolved or converted.
    """
    # Check the store before asking the registry, because the SIF in the store may belong to a user who is not trusted.
    store = open_place(place, create=True) if place_exists(place) else None
    if store is not None:
        stored = _stored_sif(request, options, store)
        if stored is not None:
            on_event(Event(phase="note", what=f"{request.source}: already in the store; the registry was not asked"))
            return stored
    image, open_blobs = resolve(request, on_event=on_event, store=store)
    store = open_place(place, create=True)
    converted = convert_image(image, open_blobs, options, store=store, environ=environ, on_event=on_event)
    return BuiltImage(
        path=converted.path,
        record=converted.record,
        reused=converted.reused,
        read=not converted.reused,
        notes=converted.notes,
    )


def _stored_sif(request: ImageRequest, options: ConvertOptions, store: Store) -> BuiltImage | None:
    """Return the store's SIF of a digest, if it was compared with its layers or no comparison is requested.

    Raises:
        FileUnusable: other users could change the SIF.
    """
    source = request.source
    if not isinstance(source, Reference) or source.digest is None:
        return None
    stored = store.find_source(source.digest, request.platform)
    if stored is None or stored.record is None:
        return None
    stored.require_trusted()
    if options.prove and stored.record.tree_sha256 is None:
        return None
    # The reference is not recorded: we do not know whether its registry has this digest.
    store.remember(stored.digest)
    return BuiltImage(path=stored.path, record=stored.record, reused=True, read=False, notes=stored.record.notes)


def convert_image(
    image: ResolvedImage,
    open_blobs: OpenBlobs,
    options: ConvertOptions,
    *,
    store: Store,
    environ: Mapping[str, str],
    on_event: OnEvent,
) -> Converted:
    """Convert a resolved image to a SIF.

    Raises:
        FileUnusable: the store has not enough space for the layers and the SIF.
        HpcenvError: see `convert`.
    """
    free_space.require_room(image, store)
    compression = runtime.compression_here(environ) if options.compression == "auto" else options.compression
    return convert(
        image, open_blobs, store=store, environ=environ, on_event=on_event,
        builder=options.builder, compression=compression, prove=options.prove, limits=options.limits,
    )  # fmt: skip


def resolve(request: ImageRequest, *, on_event: OnEvent, store: Store | None = None) -> tuple[ResolvedImage, OpenBlobs]:
    """Resolve a reference to digests.

    Args:
        request: the image.
        on_event: called with the progress.
        store: the store to search for a digest before the registry is asked. With None, the registry is always asked.

    Returns:
        The image, and a function that gives access to its layers.

    Raises:
        SpecError, ImageUnavailable, FileUnusable: the image cannot be resolved.
    """
    source = request.source
    image = _stored_image(request, store)
    if image is not None:
        on_event(Event(phase="note", what=f"{source}: its manifest is in the store; the registry was not asked for it"))
    else:
        image = _ask_registry(request, store, on_event)
    chosen = f", chosen from {', '.join(image.platforms)}" if len(image.platforms) > 1 else ""
    summary = f"{image.manifest_digest}: {len(image.layers)} layers for {image.platform}{chosen}"
    on_event(Event(phase="note", what=summary))
    return image, lambda: sources.open_source(source, image, request.access)


def _stored_image(request: ImageRequest, store: Store | None) -> ResolvedImage | None:
    """Resolve a digest from the manifest and configuration in the store; None if the store lacks one of them."""
    source = request.source
    if store is None or not isinstance(source, Reference) or source.digest is None:
        return None
    # An untrusted SIF is no risk here: only its record is read, and blobs are compared with their digests.
    known = store.find_source(source.digest, request.platform)
    record = None if known is None else known.record
    manifest = source.digest if record is None or record.manifest_digest is None else record.manifest_digest
    return sources.resolve_stored(
        source,
        store.blobs,
        manifest_digest=manifest,
        index_digest=None if manifest == source.digest else source.digest,
        platform=request.platform,
    )


def _ask_registry(request: ImageRequest, store: Store | None, on_event: OnEvent) -> ResolvedImage:
    source = request.source
    on_event(Event(phase="resolve", what=str(source)))
    try:
        image = sources.resolve(
            source,
            request.access,
            platform=request.platform,
            allow_floating=request.allow_floating,
            on_event=on_event,
        )
    except ImageUnavailable as error:
        earlier = None if store is None else _earlier_image(request, store)
        if earlier is None:
            raise
        before = (*error.hint_parts, "\n") if error.hint_parts else ()
        hint = (*before, "the store has the image that this tag named before: ", earlier)
        raise error.changed(hint=hint) from error
    on_event(Event(phase="resolve", what=str(source), done=1, total=1))
    return image


def _earlier_image(request: ImageRequest, store: Store) -> Command | None:
    """Return the command that pulls the image that this tag named before; None if the store lacks this image."""
    source = request.source
    if not isinstance(source, Reference) or source.digest is not None:
        return None
    for image in sorted(store.list_images(), key=lambda image: -image.used):
        record = image.record
        if record is not None and str(source) in record.references and record.platform == str(request.platform):
            return Command("hpcenv", "image", "pull", f"{source}@{record.manifest_digest}")
    return None
