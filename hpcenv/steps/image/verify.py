"""`hpcenv image verify`: prove that a SIF holds what its image's layers hold.

Runs on: LOGIN NODE. Needs no Apptainer: layers and SIF are read here.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcenv.adapters import sif, squashfs_reader
from hpcenv.adapters.store import Store, StorePlace
from hpcenv.errors import ImageMismatch, ImageUnavailable, SpecError
from hpcenv.model import tree
from hpcenv.model.progress import OnEvent
from hpcenv.steps.image.convert import FORMAT_LABEL, added, compare_sif, merged_layers, shown
from hpcenv.steps.image.pull import Asked, resolve


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What the comparison of a SIF with an image's layers gave.

    Attributes:
        equal: whether every path is as in the layers.
        exact: whether owners, times, extended attributes, devices and hard links were compared
            too, as for a SIF that hpcenv made; one of `apptainer build` does not keep them.
        expected, found: tree digests of the layers and of the SIF.
        paths: how many the layers make.
        differences: one line each, sorted by path.
    """

    path: Path
    reference: str
    manifest_digest: str
    sif_sha256: str
    equal: bool
    exact: bool
    expected: str
    found: str
    paths: int
    differences: tuple[str, ...]


def verify(
    asked: Asked,
    path: Path | None,
    *,
    place: StorePlace,
    environ: Mapping[str, str],
    on_event: OnEvent,
) -> Proof:
    """Compare a SIF with the layers of the image that `asked` names.

    Args:
        asked: the image. Its layers are taken from the store, or fetched into it.
        path: the SIF; None takes the store's.

    Raises:
        ImageUnavailable: there is no such SIF, or the layers cannot be had.
        FileUnusable: it is the store's, and others could change it after it was proved.
        HpcenvError: the SIF or the layers cannot be read.
    """
    if path is not None:
        sif.read_header(path)  # before anything is fetched for a file that is no SIF
    known = place.open() if place.exists() else None
    image, open_blobs = resolve(asked, environ=environ, on_event=on_event, store=known)
    store = place.open(create=True)
    if path is None:
        path = _stored(store, image.manifest_digest, asked)
    elif path.exists() and (own := store.look(image.manifest_digest)) is not None and own.path.samefile(path):
        own.require_trusted()
    merged = merged_layers(image, open_blobs, store, asked.limits, on_event)
    made_by: Literal["hpcenv", "apptainer"] = "hpcenv" if FORMAT_LABEL in sif.labels(path) else "apptainer"
    extra = added(image, merged)[1]
    try:
        differences = compare_sif(path, merged, extra, builder=made_by, on_event=on_event)
    except ImageMismatch as error:  # so damaged that it cannot be read to its end
        raise ImageMismatch(error.what, why=error.why, hint=_remedy(image.reference, asked)) from error
    expected = tree.tree_digest(merged.entries())
    return Proof(
        path=path,
        reference=image.reference,
        manifest_digest=image.manifest_digest,
        sif_sha256=sif.file_sha256(path),
        equal=not differences,
        exact=made_by == "hpcenv",
        expected=expected,
        # Every field that the digest counts was compared: equal trees have equal digests.
        found=expected if not differences else read_tree_digest(path),
        paths=merged.size()[0],
        differences=tuple(shown(difference) for difference in differences),
    )


def read_tree_digest(path: Path) -> str:
    """Return the digest of a SIF's tree (docs/explanation/images.md), `sha256:HEX`; reads all of it.

    Raises:
        HpcenvError: the SIF cannot be read to its end.
    """
    header = sif.read_header(path)
    return tree.tree_digest(squashfs_reader.read_tree(path, offset=header.runs.offset, size=header.runs.size))


def _stored(store: Store, digest: str, asked: Asked) -> Path:
    found = store.find_image(digest)
    if found is None:
        raise ImageUnavailable(
            f"the store `{store.root}` has no SIF of `{asked.reference}`",
            why=f"it is {digest}",
            hint=_pull(asked.reference, asked),
        )
    return found.path


def origin(path: Path, place: StorePlace) -> str:
    """Return a reference for the image that a SIF was made from, as the SIF or the store says.

    Raises:
        SpecError: neither knows; the user has to say.
    """
    digest = sif.labels(path).get("hpcenv.source.manifest-digest")
    record = place.open().record(digest) if digest and place.exists() else None
    for reference in record.references if record is not None else ():
        if reference.startswith("docker://") and digest is not None:
            return f"{reference.partition('@')[0]}@{digest}"
        return reference
    raise SpecError(
        f"nothing says from which image `{path}` was made",
        why=f"its label says {digest or 'nothing'}; the store knows no reference for that",
        hint=f"name the image: hpcenv image verify {path} --image docker://HOST/NAME@{digest or 'sha256:...'}",
    )


def _pull(reference: str, asked: Asked) -> str:
    """Return the command that gets an image in the way in which it was asked for here."""
    words = ["hpcenv", "image", "pull", reference]
    words += ["--platform", asked.platform] if asked.platform != "linux/amd64" else []
    for host in asked.plain_http:
        words += ["--plain-http", host]
    words += ["--ca-file", str(asked.ca_file)] if asked.ca_file is not None else []
    return shlex.join(words)


def _remedy(reference: str, asked: Asked) -> str:
    return f"move the SIF away, then: {_pull(reference, asked)}"


def refusal(proof: Proof, asked: Asked) -> ImageMismatch:
    """Return the error for a SIF that does not hold what the layers hold."""
    more = len(proof.differences) - 20
    return ImageMismatch(
        f"`{proof.path}` does not hold what the layers of `{proof.reference}` hold",
        why="\n".join((*proof.differences[:20], *([f"and {more} more (--json lists them)"] if more > 0 else []))),
        hint=_remedy(proof.reference, asked),
    )
