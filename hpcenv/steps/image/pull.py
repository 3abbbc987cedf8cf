"""`hpcenv image pull`: an image, wherever it is, becomes a SIF in the store.

Runs on: LOGIN NODE.

A tag is asked for at its registry, always. A digest names the same bytes for ever: what the
store has of it is used, and a registry is asked only for what is missing. Compute nodes
without a way out work from a store in this way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpcenv.adapters import manifests, references, sources
from hpcenv.adapters.layer_index import Limits
from hpcenv.adapters.manifests import ResolvedImage
from hpcenv.adapters.references import LocalImage, Reference
from hpcenv.adapters.sources import Access
from hpcenv.adapters.store import Store, StorePlace
from hpcenv.errors import ImageUnavailable, SpecError
from hpcenv.model.image_record import ImageRecord
from hpcenv.model.progress import Event, OnEvent
from hpcenv.steps.image import room
from hpcenv.steps.image.convert import Builder, Converted, OpenBlobs, convert
from hpcenv.steps.image.on_cluster import Allocation, convert_on_cluster


@dataclass(frozen=True, kw_only=True)
class BuiltImage:
    """A SIF, and whether it was there already.

    Attributes:
        read: whether its bytes were read in this call, and are those that its record names.
    """

    path: Path
    record: ImageRecord
    reused: bool
    read: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be converted, and how.

    Attributes:
        reference: `docker://...`, `oci:...`, `oci-archive:...` or `docker-archive:...`.
        platform: which image of a multi-platform one.
        plain_http: the registries that speak http.
        ca_file: certificates to trust for it.
        allow_floating: accept `latest` or no tag.
        builder, prove: as `convert` takes them.
        allocation: convert in a job of Slurm; None converts here.
        limits: what the image may cost.
    """

    reference: str
    platform: str = "linux/amd64"
    plain_http: tuple[str, ...] = ()
    ca_file: Path | None = None
    allow_floating: bool = False
    builder: Builder = "auto"
    prove: bool = True
    allocation: Allocation | None = None
    limits: Limits = field(default_factory=Limits)


def pull(asked: Asked, *, place: StorePlace, environ: Mapping[str, str], on_event: OnEvent) -> BuiltImage:
    """Return the image's SIF in the store; a reference is resolved once.

    Raises:
        SpecError: the reference makes no sense, floats, or is no image in layers.
        HpcenvError: as `convert`.
    """
    source = _in_layers(asked.reference)
    # What is there already is looked at before the registry is asked: it may be somebody else's trap.
    store = place.open(create=True) if place.exists() else None
    if store is not None:
        there = _there(asked, source, store)
        if there is not None:
            on_event(Event(phase="note", what=f"{source}: in the store already, no registry was asked"))
            return there
    image, open_blobs = resolve(asked, environ=environ, on_event=on_event, store=store)
    store = place.open(create=True)
    made = convert_as_asked(image, open_blobs, asked, store=store, environ=environ, on_event=on_event)
    return BuiltImage(path=made.path, record=made.record, reused=made.reused, read=not made.reused, notes=made.notes)


def _there(asked: Asked, source: Reference | LocalImage, store: Store) -> BuiltImage | None:
    """Return the SIF that a digest names, if the store has it as it was asked for.

    Raises:
        FileUnusable: others could change it.
    """
    if not isinstance(source, Reference) or source.digest is None:
        return None
    found = store.find_source(source.digest, asked.platform)
    if found is None or found.record is None:
        return None
    found.require_trusted()
    if asked.prove and found.record.tree_sha256 is None:
        return None
    store.remember(found.digest)  # not by the reference: nobody has asked whether that registry has it
    return BuiltImage(path=found.path, record=found.record, reused=True, read=False)


