"""Find the files of a repository at a commit in the store, and find out whether they changed after they were fetched.

Runs on: LOGIN NODE.

    STORE/hub/blobs/sha256/HEX, blobs/git-sha1/HEX      the files by content, for all repositories and commits
    STORE/hub/blobs/parts/models--ORG--NAME/...         downloads that are not complete
    STORE/hub/trees/models--ORG--NAME/COMMIT            a folder with the files by their names, hard links to the blobs
    STORE/hub/trees/models--ORG--NAME/COMMIT.json       the folder's record: the files that the hub lists

With `files` in hpcenv.toml the folder has only a part of the repository, and a digest of the patterns is added to the
folder's name. Every file has the same time, so the state of the data is the same on every cluster, and any change of a
file changes the state.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcenv.errors import Command, DataUnavailable, RecordInvalid
from hpcenv.identity import data
from hpcenv.identity.data import DataEntry, DataState
from hpcenv.image.store.store import Store
from hpcenv.project.hub_reference import HubReference
from hpcenv.records.codec import SCHEMA
from hpcenv.records.files import load_record
from hpcenv.records.manifest import DataCompare

# 2020-01-01 00:00 UTC. Some archive formats cannot store a time before 1980.
FILE_TIME = 1_577_836_800
_MOST_NAMED = 3
_CHANGED = "changed since it was fetched"


@dataclass(frozen=True, kw_only=True)
class TreeFile:
    """A file of a fetched repository.

    Attributes:
        path: the path relative to the folder.
        size: in bytes.
        sha256: the SHA-256 of the content.
        blob: the digest that the hub lists for the content.
    """

    path: str
    size: int
    sha256: str
    blob: str


@dataclass(frozen=True, kw_only=True)
class TreeRecord:
    """The content of a folder in the store, as the hub lists it.

    Attributes:
        hub: `[datasets/]ORG/NAME@COMMIT`.
        patterns: patterns of `files` in hpcenv.toml; empty for the whole repository.
        files: sorted by path.
    """

    hub: str
    patterns: tuple[str, ...]
    files: tuple[TreeFile, ...]
    schema: int = SCHEMA


@dataclass(frozen=True, kw_only=True)
class HubTree:
    """Where a repository at a commit is in a store; the store may not have it yet.

    Attributes:
        folder: folder with the files.
        record: path of the record.
    """

    wanted: HubReference
    patterns: tuple[str, ...]
    folder: Path
    record: Path


def locate(root: Path, wanted: HubReference, patterns: Sequence[str]) -> HubTree:
    """Return the place of a repository, or of the part that the patterns name, in the store at `root`. Pure."""
    chosen = tuple(sorted(set(patterns)))
    name = wanted.revision
    if chosen:
        name += f"-{hashlib.sha256(chr(0).join(chosen).encode()).hexdigest()[:12]}"
    parent = hub_folder(root) / "trees" / wanted.cache_folder
    return HubTree(wanted=wanted, patterns=chosen, folder=parent / name, record=parent / f"{name}.json")


def hub_folder(root: Path) -> Path:
    """Return the folder of a store with data of a hub."""
    return root / "hub"


def blobs_folder(root: Path) -> Path:
    """Return the folder of a store with the files of all repositories, by content."""
    return hub_folder(root) / "blobs"


def parts_folder(root: Path) -> Path:
    """Return a store's folder for incomplete downloads; it has one folder for each repository."""
    return blobs_folder(root) / "parts"


def partial_downloads(place: Path) -> Iterator[Path]:
    """Yield the files of the incomplete downloads in a folder."""
    for folder, _, names in os.walk(place):
        yield from (Path(folder, name) for name in names)


def partial_bytes(place: Path) -> int:
    """Return how many bytes the incomplete downloads in a folder have."""
    sizes = [0]
    for path in partial_downloads(place):
        with suppress(OSError):
            sizes.append(path.lstat().st_size)
    return sum(sizes)


def read_record(tree: HubTree) -> TreeRecord | None:
    """Return the record of a fetched tree; None if one of them is missing, or if they do not fit each other."""
    try:
        record = load_record(TreeRecord, tree.record)
    except RecordInvalid:
        return None
    fits = (record.hub, record.patterns) == (str(tree.wanted), tree.patterns)
    return record if fits and tree.folder.is_dir() and not tree.folder.is_symlink() else None


def list_trees(store: Store) -> tuple[TreeRecord, ...]:
    """Return the records of all trees in a store, sorted by repository."""
    found = []
    for path in sorted((hub_folder(store.root) / "trees").glob("*/*.json")):
        try:
            found.append(load_record(TreeRecord, path))
        except RecordInvalid:
            continue
    return tuple(found)


def expected_state(record: TreeRecord, compare: DataCompare) -> DataState:
    """Return the state of an unchanged tree. Pure."""
    return data.state_of(_entries(record), compare)


def find_changes(tree: HubTree, record: TreeRecord, compare: DataCompare) -> tuple[str, ...]:
    """Return the differences between a tree and its record, one line for each file.

    Args:
        compare: the method of comparison; with `sha256` all files are read.

    Raises:
        OSError: a file cannot be read.
    """
    expected = {entry.name: entry for entry in _entries(record)}
    found = {entry.name: entry for entry in data.read_entries(str(tree.folder), compare)}
    lines = [f"{name}: is missing" for name in expected if name not in found]
    lines += [f"{name}: is not of the hub" for name in found if name not in expected]
    for name, entry in found.items():
        wanted = expected.get(name)
        if wanted is None:
            continue
        if entry.size != wanted.size:
            lines.append(f"{name}: has {entry.size} bytes, on the hub {wanted.size}")
        elif compare == "sha256" and entry.sha256 != wanted.sha256:
            lines.append(f"{name}: has the sha256 {entry.sha256[:12]}..., on the hub {wanted.sha256[:12]}...")
        elif compare == "size-and-time" and entry.mtime_ns != wanted.mtime_ns:
            lines.append(f"{name}: {_CHANGED}")
    return tuple(sorted(lines))


def require_unchanged(tree: HubTree, compare: DataCompare) -> DataState:
    """Return the state of a fetched tree.

    Raises:
        DataUnavailable: the tree is not fetched, or files differ from what was fetched; the error names the files.
    """
    fetch = Command("hpcenv", "data", "fetch")
    record = read_record(tree)
    if record is None:
        why = f"[[data]] in hpcenv.toml names this repository, but {tree.folder} does not contain it"
        raise DataUnavailable(f"`{tree.wanted}` is not fetched", why=why, hint=fetch)
    try:
        state = data.read_state(str(tree.folder), compare)
        if state == expected_state(record, compare):
            return state
        changes = find_changes(tree, record, compare)
    except OSError as error:
        why = f"{error.filename or tree.folder}: {error.strerror}"
        raise DataUnavailable(f"the files of `{tree.wanted}` cannot be read", why=why, hint=fetch) from error
    shown = "\n".join(ascii(line)[1:-1] for line in changes[:_MOST_NAMED])
    more = f"\nand {len(changes) - _MOST_NAMED} more" if len(changes) > _MOST_NAMED else ""
    raise DataUnavailable(
        f"`{tree.wanted}` was changed since it was fetched",
        why=f"{shown}{more}\nin {tree.folder}",
        hint=("to bring the files of the hub back: ", fetch),
    )


def _entries(record: TreeRecord) -> list[DataEntry]:
    times = FILE_TIME * 10**9
    files = sorted(record.files, key=lambda file: file.path)
    return [DataEntry(name=file.path, size=file.size, mtime_ns=times, sha256=file.sha256) for file in files]
