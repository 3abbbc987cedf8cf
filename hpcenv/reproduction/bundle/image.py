"""Use the SIF in a bundle as the image of a reproduction. Runs on: LOGIN NODE.

The SIF of a bundle is never put into the project's store. In the store, the name of a SIF is the digest of its image,
which hpcenv computed from the layers. For the SIF in a bundle, only the authors state this digest. So the SIF is put
into a separate folder of this project. The sha256 of the SIF must be the locked sha256, and every node compares these
two values.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hpcenv import filesystem
from hpcenv.errors import ImageMismatch, UsageError
from hpcenv.identity.sif import file_sha256
from hpcenv.image.reference import SifFile
from hpcenv.image.store.store_folder import open_store
from hpcenv.locking.image_source import locked_sif, locked_source
from hpcenv.project.lockfile import ContainerTable
from hpcenv.project.workspace import Workspace
from hpcenv.reproduction.bundle.make import IMAGE

FOLDER = ".hpcenv/bundled"


def find_bundled(run: Path) -> Path | None:
    """Return the SIF in the folder of an unpacked bundle; None without a SIF."""
    sif = run / IMAGE
    return sif if sif.is_file() and not sif.is_symlink() else None


def use_bundled(
    workspace: Workspace, container: ContainerTable, sif: Path, *, on_bytes: Callable[[int], None] | None = None
) -> Workspace:
    """Put the SIF of a bundle into a folder of the project. Return a workspace that finds the SIF in this folder.

    Args:
        workspace: the project from which the run is repeated.
        container: the image that the lockfile of the run names.
        sif: the file in the bundle's folder.
        on_bytes: called with the number of bytes that were hashed.

    Raises:
        ImageMismatch: the file is not the locked SIF.
        UsageError: the path of the SIF in the lockfile is outside of the project.
        FileUnusable: the file cannot be read, or cannot be written into the project.
    """
    found = file_sha256(sif, on_bytes)
    if found != container.sif.sha256:
        raise ImageMismatch(
            f"`{sif}` is not the locked SIF", why=f"its sha256 is {found}, the lockfile says {container.sif.sha256}"
        )
    if isinstance(locked_source(container), SifFile):
        _put(sif, _inside(workspace, locked_sif(workspace, container)))
        return workspace
    root = workspace.root / FOLDER / found[:16]
    open_store(root, create=True)
    place = replace(workspace.store_place, root=root, shared=False, origin="the bundle")
    workspace = replace(workspace, find_store=lambda: place)
    _put(sif, locked_sif(workspace, container))
    return workspace


def _inside(workspace: Workspace, place: Path) -> Path:
    """Refuse a path that leads out of the project: a lockfile must not decide where on this machine hpcenv writes."""
    if not Path(os.path.realpath(place)).is_relative_to(os.path.realpath(workspace.root)):
        raise UsageError(
            f"the lockfile names the SIF `{place}`, which is not in the project",
            why="for a bundle, hpcenv writes nothing outside of the project",
            hint=f"put `{IMAGE}` of the bundle there yourself, if that is what you want",
        )
    return place


def _put(sif: Path, place: Path) -> None:
    """Make a hard link to a SIF at `place`; on another file system, copy the SIF.

    Keep a file that exists at `place`.
    """
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.chmod(sif, 0o444)
            _link_or_copy(sif, place)
    except OSError as error:
        raise filesystem.refused(place, error) from error


def _link_or_copy(sif: Path, place: Path) -> None:
    try:
        os.link(sif, place)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
            raise
        aside = place.with_name(f".{place.name}.{os.getpid()}")
        shutil.copyfile(sif, aside)
        os.chmod(aside, 0o444)
        os.rename(aside, place)
