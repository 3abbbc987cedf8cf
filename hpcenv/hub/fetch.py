"""Fetch a repository of a hub at a commit into the store.

Runs on: LOGIN NODE.

The hub's library downloads the files (hub/client.py). Every file is then read and compared with the digest that the hub
lists for it: the SHA-256 of a file in LFS, git's SHA-1 of all other files. After an interruption the next call
continues with the files that exist. These files are read and hashed again, because another program may have changed
them. A complete folder is renamed to its final name.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcenv import filesystem, size
from hpcenv.errors import Command, DataUnavailable, ToolMissing
from hpcenv.hub import repository_files
from hpcenv.hub import tree as trees
from hpcenv.hub.access import HubAccess
from hpcenv.hub.download import blob_path, download_all, read_digest
from hpcenv.hub.repository_files import HubFile
from hpcenv.hub.tree import HubTree, TreeFile, TreeRecord
from hpcenv.image.store.store import Store
from hpcenv.progress import Event, OnEvent, ignore
from hpcenv.project.hub_reference import HubReference
from hpcenv.records.files import open_regular, save_record, sha256_of

if TYPE_CHECKING:
    from hpcenv.hub.client import HubClient

_SECONDS_ABANDONED = 86400.0
# A partial download is removed if no call has continued it for this time.
_SECONDS_KEPT = 7 * 86400.0
# How long to wait for a different process that downloads the same repository.
_WAIT_SECONDS = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class FetchedTree:
    """A fetched repository in the store.

    Attributes:
        hub: `[datasets/]ORG/NAME@COMMIT`.
        path: folder with the files.
        files, size: number of files, and their bytes together.
        fetched: bytes that were downloaded by this call.
        already: whether the repository was already complete in the store, and no check found a change.
    """

    hub: str
    path: str
    files: int
    size: int
    fetched: int
    already: bool


def resolve(wanted: HubReference, access: HubAccess) -> str:
    """Return the commit that a branch or tag of a repository names now.

    Raises:
        DataUnavailable: the hub refuses the request or cannot be reached.
        ToolMissing: the hub's library is not installed.
    """
    with closing(_open_client(access)) as client:
        return client.resolve_commit(wanted)


def _open_client(access: HubAccess) -> HubClient:
    try:
        from hpcenv.hub.client import HubClient  # loads huggingface_hub
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] not in ("huggingface_hub", "httpx2"):
            raise
        raise ToolMissing(
            "the hub's library huggingface_hub, version 2, is not installed",
            why=f"only `hpcenv data fetch` and `resolve` need it ({error})",
            hint=Command("pip", "install", "huggingface_hub>=2,<3"),
        ) from error
    return HubClient(access)


def fetch(
    wanted: HubReference,
    patterns: Sequence[str],
    access: HubAccess,
    store: Store,
    *,
    check: bool = False,
    on_event: OnEvent = ignore,
) -> FetchedTree:
    """Fetch a repository at a commit into the store, if the store does not have it.

    Args:
        wanted: the repository; its revision must be a commit.
        patterns: patterns of the files to fetch; empty for all files.
        check: whether to read and hash all existing files; else only their sizes and times are compared.

    Raises:
        DataUnavailable: the hub refuses a request, cannot be reached, or sends bytes that do not have the listed
            digest.
        FileUnusable: the store cannot be written to, or has too little space.
        ToolMissing: the hub's library is not installed.
    """
    tree = trees.locate(store.root, wanted, patterns)
    there = _look(tree, check=check, on_event=on_event)
    if there is not None:
        return _fetched(tree, there, fetched=0, already=True)
    _require_writable(store)
    purpose, name = f"fetches {wanted}", f"hub-{wanted.cache_folder}"
    with (
        store.lease(name, purpose=purpose, timeout=_WAIT_SECONDS, on_event=on_event),
        closing(_open_client(access)) as client,
    ):
        # Another call may have fetched the repository in the meantime, and a container may already use the folder.
        there = _look(tree, check=check, on_event=ignore)
        if there is not None:
            return _fetched(tree, there, fetched=0, already=True)
        files = _list_files(wanted, tree.patterns, client, on_event)
        try:
            count = _fetch_blobs(tree, files, client, access, store, on_event)
            made = _assemble(tree, files, store)
        except OSError as error:
            raise filesystem.refused(tree.folder, error) from error
    done = _fetched(tree, made, fetched=count, already=False)
    on_event(Event(phase="publish", what=str(wanted), done=done.size, total=done.size, unit="bytes"))
    return done


def _fetched(tree: HubTree, record: TreeRecord, *, fetched: int, already: bool) -> FetchedTree:
    return FetchedTree(
        hub=str(tree.wanted), path=str(tree.folder), files=len(record.files), fetched=fetched, already=already,
        size=sum(file.size for file in record.files),
    )  # fmt: skip


def _look(tree: HubTree, *, check: bool, on_event: OnEvent) -> TreeRecord | None:
    """Return the record of a tree if the tree is complete and no check finds a change in it."""
    record = trees.read_record(tree)
    return record if record is not None and _is_unchanged(tree, record, check=check, on_event=on_event) else None


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
    wanted: HubReference, patterns: Sequence[str], client: HubClient, on_event: OnEvent
) -> tuple[HubFile, ...]:
    on_event(Event(phase="resolve", what=str(wanted)))
    # The library repeats a failed request for a list during half a minute. This request fails at once, and says why.
    client.resolve_commit(wanted)
    return repository_files.select(client.list_files(wanted), patterns, origin=f"`{wanted}`")


def _fetch_blobs(
    tree: HubTree, files: Sequence[HubFile], client: HubClient, access: HubAccess, store: Store, on_event: OnEvent
) -> int:
    """Download the missing files; return the number of their bytes."""
    _remove_old_parts(trees.parts_folder(store.root), on_event)
    place = _make_folder(trees.blobs_folder(store.root), store)
    parts = _make_folder(trees.parts_folder(store.root) / tree.wanted.cache_folder, store)
    unique = {file.digest: file for file in files}
    missing = [file for file in unique.values() if not _is_sound(blob_path(place, file.digest), file, on_event)]
    need = sum(file.size for file in missing)
    if missing:
        amount = f"{len(missing)} of {len(unique)} files to fetch, {need / 1e6:.1f} MB"
        on_event(Event(phase="note", what=f"{tree.wanted}: {amount}, from {access.endpoint}"))
    _require_space(tree, place, need - trees.partial_bytes(parts) if missing else 0, files)
    for file in missing:
        _make_folder(blob_path(place, file.digest).parent, store)
    download_all(missing, client, tree.wanted, place, parts, on_event=on_event)
    return need


def _remove_old_parts(folder: Path, on_event: OnEvent) -> None:
    """Remove partial downloads that no call has continued for a week."""
    freed = 0
    for path in trees.partial_downloads(folder):
        with suppress(OSError):
            found = path.lstat()
            if time.time() - found.st_mtime > _SECONDS_KEPT:
                path.unlink()
                freed += found.st_size
    if freed:
        what = f"removed partial downloads of earlier calls that were not continued for a week: {size.shown(freed)}"
        on_event(Event(phase="note", what=what))


def _require_space(tree: HubTree, place: Path, need: int, files: Sequence[HubFile]) -> None:
    """Check that `need` bytes fit into `place`. If hard links do not work, copies of the tree's files must fit, too.

    Raises:
        FileUnusable: too little space is free, or the user's quota leaves too little.
    """
    purpose = f"fetch `{tree.wanted}`"
    folder = tree.folder.parent
    while not folder.is_dir():
        folder = folder.parent
    if _can_link(place, folder):
        copies = 0
    else:
        copies = sum(file.size for file in files)
        purpose += " (this file system has no hard links between folders, so each file is there twice)"
    if copies and os.stat(folder).st_dev != os.stat(place).st_dev:
        filesystem.require_space(folder, copies, purpose=purpose)
        copies = 0
    if need + copies > 0:
        filesystem.require_space(place, need + copies, purpose=purpose)


def _can_link(place: Path, folder: Path) -> bool:
    """Return whether a file of `place` can get a hard link in `folder`."""
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


def _is_sound(path: Path, file: HubFile, on_event: OnEvent) -> bool:
    """Return whether a file of an earlier call exists with the right bytes; if its bytes are wrong, remove it."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    fits = stat.S_ISREG(status.st_mode) and status.st_size == file.size
    if fits and read_digest(path, file, on_event=on_event) == file.digest:
        with suppress(PermissionError):  # the file belongs to a different member of a shared store
            path.chmod(0o444)
        return True
    on_event(Event(phase="note", what=f"{file.path}: changed in the store: fetching it again"))
    path.unlink()
    return False


