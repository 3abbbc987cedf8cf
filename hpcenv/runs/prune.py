"""`hpcenv image prune`: remove images and layers that no lockfile and no run needs.

Runs on: LOGIN NODE.

In case of doubt, an image is kept. It is kept if

- a known lockfile contains one of its digests, with any schema version. Known lockfiles are those
  that `hpcenv lock` or `image build` noted in the store, other lockfiles in the same folders, and
  those of the current project;
- a known run that uses it has not ended, or its state is unknown;
- it was used within a day, or within the time that the caller names: somebody may run it without hpcenv;
- a note in the store cannot be read, or names a path that cannot be reached from here.

While another process holds a lease, nothing is removed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpcenv import filesystem
from hpcenv.errors import FileUnusable, HpcenvError
from hpcenv.image.registry import manifests
from hpcenv.image.store import lease
from hpcenv.image.store.roots import Root, is_there
from hpcenv.image.store.store import ABANDONED, Store, remove
from hpcenv.image.store.store_folder import open_place
from hpcenv.progress import OnEvent, ignore
from hpcenv.project.store_config import StorePlace
from hpcenv.project.workspace import Workspace
from hpcenv.records.files import read_file
from hpcenv.records.run_folder import RunFolder
from hpcenv.runs.entries import open_run
from hpcenv.runs.status import read_status
from hpcenv.runs.store_listing import amount

_LEASE = "prune"
_DAY = 86400.0


@dataclass(frozen=True, kw_only=True)
class StoreRemoval:
    """A file that is not needed.

    Attributes:
        kind: `image` with its record; a pulled `layer`, `manifest` or `configuration`; the `index`
            of a layer; `unfinished` work; or a `note` of a lockfile or run that is gone.
        name: digest or file name.
        size: bytes.
        used: time of the last use, in seconds since 1970 by the file system's clock.
        why: why it is not needed.
    """

    kind: Literal["image", "layer", "manifest", "configuration", "index", "unfinished", "note"]
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
    """What `prune` would remove and keep; sizes are in bytes."""

    store: Path
    removals: tuple[StoreRemoval, ...]
    kept: tuple[KeptImage, ...]
    total: int
    frees: int


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """What was removed; `skipped` has the planned removals that were not possible."""

    removed: tuple[StoreRemoval, ...]
    skipped: tuple[StoreRemoval, ...]
    freed: int


@dataclass(frozen=True, kw_only=True)
class PruneRequest:
    """Which files to remove.

    Attributes:
        place: folder of the store, and its trusted owner.
        workspaces: projects whose lockfiles and runs count, also without a note in the store.
        older_than: only files not used for this many seconds, a day by default; 0 for any age.
        keep_bytes: stop when the store is not larger than this. Then layers of kept images may be
            removed too. None removes all files that are not needed.
    """

    place: StorePlace
    workspaces: tuple[Workspace, ...] = ()
    older_than: float = _DAY
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
    """Remove the files of `plan` that are still not needed.

    All is checked again, because a lockfile may have been written or a job submitted since the plan.

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
            # The holder of a new lease may be about to use this file.
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
    """Remove one file of the plan without a lease, because the full disk has no room for a lease.

    Other processes cannot take a lease either, so none of them can begin to use the file.
    """
    still = {(item.path, item.used) for item in again.removals}
    # Layers first: they can be pulled again. An image only if there is nothing else.
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
        # The SIF first: a record without a SIF has no effect, and the next conversion overwrites it.
        remove(item.path)
        remove(store.record_path(item.name))
    else:
        remove(item.path)
    return not os.path.lexists(item.path)


# --- what may be removed -----------------------------------------------------------------


def _plan(store: Store, request: PruneRequest, environ: Mapping[str, str]) -> PrunePlan:
    now = filesystem.file_time(store.tmp)
    needs = _needs(store, request.workspaces, environ)
    images, kept = _images(store, needs, now - request.older_than)
    layers, of_kept_images = _layers(store, {item.digest for item in kept})
    spare = [*needs.gone_notes, *_unfinished(store, now)]
    spare += [*images, *(item for item in layers if now - item.used >= request.older_than)]
    total = amount(store.root).size
    if request.keep_bytes is not None:
        order = sorted(spare, key=lambda item: (item.kind not in ("note", "unfinished"), item.used))
        old = (item for item in of_kept_images if now - item.used >= request.older_than)
        order += sorted(old, key=lambda item: item.used)
        spare, left = [], total
        for item in order:
            if left > request.keep_bytes or item.kind in ("note", "unfinished"):
                spare.append(item)
                left -= item.size
    return PrunePlan(
        store=store.root,
        removals=tuple(spare),
        kept=tuple(kept),
        total=total,
        frees=sum(item.size for item in spare),
    )


