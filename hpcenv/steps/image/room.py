"""Whether a store has room for an image, asked as soon as the sizes are known.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
from pathlib import Path

from hpcenv.adapters import blobs, filesystem
from hpcenv.adapters.manifests import ResolvedImage
from hpcenv.adapters.store import Store
from hpcenv.errors import FileUnusable
from hpcenv.model import size

# What hpcenv itself adds to a SIF, and a squashfs's own tables.
_SLACK = 64 << 20
# The packer compresses with zstd level 1. Layers of gzip come out smaller (a torch image: 374 MB of layers, 352 MB of
# SIF), layers of a high zstd level larger; how high it was, a layer does not say.
_OF_ZSTD = 1.3


def sif_size(image: ResolvedImage) -> int:
    """Return how many bytes the SIF of an image will have at most, as far as the layers' sizes tell.

    An estimate: layers that are not compressed give a SIF that is several times smaller.
    """
    return _SLACK + sum(
        int(layer.size * _OF_ZSTD) if layer.media_type.endswith("zstd") else layer.size for layer in image.layers
    )


def missing(image: ResolvedImage, store: Store) -> int:
    """Return how many bytes of layers are still to be fetched; what has arrived of one counts."""
    sizes = {layer.digest: layer.size for layer in image.layers}
    there = {digest: _arrived(blobs.blob_path(store.blobs, digest)) for digest in sizes}
    return sum(max(count - there[digest], 0) for digest, count in sizes.items())


def _arrived(path: Path) -> int:
    """Return the bytes of a blob that lie in the store, whole or in part."""
    try:
        return os.lstat(path).st_size
    except OSError:
        pass
    sizes = [0]
    for part in path.parent.glob(f".{path.name}.*.part"):
        try:
            sizes.append(os.lstat(part).st_size)
        except OSError:
            continue
    return max(sizes)


def require_room(image: ResolvedImage, store: Store) -> None:
    """Refuse an image that the store has no room for, before anything of it is fetched.

    Nothing is refused that is in the store already, or that another process is converting
    just now: what that one writes is what this one will use.

    Raises:
        FileUnusable: the file system or the user's quota has less than layers and SIF need.
    """
    if not store.writable or store.find_image(image.manifest_digest) is not None:
        return
    if os.path.lexists(store.leases / image.manifest_digest.replace(":", "-")):
        return
    layers, made = missing(image, store), sif_size(image)
    try:
        found = filesystem.space(store.root)
    except OSError as error:
        raise filesystem.refused(store.root, error, doing="used") from error
    if found.usable >= layers + made:
        return
    by_quota = found.usable == found.quota
    has = f"your quota leaves {size.shown(found.usable)} (says `{found.origin}`)" if by_quota else ""
    what = f"{size.shown(layers)} are to be fetched" if layers else "all layers are there"
    raise FileUnusable(
        f"there is not enough space in `{store.root}` for `{image.reference}`",
        why=f"{what}, and the SIF has up to {size.shown(made)}\n"
        f"{has or f'the file system has {size.shown(found.usable)} free'}; nothing was fetched",
        hint="hpcenv image prune, or keep images elsewhere (--store, HPCENV_STORE)",
    )
