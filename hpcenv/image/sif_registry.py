"""Fetch a SIF from a registry: `oras://` as the source of an image.

Runs on: LOGIN NODE.

A SIF is one blob, and its name in the registry is its sha256. If the received bytes have a different sha256, hpcenv
refuses them. The SIF's name in the store is also its sha256. The digest of the image from which the SIF was made is
never used as the name. Only the user who pushed the SIF says which image this is, and hpcenv cannot check this.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpcenv import filesystem
from hpcenv.errors import Command, ImageMismatch, ImageUnavailable
from hpcenv.identity import sif
from hpcenv.image.convert.conversion import FORMAT_LABEL
from hpcenv.image.describe import describe_sif
from hpcenv.image.pull import BuiltImage
from hpcenv.image.reference import DIGEST, Platform, SifReference, refuse_floating
from hpcenv.image.registry import blobs, manifests, source
from hpcenv.image.registry.blobs import BlobSpec
from hpcenv.image.registry.source import Access
from hpcenv.image.sif_proof import read_tree_digest
from hpcenv.image.store.sif_record import Provenance, utc_now
from hpcenv.image.store.store import Store
from hpcenv.progress import Event, OnEvent

__all__ = ["OTHER_COMPRESSION", "fetch_sif", "resolve_sif"]

# A hint for a user who perhaps has no Apptainer.
OTHER_COMPRESSION = (
    "the user who pushed it can make a SIF that it reads: hpcenv image build --compression gzip, then apptainer push"
)

_SIF_LAYERS = (
    "application/vnd.sylabs.sif.layer.v1.sif",
    # The media type of SingularityPro and of Singularity before 3.7, which is misspelt (hpcng/singularity issue 4437).
    "appliciation/vnd.sylabs.sif.layer.tar",
)

# How long to wait for a different process that downloads the same SIF.
_WAIT_SECONDS = 4 * 3600.0


def resolve_sif(wanted: SifReference, access: Access, *, allow_floating: bool, on_event: OnEvent) -> BlobSpec:
    """Ask a registry which SIF a reference names now.

    Raises:
        SpecError: the reference has no tag, or the tag `latest`.
        ImageUnavailable: the SIF does not exist, is not a SIF, or the registry cannot be reached.
    """
    if wanted.floats and not allow_floating:
        refuse_floating(wanted)
    on_event(Event(phase="resolve", what=str(wanted)))
    with contextlib.closing(source.open_client(wanted, access, on_event=on_event)) as client:
        client.authenticate()
        _, body = client.manifest(wanted.digest or wanted.tag or "latest")
    document = manifests.read_document(body, origin=wanted.registry, what="manifest")
    spec = _sif_layer(document, str(wanted))
    on_event(Event(phase="resolve", what=str(wanted), done=1, total=1))
    return spec


def _sif_layer(manifest: Mapping[str, Any], name: str) -> BlobSpec:
    """Return the SIF that a manifest of Apptainer names.

    Apptainer 1.4 writes an OCI manifest with an empty configuration and one layer, which is the SIF
    (`internal/pkg/client/oras/`: `image.go`, `layer.go`, `config.go`, read 2026-11-23). So the digest of the layer is
    the sha256 of the SIF. Apptainer accepts every configuration and two media types of the layer. hpcenv accepts the
    same.

    Raises:
        ImageUnavailable: the manifest does not describe a SIF.
    """
    layers = manifest.get("layers")
    entries = [entry for entry in layers if isinstance(entry, dict)] if isinstance(layers, list) else []
    types = [str(entry.get("mediaType"))[:100] for entry in entries]
    if len(entries) != 1 or types[0] not in _SIF_LAYERS:
        image = Command("hpcenv", "image", "pull", name.replace("oras://", "docker://", 1))
        why = f"its layers are of type {', '.join(sorted(set(types)))[:200] or 'none'}, not one SIF"
        raise manifests.unusable(name, why, ("if it is a container image: ", image))
    digest, size = entries[0].get("digest"), entries[0].get("size")
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise manifests.unusable(name, f"its SIF has the digest {str(digest)[:80]!r}, not a sha256 one")
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise manifests.unusable(name, f"its SIF has the size {str(size)[:40]!r}")
    return BlobSpec(digest=digest, size=size)


def fetch_sif(
    wanted: SifReference, spec: BlobSpec, access: Access, *, platform: Platform, store: Store, on_event: OnEvent
) -> BuiltImage:
    """Return a SIF in the store; download it from a registry if the store does not have it.

    The bytes of the SIF are hashed, even if the store already has the SIF.

    Args:
        wanted: the registry and the repository.
        spec: the SIF, from its manifest or from a lockfile.
        access: how to connect to the registry.
        platform: the platform that the SIF must be for.
        store: the store for the SIF.
        on_event: gets the progress.

    Raises:
        ImageUnavailable: the registry does not have the SIF, sends wrong bytes, or the SIF is for another platform.
        ImageMismatch: the file is damaged, or not a SIF.
        FileUnusable: the store has not enough space, or is not trusted.
    """
    digest = spec.digest
    if not store.writable:
        found = _stored(wanted, spec, store)
        if found is not None:
            return found
    purpose = f"fetches {digest[:19]}"
    with store.lease(digest, purpose=purpose, timeout=_WAIT_SECONDS, on_event=on_event):
        found = _stored(wanted, spec, store)
        if found is not None:
            on_event(Event(phase="note", what=f"{wanted}: the SIF {digest[:19]}... is in the store"))
            return found
        return _download(wanted, spec, access, platform=platform, store=store, on_event=on_event)


def _stored(wanted: SifReference, spec: BlobSpec, store: Store) -> BuiltImage | None:
    """Return the SIF in the store if its bytes are right; move a changed SIF aside."""
    stored = store.find_image(spec.digest)
    if stored is None or stored.record is None:
        return None
    if f"sha256:{sif.file_sha256(stored.path)}" != spec.digest:
        store.set_aside(spec.digest)
        return None
    store.remember(spec.digest, reference=str(wanted))
    return BuiltImage(path=stored.path, record=stored.record, reused=True, read=True)


def _download(
    wanted: SifReference, spec: BlobSpec, access: Access, *, platform: Platform, store: Store, on_event: OnEvent
) -> BuiltImage:
    with store.scratch(0, purpose="fetch the SIF") as folder:
        finished = folder / "image.sif"
        try:
            with source.open_blobs(wanted, access) as connection:
                (blob,) = blobs.fetch_all([spec], connection, store.blobs, leases=store.leases, on_event=on_event)
            # Both paths are on the store's file system. Now the SIF is only at the path `finished`, and no longer among
            # the blobs.
            os.rename(blob, finished)
        except OSError as error:
            raise filesystem.refused(finished, error) from error
        labels = sif.labels(finished)
        made = Provenance(
            builder="hpcenv" if FORMAT_LABEL in labels else "apptainer", tools={}, created=utc_now()
        )  # fmt: skip
        record = describe_sif(finished, str(wanted), made)
        if record.digest != spec.digest:
            raise ImageMismatch(
                f"the SIF of `{wanted}` does not have its digest",
                why=f"expected {spec.digest}\nreceived {record.digest}",
            )
        if record.platform != f"{platform.os}/{platform.architecture}":
            raise ImageUnavailable(
                f"`{wanted}` is for {record.platform}",
                why=f"{platform} was requested",
                hint="name the SIF of that platform",
            )
        record = replace(record, tree_sha256=read_tree_digest(finished))
        stored = store.publish_image(finished, record)
    return BuiltImage(path=stored.path, record=record, reused=False, read=True)
