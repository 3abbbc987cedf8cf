"""What the store knows of a SIF beside the file itself.

Runs on: LOGIN NODE. Pure.

The SIF's bytes depend on the image and on the tools only. Which reference it was asked for
by, who made it, where and when, stands here. A record is a note, not a proof: whoever
relies on a digest in it computes that digest from the file.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Literal

from hpcenv import wire
from hpcenv.dataclass import dataclass, field
from hpcenv.errors import RecordInvalid

__all__ = ["SCHEMA", "ImageRecord", "Material", "Provenance", "SifFacts", "dumps", "loads", "with_reference"]

SCHEMA = 1
# A record that is longer, or names more, was not written by hpcenv.
LONGEST = 1 << 20
_MOST_REFERENCES = 50

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class SifFacts:
    """The SIF file: digests in hexadecimal, sizes in bytes.

    `partition_sha256` is None until somebody needs it: `lock` does.
    """

    sha256: str
    size: int
    partition_sha256: str | None
    partition_size: int
    compression: str
    architecture: str


@dataclass(frozen=True, kw_only=True)
class Material:
    """One thing that a definition file uses, and what is known of it.

    Attributes:
        what: `source` of a stage, a `file` copied by %files, or a `bind`: a folder of the
            host that the build saw.
        name: as the definition file writes it, with a digest in place of a tag; for a bind
            `SRC:DST:ro` or `SRC:DST:rw`.
        digest: `sha256:HEX` of the manifest, file or folder; None for what cannot be known.
    """

    what: Literal["source", "file", "bind"]
    name: str
    digest: str | None


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """How, by whom and when a SIF was made.

    Attributes:
        builder: which way it was made: by hpcenv from the layers, or by `apptainer build`.
        tools: name -> version of what decides the SIF's bytes.
        libraries: the same of shared libraries that those tools are linked with; `unknown:` and
            why where it could not be told. Empty in records of earlier versions.
        arguments: what was passed to the tool that wrote the squashfs.
        epoch: seconds since 1970 that file times were limited to; None where they were not.
        created: when, RFC 3339 in UTC.
        user, host: who, and on which machine.
        definition: `sha256:HEX` of the definition file, if it was made from one.
        materials: what that file was built from.
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
    """A SIF of the store.

    Attributes:
        digest: the store's name for it: the image's manifest digest, or `sha256:` and the
            SIF's own hash where it was not made from an image with a manifest.
        references: what it was asked for by, the latest first.
        index_digest: of the multi-platform index that a reference led to, if any.
        manifest_digest, config_digest, chain_id: identity of the image, if it has one.
        platform: `os/architecture[/variant]`.
        tree_sha256: digest of the file tree, `sha256:HEX`; None where it was not proved.
        layers: digests of the layers as pulled, and `diff_ids` of what is in them.
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


def with_reference(record: ImageRecord, reference: str, index_digest: str | None) -> ImageRecord:
    """Return the record after the image was asked for by `reference`."""
    others = tuple(other for other in record.references if other != reference)
    return dataclasses.replace(
        record,
        references=(reference, *others)[:_MOST_REFERENCES],
        index_digest=index_digest or record.index_digest,
    )


def dumps(record: ImageRecord) -> str:
    """Return the record as JSON text: sorted keys, one final newline."""
    return wire.dumps(record)


def loads(text: str, *, origin: str) -> ImageRecord:
    """Return the record that `text` holds.

    Args:
        origin: where the text comes from, for messages.

    Raises:
        RecordInvalid: not JSON, another schema, a missing key, a wrong type or no digest.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordInvalid(f"`{origin}` is not JSON", why=str(error)[:200]) from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA or isinstance(schema, bool):
        raise RecordInvalid(f"`{origin}` has schema {str(schema)[:20]}, this hpcenv reads schema {SCHEMA}")
    record = wire.loads(ImageRecord, text, origin=origin)
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
        raise RecordInvalid(f"`{origin}`: `{bad[0]}` is not what it must be")
    return record
