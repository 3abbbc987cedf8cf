"""The repositories of a hub that are in a store.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcenv.hub import tree
from hpcenv.image.store.store_folder import open_place, place_exists
from hpcenv.project.hub_reference import parse_locked
from hpcenv.project.store_config import StorePlace


@dataclass(frozen=True, kw_only=True)
class StoredTree:
    """A repository, or a part of a repository, in a store.

    Attributes:
        hub: `[datasets/]ORG/NAME@COMMIT`.
        patterns: patterns of the fetched files; empty for all files.
        path: folder with the files.
        files, size: number of files, and their bytes together.
    """

    hub: str
    patterns: tuple[str, ...]
    path: str
    files: int
    size: int


def list_stored(place: StorePlace) -> tuple[StoredTree, ...]:
    """Return the repositories in a store; empty if there is no store.

    Raises:
        FileUnusable: the store cannot be read, or is not trusted.
    """
    if not place_exists(place):
        return ()
    found = []
    for record in tree.list_trees(open_place(place)):
        try:
            located = tree.locate(place.root, parse_locked(record.hub), record.patterns)
        except ValueError:
            continue  # not a record that hpcenv wrote
        if located.folder.is_dir():
            size = sum(file.size for file in record.files)
            found.append(
                StoredTree(
                    hub=record.hub,
                    patterns=record.patterns,
                    path=str(located.folder),
                    files=len(record.files),
                    size=size,
                )
            )
    return tuple(found)


def partial_bytes(place: StorePlace) -> int:
    """Return the size of all incomplete downloads of hub files in a store, in bytes."""
    return tree.partial_bytes(tree.parts_folder(place.root))
