"""The lockfiles and runs that need images in a store: `prune` keeps what they need.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcenv import filesystem
from hpcenv.errors import RecordInvalid
from hpcenv.image.store.record import utc_now
from hpcenv.records.codec import decode_record

SCHEMA = 1
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_LONGEST = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Root:
    """A lockfile or a run that needs images in the store.

    Attributes:
        path: of the lockfile, or of the run folder.
        digests: the images, by their names in the store.
        mount, kind_of_mount, network: the file system of `path`. Only a machine that has this file
            system can tell that the path no longer exists.
        host, user: who recorded this, and on which machine.
        added: when, RFC 3339 in UTC.
    """

    schema: int = SCHEMA
    kind: Literal["lockfile", "run"]
    path: str
    digests: tuple[str, ...]
    mount: str
    kind_of_mount: str
    network: bool
    host: str
    user: str
    added: str


def root_of(kind: Literal["lockfile", "run"], path: Path, digests: Sequence[str]) -> Root:
    """Return the record of a lockfile or run that needs the images with these digests."""
    path = Path(os.path.abspath(path))
    mount = filesystem.mount_of(Path(os.path.realpath(path)))
    return Root(
        kind=kind,
        path=str(path),
        digests=tuple(digests),
        mount="" if mount is None else mount.point,
        kind_of_mount="" if mount is None else mount.kind,
        network=mount is not None and mount.network,
        host=os.uname().nodename,
        user=filesystem.user_name(os.geteuid()),
        added=utc_now(),
    )


def is_there(root: Root) -> bool | None:
    """Tell whether the lockfile or run of a record still exists; None if this machine cannot tell."""
    path = Path(root.path)
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError):
        return None
    else:
        return True
    mount = filesystem.mount_of(Path(os.path.realpath(path)))
    here = root.network or root.host == os.uname().nodename
    same = mount is not None and (mount.point, mount.kind) == (root.mount, root.kind_of_mount)
    return False if here and same else None


def file_name(root: Root) -> str:
    """Return the name of the record's file: one for each lockfile or run."""
    identity = f"{root.kind}\0{root.path}\0{'' if root.network else root.host}"
    return hashlib.sha256(os.fsencode(identity)).hexdigest()[:32] + ".json"


def read(path: Path) -> Root | None:
    """Return a record; None if it cannot be read or is not valid."""
    try:
        with open(path, encoding="utf-8") as file:
            root = decode_record(Root, file.read(_LONGEST), origin=str(path))
    except (OSError, UnicodeDecodeError, RecordInvalid):
        return None
    return root if all(_DIGEST.fullmatch(digest) for digest in root.digests) else None
