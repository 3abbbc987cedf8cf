"""`hpcenv image list`: the content of a store.

Runs on: LOGIN NODE. Changes nothing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcenv.image.store.roots import Root, is_there
from hpcenv.image.store.store import Store, StoredImage
from hpcenv.image.store.store_folder import open_place, place_exists
from hpcenv.project.store_config import StorePlace
from hpcenv.runs.entries import Submitted, Sweep, open_folder, runs_of
from hpcenv.runs.state import RunState, read_states


@dataclass(frozen=True, kw_only=True)
class Amount:
    """Number and total bytes of some files."""

    count: int
    size: int


@dataclass(frozen=True, kw_only=True)
class ListedImage:
    """One SIF of a store.

    Attributes:
        digest: the store's name of the SIF.
        references: image references that resolved to it, the latest first; empty if unknown.
        used: time of the last use, in seconds since 1970.
        created: time of its creation, RFC 3339.
        used_by: lockfiles and runs that need it; a run that has ended does not.
        problem: why the store does not use it; empty without a problem.
    """

    digest: str
    path: Path
    size: int
    references: tuple[str, ...]
    platform: str
    used: float
    created: str
    used_by: tuple[str, ...]
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class StoreListing:
    """The content of a store; `exists` is False if there is no store yet.

    Attributes:
        origin: what names the folder; for the default, why it is this one.
    """

    store: Path
    origin: str
    exists: bool
    writable: bool
    images: tuple[ListedImage, ...] = ()
    blobs: Amount = Amount(count=0, size=0)
    indexes: Amount = Amount(count=0, size=0)
    unfinished: Amount = Amount(count=0, size=0)


def list_images(place: StorePlace, environ: Mapping[str, str]) -> StoreListing:
    """Return the SIFs of a store, the last used one first.

    Args:
        place: folder of the store, and its trusted owner.
        environ: environment variables, for the Slurm commands.

    Raises:
        FileUnusable: the store is not trusted, or cannot be read.
    """
    if not place_exists(place):
        return StoreListing(store=place.root, origin=place.origin, exists=False, writable=False)
    store = open_place(place)
    needed: dict[str, list[str]] = {}
    for root in _in_need(store, environ):
        for digest in root.digests:
            needed.setdefault(digest, []).append(f"{root.kind} {root.path}")
    images = sorted(store.list_images(), key=lambda image: -image.used)
    return StoreListing(
        store=store.root,
        origin=place.origin,
        exists=True,
        writable=store.writable,
        images=tuple(_listed(image, tuple(needed.get(image.digest, ()))) for image in images),
        blobs=amount(store.blobs / "sha256"),
        indexes=amount(store.indexes / "sha256"),
        unfinished=amount(store.tmp),
    )


def _in_need(store: Store, environ: Mapping[str, str]) -> list[Root]:
    """Return the lockfiles and runs that need images, by the rules of `image prune`, with one query to Slurm."""
    roots = [root for _, root in store.list_roots() if root is not None and is_there(root) is not False]
    runs: dict[str, tuple[Submitted, ...]] = {}
    for root in roots:
        entry = open_folder(Path(root.path)) if root.kind == "run" and is_there(root) else None
        if isinstance(entry, (Submitted, Sweep)):
            runs[root.path] = runs_of(entry)
    answers = iter(read_states([run for group in runs.values() for run in group], environ))
    states = {path: [next(answers) for _ in group] for path, group in runs.items()}
    return [root for root in roots if root.path not in states or not all(map(_is_over, states[root.path]))]


def _is_over(state: RunState) -> bool:
    return state.ended and not state.waits_again


def _listed(image: StoredImage, used_by: tuple[str, ...]) -> ListedImage:
    record, problem = image.record, ""
    if record is None:
        problem = "its record is missing or damaged"
    elif record.sif.size != image.size:
        problem = f"it has {image.size} bytes, but its record has {record.sif.size}"
    elif image.distrust:
        problem = f"{image.distrust}: {image.remedy}"
    return ListedImage(
        digest=image.digest,
        path=image.path,
        size=image.size,
        references=() if record is None else record.references,
        platform="" if record is None else record.platform,
        used=image.used,
        created="" if record is None else record.made.created,
        used_by=used_by,
        problem=problem,
    )


def amount(folder: Path) -> Amount:
    """Return number and total bytes of the files below a folder, without unreadable ones."""
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
