"""A SIF that stands for the locked one: made anew from the same image, with other bytes and the same tree.

Runs on: LOGIN NODE. Another version of squashfs-tools, or `apptainer build`, packs the same files into other bytes
(docs/explanation/images.md, "Same bytes"): who has a lockfile from another cluster needs no other lockfile for that.
What a SIF is, is read from the file; the store's record only says of which image and by which tool it was made.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpcenv import wire
from hpcenv.adapters.store_place import StorePlace
from hpcenv.errors import HpcenvError
from hpcenv.model.lockfile import ContainerTable
from hpcenv.wire import Expectation

_SIF = "container.sif.sha256"
_NOTE = "made anew from the locked image: other bytes, the same tree"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def stands_for(
    container: ContainerTable, image: Path, sha256: str, *, place: StorePlace, cache: Path | None = None
) -> bool:
    """Return whether a SIF with other bytes than the locked one holds the locked tree.

    Args:
        container: what is locked; it has a tree digest only if that was proved.
        image: the file. Its tree is read once, which takes seconds for each GB.
        sha256: what the file has now, in hexadecimal; read from it just before.
        place: the store that must have made it, from the locked image.
        cache: folder of this user's where the tree digests of SIFs are kept, by sha256.
    """
    if container.tree_sha256 is None or container.manifest_digest is None:
        return False
    try:
        found = place.open().find_image(container.manifest_digest)
        record = None if found is None else found.record
        if record is None or record.manifest_digest != container.manifest_digest or record.sif.sha256 != sha256:
            return False
        return _tree_of(image, sha256, cache) == container.tree_sha256
    except HpcenvError:
        return False  # no store, or nothing that can be read: then it is only another file


def _tree_of(image: Path, sha256: str, cache: Path | None) -> str:
    kept = None if cache is None else cache / "trees" / sha256
    if kept is not None:
        with suppress(OSError, UnicodeDecodeError):
            known = kept.read_text(encoding="utf-8").strip()
            if _DIGEST.fullmatch(known):
                return known
    from hpcenv.steps.image.verify import read_tree_digest

    digest = read_tree_digest(image)
    if kept is not None:
        with suppress(OSError):  # then it is read again the next time
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            wire.write_text(digest + "\n", kept)
    return digest


def expecting(expectations: tuple[Expectation, ...], sha256: str) -> tuple[Expectation, ...]:
    """Return what nodes are compared with where the SIF with this hash stands for the locked one. Pure.

    They must have this very file; that it is not the locked one is told, and is no reason to stop.
    """
    found: list[Expectation] = []
    for expected in expectations:
        if expected.field == _SIF:
            found.append(replace(expected, value=sha256, origin="at submission"))
            found.append(replace(expected, severity="info", note=_NOTE))
        else:
            found.append(expected)
    return tuple(found)
