"""The store's record of a SIF.

Runs on: LOGIN NODE. Pure.

The bytes of a SIF depend only on the image and on the tools. The record has all other facts: the references under which
the SIF was requested, who made the SIF, where and when. A record may be wrong: code that relies on a digest must
compute this digest from the file.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Literal

from hpcenv.errors import RecordInvalid
from hpcenv.records.codec import decode_record, encode_record

__all__ = ["SCHEMA", "ImageRecord", "Material", "Provenance", "SifFacts", "dumps", "loads", "utc_now", "with_reference"]

SCHEMA = 1
# hpcenv writes no record that is longer or has more references.
LONGEST = 1 << 20
_MOST_REFERENCES = 50

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class SifFacts:
    """Facts about the SIF file. Digests are in hexadecimal, sizes in bytes.

    `partition_sha256` is None until a command such as `hpcenv lock` needs this hash.
    """

    sha256: str
    size: int
    partition_sha256: str | None
    partition_size: int
    compression: str
    architecture: str


@dataclass(frozen=True, kw_only=True)
class Material:
    """One input of a definition file.

    Attributes:
        what: the `source` of a stage, a `file` copied by %files, or a `bind`: a folder of the
            host that the build could use.
        name: the name as in the definition file, but with a digest instead of a tag; for a bind `SRC:DST:ro` or
            `SRC:DST:rw`.
        digest: `sha256:HEX` of the manifest, file or folder; None if it is unknown.
    """

    what: Literal["source", "file", "bind"]
    name: str
    digest: str | None


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """How, by whom and when a SIF was made.

    Attributes:
        builder: `hpcenv` from the layers, or `apptainer build`.
        tools: name -> version of the tools that determine the SIF's bytes.
        libraries: name -> version of the shared libraries of these tools; the version is `unknown:` and the reason if
            it could not be determined. `libraries` is empty in records of earlier hpcenv versions.
        arguments: arguments of the tool that wrote the squashfs.
        epoch: the latest time that a file may have, in seconds since 1970; None if times were not limited.
        created: when the SIF was made, as RFC 3339 in UTC.
        user, host: who made the SIF, and on which machine.
        definition: `sha256:HEX` of the definition file, if the SIF was built from a definition file.
        materials: the inputs of the definition file.
    """

    builder: Literal["hpcenv", "apptainer"]
    tools: dict[str, str]
    libraries: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    epoch: int | None = None
    created: str = ""
    user: str = ""
    host: str = ""
    definition: str | None = None
    materials: tuple[Material, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ImageRecord:
    """The record of a SIF in the store.

    Attributes:
        digest: the SIF's name in the store: the image's manifest digest, or `sha256:` and the
            hash of the SIF if the image has no manifest.
        references: the references under which the image was requested, the latest first.
        index_digest: the digest of the multi-platform index that a reference names, if it names an index.
        manifest_digest, config_digest, chain_id: the identity of the image; None if the image has no manifest.
        platform: `os/architecture[/variant]`.
        tree_sha256: digest of the file tree, `sha256:HEX`; None if the tree was not compared
            with the layers. For a SIF from a registry, the digest of the tree in the SIF.
        layers, diff_ids: the digests of the layers as downloaded, and of their uncompressed content.
        notes: what the user should know about the image, for example what was left out and what cannot work.
    """

    schema: int = SCHEMA
    digest: str
    references: tuple[str, ...] = ()
    index_digest: str | None = None
    manifest_digest: str | None = None
    config_digest: str | None = None
    chain_id: str | None = None
    platform: str
    tree_sha256: str | None = None
    layers: tuple[str, ...] = ()
    diff_ids: tuple[str, ...] = ()
    sif: SifFacts
    made: Provenance
    notes: tuple[str, ...] = ()


def with_reference(record: ImageRecord, reference: str, index_digest: str | None) -> ImageRecord:
    """Return the record with one more reference, as the latest."""
    others = tuple(other for other in record.references if other != reference)
    return dataclasses.replace(
        record,
        references=(reference, *others)[:_MOST_REFERENCES],
        index_digest=index_digest or record.index_digest,
    )


def dumps(record: ImageRecord) -> str:
    """Return the record as JSON text: sorted keys, one final newline."""
    return encode_record(record)


def loads(text: str, *, origin: str) -> ImageRecord:
    """Parse a record.

    Args:
        text: the JSON text.
        origin: where the text comes from, for messages.

    Raises:
        RecordInvalid: the text is not JSON, has a different schema, lacks a key, or has an invalid value.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordInvalid(f"`{origin}` is not JSON", why=str(error)[:200]) from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA or isinstance(schema, bool):
        raise RecordInvalid(f"`{origin}` has schema {str(schema)[:20]}, this hpcenv reads schema {SCHEMA}")
    record = decode_record(ImageRecord, text, origin=origin)
    digests = {
        "digest": record.digest,
        "index_digest": record.index_digest,
        "manifest_digest": record.manifest_digest,
        "config_digest": record.config_digest,
        "chain_id": record.chain_id,
        "tree_sha256": record.tree_sha256,
        **{f"layers[{n}]": digest for n, digest in enumerate(record.layers)},
        **{f"diff_ids[{n}]": digest for n, digest in enumerate(record.diff_ids)},
        "made.definition": record.made.definition,
        **{f"made.materials[{n}].digest": material.digest for n, material in enumerate(record.made.materials)},
    }
    bad = [name for name, digest in digests.items() if digest is not None and not _DIGEST.fullmatch(digest)]
    hashes = {"sif.sha256": record.sif.sha256, "sif.partition_sha256": record.sif.partition_sha256}
    bad += [name for name, text in hashes.items() if text is not None and not _HEX.fullmatch(text)]
    bad += [f"sif.{name}" for name in ("size", "partition_size") if getattr(record.sif, name) < 0]
    if bad:
        raise RecordInvalid(f"`{origin}`: the value of `{bad[0]}` is invalid")
    return record


def utc_now() -> str:
    """Return the current time for records: RFC 3339, UTC, whole seconds."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