def _assemble(tree: HubTree, files: Sequence[HubFile], store: Store) -> TreeRecord:
    """Make the folder of a tree under a temporary name, then rename the folder; return the tree's record.

    Raises:
        OSError: the file system refuses an operation.
    """
    parent = _make_folder(tree.folder.parent, store)
    _remove_abandoned(parent)
    aside = parent / f".{tree.folder.name}.{secrets.token_hex(8)}"
    place = trees.blobs_folder(store.root)
    try:
        _make_folder(aside, store)
        made = []
        for file in files:
            target = aside / file.path
            _make_folder(target.parent, store)
            _link(blob_path(place, file.digest), target)
            made.append(_recorded(file, target))
        record = TreeRecord(hub=str(tree.wanted), patterns=tree.patterns, files=tuple(made))
        # Save the record before the folder gets its name. Otherwise, a call that begins in between would find a folder
        # without a record. All calls write the same record. If a folder does not fit the record, it is fetched again.
        save_record(record, tree.record)
        _put_in_place(aside, tree)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return record


def _put_in_place(aside: Path, tree: HubTree) -> None:
    """Give a complete folder its name; old and new files are never mixed.

    Raises:
        OSError: the file system refuses an operation.
    """
    old = aside.with_name(f"{aside.name}.old")
    with suppress(FileNotFoundError):
        os.rename(tree.folder, old)
    os.rename(aside, tree.folder)
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.unlink(missing_ok=True)


def _link(blob: Path, target: Path) -> None:
    """Link or copy a blob to its name in a tree, and set the time that all files get."""
    try:
        if int(os.stat(blob).st_mtime) != trees.FILE_TIME:
            os.utime(blob, (trees.FILE_TIME, trees.FILE_TIME))
        os.link(blob, target)
    except OSError:
        # BeeGFS has no hard links between folders, and some file systems have no hard links. If fs.protected_hardlinks
        # is set, a file of another member of a shared store cannot be linked.
        shutil.copyfile(blob, target)
        target.chmod(0o444)
        os.utime(target, (trees.FILE_TIME, trees.FILE_TIME))


def _recorded(file: HubFile, path: Path) -> TreeFile:
    algorithm, _, digest = file.digest.partition(":")
    if algorithm != "sha256":
        digest = sha256_of(open_regular(path))
    return TreeFile(path=file.path, size=file.size, sha256=digest, blob=file.digest)


def _make_folder(path: Path, store: Store) -> Path:
    """Make a folder and its missing parent folders with the modes of the store, independent of the umask."""
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