def convert_as_asked(
    image: ResolvedImage,
    open_blobs: OpenBlobs,
    asked: Asked,
    *,
    store: Store,
    environ: Mapping[str, str],
    on_event: OnEvent,
) -> Converted:
    """Return the SIF of a resolved image, converted here or in a job of Slurm.

    Raises:
        FileUnusable: the store has no room for layers and SIF.
        HpcenvError: as `convert` and `convert_on_cluster`.
    """
    room.require_room(image, store)
    if asked.allocation is not None:
        return convert_on_cluster(
            image, open_blobs, asked.allocation, store=store, environ=environ, on_event=on_event,
            builder=asked.builder, prove=asked.prove, limits=asked.limits,
        )  # fmt: skip
    return convert(
        image, open_blobs, store=store, environ=environ, on_event=on_event,
        builder=asked.builder, prove=asked.prove, limits=asked.limits,
    )  # fmt: skip


def resolve(
    asked: Asked, *, environ: Mapping[str, str], on_event: OnEvent, store: Store | None = None
) -> tuple[ResolvedImage, OpenBlobs]:
    """Return what a reference means now, and how to have its blobs.

    Args:
        store: where a digest is looked for before its registry is asked; None asks.

    Raises:
        SpecError, ImageUnavailable, FileUnusable: it cannot be resolved.
    """
    source = _in_layers(asked.reference)
    access = Access(plain_http=frozenset(asked.plain_http), ca_file=asked.ca_file, environ=environ)
    image = _kept(asked, source, store)
    if image is not None:
        on_event(Event(phase="note", what=f"{source}: its manifest is in the store, no registry was asked for it"))
    else:
        image = _asked_for(asked, source, access, store, on_event)
    chosen = f", chosen from {', '.join(image.platforms)}" if len(image.platforms) > 1 else ""
    said = f"{image.manifest_digest}: {len(image.layers)} layers for {image.platform}{chosen}"
    on_event(Event(phase="note", what=said))
    return image, lambda: sources.open_source(source, image, access)


def _in_layers(reference: str) -> Reference | LocalImage:
    source = references.parse_source(reference)
    if not isinstance(source, (Reference, LocalImage)):
        raise SpecError(
            f"`{reference}` is not an image in layers",
            why="only those can be converted",
            hint="a SIF needs no conversion; a definition file: hpcenv image build FILE.def",
        )
    return source


def _kept(asked: Asked, source: Reference | LocalImage, store: Store | None) -> ResolvedImage | None:
    """Return the image that a digest names from what the store keeps of it."""
    if store is None or not isinstance(source, Reference) or source.digest is None:
        return None
    # Whoever may write to the SIF: only its record counts here, and blobs are known by their digests.
    known = store.find_source(source.digest, asked.platform)
    record = None if known is None else known.record
    manifest = source.digest if record is None or record.manifest_digest is None else record.manifest_digest
    return sources.resolve_kept(
        source,
        store.blobs,
        manifest_digest=manifest,
        index_digest=None if manifest == source.digest else source.digest,
        platform=asked.platform,
    )


def _asked_for(
    asked: Asked, source: Reference | LocalImage, access: Access, store: Store | None, on_event: OnEvent
) -> ResolvedImage:
    on_event(Event(phase="resolve", what=str(source)))
    try:
        image = sources.resolve(source, access, platform=asked.platform, allow_floating=asked.allow_floating)
    except ImageUnavailable as error:
        named = None if store is None else _named_before(asked, source, store)
        if named is not None:
            error.hint = "\n      ".join(
                filter(None, (error.hint, f"the store has the image that this tag led to before: {named}"))
            )
        raise
    on_event(Event(phase="resolve", what=str(source), done=1, total=1))
    return image


def _named_before(asked: Asked, source: Reference | LocalImage, store: Store) -> str | None:
    """Return the command for the image that a tag led to when it was last asked for, if the store has it."""
    if not isinstance(source, Reference) or source.digest is not None:
        return None
    platform = manifests.spell_platform(references.parse_platform(asked.platform))
    for image in sorted(store.list_images(), key=lambda image: -image.used):
        record = image.record
        if record is not None and str(source) in record.references and record.platform == platform:
            return f"hpcenv image pull {source}@{record.manifest_digest}"
    return None
