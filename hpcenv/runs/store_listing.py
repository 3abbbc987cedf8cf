"""`hpcenv image list`: the content of a store.

Runs on: LOGIN NODE. Nothing is changed.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from hpcenv.image.store.store import StoredImage
from hpcenv.image.store.store_folder import open_place, place_exists
from hpcenv.project.store_config import StorePlace


@dataclass(frozen=True, kw_only=True)
class Amount:
    """Number and total bytes of some files."""

    count: int
    size: int


@dataclass(frozen=True, kw_only=True)
class ListedImage:
    """One SIF of a store.

    Attributes:
        digest: the name of the SIF in the store.
        references: image references that resolved to this SIF, the latest first; empty if the value is unknown.
        used: time of the last use, in seconds since 1970.
        created: time at which the SIF was made, in the format of RFC 3339.
        problem: why the store does not use this SIF; empty if there is no problem.
    """

    digest: str
    path: Path
    size: int
    references: tuple[str, ...]
    platform: str
    used: float
    created: str
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class StoreListing:
    """The content of a store. `exists` is False if the store does not exist yet.

    Attributes:
        origin: the setting that names the folder. If no setting names the folder, the reason why hpcenv uses this
            folder.
    """

    store: Path
    origin: str
    exists: bool
    writable: bool
    images: tuple[ListedImage, ...] = ()
    blobs: Amount = Amount(count=0, size=0)
    indexes: Amount = Amount(count=0, size=0)
    unfinished: Amount = Amount(count=0, size=0)


def list_images(place: StorePlace) -> StoreListing:
    """Return the SIFs of a store, in the order of their last use, the most recent use first.

    Args:
        place: folder of the store, and its trusted owner.

    Raises:
        FileUnusable: the store is not trusted, or cannot be read.
    """
    if not place_exists(place):
        return StoreListing(store=place.root, origin=place.origin, exists=False, writable=False)
    store = open_place(place)
    images = sorted(store.list_images(), key=lambda image: -image.used)
    return StoreListing(
        store=store.root,
        origin=place.origin,
        exists=True,
        writable=store.writable,
        images=tuple(map(_listed, images)),
        blobs=amount(store.blobs / "sha256"),
        indexes=amount(store.indexes / "sha256"),
        unfinished=amount(store.tmp),
    )


def _listed(image: StoredImage) -> ListedImage:
    record, problem = image.record, ""
    if record is None:
        problem = "its record is missing or damaged"
    elif record.sif.size != image.size:
        problem = f"it has {image.size} bytes, but its record has {record.sif.size}"
    elif image.distrust:
        problem = f"{image.distrust}: {image.hint}"
    return ListedImage(
        digest=image.digest,
        path=image.path,
        size=image.size,
        references=() if record is None else record.references,
        platform="" if record is None else record.platform,
        used=image.used,
        created="" if record is None else record.made.created,
        problem=problem,
    )


def amount(folder: Path) -> Amount:
    """Return number and total bytes of the files below a folder. Unreadable files do not count."""
    count = size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(parent, name))
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                count, size = count + 1, size + status.st_size
    return Amount(count=count, size=size)
