"""`hpcenv image prune`: remove images and downloaded files from the store that were not used for some time.

Runs on: LOGIN NODE.

Without `--all`, an image is kept in these cases:

- the image was used in the last 30 days. A submission, the start of a run, and a read count as use;
- a queued or running job of the caller names the image, or squeue does not answer.

A SIF that was not made from an image in a registry cannot be made again, so it is always kept.
While another process holds a lease, nothing is removed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcenv import filesystem
from hpcenv.cluster import slurm
from hpcenv.errors import FileUnusable, ToolFailed, ToolMissing
from hpcenv.image.store import lease
from hpcenv.image.store.store import ABANDONED, Store, StoredImage, remove
from hpcenv.image.store.store_folder import open_place
from hpcenv.progress import OnEvent, ignore
from hpcenv.project.store_config import StorePlace
from hpcenv.records.files import LONGEST_RECORD, read_json
from hpcenv.records.run_folder import RunFolder
from hpcenv.runs.store_listing import amount

_LEASE = "prune"
DAY = 86400.0
# A file that was used more recently is removed only with `--all`.
SPARED = 30 * DAY
# An image of a registry can be fetched again by its digest. An archive, an OCI layout or the input of a definition file
# may be missing, or may have changed.
_FETCHED_AGAIN = ("docker://", "oras://")


@dataclass(frozen=True, kw_only=True)
class StoreRemoval:
    """A file that can be removed.

    Attributes:
        kind: the kind of file. `image` is a SIF with its record. `download` is a layer, manifest or configuration.
            `index` is the index of a layer. `unfinished` is a file or folder of a process that has ended.
        name: digest or file name.
        size: bytes.
        used: time of the last use, in seconds since 1970 by the file system's clock.
        why: why the file can be removed.
    """

    kind: Literal["image", "download", "index", "unfinished"]
    name: str
    path: Path
    size: int
    used: float
    why: str


@dataclass(frozen=True, kw_only=True)
class KeptImage:
    """An image that is kept, and why."""

    digest: str
    size: int
    why: str


@dataclass(frozen=True, kw_only=True)
class PrunePlan:
    """What `prune` would remove and keep. All sizes are in bytes."""

    store: Path
    removals: tuple[StoreRemoval, ...]
    kept: tuple[KeptImage, ...]
    total: int
    frees: int


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """What was removed. `skipped` contains the planned removals that were not possible."""

    removed: tuple[StoreRemoval, ...]
    skipped: tuple[StoreRemoval, ...]
    freed: int


@dataclass(frozen=True, kw_only=True)
class PruneRequest:
    """Which files to remove.

    Attributes:
        place: folder of the store, and its trusted owner.
        older_than: remove only files that were not used for this many seconds.
        all: remove also images that a queued or running job of the caller names.
        keep_bytes: remove files in the order of their last use, the oldest use first, and stop when the store has at
            most this number of bytes. None means that everything that can be removed is removed.
    """

    place: StorePlace
    older_than: float = SPARED
    all: bool = False
    keep_bytes: int | None = None


def plan_prune(request: PruneRequest, *, environ: Mapping[str, str], on_event: OnEvent = ignore) -> PrunePlan:
    """Return what may be removed, and what is kept and why. Nothing is changed.

    Args:
        request: which files to remove.
        environ: environment variables, for the Slurm commands.
        on_event: called with progress events.

    Raises:
        FileUnusable: the store is not trusted, read-only, or in use.
    """
    store = open_place(request.place)
    store.require_writable("remove files")
    _require_idle(store, on_event)
    return _plan(store, request, environ)


def prune(plan: PrunePlan, request: PruneRequest, *, environ: Mapping[str, str], on_event: OnEvent = ignore) -> Pruned:
    """Remove the files of `plan` that can still be removed.

    Everything is checked again, because a job may have been submitted since the plan was made.

    Args:
        plan: what to remove.
        request: the request that `plan` was made for.
        environ: environment variables, for the Slurm commands.
        on_event: called with progress events.

    Raises:
        FileUnusable: see `plan_prune`.
        ToolFailed: another `prune` is running.
    """
    store = open_place(request.place)
    removed: list[StoreRemoval] = []
    skipped: list[StoreRemoval] = []
    if _is_full(store):
        _require_idle(store, on_event)
        removed += _make_room(plan, _plan(store, request, environ), store)
    with store.lease(_LEASE, purpose="removes unused files", timeout=60, on_event=on_event):
        _require_idle(store, on_event)
        idle = set(os.listdir(store.leases))
        again = {(item.path, item.used) for item in _plan(store, request, environ).removals}
        for item in plan.removals:
            if item in removed:
                continue
            # A process that has just taken a lease may begin to use this file.
            in_use = not set(os.listdir(store.leases)) <= idle
            used_since = item.kind == "image" and _used_now(item, store) != item.used
            if in_use or used_since or (item.path, item.used) not in again or not _remove(item, store):
                skipped.append(item)
            else:
                removed.append(item)
        return Pruned(removed=tuple(removed), skipped=tuple(skipped), freed=sum(item.size for item in removed))


def _is_full(store: Store) -> bool:
    """Whether the disk is so full that no lease can be written."""
    probe = store.leases / f".{secrets.token_hex(8)}.new"
    try:
        probe.write_bytes(bytes(4096))
    except OSError as error:
        return error.errno in filesystem.FULL
    finally:
        remove(probe)
    return False


def _make_room(plan: PrunePlan, again: PrunePlan, store: Store) -> list[StoreRemoval]:
    """Remove one file of the plan without a lease, because the full disk has no space for a lease.

    Other processes cannot take a lease either, so none of them can begin to use the file.
    """
    still = {(item.path, item.used) for item in again.removals}
    # Layers are removed first, because they can be pulled again. An image is removed only if there is nothing else.
    for item in sorted(plan.removals, key=lambda item: (item.kind == "image", -item.size)):
        if item.size and (item.path, item.used) in still and _remove(item, store):
            return [item]
    return []


def _require_idle(store: Store, on_event: OnEvent) -> None:
    holders = lease.live_holders(store.leases, on_event=on_event, but=_LEASE)
    if holders:
        raise FileUnusable(
            f"the store `{store.root}` is in use",
            why="\n".join(map(str, holders)),
            hint="nothing was removed; try again later",
        )


def _used_now(item: StoreRemoval, store: Store) -> float | None:
    image = store.look(item.name)
    return None if image is None else image.used


def _remove(item: StoreRemoval, store: Store) -> bool:
    if item.kind == "image":
        # The SIF is removed first. A record without a SIF has no effect, and the next conversion overwrites the record.
        remove(item.path)
        remove(store.record_path(item.name))
    else:
        remove(item.path)
    return not os.path.lexists(item.path)


# --- what can go -------------------------------------------------------------------------


def _plan(store: Store, request: PruneRequest, environ: Mapping[str, str]) -> PrunePlan:
    now = filesystem.file_time(store.tmp)
    named = {} if request.all else _named_by_jobs(environ)
    images, kept = _images(store, named, now - request.older_than)
    left_over, spare = list(_unfinished(store, now)), [*images, *_downloads(store, now - request.older_than)]
    total = amount(store.root).size
    if request.keep_bytes is not None:
        left, order, spare = total - sum(item.size for item in left_over), sorted(spare, key=lambda one: one.used), []
        for item in order:
            if left > request.keep_bytes:
                spare.append(item)
                left -= item.size
    removals = (*left_over, *spare)
    return PrunePlan(
        store=store.root, removals=removals, kept=tuple(kept), total=total, frees=sum(item.size for item in removals)
    )


def _images(
    store: Store, named: Mapping[Path, str] | None, unused_since: float
) -> tuple[list[StoreRemoval], list[KeptImage]]:
    """Return the images that can be removed, and the images that are kept.

    Args:
        named: SIF -> the job that names it; None if squeue does not answer.
        unused_since: an image that was used after this time is kept.
    """
    spare, kept = [], []
    for image in store.list_images():
        why = _why_kept(image, named, unused_since)
        if why:
            why += f"; the store does not use it: {image.distrust}; {image.hint}" if image.distrust else ""
            kept.append(KeptImage(digest=image.digest, size=image.size, why=why))
            continue
        why = "it was not used lately" if image.whole else "it is damaged"
        why += f", and {image.distrust}" if image.distrust else ""
        spare.append(
            StoreRemoval(kind="image", name=image.digest, path=image.path, size=image.size, used=image.used, why=why)
        )
    return spare, kept


def _why_kept(image: StoredImage, named: Mapping[Path, str] | None, unused_since: float) -> str:
    if image.used > unused_since:
        return "it was used a short time ago; --all removes it too"
    if image.whole and not _can_be_made_again(image):
        return f"it was not made from an image in a registry, and cannot be made again; remove it by hand: {image.path}"
    if named is None:
        return "squeue does not say whether a job of yours needs it; --all removes it too"
    return f"{named[image.path]} names it; --all removes it too" if image.path in named else ""


def _can_be_made_again(image: StoredImage) -> bool:
    record = image.record
    return (
        record is not None
        and record.made.definition is None
        and any(reference.startswith(_FETCHED_AGAIN) for reference in record.references)
    )


def _named_by_jobs(environ: Mapping[str, str]) -> dict[Path, str] | None:
    """Return SIF -> queued or running job of the caller; empty without Slurm; None if squeue does not answer."""
    try:
        jobs = slurm.own_folders(environ)
    except ToolMissing:
        return {}
    except ToolFailed:
        return None
    found = {}
    for job_id, folder in jobs.items():
        sif = _sif_of_run(Path(folder))
        if sif is not None:
            found[sif] = f"job {job_id} ({folder})"
    return found


def _sif_of_run(folder: Path) -> Path | None:
    """Return the SIF that a run, or the runs of a sweep, use; None if they use no SIF."""
    for manifest in (RunFolder(folder).manifest, *sorted(folder.glob("[0-9]*/manifest.json"))[:1]):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            sif = str(read_json(manifest, most=LONGEST_RECORD)["environment"]["sif"])
            return Path(sif) if sif else None
    return None


def _downloads(store: Store, unused_since: float) -> Iterator[StoreRemoval]:
    """Yield downloaded files and indexes of layers. No SIF needs them, and hpcenv can download or make them again."""
    kinds: tuple[tuple[Path, Literal["download", "index"]], ...] = ((store.blobs, "download"), (store.indexes, "index"))
    for folder, kind in kinds:
        for path, status in _files(folder / "sha256"):
            if not path.name.startswith(".") and status.st_mtime <= unused_since:
                yield StoreRemoval(
                    kind=kind, name=f"sha256:{path.name[:64]}", path=path, size=status.st_size, used=status.st_mtime,
                    why="it can be fetched again" if kind == "download" else "it can be made again",
                )  # fmt: skip


def _unfinished(store: Store, now: float) -> Iterator[StoreRemoval]:
    """Yield what killed processes left: their folders, and hidden files that are a day old."""
    # The callers have called `_require_idle`.
    for path in store.leftovers(idle=True):
        yield StoreRemoval(
            kind="unfinished", name=path.name, path=path, size=amount(path).size, used=_used(path),
            why="its process has ended",
        )  # fmt: skip
    for folder in (store.blobs / "sha256", store.indexes / "sha256", store.images, store.leases):
        for path, status in _files(folder):
            hidden = path.name.startswith(".") or (folder == store.leases and path.name != _LEASE)
            if hidden and now - status.st_mtime > ABANDONED:
                yield StoreRemoval(
                    kind="unfinished", name=path.name, path=path, size=status.st_size, used=status.st_mtime,
                    why="no process has written to it for a day",
                )  # fmt: skip


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return
    for name in names:
        try:
            status = os.lstat(folder / name)
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            yield folder / name, status


def _used(path: Path) -> float:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0
