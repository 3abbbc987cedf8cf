"""`hpcenv image list`: what is in a store.

Runs on: LOGIN NODE. Changes nothing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcenv.adapters.store import Root, Store, StoredImage, StorePlace, is_there
from hpcenv.steps.runs import RunState, Submitted, Sweep, open_folder, read_states, runs_of


@dataclass(frozen=True, kw_only=True)
class Amount:
    """Files of one kind: how many, and their bytes together."""

    count: int
    size: int


@dataclass(frozen=True, kw_only=True)
class ListedImage:
    """One SIF.

    Attributes:
        digest: the store's name for it.
        references: what it was asked for by, the latest first; empty where nobody knows.
        used: when it was last asked for or read, seconds since 1970.
        created: when it was made, RFC 3339.
        used_by: lockfiles and runs that said they need it, and still do: a run that has ended does not.
        problem: why it is not used as it is; empty when it is.
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
class Listing:
    """A store's content; `exists` is False where there is none yet."""

    store: Path
    exists: bool
    writable: bool
    images: tuple[ListedImage, ...] = ()
    blobs: Amount = Amount(count=0, size=0)
    indexes: Amount = Amount(count=0, size=0)
    unfinished: Amount = Amount(count=0, size=0)


def list_images(place: StorePlace, environ: Mapping[str, str]) -> Listing:
    """Return every SIF of a store, the latest used first.

    Args:
        place: the store's folder, and whom the user trusts with it.
        environ: for Slurm's commands, which say whether runs have ended.

    Raises:
        FileUnusable: the store is not trusted, or cannot be read.
    """
    if not place.exists():
        return Listing(store=place.root, exists=False, writable=False)
    store = place.open()
    needed: dict[str, list[str]] = {}
    for root in _in_need(store, environ):
        for digest in root.digests:
            needed.setdefault(digest, []).append(f"{root.kind} {root.path}")
    images = sorted(store.list_images(), key=lambda image: -image.used)
    return Listing(
        store=store.root,
        exists=True,
        writable=store.writable,
        images=tuple(_listed(image, tuple(needed.get(image.digest, ()))) for image in images),
        blobs=amount(store.blobs / "sha256"),
        indexes=amount(store.indexes / "sha256"),
        unfinished=amount(store.tmp),
    )


def _in_need(store: Store, environ: Mapping[str, str]) -> list[Root]:
    """Return the notes of what is there and has not ended, as `image prune` counts; Slurm is asked once for all."""
    roots = [root for _, root in store.list_roots() if root is not None and is_there(root) is not False]
    asked: dict[str, tuple[Submitted, ...]] = {}
    for root in roots:
        entry = open_folder(Path(root.path)) if root.kind == "run" and is_there(root) else None
        if isinstance(entry, (Submitted, Sweep)):
            asked[root.path] = runs_of(entry)
    states = iter(read_states([run for group in asked.values() for run in group], environ))
    theirs = {path: [next(states) for _ in group] for path, group in asked.items()}
    return [root for root in roots if root.path not in theirs or not all(map(_is_over, theirs[root.path]))]


def _is_over(state: RunState) -> bool:
    return state.ended and not state.waits_again


def _listed(image: StoredImage, used_by: tuple[str, ...]) -> ListedImage:
    record, problem = image.record, ""
    if record is None:
        problem = "its record is missing or damaged"
    elif record.sif.size != image.size:
        problem = f"it has {image.size} bytes, its record says {record.sif.size}"
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
    """Count the files below a folder, and their bytes; what cannot be read counts nothing."""
    count = size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(place, name))
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                count, size = count + 1, size + status.st_size
    return Amount(count=count, size=size)
