"""`hpcenv image inspect`: what a SIF is, and where it came from.

Runs on: LOGIN NODE. Needs no Apptainer. Changes nothing.

The file is untrusted. What is not a whole SIF is an error; an optional part that cannot be
read is a note, and the rest is told.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcenv.adapters import sif
from hpcenv.adapters.sif import Header, Object, Superblock
from hpcenv.adapters.store import StorePlace
from hpcenv.errors import HpcenvError
from hpcenv.steps.image.path import find_path

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_DEFFILE_FROM = "org.label-schema.usage.singularity.deffile.from"
_BASE_DIGEST = "org.opencontainers.image.base.digest"
_LOCK_LINE = re.compile(rb"(?m)^(schema|generated-by|fingerprint|kind)\s*=\s*(\d{1,9}|\"[^\"\n]{0,200}\")\s*$")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Which image a SIF was made from, as far as it says so itself.

    Attributes:
        origin: where that was found: a label's name, the definition file, or `unknown`.
        reference: the image's name, where it is there.
        digest: the manifest's. From `base.digest` or a definition file it may be that of a
            multi-platform index instead: `digest_of` then says `manifest or index`.
    """

    origin: str
    reference: str | None = None
    digest: str | None = None
    digest_of: str = ""
    index_digest: str | None = None
    config_digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class EmbeddedLock:
    """The lockfile in a SIF: what its first lines say; it is not checked here."""

    size: int
    says: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class InspectedImage:
    """A SIF without its file system's content.

    Attributes:
        sha256, partition_sha256: None where nobody asked for them.
        signatures: how many signature objects there are. They are not verified.
        squashfs: None where the partition is no squashfs 4.0.
        config: the image's OCI configuration, as far as it was kept.
        notes: what could not be read.
    """

    path: Path
    size: int
    sha256: str | None
    partition_sha256: str | None
    header: Header
    signatures: int
    squashfs: Superblock | None
    labels: Mapping[str, str]
    source: Source
    lock: EmbeddedLock | None
    config: Mapping[str, Any] | None
    notes: tuple[str, ...]


def inspect(
    image: str,
    *,
    cwd: Path,
    place: StorePlace,
    hashes: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> InspectedImage:
    """Read a SIF's header, objects, labels and origin.

    Args:
        image: path of a SIF, or what `find_path` finds in the store.
        cwd: what a relative path is relative to.
        place: the store's folder, and whom the user trusts with it.
        hashes: read the whole file too, for its digests.
        on_bytes: called with the number of bytes of each piece hashed.

    Raises:
        ImageMismatch: it is not a whole SIF.
        EnvironmentUnreadable: it may not be read.
        ImageUnavailable: neither a file nor an image of the store has that name.
    """
    path = Path(os.path.abspath(cwd / image))
    if not os.path.isfile(path) and not image.endswith(".sif"):
        path = find_path(place, image).path
    header = sif.read_header(path)
    notes: list[str] = []

    def optional(what: str, read: Callable[[], Any], default: Any) -> Any:
        try:
            return read()
        except HpcenvError as error:
            notes.append(f"{what}: {error.why or error.what}")
            return default

    labels: dict[str, str] = optional("labels", lambda: sif.labels(path, header), {})
    recipes = [entry for entry in header.objects if entry.kind == "definition-file"]
    texts: list[bytes] = optional("definition file", lambda: [sif.read_object(path, entry) for entry in recipes], [])
    return InspectedImage(
        path=path,
        size=header.file_size,
        sha256=sif.file_sha256(path, on_bytes) if hashes else None,
        partition_sha256=sif.partition_sha256(path, header, on_bytes) if hashes else None,
        header=header,
        signatures=sum(entry.kind == "signature" for entry in header.objects),
        squashfs=optional("file system", lambda: sif.superblock(path, header), None),
        labels=labels,
        source=source_of(labels, texts),
        lock=optional("embedded lockfile", lambda: _lock(path, header), None),
        config=optional("OCI configuration", lambda: _config(path, header, notes), None),
        notes=tuple(notes),
    )


def source_of(labels: Mapping[str, str], definitions: Sequence[bytes] = ()) -> Source:
    """Return the image that labels and definition files name; the surest statement first.

    hpcenv's own labels; the base digest that Apptainer 1.5.0 and later write for docker://;
    a definition file that names a digest, which Apptainer keeps as a label and as a text.
    A SIF that was built from a tag by Apptainer before 1.5.0 names no digest anywhere.
    """
    own = _digest(labels.get("hpcenv.source.manifest-digest"))
    if own is not None:
        return Source(
            origin="label hpcenv.source.manifest-digest",
            reference=labels.get("hpcenv.source.reference"),
            digest=own,
            digest_of="manifest",
            index_digest=_digest(labels.get("hpcenv.source.index-digest")),
            config_digest=_digest(labels.get("hpcenv.source.config-digest")),
        )
    reference = labels.get(_DEFFILE_FROM)
    base = _digest(labels.get(_BASE_DIGEST))
    if base is not None:
        return Source(origin=f"label {_BASE_DIGEST}", reference=reference, digest=base, digest_of="manifest or index")
    named = {f"label {_DEFFILE_FROM}": reference or ""}
    for text in definitions:
        match = re.search(rb"(?im)^from:[ \t]*(\S{1,1000})[ \t]*$", text)
        if match is not None:
            named.setdefault("definition file", match[1].decode(errors="replace"))
    for origin, name in named.items():
        found = _digest(name.rpartition("@")[2])
        if found is not None:
            return Source(origin=origin, reference=name, digest=found, digest_of="manifest or index")
    return Source(origin="unknown", reference=next((name for name in named.values() if name), None))


def _digest(text: str | None) -> str | None:
    return text if text is not None and _DIGEST.fullmatch(text) else None


def _lock(path: Path, header: Header) -> EmbeddedLock | None:
    text = sif.embedded_lock(path, header)
    if text is None:
        return None
    says = {key.decode(): value.decode(errors="replace").strip('"') for key, value in _LOCK_LINE.findall(text)}
    return EmbeddedLock(size=len(text), says=says)


def _config(path: Path, header: Header, notes: list[str]) -> dict[str, Any] | None:
    entry: Object | None = header.named("oci-config.json")
    if entry is None:
        return None
    try:
        found = json.loads(sif.read_object(path, entry))
    except (ValueError, RecursionError) as error:
        notes.append(f"OCI configuration: {type(error).__name__}")
        return None
    return found if isinstance(found, dict) else None
