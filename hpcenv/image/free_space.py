"""Check that a store has enough space for an image, as soon as the sizes are known.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os

from hpcenv import filesystem, size
from hpcenv.errors import Command, FileUnusable
from hpcenv.image.registry import blobs, oci_layout
from hpcenv.image.registry.blobs import BlobSpec
from hpcenv.image.registry.manifests import ResolvedImage
from hpcenv.image.store.store import Store

# Bytes for the files that hpcenv adds to a SIF, and for the tables of squashfs.
_SLACK = 64 << 20
# hpcenv compresses with zstd level 1. So the SIF is smaller than gzip layers (a torch image: 374 MB of layers, 352 MB
# of SIF), but larger than layers with a high zstd level. A layer does not name its level.
_ZSTD_GROWTH = 1.3


def sif_size(image: ResolvedImage) -> int:
    """Estimate an upper limit for the size of an image's SIF, in bytes, from the sizes of its layers.

    If the layers are not compressed, the SIF is several times smaller.
    """
    return _SLACK + sum(
        int(layer.size * _ZSTD_GROWTH) if layer.media_type.endswith("zstd") else layer.size for layer in image.layers
    )


def missing(image: ResolvedImage, store: Store) -> int:
    """Return how many bytes of layers must still be downloaded; partial downloads are subtracted."""
    fetched = (layer for layer in image.layers if oci_layout.layer_file(image, layer) is None)
    wanted = {layer.digest: BlobSpec(digest=layer.digest, size=layer.size) for layer in fetched}
    return sum(spec.size - blobs.arrived(store.blobs, spec) for spec in wanted.values())


def require_room(image: ResolvedImage, store: Store) -> None:
    """Raise an error if the store has not enough space for an image, before anything is downloaded.

    An image that is already in the store is accepted. An image that another process is converting now is also accepted,
    because the caller will use the SIF of the other process.

    Raises:
        FileUnusable: the file system or the user's quota has too little space for the layers and the SIF.
    """
    if not store.writable or store.find_image(image.manifest_digest) is not None:
        return
    if os.path.lexists(store.leases / image.manifest_digest.replace(":", "-")):
        return
    layers, made = missing(image, store), sif_size(image)
    try:
        space = filesystem.space(store.root)
    except OSError as error:
        raise filesystem.refused(store.root, error, doing="used") from error
    if space.usable >= layers + made:
        return
    by_quota = space.usable == space.quota
    available = f"your quota leaves {size.shown(space.usable)} (according to `{space.origin}`)"
    if not by_quota:
        available = f"the file system has {size.shown(space.usable)} free"
    download = f"{size.shown(layers)} must be downloaded" if layers else "all layers are in the store"
    raise FileUnusable(
        f"there is not enough space in `{store.root}` for `{image.reference}`",
        why=f"{download}, and the SIF needs up to {size.shown(made)}\n{available}; nothing was downloaded",
        hint=(Command("hpcenv", "image", "prune"), ", or use another store (--store, HPCENV_STORE)"),
    )
