"""Fetch a repository of a hub at a commit into the store.

Runs on: LOGIN NODE.

Every file is checked against the digest that the hub lists for it while it arrives: the SHA-256 of a file in LFS, git's
SHA-1 of any other one. After an interruption the next call continues with the files that are there; those are read and
hashed again, because another program may have changed them. The folder appears by rename when it is complete.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hpcenv import filesystem, size
from hpcenv.errors import DataUnavailable
from hpcenv.hub import listing
from hpcenv.hub import tree as trees
from hpcenv.hub.access import HubAccess
from hpcenv.hub.listing import HubFile
from hpcenv.hub.tree import HubTree, TreeFile, TreeRecord
from hpcenv.image.registry import blobs
from hpcenv.image.registry.blobs import BlobSpec, BlobWords, TransferLimits
from hpcenv.image.store.store import Store
from hpcenv.progress import Event, OnEvent, ignore
from hpcenv.project.hub_reference import HubReference
from hpcenv.records.files import save_record

_CHUNK = 4 << 20
_WORKERS = 8
_MOST_RENAMES = 100
_SECONDS_ABANDONED = 86400.0
_LIMITS = TransferLimits(most_bytes=1 << 50, resume_from=1 << 20)


@dataclass(frozen=True, kw_only=True)
class FetchedTree:
    """A repository that is in the store now.

    Attributes:
        hub: `[datasets/]ORG/NAME@COMMIT`.
        path: folder with the files.
        files, size: number, and bytes together.
        fetched: bytes that were downloaded by this call.
        already: it was complete, and unchanged as far as it was checked.
    """

    hub: str
    path: str
    files: int
    size: int
    fetched: int
    already: bool


def resolve(wanted: HubReference, access: HubAccess, *, on_event: OnEvent = ignore) -> str:
    """Return the commit that a branch or tag of a repository names now.

    Raises:
        DataUnavailable: the hub refuses it or cannot be reached.
    """
    from hpcenv.hub.client import HubClient  # loads requests

    with closing(HubClient(access, on_event=on_event)) as client:
        return client.resolve_commit(wanted)


def fetch(
    wanted: HubReference,
    patterns: Sequence[str],
    access: HubAccess,
    store: Store,
    *,
    check: bool = False,
    on_event: OnEvent = ignore,
) -> FetchedTree:
    """Bring a repository at a commit into the store, unless it is there.

    Args:
        wanted: its revision is a commit.
        patterns: which files; empty for all.
        check: read and hash all files that are there; else their sizes and times are looked at.

    Raises:
        DataUnavailable: the hub refuses it, cannot be reached, or sends something else than it lists.
        FileUnusable: the store cannot be written to, or has too little space.
    """
    tree = trees.locate(store.root, wanted, patterns)
    judged = _identity(tree.folder)
    record = trees.read_record(tree)
    if record is not None and _is_unchanged(tree, record, check=check, on_event=on_event):
        total = sum(file.size for file in record.files)
        return FetchedTree(
            hub=str(wanted), path=str(tree.folder), files=len(record.files), size=total, fetched=0, already=True
        )
    _require_writable(store)
    files = _list_files(wanted, tree.patterns, access, on_event)
    fetched = _fetch_blobs(tree, files, access, store, on_event)
    try:
        made = _assemble(tree, files, store, judged)
    except OSError as error:
        raise filesystem.refused(tree.folder, error) from error
    total = sum(file.size for file in made.files)
    on_event(Event(phase="publish", what=str(wanted), done=total, total=total, unit="bytes"))
    return FetchedTree(
        hub=str(wanted), path=str(tree.folder), files=len(made.files), size=total, fetched=fetched, already=False
    )


def _is_unchanged(tree: HubTree, record: TreeRecord, *, check: bool, on_event: OnEvent) -> bool:
    if check:
        on_event(Event(phase="note", what=f"reading the files of {tree.wanted} and comparing their hashes"))
    try:
        changes = trees.find_changes(tree, record, "size-and-time")
        if not changes and check:
            changes = trees.find_changes(tree, record, "sha256")
    except OSError as error:
        changes = (f"{error.filename or tree.folder}: {error.strerror}",)
    for line in changes:
        on_event(Event(phase="note", what=f"{tree.wanted}: {ascii(line)[1:-1]}: fetching it again"))
    return not changes


def _require_writable(store: Store) -> None:
    if not store.writable:
        raise DataUnavailable(
            f"nothing can be fetched into the store `{store.root}`",
            why=store.read_only_because,
            hint="ask its owner to fetch, or use a store of your own (--store, HPCENV_STORE)",
        )


def _list_files(
    wanted: HubReference, patterns: Sequence[str], access: HubAccess, on_event: OnEvent
) -> tuple[HubFile, ...]:
    from hpcenv.hub.client import HubClient  # loads requests

    origin = f"`{wanted}`"
    on_event(Event(phase="resolve", what=str(wanted)))
    with closing(HubClient(access, on_event=on_event)) as client:
        files = listing.parse_entries(client.list_entries(wanted), origin=origin)
    return listing.select(files, patterns, origin=origin)


def _fetch_blobs(tree: HubTree, files: Sequence[HubFile], access: HubAccess, store: Store, on_event: OnEvent) -> int:
    """Download what is missing; return how many bytes that were."""
    from hpcenv.hub.client import HubFiles  # loads requests

    wanted = tree.wanted
    place = _make_folder(trees.hub_folder(store.root) / "blobs", store)
    _remove_old_parts(place, on_event)
    paths = {file.blob.digest: file.path for file in files}
    specs = {file.blob.digest: file.blob for file in files}
    words = BlobWords(blob="file", owner="repository", names=paths, error=DataUnavailable)
    _require_sound(place, specs.values(), words, on_event)
    missing = [spec for spec in specs.values() if blobs.cached(place, spec) is None]
    need = sum(spec.size for spec in missing)
    if missing:
        text = f"{wanted}: {len(missing)} of {len(specs)} files to fetch, {need / 1e6:.1f} MB, from {access.endpoint}"
        on_event(Event(phase="note", what=text))
    _require_space(tree, place, need - trees.partial_bytes(place) if missing else 0, files)
    large = [spec for spec in missing if spec.digest.startswith("sha256:")]
    small = [spec for spec in missing if not spec.digest.startswith("sha256:")]
    with closing(HubFiles(access, wanted, paths)) as source:
        for part, shown in ((large, on_event), (small, _Counting(on_event, len(small)))):
            blobs.fetch_all(part, source, place, workers=_WORKERS, on_event=shown, limits=_LIMITS, words=words)
    return need


class _Counting:
    """Shows the files that are not in LFS as one piece of work: there may be thousands, most with a few kB."""

    def __init__(self, on_event: OnEvent, total: int) -> None:
        self._on_event = on_event
        self._total = total
        self._done = 0

    def __call__(self, event: Event) -> None:
        if event.phase != "fetch":
            self._on_event(event)
        elif event.done == event.total:
            self._done += 1
            self._on_event(Event(phase="fetch", what="small files", done=self._done, total=self._total, unit="entries"))


def _remove_old_parts(place: Path, on_event: OnEvent) -> None:
    """Remove partial downloads that no call has continued for a week."""
    freed = blobs.sweep(place)
    if freed:
        what = f"removed partial downloads of earlier calls that were not continued for a week: {size.shown(freed)}"
        on_event(Event(phase="note", what=what))


def _require_space(tree: HubTree, place: Path, need: int, files: Sequence[HubFile]) -> None:
    """Check that `need` bytes fit into `place`, and the files of the tree, too, where they cannot be links.

    Raises:
        FileUnusable: less is free, or the user's quota leaves less.
    """
    purpose = f"fetch `{tree.wanted}`"
    folder = tree.folder.parent
    while not folder.is_dir():
        folder = folder.parent
    if _can_link(place, folder):
        copies = 0
    else:
        copies = sum(file.blob.size for file in files)
        purpose += " (this file system has no hard links between folders, so each file is there twice)"
    if copies and os.stat(folder).st_dev != os.stat(place).st_dev:
        filesystem.require_space(folder, copies, purpose=purpose)
        copies = 0
    if need + copies > 0:
        filesystem.require_space(place, need + copies, purpose=purpose)


def _can_link(place: Path, folder: Path) -> bool:
    """Tell whether a file of `place` can get a second name in `folder`."""
    name = f".link.{secrets.token_hex(8)}"
    try:
        (place / name).touch(exist_ok=False)
        os.link(place / name, folder / name)
    except OSError:
        return False
    finally:
        for path in (place / name, folder / name):
            with suppress(OSError):
                path.unlink()
    return True


def _require_sound(place: Path, specs: Iterable[BlobSpec], words: BlobWords, on_event: OnEvent) -> None:
    """Remove files of earlier calls whose content is not what their name says."""
    for spec in specs:
        path = blobs.cached(place, spec)
        if path is None:
            continue
        digest = blobs.hasher(spec)
        done = 0
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                on_event(Event(phase="verify", what=words.name(spec.digest), done=done, total=spec.size, unit="bytes"))
        if digest.hexdigest() != spec.digest.rpartition(":")[2]:
            on_event(Event(phase="note", what=f"{words.name(spec.digest)}: changed in the store: fetching it again"))
            blobs.discard(path)


def _assemble(tree: HubTree, files: Sequence[HubFile], store: Store, judged: tuple[int, ...] | None) -> TreeRecord:
    """Make the folder of a tree beside its place, and give it its name; return its record.

    Args:
        judged: identity of the folder that this call found unusable; None if there was none.

    Raises:
        OSError: the file system refuses it.
    """
    parent = _make_folder(tree.folder.parent, store)
    _remove_abandoned(parent)
    aside = parent / f".{tree.folder.name}.{secrets.token_hex(8)}"
    blobs_folder = trees.hub_folder(store.root) / "blobs"
    try:
        _make_folder(aside, store)
        made = []
        for file in files:
            target = aside / file.path
            _make_folder(target.parent, store)
            blob = blobs.blob_path(blobs_folder, file.blob.digest)
            _link(blob, target)
            made.append(_recorded(file, target))
        record = TreeRecord(hub=str(tree.wanted), patterns=tree.patterns, files=tuple(made))
        # Before the folder: a call that begins between both must not take the folder for one without a record. All
        # calls write the same record, and a folder that does not fit it is fetched again.
        save_record(record, tree.record)
        _put_in_place(aside, tree, record, judged)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return record


def _put_in_place(aside: Path, tree: HubTree, record: TreeRecord, judged: tuple[int, ...] | None) -> None:
    """Give a complete folder its name; there is never a moment with half of the old and half of the new files.

    A complete folder that another call has put there in the meantime stays: a container may have bound it already, and
    would see an empty folder after its removal.

    Raises:
        OSError: the file system refuses it.
    """
    old = aside.parent / f".{tree.folder.name}.{secrets.token_hex(8)}.old"
    for _ in range(_MOST_RENAMES):
        try:
            os.rename(aside, tree.folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        else:
            return
        if _is_of_another_call(tree.folder, tree, record, judged):
            return
        with suppress(FileNotFoundError):
            os.rename(tree.folder, old)
        if _is_of_another_call(old, tree, record, judged):
            # It came between the look and the rename: back with it, unless there is a third one already.
            with suppress(OSError):
                os.rename(old, tree.folder)
        elif old.is_dir() and not old.is_symlink():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.unlink(missing_ok=True)
    raise OSError(errno.EEXIST, "other processes put it there again and again", str(tree.folder))


def _is_of_another_call(folder: Path, tree: HubTree, record: TreeRecord, judged: tuple[int, ...] | None) -> bool:
    """Tell whether a folder has all files of a record, and is not the one that this call found unusable."""
    identity = _identity(folder)
    if identity is None or identity == judged:
        return False
    try:
        return not trees.find_changes(replace(tree, folder=folder), record, "size-and-time")
    except OSError:
        return False


def _identity(folder: Path) -> tuple[int, ...] | None:
    """Return what tells a folder from one that has its name later; None if it is no folder. A rename keeps it."""
    try:
        found = os.lstat(folder)
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_mtime_ns) if stat.S_ISDIR(found.st_mode) else None


def _link(blob: Path, target: Path) -> None:
    """Give a blob its name in a tree, and the time of all files."""
    try:
        if int(os.stat(blob).st_mtime) != trees.FILE_TIME:
            os.utime(blob, (trees.FILE_TIME, trees.FILE_TIME))
        os.link(blob, target)
    except OSError:
        # BeeGFS has no hard links between folders, some file systems have none at all, and a file of another member of
        # a shared store cannot be linked where fs.protected_hardlinks is set.
        shutil.copyfile(blob, target)
        target.chmod(0o444)
        os.utime(target, (trees.FILE_TIME, trees.FILE_TIME))


def _recorded(file: HubFile, path: Path) -> TreeFile:
    algorithm, _, digest = file.blob.digest.partition(":")
    if algorithm != "sha256":
        digest = _sha256(path)
    return TreeFile(path=file.path, size=file.blob.size, sha256=digest, blob=file.blob.digest)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _make_folder(path: Path, store: Store) -> Path:
    """Make a folder and those above it with the modes of the store, whatever the umask is."""
    missing = []
    place = path
    while not place.is_dir():
        missing.append(place)
        place = place.parent
    for folder in reversed(missing):
        with suppress(FileExistsError):
            folder.mkdir()
            folder.chmod(0o2775 if store.shared else 0o755)
    return path


def _remove_abandoned(parent: Path) -> None:
    """Remove folders of calls that were killed a day ago or longer."""
    for entry in list(os.scandir(parent)):
        with suppress(OSError):
            idle = time.time() - entry.stat(follow_symlinks=False).st_mtime
            if entry.name.startswith(".") and idle > _SECONDS_ABANDONED:
                shutil.rmtree(entry.path, ignore_errors=True)
