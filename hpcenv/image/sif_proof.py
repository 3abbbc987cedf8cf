"""`hpcenv image verify`: check that a SIF has exactly the content of its image's layers.

Runs on: LOGIN NODE. No Apptainer is needed, because hpcenv itself reads the layers and the SIF.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hpcenv.errors import Command, Hint, ImageMismatch, ImageUnavailable, SpecError
from hpcenv.identity import sif
from hpcenv.image.content import tree
from hpcenv.image.convert import squashfs_reader
from hpcenv.image.convert.conversion import FORMAT_LABEL, OpenBlobs, added, compare_sif, merged_layers, shown
from hpcenv.image.convert.layer_index import LayerLimits
from hpcenv.image.pull import ImageRequest, resolve
from hpcenv.image.reference import ImageSource, Platform, Reference, parse_source
from hpcenv.image.registry.manifests import ResolvedImage
from hpcenv.image.store.store import Store
from hpcenv.image.store.store_folder import open_place, place_exists
from hpcenv.progress import OnEvent
from hpcenv.project.store_config import StorePlace


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The result of comparing a SIF with the layers of an image.

    Attributes:
        equal: whether every path of the SIF is equal to the same path of the layers.
        exact: whether the comparison includes owners, times, extended attributes, devices and hard links. The
            comparison includes these values only for a SIF that hpcenv made, because `apptainer build` does not
            preserve them.
        expected, found: tree digests of the layers and of the SIF.
        paths: the number of paths in the layers.
        differences: one line for each difference, sorted by path.
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
    request: ImageRequest,
    path: Path | None,
    *,
    limits: LayerLimits,
    place: StorePlace,
    on_event: OnEvent,
) -> Proof:
    """Compare a SIF with the layers of an image.

    Args:
        request: the image. Layers that the store does not have are fetched into the store.
        path: the SIF; None for the SIF in the store.
        limits: limits on what the image may contain.
        place: the store.
        on_event: called with the progress.

    Raises:
        ImageUnavailable: the SIF does not exist, or the layers cannot be fetched.
        FileUnusable: the SIF is in the store, and other users could change it after the comparison.
        HpcenvError: the SIF or the layers cannot be read.
    """
    if path is not None:
        sif.read_header(path)  # fail before anything is fetched
    known = open_place(place) if place_exists(place) else None
    image, open_blobs = resolve(request, on_event=on_event, store=known)
    store = open_place(place, create=True)
    with store.in_use(purpose=f"compares a SIF with the layers of {image.manifest_digest[:19]}", on_event=on_event):
        return _compare(request, path, image, open_blobs, store=store, limits=limits, on_event=on_event)


def _compare(
    request: ImageRequest,
    path: Path | None,
    image: ResolvedImage,
    open_blobs: OpenBlobs,
    *,
    store: Store,
    limits: LayerLimits,
    on_event: OnEvent,
) -> Proof:
    if path is None:
        path = _stored(store, image.manifest_digest, request)
    elif path.exists() and (own := store.look(image.manifest_digest)) is not None and own.path.samefile(path):
        own.require_trusted()
    merged = merged_layers(image, open_blobs, store, limits, on_event)
    made_by: Literal["hpcenv", "apptainer"] = "hpcenv" if FORMAT_LABEL in sif.labels(path) else "apptainer"
    extra = added(image, merged)[1]
    try:
        differences = compare_sif(path, merged, extra, builder=made_by, on_event=on_event)
    except ImageMismatch as error:  # too damaged to be read to the end
        raise ImageMismatch(error.what, why=error.why, hint=_hint(request)) from error
    expected = tree.tree_digest(merged.entries())
    return Proof(
        path=path,
        reference=image.reference,
        manifest_digest=image.manifest_digest,
        sif_sha256=sif.file_sha256(path),
        equal=not differences,
        exact=made_by == "hpcenv",
        expected=expected,
        # The comparison covers every field of the tree digest, so equal trees have equal digests.
        found=expected if not differences else read_tree_digest(path),
        paths=merged.size()[0],
        differences=tuple(shown(difference) for difference in differences),
    )


def read_tree_digest(path: Path) -> str:
    """Read a whole SIF and return the digest of its tree (docs/explanation/images.md), `sha256:HEX`.

    Raises:
        HpcenvError: the SIF cannot be read to its end.
    """
    header = sif.read_header(path)
    return tree.tree_digest(squashfs_reader.read_tree(path, offset=header.runs.offset, size=header.runs.size))


def _stored(store: Store, digest: str, request: ImageRequest) -> Path:
    image = store.find_image(digest)
    if image is None:
        raise ImageUnavailable(
            f"the store `{store.root}` has no SIF of `{request.source}`",
            why=f"its digest is {digest}",
            hint=_pull_command(request),
        )
    store.remember(digest)
    return image.path


def origin(path: Path, place: StorePlace) -> ImageSource:
    """Return the image that a SIF was made from, according to the SIF's labels or the store.

    Raises:
        SpecError: neither the labels nor the store names the image, so the user must name it.
    """
    digest = sif.labels(path).get("hpcenv.source.manifest-digest")
    record = open_place(place).record(digest) if digest and place_exists(place) else None
    if record is not None and record.references:
        source = parse_source(record.references[0])
        return replace(source, digest=digest) if isinstance(source, Reference) else source
    raise SpecError(
        f"hpcenv does not know from which image `{path}` was made",
        why=f"its label names {digest or 'no image'}; the store has no reference for it",
        hint=(
            "name the image: ",
            Command("hpcenv", "image", "verify", str(path), "--image", f"docker://HOST/NAME@{digest or 'sha256:...'}"),
        ),
    )


def _pull_command(request: ImageRequest) -> Command:
    """Return the command that pulls an image with the options of this request."""
    return Command("hpcenv", "image", "pull", str(request.source), *request_options(request))


def request_options(request: ImageRequest) -> list[str]:
    """Return the command line options that make the same request; defaults are omitted."""
    options = ["--platform", str(request.platform)] if request.platform != Platform() else []
    for host in request.access.plain_http:
        options += ["--plain-http", host]
    ca_file = request.access.ca_file
    return options + (["--ca-file", str(ca_file)] if ca_file is not None else [])


def _hint(request: ImageRequest) -> Hint:
    return ("move the SIF to another place, then: ", _pull_command(request))


def refusal(proof: Proof, request: ImageRequest) -> ImageMismatch:
    """Return the error for a SIF that differs from the layers."""
    more = len(proof.differences) - 20
    return ImageMismatch(
        f"`{proof.path}` does not contain what the layers of `{proof.reference}` contain",
        why="\n".join((*proof.differences[:20], *([f"and {more} more (--json lists them)"] if more > 0 else []))),
        hint=_hint(request),
    )
