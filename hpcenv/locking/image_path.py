"""Find the SIF of an image: in the store, or in the project.

Runs on: LOGIN NODE. Changes nothing except the time of last use in the store.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from hpcenv.errors import Command, Hint, ImageMismatch, ImageUnavailable, UsageError
from hpcenv.image.reference import SifFile
from hpcenv.image.store.store import Store, StoredImage
from hpcenv.image.store.store_folder import open_place, place_exists
from hpcenv.locking.image_source import locked_source
from hpcenv.project.lockfile import ContainerTable, Lockfile
from hpcenv.project.store_config import StorePlace

__all__ = ["find_locked", "find_path", "find_sif"]

# A text with fewer digits could also be a word in a reference.
_LEAST_DIGITS = 6


def find_sif(name: str, cwd: Path, place: StorePlace) -> Path:
    """Return the absolute path of a SIF.

    Args:
        name: the path of a SIF file, or a name for `find_path`.
        cwd: the folder at which a relative path begins.
        place: the store's folder, and the users whom the user trusts with it.

    Raises:
        ImageUnavailable: the name is neither a file nor an image in the store.
        FileUnusable: other users could change the SIF in the store.
        UsageError: the name is a folder, or fits several images in the store.
    """
    path = Path(os.path.abspath(cwd / name))
    if os.path.isfile(path) or name.endswith(".sif"):
        return path
    if os.path.isdir(path):
        raise _is_folder(name, path)
    return find_path(place, name)


def _is_folder(name: str, path: Path) -> UsageError:
    """Return the error for a folder, if the user must name a SIF or an image of the store."""
    why = "expected: the path of a SIF, or an image of the store"
    if not os.path.isfile(path / "oci-layout"):
        return UsageError(f"`{name}` is a folder", why=why, hint=Command("hpcenv", "image", "list"))
    pull = Command("hpcenv", "image", "pull", f"oci:{name}")
    return UsageError(f"`{name}` is the folder of an OCI layout", why=why, hint=("to make a SIF from it: ", pull))


def find_path(place: StorePlace, name: str) -> Path:
    """Return the path of a SIF in the store.

    Args:
        place: the store's folder, and the users whom the user trusts with it.
        name: the reference that was pulled, or a digest of the image (manifest, index, config, SIF), or the first six
            or more digits of a digest.

    Raises:
        ImageUnavailable: the store has no such SIF.
        FileUnusable: other users could change the SIF.
        UsageError: the name fits several images; the message lists them.
    """
    store = _open(place, hint=_pull_command(name))
    fitting = [image for image in store.list_images() if image.whole and _fits(image, name)]
    if not fitting:
        short = re.fullmatch(r"(sha256:)?[0-9a-f]{1,5}", name)
        why = f"a digest needs at least {_LEAST_DIGITS} digits" if short else None
        raise ImageUnavailable(f"the store `{store.root}` has no SIF of `{name}`", why=why, hint=_pull_command(name))
    if len(fitting) > 1:
        raise UsageError(
            f"`{name}` fits {len(fitting)} images in the store `{store.root}`",
            why="\n".join(f"{image.digest} made {_created(image)}" for image in fitting),
            hint="name one image by its digest, or by a lockfile: --lock NAME",
        )
    fitting[0].require_trusted()
    store.remember(fitting[0].digest)
    return fitting[0].path


def find_locked(place: StorePlace, locked: Lockfile, *, origin: Path, root: Path | None = None) -> Path:
    """Return the path of the SIF that a lockfile names.

    Args:
        place: the store's folder, and the users whom the user trusts with it.
        locked: the lockfile.
        origin: the lockfile's path, for messages.
        root: the project's folder; the path of a SIF in the project is relative to it.

    Raises:
        UsageError: the lockfile names no image.
        ImageUnavailable: the SIF is neither in the store nor in the project.
        FileUnusable: other users could change the SIF.
        ImageMismatch: the SIF's size or record does not agree with the lockfile.
    """
    if locked.container is None:
        raise UsageError(f"`{origin}` locks an environment of the host, not an image")
    source = locked_source(locked.container)
    if root is not None and isinstance(source, SifFile):
        return _project_file(root / Path(source.path).expanduser(), locked.container, origin)
    digest, expected = locked.container.digest, locked.container.sif
    # A pull by the tag may get a different image than the locked image.
    build = Command("hpcenv", "image", "build", "--lock", str(origin))
    store = _open(place, hint=build)
    image = store.find_image(digest)
    if image is None or image.record is None:
        raise ImageUnavailable(
            f"the SIF that `{origin}` names is not in the store `{store.root}`",
            why=f"it would be {store.image_path(digest)}",
            hint=build,
        )
    if (image.record.sif.sha256, image.size) != (expected.sha256, expected.size):
        raise ImageMismatch(
            f"`{image.path}` is not the SIF that `{origin}` names",
            why=f"the store has sha256 {image.record.sif.sha256}, {image.size} bytes\n"
            f"the lockfile has sha256 {expected.sha256}, {expected.size} bytes",
            hint=("to make the locked SIF: ", build),
        )
    store.remember(image.digest)
    return image.path


def _project_file(path: Path, container: ContainerTable, origin: Path) -> Path:
    """Check the size of a SIF outside the store. Only `lock --check` checks the digest of this SIF."""
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise ImageUnavailable(
            f"the SIF that `{origin}` names does not exist",
            why=f"{path}: {error.strerror}",
            hint="copy the file from where the lockfile was made; the lockfile has its size and sha256",
        ) from error
    if size != container.sif.size:
        raise ImageMismatch(
            f"`{path}` is not the SIF that `{origin}` names",
            why=f"it has {size} bytes, the lockfile has {container.sif.size}",
            hint=("copy the file from where the lockfile was made; to lock this file: ", Command("hpcenv", "lock")),
        )
    return path


def _open(place: StorePlace, *, hint: Hint) -> Store:
    if not place_exists(place):
        raise ImageUnavailable(f"the store `{place.root}` does not exist yet", hint=hint)
    return open_place(place)


def _pull_command(name: str) -> Hint:
    if "://" in name or "/" in name:
        return Command("hpcenv", "image", "pull", name)
    return (Command("hpcenv", "image", "list"), ", or ", Command("hpcenv", "image", "pull", "REFERENCE"))


def _fits(image: StoredImage, name: str) -> bool:
    record = image.record
    if record is None:
        return False
    if name in record.references or f"docker://{name}" in record.references:
        return True
    match = re.fullmatch(rf"(?:sha256:)?([0-9a-f]{{{_LEAST_DIGITS},64}})", name.rpartition("@")[2])
    if match is None:
        return False
    digests = (image.digest, record.manifest_digest, record.index_digest, record.config_digest, record.sif.sha256)
    return any(digest is not None and digest.removeprefix("sha256:").startswith(match[1]) for digest in digests)


def _created(image: StoredImage) -> str:
    return (image.record.made.created if image.record is not None else "") or "at an unknown time"
