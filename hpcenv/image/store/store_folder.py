"""The folder of a store: create it, and open it if only trusted users could put SIFs into it.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from hpcenv import filesystem
from hpcenv.errors import Command, FileUnusable
from hpcenv.filesystem import Trust
from hpcenv.image.store.store import Store
from hpcenv.project.store_config import StorePlace
from hpcenv.records.files import write_text

# The schema of store.json.
SCHEMA = 1
# Signature of the Cache Directory Tagging Specification 0.6; backup programs skip such folders.
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Made by hpcenv: images and data that can be made again.\n"
_README = """Layers and SIFs of hpcenv, named by their content; see `hpcenv image list`.
To remove what was not used lately: `hpcenv image prune`. The whole folder can be removed while no
job runs from it: `hpcenv image pull` makes the same files again.
hub/ has models and data of a hub; see `hpcenv data list`. `hpcenv data fetch` makes them again.
"""
_FOLDERS = ("blobs/sha256", "indexes/sha256", "images", "tmp", "leases", "hub")


def place_exists(place: StorePlace) -> bool:
    """Return whether the folder of a store exists.

    Raises:
        FileUnusable: the caller has no access to the folder.
    """
    try:
        os.lstat(place.root)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise filesystem.refused(place.root, error, doing="accessed") from error
    return True


def open_place(place: StorePlace, *, create: bool = False) -> Store:
    """Open the store of a project or user; see `open_store`."""
    return open_store(place.root, create=create, shared=place.shared, trusted_owners=place.trusted_owners)


def open_store(root: Path, *, create: bool = False, shared: bool = False, trusted_owners: Sequence[str] = ()) -> Store:
    """Open a store; check first that only trusted users could put SIFs into it.

    Args:
        root: the folder of the store.
        create: whether to create the folder, and its missing subfolders.
        shared: whether to trust the group of the folder, and let this group write to new files.
        trusted_owners: login names or user ids to trust in addition to the caller and root.

    Raises:
        FileUnusable: the store does not exist, is not trusted, or the file system refuses the operation.
        UsageError: this machine does not know a trusted owner.
    """
    root = Path(os.path.abspath(root))
    trust = Trust(owners=filesystem.user_ids(trusted_owners), group=shared)
    try:
        if create and not os.path.lexists(root):
            _make_root(root, shared=shared)
        trust, is_store = _declared(root, trust)
        filesystem.require_trusted(root, trust)
        if not is_store and not create:
            raise FileNotFoundError(None, "no store", str(root))
        because = _read_only(root)
        if create and not because:
            _furnish(root, shared=trust.group, is_store=is_store)
        for name in ("blobs", "indexes", *_FOLDERS):
            if os.path.lexists(root / name):
                filesystem.require_trusted(root / name, trust)
    except (FileNotFoundError, NotADirectoryError) as error:
        if create:
            why = f"{error.filename or root}: {error.strerror}"
            hint = "name a folder that you can write to: --store DIR, or `store` under [paths] in hpcenv.toml"
            raise FileUnusable(f"no store can be created in `{root}`", why=why, hint=hint) from error
        raise FileUnusable(
            f"`{root}` has no store", hint=(Command("hpcenv", "image", "pull", "REFERENCE"), " creates one")
        ) from error
    except OSError as error:
        raise filesystem.refused(Path(os.fsdecode(error.filename or root)), error, doing="used") from error
    return Store(root=root, writable=not because, shared=trust.group, read_only_because=because)


def _declared(root: Path, trust: Trust) -> tuple[Trust, bool]:
    """Read store.json.

    Return the trusted users (and the group, if the store is shared), and whether this is a store.
    """
    path = root / "store.json"
    try:
        status = os.lstat(path)
        # Ignore the file of an untrusted owner: a user who is not trusted may have written it.
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in {os.geteuid(), 0, *trust.owners}:
            return trust, True
        declared = json.loads(path.read_text(encoding="utf-8"))
        schema, shared = declared["schema"], declared["shared"] is True
    except FileNotFoundError:
        return trust, False
    except (ValueError, KeyError, TypeError, RecursionError):
        return trust, True
    if isinstance(schema, int) and schema > SCHEMA:
        raise FileUnusable(
            f"the store `{root}` was made by a newer hpcenv",
            why=f"its schema is {schema}, this hpcenv supports {SCHEMA}",
            hint="pip install --upgrade hpcenv, or name another store",
        )
    return dataclasses.replace(trust, group=trust.group or shared), True


def _read_only(root: Path) -> str:
    """Return why the caller has no permission to write to the store; empty if the caller has this permission."""
    if os.access(root, os.W_OK | os.X_OK, effective_ids=True):
        return ""
    owner = filesystem.user_name(os.stat(root).st_uid)
    return f"it belongs to {owner}" if os.stat(root).st_uid != os.geteuid() else "you have no permission to write to it"


def _make_root(root: Path, *, shared: bool) -> None:
    for folder in reversed(root.parents):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o755)
    with contextlib.suppress(FileExistsError):
        os.mkdir(root, 0o700)
        os.chmod(root, 0o2775 if shared else 0o755)


def _furnish(root: Path, *, shared: bool, is_store: bool) -> None:
    """Create the missing files and folders of a store; their modes do not depend on the umask."""
    if not is_store:
        foreign = sorted(name for name in os.listdir(root) if not name.startswith(".") and name not in _KNOWN)
        if foreign:
            raise FileUnusable(
                f"`{root}` is neither a store nor empty",
                why=f"it contains `{foreign[0]}`",
                hint="name a folder that is empty or does not exist yet",
            )
    mode = 0o2775 if shared else 0o755
    mine = os.stat(root).st_uid == os.geteuid()
    if mine and shared and stat.S_IMODE(os.stat(root).st_mode) != mode:
        os.chmod(root, mode)
    declaration = json.dumps({"schema": SCHEMA, "shared": shared}) + "\n"
    texts = {"store.json": declaration, "CACHEDIR.TAG": _TAG, ".gitignore": "*\n", "README": _README}
    for name, text in texts.items():
        if not os.path.lexists(root / name):
            write_text(text, root / name, mode=0o664 if shared else 0o644)
    for name in ("blobs", "indexes", *_FOLDERS):
        folder = root / name
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
            os.chmod(folder, mode)


_KNOWN = frozenset({"store.json", "CACHEDIR.TAG", "README", *(name.partition("/")[0] for name in _FOLDERS)})
