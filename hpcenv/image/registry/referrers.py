"""Artifacts in a registry that refer to an image: signatures, bills of materials, records.

Runs on: LOGIN NODE. Loads `requests`.

OCI image-spec 1.1 (2024-02), manifest.md, `subject` and "Guidelines for Artifact Usage"; distribution-spec 1.1,
"Listing Referrers" and "Referrers Tag Schema". A registry with the referrers API keeps the list itself, and says so
with `OCI-Subject` in its answer to a push. Without it, clients keep the list: an index with the tag `sha256-HEX`. Two
clients that change this index at the same time can lose an entry; the specification has no remedy.

A list is a claim of everybody who may write to the repository. So each artifact is fetched by its digest, and its
`subject` is compared again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin

import requests

from hpcenv.errors import ImageUnavailable
from hpcenv.image.reference import DIGEST
from hpcenv.image.registry.blobs import BlobSpec
from hpcenv.image.registry.client import Client
from hpcenv.image.registry.manifests import INDEXES, MANIFESTS, canonical, digest_of, kind, read_document
from hpcenv.image.registry.upload import EMPTY, UploadedManifest, push_bytes, push_manifest

__all__ = [
    "ArtifactFile",
    "Descriptor",
    "Referrer",
    "find_manifest",
    "list_referrers",
    "push_artifact",
    "read_files",
    "read_referrer",
]

_EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
_TITLE = "org.opencontainers.image.title"
# No real image has more; the list comes from an untrusted registry.
_MOST_PAGES = 20
_MOST_REFERRERS = 1000


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """A manifest in a registry: its type, digest, and size in bytes."""

    media_type: str
    digest: str
    size: int

    def data(self) -> dict[str, Any]:
        """Return it as JSON (image-spec 1.1, descriptor.md)."""
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


@dataclass(frozen=True, kw_only=True)
class Referrer:
    """An entry of a list of referrers."""

    digest: str
    artifact_type: str
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ArtifactFile:
    """A file of an artifact: its blob, its type, and its name for `oras pull`."""

    spec: BlobSpec
    media_type: str
    title: str


def find_manifest(client: Client, name: str) -> Descriptor | None:
    """Return the manifest or index that a tag or digest names; None if the repository has none.

    Raises:
        ImageUnavailable: the registry refuses it or cannot be reached.
    """
    found = _manifest(client, name)
    if found is None:
        return None
    body, media_type = found
    return Descriptor(media_type=media_type, digest=digest_of(body), size=len(body))


def _manifest(client: Client, name: str) -> tuple[bytes, str] | None:
    headers = {"Accept": ", ".join(MANIFESTS + INDEXES)}
    answer = client.call("GET", f"manifests/{name}", accept=(200, 404), headers=headers)
    if answer.status == 404:
        return None
    if name.startswith("sha256:") and digest_of(answer.body) != name:
        raise _unusable(name, "its bytes have another digest")
    document = read_document(answer.body, origin="the registry", what="manifest")
    media_type = document.get("mediaType") or answer.headers.get("Content-Type", "")
    return answer.body, str(media_type)


# -- write ----------------------------------------------------------------------------------


def push_artifact(
    client: Client,
    artifact_type: str,
    files: Sequence[ArtifactFile],
    *,
    subject: Descriptor | None,
    tag: str | None = None,
    annotations: Mapping[str, str] | None = None,
) -> UploadedManifest:
    """Upload the manifest of an artifact, whose files are uploaded already.

    Args:
        client: of the repository.
        artifact_type: what it is.
        files: what it consists of.
        subject: the manifest that it refers to. The repository need not have that.
        tag: its name; without one it is found by its digest, or as a referrer.
        annotations: of the manifest.

    Raises:
        ImageUnavailable: the registry refuses it or cannot be reached.
    """
    push_bytes(client, EMPTY)
    manifest: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": MANIFESTS[0],
        "artifactType": artifact_type,
        "config": {"mediaType": _EMPTY_TYPE, "digest": digest_of(EMPTY), "size": len(EMPTY)},
        "layers": [
            {
                "mediaType": file.media_type,
                "digest": file.spec.digest,
                "size": file.spec.size,
                "annotations": {_TITLE: file.title},
            }
            for file in files
        ],
    }
    if subject is not None:
        manifest["subject"] = subject.data()
    if annotations:
        manifest["annotations"] = dict(annotations)
    body = canonical(manifest)
    made = push_manifest(client, tag or digest_of(body), body)
    if subject is not None and not made.indexed:
        entry = Descriptor(media_type=MANIFESTS[0], digest=made.digest, size=made.size).data()
        entry |= {"artifactType": artifact_type, "annotations": dict(annotations or {})}
        _add_to_tag(client, subject.digest, entry)
    return made


def _add_to_tag(client: Client, subject: str, entry: dict[str, Any]) -> None:
    """Add an entry to the index of the tag schema, if it is not in it."""
    tag = _tag_of(subject)
    found = _manifest(client, tag)
    entries: list[Any] = []
    if found is not None:
        index = read_document(found[0], origin="the registry", what="index")
        listed = index.get("manifests")
        if kind(index) != "index" or not isinstance(listed, list):
            raise _unusable(tag, "the tag of the list of referrers names something else")
        entries = listed
    if any(isinstance(one, dict) and one.get("digest") == entry["digest"] for one in entries):
        return
    body = canonical({"schemaVersion": 2, "mediaType": INDEXES[0], "manifests": [*entries, entry]})
    push_manifest(client, tag, body, INDEXES[0])


def _tag_of(digest: str) -> str:
    """Distribution-spec 1.1, "Referrers Tag Schema": algorithm to 32 characters, `-`, value to 64."""
    algorithm, _, value = digest.partition(":")
    return f"{algorithm[:32]}-{value[:64]}"


# -- read -----------------------------------------------------------------------------------


def list_referrers(client: Client, digest: str) -> tuple[Referrer, ...]:
    """Return what a repository lists as referring to a manifest: claims, until each one is read.

    Raises:
        ImageUnavailable: the registry refuses it or cannot be reached, or the list is too long.
    """
    found: list[Referrer] = []
    for entry in _entries(client, digest):
        if len(found) >= _MOST_REFERRERS:
            raise _unusable(digest, f"more than {_MOST_REFERRERS} artifacts refer to it")
        name, annotations = entry.get("digest"), entry.get("annotations")
        if isinstance(name, str) and DIGEST.fullmatch(name):
            texts = annotations if isinstance(annotations, dict) else {}
            found.append(
                Referrer(
                    digest=name,
                    artifact_type=str(entry.get("artifactType") or ""),
                    annotations={str(key): str(value) for key, value in texts.items()},
                )
            )
    return tuple(found)


def _entries(client: Client, digest: str) -> Iterator[Mapping[str, Any]]:
    path = f"referrers/{digest}"
    for _ in range(_MOST_PAGES):
        answer = client.call("GET", path, accept=(200, 404), headers={"Accept": INDEXES[0]})
        if answer.status == 404:
            yield from _tagged(client, digest)
            return
        yield from _listed(answer.body)
        following = requests.utils.parse_header_links(answer.headers.get("Link", ""))
        links = [link["url"] for link in following if link.get("rel") == "next"]
        if not links:
            return
        try:
            path = urljoin(answer.url, links[0])
        except ValueError:
            raise _unusable(digest, "the address of the next page of its referrers is not valid") from None
    raise _unusable(digest, f"the list of its referrers has more than {_MOST_PAGES} pages")


def _tagged(client: Client, digest: str) -> Iterator[Mapping[str, Any]]:
    found = _manifest(client, _tag_of(digest))
    if found is not None:
        yield from _listed(found[0])


def _listed(body: bytes) -> Iterator[Mapping[str, Any]]:
    listed = read_document(body, origin="the registry", what="index").get("manifests")
    yield from (entry for entry in (listed if isinstance(listed, list) else ()) if isinstance(entry, dict))


def read_referrer(client: Client, referrer: Referrer, subject: str) -> dict[str, Any] | None:
    """Return the manifest of a referrer; None if it refers to another manifest than the list says.

    Raises:
        ImageUnavailable: the registry does not have it, or cannot be reached.
    """
    _, body = client.manifest(referrer.digest)
    document = read_document(body, origin="the registry", what="manifest")
    named = document.get("subject")
    return document if isinstance(named, dict) and named.get("digest") == subject else None


def read_files(document: Mapping[str, Any]) -> tuple[ArtifactFile, ...]:
    """Return the files of an artifact; entries that are not well-formed are left out."""
    layers = document.get("layers")
    files = []
    for entry in layers if isinstance(layers, list) else ():
        digest, size = (entry.get("digest"), entry.get("size")) if isinstance(entry, dict) else (None, None)
        if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            continue
        if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
            continue
        notes = entry.get("annotations")
        title = notes.get(_TITLE) if isinstance(notes, dict) else None
        spec = BlobSpec(digest=digest, size=size)
        files.append(ArtifactFile(spec=spec, media_type=str(entry.get("mediaType")), title=str(title or "")))
    return tuple(files)


def _unusable(name: str, why: str) -> ImageUnavailable:
    return ImageUnavailable(f"the registry has something unusable for {name[:80]}", why=why)
