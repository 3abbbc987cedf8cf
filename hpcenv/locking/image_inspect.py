"""`hpcenv image inspect`: describe a SIF and the image that it was made from.

Runs on: LOGIN NODE. Needs no Apptainer. Changes nothing.

The file is untrusted. An incomplete SIF is an error. If an optional part cannot be read, the result has a note, and all
other parts are reported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcenv.errors import EnvironmentUnreadable, HpcenvError
from hpcenv.identity import sif
from hpcenv.identity.sif import Header, Object, Superblock

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_DEFFILE_FROM = "org.label-schema.usage.singularity.deffile.from"
_BASE_DIGEST = "org.opencontainers.image.base.digest"
_LOCK_LINE = re.compile(rb"(?m)^(schema|generated-by|fingerprint|kind)\s*=\s*(\d{1,9}|\"[^\"\n]{0,200}\")\s*$")


@dataclass(frozen=True, kw_only=True)
class SifOrigin:
    """The image that a SIF was made from, according to the SIF itself.

    Attributes:
        origin: which part of the SIF names the image: a label, the definition file, or `unknown`.
        reference: the image's name, if the SIF contains this name.
        digest: the digest of the manifest. If it comes from `base.digest` or from a definition file, it may be the
            digest of a multi-platform index instead. Then `digest_of` is `manifest or index`.
        digest_of: `manifest`, or `manifest or index`.
    """

    origin: str
    reference: str | None = None
    digest: str | None = None
    digest_of: str = ""
    index_digest: str | None = None
    config_digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class EmbeddedLock:
    """The lockfile inside a SIF: its size in bytes and its first fields, which are not validated."""

    size: int
    fields: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class InspectedImage:
    """The data about a SIF. The content of its file system is not read.

    Attributes:
        size: size of the file, in bytes.
        sha256, partition_sha256: digests of the file and of the file system; None without `hashes`.
        signatures: the number of signature objects. The signatures are not verified.
        squashfs: None if the partition is not squashfs 4.0.
        config: the image's OCI configuration, if the SIF has it.
        notes: the parts that could not be read.
    """

    path: Path
    size: int
    sha256: str | None
    partition_sha256: str | None
    header: Header
    signatures: int
    squashfs: Superblock | None
    labels: Mapping[str, str]
    source: SifOrigin
    lock: EmbeddedLock | None
    config: Mapping[str, Any] | None
    notes: tuple[str, ...]


def inspect(path: Path, *, hashes: bool = False, on_bytes: Callable[[int], None] | None = None) -> InspectedImage:
    """Read a SIF's header, objects, labels and origin.

    Args:
        path: the SIF.
        hashes: also read the whole file to compute its digests.
        on_bytes: called after each hashed piece with its number of bytes.

    Raises:
        ImageMismatch: the file is not a complete SIF.
        EnvironmentUnreadable: the file does not exist, or the operating system denies access.
    """
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
        config=optional("OCI configuration", lambda: _config(path, header), None),
        notes=tuple(notes),
    )


def source_of(labels: Mapping[str, str], definitions: Sequence[bytes] = ()) -> SifOrigin:
    """Return the image that labels and definition files name. The most reliable source is used.

    The sources, from the most to the least reliable, are: hpcenv's labels; the base digest that Apptainer 1.5.0 and
    newer write for docker://; and a digest in the definition file, which Apptainer stores as a label and as text. If an
    Apptainer before 1.5.0 built a SIF from a tag, the SIF contains no digest.
    """
    own = _digest(labels.get("hpcenv.source.manifest-digest"))
    if own is not None:
        return SifOrigin(
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
        return SifOrigin(
            origin=f"label {_BASE_DIGEST}", reference=reference, digest=base, digest_of="manifest or index"
        )
    named = {f"label {_DEFFILE_FROM}": reference or ""}
    for text in definitions:
        match = re.search(rb"(?im)^from:[ \t]*(\S{1,1000})[ \t]*$", text)
        if match is not None:
            named.setdefault("definition file", match[1].decode(errors="replace"))
    for origin, name in named.items():
        digest = _digest(name.rpartition("@")[2])
        if digest is not None:
            return SifOrigin(origin=origin, reference=name, digest=digest, digest_of="manifest or index")
    return SifOrigin(origin="unknown", reference=next((name for name in named.values() if name), None))


def _digest(text: str | None) -> str | None:
    return text if text is not None and _DIGEST.fullmatch(text) else None


def _lock(path: Path, header: Header) -> EmbeddedLock | None:
    text = sif.embedded_lock(path, header)
    if text is None:
        return None
    fields = {key.decode(): value.decode(errors="replace").strip('"') for key, value in _LOCK_LINE.findall(text)}
    return EmbeddedLock(size=len(text), fields=fields)


def _config(path: Path, header: Header) -> dict[str, Any] | None:
    entry: Object | None = header.named("oci-config.json")
    if entry is None:
        return None
    try:
        config = json.loads(sif.read_object(path, entry))
    except (ValueError, RecursionError) as error:
        raise EnvironmentUnreadable("the OCI configuration cannot be read", why=type(error).__name__) from error
    return config if isinstance(config, dict) else None
