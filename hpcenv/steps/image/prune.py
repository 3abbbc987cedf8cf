"""`hpcenv image prune`: remove what no lockfile and no run needs.

Runs on: LOGIN NODE.

What is needed is never guessed in favour of removing. An image stays when

- a lockfile that is known has one of its digests in its text, whatever that lockfile's
  schema; known are those that `hpcenv lock` or `image build` noted in the store, the others beside them, and
  those of the project the user is in;
- a run that is known has not ended, or nobody can tell whether it has;
- a note in the store cannot be read, or names a place that is not reachable from here.

While anybody holds a lease, nothing is removed at all.
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

from hpcenv import wire
from hpcenv.adapters import filesystem, lease, manifests
from hpcenv.adapters.store import ABANDONED, Root, Store, StorePlace, is_there, remove
from hpcenv.errors import FileUnusable, HpcenvError
from hpcenv.model.progress import OnEvent, ignore
from hpcenv.steps import runs
from hpcenv.steps.image.listing import amount
from hpcenv.steps.workspace import Workspace
from hpcenv.wire import RunFolder

_LEASE = "prune"


@dataclass(frozen=True, kw_only=True)
class Removal:
    """One thing that is not needed.

    Attributes:
        kind: `image` with its record; `layer`, `manifest` or `configuration` as pulled; a layer's
            `index`; `unfinished` work; or a `note` of a lockfile or run that is gone.
        name: digest or file name.
        size: in bytes.
        used: when it was last used, seconds since 1970 by the file system's clock.
        why: why nobody needs it.
    """

    kind: Literal["image", "layer", "manifest", "configuration", "index", "unfinished", "note"]
    name: str
    path: Path
    size: int
    used: float
    why: str


@dataclass(frozen=True, kw_only=True)
class Kept:
    """An image that stays, and for whom."""

    digest: str
    size: int
    why: str


@dataclass(frozen=True, kw_only=True)
class PrunePlan:
    """What `prune` would do; sizes are in bytes."""

    store: Path
    removals: tuple[Removal, ...]
    kept: tuple[Kept, ...]
    total: int
    frees: int


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """What was done: what was planned and could not be removed is in `skipped`."""

    removed: tuple[Removal, ...]
    skipped: tuple[Removal, ...]
    freed: int


@dataclass(frozen=True, kw_only=True)
class PruneRequest:
    """What the user asked for.

    Attributes:
        place: the store's folder, and whom the user trusts with it.
        workspaces: projects whose lockfiles and runs count, whether noted or not.
        older_than: seconds since the last use; 0 for any age.
        keep_bytes: stop as soon as the store has no more; layers of images that stay may go
            too then. None removes all that is not needed.
    """

    place: StorePlace
    workspaces: tuple[Workspace, ...] = ()
    older_than: float = 0.0
    keep_bytes: int | None = None


def plan_prune(request: PruneRequest, *, environ: Mapping[str, str], on_event: OnEvent = ignore) -> PrunePlan:
    """Say what may be removed, and what stays for whom. Changes nothing.

    Args:
        environ: the caller's environment; Slurm is asked for the states of runs.

    Raises:
        FileUnusable: the store is not trusted, read-only, or in use just now.
    """
    store = request.place.open()
    store.require_writable("remove anything")
    _require_idle(store, on_event)
    return _plan(store, request, environ)


def prune(plan: PrunePlan, request: PruneRequest, *, environ: Mapping[str, str], on_event: OnEvent = ignore) -> Pruned:
    """Remove what `plan` says, as far as it still is not needed.

    Everything is looked at again: between plan and consent a lockfile may have been written
    or a job submitted.

    Raises:
        FileUnusable: as for `plan_prune`.
        ToolFailed: another `prune` is at work.
    """
    store = request.place.open()
    removed: list[Removal] = []
    skipped: list[Removal] = []
    if _is_full(store):
        _require_idle(store, on_event)
        removed += _make_room(plan, _plan(store, request, environ), store)
    with store.lease(_LEASE, purpose="removes what nobody needs", timeout=60, on_event=on_event):
        _require_idle(store, on_event)
        idle = set(os.listdir(store.leases))
        again = {(item.path, item.used) for item in _plan(store, request, environ).removals}
        for item in plan.removals:
            if item in removed:
                continue
            # A lease that came since: its holder may be about to use what is to go.
            in_use = not set(os.listdir(store.leases)) <= idle
            asked_for = item.kind == "image" and _used_now(item, store) != item.used
            if in_use or asked_for or (item.path, item.used) not in again or not _remove(item, store):
                skipped.append(item)
            else:
                removed.append(item)
        return Pruned(removed=tuple(removed), skipped=tuple(skipped), freed=sum(item.size for item in removed))


def _is_full(store: Store) -> bool:
    """Whether not even a lease can be written."""
    probe = store.leases / f".{secrets.token_hex(8)}.new"
    try:
        probe.write_bytes(bytes(4096))
    except OSError as error:
        return error.errno in filesystem.FULL
    finally:
        remove(probe)
    return False


def _make_room(plan: PrunePlan, again: PrunePlan, store: Store) -> list[Removal]:
    """Remove one thing of the plan without a lease: a disk that is full has no room for one.

    Nobody else can take a lease then, so nobody begins to need it now.
    """
    still = {(item.path, item.used) for item in again.removals}
    # A layer can be fetched again; an image, if there is nothing else.
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
            hint="try again when that is done; nothing was removed",
        )


def _used_now(item: Removal, store: Store) -> float | None:
    image = store.look(item.name)
    return None if image is None else image.used


def _remove(item: Removal, store: Store) -> bool:
    if item.kind == "image":
        # The SIF first: a record without a SIF is nothing, and the next conversion writes it anew.
        remove(item.path)
        remove(store.record_path(item.name))
    else:
        remove(item.path)
    return not os.path.lexists(item.path)


# --- what may go -------------------------------------------------------------------------


def _plan(store: Store, request: PruneRequest, environ: Mapping[str, str]) -> PrunePlan:
    now = filesystem.file_time(store.tmp)
    needs = _needs(store, request.workspaces, environ)
    images, kept = _images(store, needs)
    layers, theirs = _layers(store, {item.digest for item in kept})
    spare = [*needs.gone_notes, *_unfinished(store, now)]
    spare += [item for item in (*images, *layers) if now - item.used >= request.older_than]
    total = amount(store.root).size
    if request.keep_bytes is not None:
        order = sorted(spare, key=lambda item: (item.kind not in ("note", "unfinished"), item.used))
        order += sorted((i for i in theirs if now - i.used >= request.older_than), key=lambda item: item.used)
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


def _images(store: Store, needs: _Needs) -> tuple[list[Removal], list[Kept]]:
    spare, kept = [], []
    for image in store.list_images():
        why = needs.everything or needs.of.get(image.digest, "")
        if why:
            why += f"; nobody uses it as it is: {image.distrust}; {image.remedy}" if image.distrust else ""
            kept.append(Kept(digest=image.digest, size=image.size, why=why))
            continue
        because = "no lockfile and no run needs it"
        if not image.whole:
            because += ", and it is damaged"
        elif image.distrust:
            because += f", and {image.distrust}"
        spare.append(
            Removal(kind="image", name=image.digest, path=image.path, size=image.size, used=image.used, why=because)
        )
    return spare, kept


def _layers(store: Store, kept: set[str]) -> tuple[list[Removal], list[Removal]]:
    """Return what was pulled, and indexes, of no image that stays; and those of images that do."""
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
    spare: list[Removal] = []
    theirs: list[Removal] = []
    for folder, mine in ((store.blobs, blobs), (store.indexes, indexes)):
        for path, status in _files(folder / "sha256"):
            name = f"sha256:{path.name[:64]}"
            if path.name.startswith("."):
                continue
            why = "its image is a SIF already" if name in mine else "no image that stays was made from it"
            kind = "index" if folder == store.indexes else kinds.get(name) or _kind_of(path, status.st_size)
            item = Removal(kind=kind, name=name, path=path, size=status.st_size, used=status.st_mtime, why=why)
            (theirs if name in mine else spare).append(item)
    return spare, theirs


def _kind_of(blob: Path, size: int) -> Literal["layer", "manifest", "configuration"]:
    """Tell by its content what a blob is that no record names; a layer is a tar, packed or not, and no JSON."""
    if size > manifests.CONFIG_LIMIT:
        return "layer"
    try:
        document = json.loads(_read(blob) or b"")
    except (ValueError, RecursionError):
        return "layer"
    if not isinstance(document, dict):
        return "layer"
    return "configuration" if "rootfs" in document else "manifest"


def _unfinished(store: Store, now: float) -> Iterator[Removal]:
    """Yield what killed processes left: their folders, and hidden files that are a day old."""
    # `_require_idle` has been asked.
    for path in store.leftovers(idle=True):
        yield Removal(
            kind="unfinished", name=path.name, path=path, size=amount(path).size, used=_used(path),
            why="its process is no more",
        )  # fmt: skip
    for folder in (store.blobs / "sha256", store.indexes / "sha256", store.images, store.leases, store.roots):
        for path, status in _files(folder):
            hidden = path.name.startswith(".") or (folder == store.leases and path.name != _LEASE)
            if hidden and now - status.st_mtime > ABANDONED:
                yield Removal(
                    kind="unfinished", name=path.name, path=path, size=status.st_size, used=status.st_mtime,
                    why="nobody has written to it for a day",
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


# --- who needs what ----------------------------------------------------------------------


@dataclass(kw_only=True)
class _Needs:
    """Digest -> who needs it; `everything` says why nothing at all may go."""

    of: dict[str, str] = field(default_factory=dict)
    everything: str = ""
    gone_notes: list[Removal] = field(default_factory=list)

    def add(self, digests: Sequence[str] | set[str], why: str) -> None:
        for digest in digests:
            self.of.setdefault(digest, why)


def _needs(store: Store, workspaces: Sequence[Workspace], environ: Mapping[str, str]) -> _Needs:
    needs, names = _Needs(), _Names(store)
    # Path -> what a note says of it, for where the path itself does not tell.
    lockfiles: dict[Path, set[str] | None] = {}
    folders: dict[Path, set[str] | None] = {}
    for workspace in workspaces:
        lockfiles.update(dict.fromkeys(_beside(workspace.lockfile_path("x"))))
        folders.update(dict.fromkeys(_run_folders(workspace.runs)))
    for note, root in store.list_roots():
        there = None if root is None else is_there(root)
        if root is None:
            needs.everything = f"the note {note} cannot be read; remove it if you know that nobody needs it"
        elif there is None:
            needs.add(set(root.digests), f"{root.kind} {root.path}: cannot be looked at from here")
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
        said = names.of_run(folder)
        digests = (noted or set()) | (said or set()) if said is not None or noted is not None else names.all()
        # Slurm is asked only where its answer decides something.
        if not digests <= needs.of.keys():
            needs.add(*_of_run(folder, digests, environ))
    return needs


def _gone(note: Path, root: Root) -> Removal:
    why = f"{root.kind} {root.path} is gone"
    return Removal(kind="note", name=note.name, path=note, size=amount(note).size, used=_used(note), why=why)


class _Names:
    """Which images of the store a text speaks of: by their own digest, or their SIF's."""

    def __init__(self, store: Store) -> None:
        self._digests: dict[str, str] = {}
        for image in store.list_images():
            self._digests[image.digest.removeprefix("sha256:")] = image.digest
            if image.record is not None:
                self._digests[image.record.sif.sha256] = image.digest

    def in_text(self, text: bytes) -> set[str]:
        found = {match.decode() for match in re.findall(rb"[0-9a-f]{64}", text)}
        return {self._digests[name] for name in found & self._digests.keys()}

    def all(self) -> set[str]:
        """Return every image: needed by what cannot be read."""
        return set(self._digests.values())

    def of_run(self, folder: Path) -> set[str] | None:
        """Return the images that a run's manifest or copied lockfile speak of, None if it cannot be read."""
        manifest, lockfile = _read(RunFolder(folder).manifest), _read(RunFolder(folder).lockfile)
        try:
            json.loads(manifest or b"")
        except (ValueError, RecursionError):
            return None  # cut off, and maybe before the image's name
        return self.in_text((manifest or b"") + (lockfile or b""))


def _of_run(folder: Path, digests: set[str], environ: Mapping[str, str]) -> tuple[set[str], str]:
    """Return what a run still needs, and why; nothing when it surely has ended."""
    if not digests:
        return set(), ""
    try:
        status = runs.read_status(runs.open_run(folder), environ)
    except HpcenvError as error:
        return digests, f"run {folder}: {error.what}"
    if status.ended and not status.waits_again:
        return set(), ""
    return digests, f"run {folder}: {status.state}"


def _beside(lockfile: Path) -> set[Path]:
    """Return the lockfiles in the folder of this one."""
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
        return wire.read_file(path)
    except (OSError, ValueError):
        return None