def _images(store: Store, needs: _Needs, unused_since: float) -> tuple[list[StoreRemoval], list[KeptImage]]:
    """Return the images that may be removed, and those that are needed or were used after `unused_since`."""
    spare, kept = [], []
    for image in store.list_images():
        why = needs.everything or needs.of.get(image.digest, "")
        if not why and image.used > unused_since:
            why = "it was used a short time ago; --older-than 0 removes it too"
        if why:
            why += f"; the store does not use it: {image.distrust}; {image.remedy}" if image.distrust else ""
            kept.append(KeptImage(digest=image.digest, size=image.size, why=why))
            continue
        why = "no lockfile and no run needs it"
        if not image.whole:
            why += ", and it is damaged"
        elif image.distrust:
            why += f", and {image.distrust}"
        spare.append(
            StoreRemoval(kind="image", name=image.digest, path=image.path, size=image.size, used=image.used, why=why)
        )
    return spare, kept


def _layers(store: Store, kept: set[str]) -> tuple[list[StoreRemoval], list[StoreRemoval]]:
    """Return the blobs and indexes that no kept image uses, and those of kept images."""
    records = {image.digest: image.record for image in store.list_images() if image.record is not None}
    blobs: set[str] = set()
    indexes: set[str] = set()
    for digest in kept & records.keys():
        record = records[digest]
        blobs.update(record.layers, (record.manifest_digest or "", record.config_digest or ""))
        indexes.update(record.diff_ids)
    kinds: dict[str, Literal["layer", "manifest", "configuration"]] = {}
    for record in records.values():
        kinds.update(dict.fromkeys(record.layers, "layer"))
        kinds.update({record.manifest_digest or "": "manifest", record.config_digest or "": "configuration"})
    spare: list[StoreRemoval] = []
    of_kept_images: list[StoreRemoval] = []
    for folder, mine in ((store.blobs, blobs), (store.indexes, indexes)):
        for path, status in _files(folder / "sha256"):
            name = f"sha256:{path.name[:64]}"
            if path.name.startswith("."):
                continue
            why = "its image is already a SIF" if name in mine else "no kept image was made from it"
            kind = "index" if folder == store.indexes else kinds.get(name) or _kind_of(path, status.st_size)
            item = StoreRemoval(kind=kind, name=name, path=path, size=status.st_size, used=status.st_mtime, why=why)
            (of_kept_images if name in mine else spare).append(item)
    return spare, of_kept_images


def _kind_of(blob: Path, size: int) -> Literal["layer", "manifest", "configuration"]:
    """Return the kind of a blob without a record, by its content: a layer is a tar archive and not JSON."""
    if size > manifests.CONFIG_LIMIT:
        return "layer"
    try:
        document = json.loads(_read(blob) or b"")
    except (ValueError, RecursionError):
        return "layer"
    if not isinstance(document, dict):
        return "layer"
    return "configuration" if "rootfs" in document else "manifest"


def _unfinished(store: Store, now: float) -> Iterator[StoreRemoval]:
    """Yield files of killed processes: their folders, and hidden files that are a day old."""
    # The callers have called `_require_idle`.
    for path in store.leftovers(idle=True):
        yield StoreRemoval(
            kind="unfinished", name=path.name, path=path, size=amount(path).size, used=_used(path),
            why="its process has ended",
        )  # fmt: skip
    for folder in (store.blobs / "sha256", store.indexes / "sha256", store.images, store.leases, store.roots):
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


# --- what is needed ----------------------------------------------------------------------


@dataclass(kw_only=True)
class _Needs:
    """Which images are needed.

    Attributes:
        of: digest -> what needs it.
        everything: why all images are kept; empty if they are not.
        gone_notes: notes of lockfiles and runs that are gone.
    """

    of: dict[str, str] = field(default_factory=dict)
    everything: str = ""
    gone_notes: list[StoreRemoval] = field(default_factory=list)

    def add(self, digests: Sequence[str] | set[str], why: str) -> None:
        for digest in digests:
            self.of.setdefault(digest, why)


