"""Which folder is the store of images. `hpcenv.image.store` opens this folder.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class StorePlace:
    """The folder of a store, and the users who are trusted to own the folder; see `open_store`.

    Attributes:
        origin: which setting names the folder, as text for people.
    """

    root: Path
    trusted_owners: tuple[str, ...] = ()
    shared: bool = False
    origin: str = ""


def default_store(environ: Mapping[str, str], cache: Path) -> tuple[Path, str]:
    """Return the default folder of images, and why this folder was chosen.

    Home folders are small on most clusters, but images are large. So $SCRATCH is preferred if the site sets this
    variable. If a store exists in the cache folder, it stays in use. If a site deletes images on its scratch file
    system, hpcenv can make them again from the lockfile.

    Args:
        environ: the user's environment.
        cache: hpcenv's folder of files that it can compute again.
    """
    usual, scratch = cache / "store", environ.get("SCRATCH", "")
    if usual.is_dir():
        return usual, "it exists already"
    if scratch.startswith("/") and os.path.isdir(scratch) and os.access(scratch, os.W_OK | os.X_OK):
        return Path(scratch, "hpcenv", "store"), "SCRATCH is set; homes are small on most clusters"
    why = f"SCRATCH is {scratch!r}, which is no folder that you can write to" if scratch else "SCRATCH is not set"
    return usual, why


_HOLE = re.compile(r"\$\{(\w+)\}")


def site_store(folder: str, environ: Mapping[str, str], user: str) -> tuple[Path | None, str]:
    """Return the folder of images that a site profile names; None, with the reason, if this user cannot use it.

    Args:
        folder: the folder as in the profile, with `${user}` and `${NAME}`.
        environ: the user's environment.
        user: the name that replaces `${user}`.
    """
    values = {name: user if name == "user" else environ.get(name, "") for name in _HOLE.findall(folder)}
    unset = [name for name, value in values.items() if not value]
    if unset:
        return None, f"{' and '.join(unset)} {'is' if len(unset) == 1 else 'are'} not set"
    path = _HOLE.sub(lambda hole: values[hole[1]], folder)
    if not path.startswith("/") or not path.isprintable():
        return None, f"{path!r} is no absolute path"
    place = Path(os.path.normpath(path))
    # hpcenv makes missing folders as this user, so the nearest folder that exists decides. `open_store` refuses a store
    # of another user, and its error says what to do.
    there = next(above for above in (place, *place.parents) if os.path.lexists(above))
    if not os.path.isdir(there):
        return None, f"{there} is no folder"
    if there != place and not os.access(there, os.W_OK | os.X_OK):
        return None, f"{place} is not there, and you cannot write to {there}"
    return place, ""
