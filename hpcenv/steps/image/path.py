"""`hpcenv image path`: where the SIF of an image lies.

Runs on: LOGIN NODE. Changes nothing but the note that the image was used.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from hpcenv.adapters import references
from hpcenv.adapters.references import SifFile
from hpcenv.adapters.store import Store, StoredImage, StorePlace
from hpcenv.errors import ImageMismatch, ImageUnavailable, UsageError
from hpcenv.model.lockfile import ContainerTable, Lockfile


@dataclass(frozen=True, kw_only=True)
class FoundImage:
    """A SIF, most often of the store: `digest` is its name there, sizes are in bytes."""

    path: Path
    digest: str
    sha256: str
    size: int
    references: tuple[str, ...]


def find_path(place: StorePlace, word: str) -> FoundImage:
    """Return the SIF that a word names.

    Args:
        place: the store's folder, and whom the user trusts with it.
        word: a reference that the image was asked for by, or one of its digests
            (manifest, index, config, SIF), also its first six digits or more.

    Raises:
        ImageUnavailable: no such SIF is in the store.
        FileUnusable: others could change it.
        UsageError: several are; says which.
    """
    store = _open(place, hint=_pull(word))
    found = [image for image in store.list_images() if image.whole and _is_meant(image, word)]
    if not found:
        short = re.fullmatch(r"(sha256:)?[0-9a-f]{1,5}", word)
        why = f"of a digest, at least {_LEAST_DIGITS} digits are needed" if short else None
        raise ImageUnavailable(f"no SIF of `{word}` is in the store `{store.root}`", why=why, hint=_pull(word))
    if len(found) > 1:
        raise UsageError(
            f"`{word}` names {len(found)} images in the store `{store.root}`",
            why="\n".join(f"{image.digest} made {_created(image)}" for image in found),
            hint="name one by its digest, or by a lockfile: --lock NAME",
        )
    found[0].require_trusted()
    return _answer(store, found[0])


def find_locked(place: StorePlace, locked: Lockfile, *, origin: Path, root: Path | None = None) -> FoundImage:
    """Return the SIF that a lockfile names.

    Args:
        origin: the lockfile's path, for messages.
        root: the project's folder, where a SIF that is nobody's but the project's lies.

    Raises:
        UsageError: the lockfile names no image.
        ImageUnavailable: the SIF is not in the store, or not where the project has it.
        FileUnusable: others could change it.
        ImageMismatch: it is another SIF than the lockfile's, as far as its size or record tells.
    """
    if locked.container is None:
        raise UsageError(f"`{origin}` locks an environment of the host, not an image")
    source = references.parse_source(locked.container.reference)
    if root is not None and isinstance(source, SifFile):
        return _own_file(root / Path(source.path).expanduser(), locked.container, origin)
    digest, expected = locked.container.digest, locked.container.sif
    store = _open(place, hint=_pull(locked.container.reference))
    image = store.find_image(digest)
    if image is None or image.record is None:
        raise ImageUnavailable(
            f"the SIF that `{origin}` names is not in the store `{store.root}`",
            why=f"it would be {store.image_path(digest)}",
            hint=_pull(locked.container.reference),
        )
    if (image.record.sif.sha256, image.size) != (expected.sha256, expected.size):
        raise ImageMismatch(
            f"`{image.path}` is not the SIF that `{origin}` names",
            why=f"the store says sha256 {image.record.sif.sha256}, {image.size} bytes\n"
            f"the lockfile says sha256 {expected.sha256}, {expected.size} bytes",
            hint="hpcenv lock writes down the one that is there",
        )
    return _answer(store, image)


def _own_file(path: Path, container: ContainerTable, origin: Path) -> FoundImage:
    """Describe a SIF outside the store; its size is compared, its hash is not: `lock --check` does that."""
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise ImageUnavailable(
            f"the SIF that `{origin}` names is not there", why=f"{path}: {error.strerror}", hint="hpcenv lock"
        ) from error
    if size != container.sif.size:
        raise ImageMismatch(
            f"`{path}` is not the SIF that `{origin}` names",
            why=f"it has {size} bytes, the lockfile says {container.sif.size}",
            hint="hpcenv lock writes down the one that is there",
        )
    return FoundImage(
        path=path,
        digest=container.digest,
        sha256=container.sif.sha256,
        size=size,
        references=(container.reference,),
    )


def _open(place: StorePlace, *, hint: str) -> Store:
    if not place.exists():
        raise ImageUnavailable(f"there is no store in `{place.root}` yet", hint=hint)
    return place.open()


def _pull(word: str) -> str:
    return f"hpcenv image pull {word}" if "://" in word or "/" in word else "hpcenv image list, or hpcenv image pull"


# Of a digest; fewer may well be a word of somebody's reference.
_LEAST_DIGITS = 6


def _is_meant(image: StoredImage, word: str) -> bool:
    record = image.record
    if record is None:
        return False
    if word in record.references or f"docker://{word}" in record.references:
        return True
    match = re.fullmatch(rf"(?:sha256:)?([0-9a-f]{{{_LEAST_DIGITS},64}})", word.rpartition("@")[2])
    if match is None:
        return False
    digests = (image.digest, record.manifest_digest, record.index_digest, record.config_digest, record.sif.sha256)
    return any(digest is not None and digest.removeprefix("sha256:").startswith(match[1]) for digest in digests)


def _created(image: StoredImage) -> str:
    return (image.record.made.created if image.record is not None else "") or "at an unknown time"


def _answer(store: Store, image: StoredImage) -> FoundImage:
    assert image.record is not None
    store.remember(image.digest)
    return FoundImage(
        path=image.path,
        digest=image.digest,
        sha256=image.record.sif.sha256,
        size=image.size,
        references=image.record.references,
    )