def _needs(store: Store, workspaces: Sequence[Workspace], environ: Mapping[str, str]) -> _Needs:
    needs, names = _Needs(), _Names(store)
    # Path -> digests from its note, in case the path itself cannot be read.
    lockfiles: dict[Path, set[str] | None] = {}
    folders: dict[Path, set[str] | None] = {}
    for workspace in workspaces:
        lockfiles.update(dict.fromkeys(_beside(workspace.lockfile_path("x"))))
        folders.update(dict.fromkeys(_run_folders(workspace.runs)))
    for note, root in store.list_roots():
        there = None if root is None else is_there(root)
        if root is None:
            needs.everything = f"the note {note} cannot be read; remove it if you know that it is not needed"
        elif there is None:
            needs.add(set(root.digests), f"{root.kind} {root.path}: cannot be reached from here")
        elif not there:
            needs.gone_notes.append(_gone(note, root))
        elif root.kind == "run":
            folders[Path(root.path)] = set(root.digests)
        else:
            for path in _beside(Path(root.path)):
                lockfiles.setdefault(path)
            lockfiles[Path(root.path)] = set(root.digests)
    for path, noted in sorted(lockfiles.items()):
        text = _read(path)
        if text is not None:
            needs.add(names.in_text(text), f"lockfile {path}")
        elif noted is not None:
            needs.add(noted, f"lockfile {path}: cannot be read")
        elif os.path.lexists(path):
            needs.everything = needs.everything or f"the lockfile {path} cannot be read"
    for folder, noted in sorted(folders.items()):
        named = names.of_run(folder)
        digests = (noted or set()) | (named or set()) if named is not None or noted is not None else names.all()
        # Ask Slurm only if the answer makes a difference.
        if not digests <= needs.of.keys():
            needs.add(*_of_run(folder, digests, environ))
    return needs


def _gone(note: Path, root: Root) -> StoreRemoval:
    why = f"{root.kind} {root.path} is gone"
    return StoreRemoval(kind="note", name=note.name, path=note, size=amount(note).size, used=_used(note), why=why)


class _Names:
    """Finds images of the store in a text, by their digest or by the sha256 of their SIF."""

    def __init__(self, store: Store) -> None:
        self._digests: dict[str, str] = {}
        for image in store.list_images():
            self._digests[image.digest.removeprefix("sha256:")] = image.digest
            if image.record is not None:
                self._digests[image.record.sif.sha256] = image.digest

    def in_text(self, text: bytes) -> set[str]:
        names = {match.decode() for match in re.findall(rb"[0-9a-f]{64}", text)}
        return {self._digests[name] for name in names & self._digests.keys()}

    def all(self) -> set[str]:
        """Return all images, for a run whose records cannot be read."""
        return set(self._digests.values())

    def of_run(self, folder: Path) -> set[str] | None:
        """Return the images in a run's manifest or copied lockfile; None if they cannot be read."""
        manifest, lockfile = _read(RunFolder(folder).manifest), _read(RunFolder(folder).lockfile)
        try:
            json.loads(manifest or b"")
        except (ValueError, RecursionError):
            return None  # the file may be cut off before the name of the image
        return self.in_text((manifest or b"") + (lockfile or b""))


def _of_run(folder: Path, digests: set[str], environ: Mapping[str, str]) -> tuple[set[str], str]:
    """Return the digests that a run still needs, and why; nothing if it has ended."""
    if not digests:
        return set(), ""
    try:
        status = read_status(open_run(folder), environ)
    except HpcenvError as error:
        return digests, f"run {folder}: {error.what}"
    if status.ended and not status.waits_again:
        return set(), ""
    return digests, f"run {folder}: {status.state}"


def _beside(lockfile: Path) -> set[Path]:
    """Return all lockfiles in the folder of a lockfile."""
    try:
        return {lockfile.parent / name for name in os.listdir(lockfile.parent) if name.endswith(".lock.toml")}
    except OSError:
        return set()


def _run_folders(folder: Path) -> set[Path]:
    try:
        return {folder / name for name in os.listdir(folder) if os.path.lexists(folder / name / "manifest.json")}
    except OSError:
        return set()


def _read(path: Path) -> bytes | None:
    try:
        return read_file(path)
    except (OSError, ValueError):
        return None
