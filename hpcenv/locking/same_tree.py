"""A SIF that can replace the locked SIF: made again from the same image, with different bytes and the same file tree.

Runs on: LOGIN NODE. A different version of squashfs-tools, or `apptainer build`, packs the same files into different
bytes (docs/explanation/images.md, "Same bytes"). A lockfile from another cluster stays valid for such a SIF. The tree
is read from the file itself. The record in the store only names the image and the tool.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpcenv.errors import HpcenvError
from hpcenv.image.sif_proof import read_tree_digest
from hpcenv.image.store.store_folder import open_place
from hpcenv.project.lockfile import ContainerTable, Lockfile, severities_of
from hpcenv.project.store_config import StorePlace
from hpcenv.records.files import write_text
from hpcenv.records.manifest import Expectation

_SIF = "container.sif.sha256"
_MADE_AGAIN = "container.sif.made-again"
_NOTE = "made again from the locked image: other bytes, the same tree"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def stands_for(
    container: ContainerTable, image: Path, sha256: str, *, place: StorePlace, cache: Path | None = None
) -> bool:
    """Return whether a SIF has the locked file tree, although its bytes are not the locked bytes.

    Args:
        container: the locked container. It has a digest of the file tree only if the tree was compared with the
            layers.
        image: the SIF. The file tree of the SIF is read once, which takes seconds for each GB.
        sha256: the sha256 of the present file, in hexadecimal.
        place: the store. The store must have made the SIF from the locked image.
        cache: the user's folder for the tree digests of SIFs, by sha256.
    """
    if container.tree_sha256 is None or container.manifest_digest is None:
        return False
    try:
        found = open_place(place).find_image(container.manifest_digest)
        record = None if found is None else found.record
        if record is None or record.manifest_digest != container.manifest_digest or record.sif.sha256 != sha256:
            return False
        return _tree_of(image, sha256, cache) == container.tree_sha256
    except HpcenvError:
        return False  # there is no store, or it cannot be read, so the file counts as a different SIF


def _tree_of(image: Path, sha256: str, cache: Path | None) -> str:
    kept = None if cache is None else cache / "trees" / sha256
    if kept is not None:
        with suppress(OSError, UnicodeDecodeError):
            known = kept.read_text(encoding="utf-8").strip()
            if _DIGEST.fullmatch(known):
                return known
    digest = read_tree_digest(image)
    if kept is not None:
        with suppress(OSError):  # without the cache, the tree is read again the next time
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_text(digest + "\n", kept)
    return digest


def expecting(expectations: tuple[Expectation, ...], sha256: str, locked: Lockfile) -> tuple[Expectation, ...]:
    """Return the values that the nodes must have if a SIF that was made again replaces the locked SIF. Pure.

    The nodes must have the SIF with this sha256. The difference to the locked sha256 is reported with the severity of
    `container.sif.made-again`.
    """
    severity = severities_of(locked).of(_MADE_AGAIN)
    changed: list[Expectation] = []
    for expected in expectations:
        if expected.field == _SIF:
            changed.append(replace(expected, value=sha256, origin="at submission"))
            changed.append(replace(expected, severity=severity, note=_NOTE))
        else:
            changed.append(expected)
    return tuple(changed)
