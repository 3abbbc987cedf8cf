"""Read an image's manifest and configuration.

Runs on: LOGIN NODE. Pure. OCI image-spec 1.1 (2024-02) and Docker's Image Manifest V2,
Schema 2. The bytes come from untrusted registries, layouts and archives: the type of every field is
checked before its use, and every fault raises an `HpcenvError`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hpcenv.errors import Command, Hint, ImageUnavailable
from hpcenv.image.reference import DIGEST, Platform
from hpcenv.text import printable

__all__ = [
    "CONFIGS",
    "CONFIG_LIMIT",
    "INDEXES",
    "MANIFESTS",
    "MANIFEST_LIMIT",
    "PLAIN_LAYER",
    "ChosenManifest",
    "ImageDocuments",
    "Layer",
    "ResolvedImage",
    "canonical",
    "chain_id",
    "check_platform",
    "choose",
    "config_descriptor",
    "describe",
    "digest_of",
    "kind",
    "no_manifest",
    "platform_name",
    "printable",
    "read_document",
    "select_entry",
    "unusable",
]

# OCI image-spec 1.1 (2024-02) and Docker Image Manifest V2, Schema 2.
INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
CONFIGS = (
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
)
PLAIN_LAYER = "application/vnd.oci.image.layer.v1.tar"
_LAYER = re.compile(
    r"application/vnd\.(?:"
    r"oci\.image\.layer\.(?:nondistributable\.)?v1\.tar(?:\+(?:gzip|zstd))?"
    r"|docker\.image\.rootfs\.diff\.tar(?:\.(?:gzip|zstd))?)"
)

# OCI distribution-spec 1.1: "a registry SHOULD enforce some limit" of 4 MiB on manifests.
MANIFEST_LIMIT = 4 * 1024 * 1024
CONFIG_LIMIT = 8 * 1024 * 1024


DigestOrigin = Literal["registry", "layout", "synthesised"]

_CHECK_NAME = "check the name and the tag; registries hold more than images"
# How deep indexes may be nested. No real image is known in which the nesting is deeper than one index in another.
_MOST_NESTED = 4
_MOST_READ = 16
# Limits the memory that a manifest can use. Docker itself makes at most 127 layers.
_MOST_LAYERS = 4096


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer.

    `digest` and `size` (in bytes) describe the blob; `diff_id` is the digest of the tar in the blob.
    """

    digest: str
    diff_id: str
    size: int
    media_type: str


@dataclass(frozen=True, kw_only=True)
class ResolvedImage:
    """An image whose reference was resolved to digests. Its manifest and configuration have these digests.

    Attributes:
        reference: the image's name for messages and records: `docker://...` with registry and `library/` filled in,
            or a layout or archive as the user wrote it.
        registry, repository: where the image is; empty for a layout or an archive.
        index_digest: the digest of the multi-platform index; None if the reference names a single image.
        manifest_digest: the digest of the platform's manifest; use this digest to pull.
        config_digest: docker's image ID.
        platform: `os/architecture[/variant]`.
        rootfs_chain_id: identity of the file system (`chain_id` of all diff_ids).
        env_digest: the digest of the run-time settings: sorted Env, Entrypoint, Cmd, WorkingDir and User, as canonical
            JSON.
        nvidia_require: the value of `NVIDIA_REQUIRE_CUDA` in the image's environment.
        created: when the image was made (RFC 3339), from the image's configuration.
        config: the whole image configuration.
        platforms: all platforms of the index, sorted; without an index, only the image's platform.
        digest_origin: who made the manifest: a `registry`, a `layout` (also in an
            archive), or hpcenv itself (`synthesised`, see `oci_layout`).
        manifest: the bytes whose digest is `manifest_digest`.
        config_bytes: the bytes whose digest is `config_digest`.
        layout: the folder of a local layout, or None. The layers are read from this folder, without a copy.
    """

    reference: str
    registry: str
    repository: str
    tag: str | None
    index_digest: str | None
    manifest_digest: str
    config_digest: str
    platform: str
    layers: tuple[Layer, ...]
    rootfs_chain_id: str
    env_digest: str
    nvidia_require: str | None
    created: str | None
    config: Mapping[str, Any] = field(repr=False)
    platforms: tuple[str, ...] = ()
    digest_origin: DigestOrigin = "registry"
    manifest: bytes = field(default=b"", repr=False)
    config_bytes: bytes = field(default=b"", repr=False)
    layout: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ImageDocuments:
    """The verified manifest and configuration of an image; fields as in `ResolvedImage`."""

    reference: str
    registry: str = ""
    repository: str = ""
    tag: str | None = None
    index_digest: str | None = None
    platforms: tuple[str, ...] = ()
    digest_origin: DigestOrigin = "registry"
    manifest: bytes = field(repr=False)
    config: bytes = field(repr=False)
    layout: Path | None = None


def digest_of(data: bytes) -> str:
    """Return `sha256:` and the hexadecimal digest of `data`."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def read_document(body: bytes, *, origin: str, what: str) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        origin: where the bytes come from, for the error.
        what: `manifest` or `configuration`, for the error.

    Raises:
        ImageUnavailable: the bytes are no JSON object.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ImageUnavailable(
            f"`{origin}` answered with something that is not an image {what}",
            why=f"the answer begins with {body[:60]!r}",
            hint="check the host and port; the answer may come from a proxy or a login page",
        )
    return document


# --- reading manifests -----------------------------------------------------------------


def kind(document: Mapping[str, Any]) -> str:
    """Return `index`, `manifest` or `other`.

    image-spec 1.1 says that `mediaType` SHOULD be used. Without `mediaType`, the fields decide the kind: some fields
    exist only in an index, others only in a manifest.
    """
    media = document.get("mediaType")
    if media in INDEXES or (media is None and "manifests" in document):
        return "index"
    if media in MANIFESTS or (media is None and "config" in document):
        return "manifest"
    return "other"


def no_manifest(document: Mapping[str, Any], name: str) -> ImageUnavailable:
    """Return the error for a document that is not an image manifest."""
    if document.get("schemaVersion") == 1:
        why = "its manifest is Docker's schema 1 from before 2017, which has no digests of the layers' contents"
        return unusable(name, why, "convert it: skopeo copy --format v2s2 reads schema 1 and writes a current manifest")
    if not document.get("mediaType"):
        return unusable(name, "its manifest has neither a media type nor a configuration", _CHECK_NAME)
    return unusable(name, f"its manifest is of type {str(document.get('mediaType'))[:100]!r}", _CHECK_NAME)


@dataclass(frozen=True, kw_only=True)
class ChosenManifest:
    """The manifest of an image that an index names: its bytes, its document, and all platforms of the index."""

    body: bytes
    document: Mapping[str, Any]
    platforms: tuple[str, ...]


def choose(
    index: Mapping[str, Any], wanted: Platform, name: str, read: Callable[[str], tuple[bytes, Mapping[str, Any]]]
) -> ChosenManifest:
    """Return the first manifest for the platform; indexes inside the index are followed.

    image-spec 1.1, image-index.md: "If multiple manifests match a client or runtime's
    requirements, the first matching entry SHOULD be used."

    Args:
        index: the index.
        wanted: the platform.
        name: the image's name, for errors.
        read: returns the verified bytes and the document of a digest.

    Raises:
        ImageUnavailable: the index has no image for the platform; the error lists the platforms that it has.
    """
    search = _IndexSearch(wanted=wanted, name=name, read=read)
    found = search.look(index, _MOST_NESTED)
    platforms = tuple(sorted(set(search.platforms)))
    if found is None:
        raise _no_platform(name, wanted, platforms)
    return ChosenManifest(body=found[0], document=found[1], platforms=platforms)


def select_entry(entries: Sequence[Mapping[str, Any]], wanted: Platform, name: str) -> str:
    """Return the digest of the first entry for the platform, from a list in which each entry names its platform.

    Raises:
        ImageUnavailable: no entry is for the platform.
    """
    for entry in entries:
        platform = entry.get("platform")
        if isinstance(platform, dict) and _platform_fits(platform, wanted):
            return _entry_digest(entry, name)
    named = [platform_name(entry["platform"]) for entry in entries if isinstance(entry.get("platform"), dict)]
    raise _no_platform(name, wanted, tuple(sorted(set(named))))


@dataclass(frozen=True, kw_only=True)
class _IndexSearch:
    """Searches for an image in an index, and in further indexes that this index contains."""

    wanted: Platform
    name: str
    read: Callable[[str], tuple[bytes, Mapping[str, Any]]]
    platforms: list[str] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def look(self, index: Mapping[str, Any], depth: int) -> tuple[bytes, Mapping[str, Any]] | None:
        listed = index.get("manifests")
        entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        found = None
        for entry in entries:
            platform = entry.get("platform")
            if isinstance(platform, dict):
                if platform.get("os") == "unknown":
                    continue  # attestations have the platform unknown/unknown
                self.platforms.append(platform_name(platform))
                fits = _platform_fits(platform, self.wanted)
            else:
                # The platform is optional in an entry. An entry for an inner index names no platform. If an entry for a
                # manifest names no platform, the manifest's configuration names it.
                fits = entry.get("mediaType") in INDEXES or len(entries) == 1
            if fits and found is None:
                found = self._open(entry, depth)
        return found

    def _open(self, entry: Mapping[str, Any], depth: int) -> tuple[bytes, Mapping[str, Any]] | None:
        digest = _entry_digest(entry, self.name)
        if depth == 0 or len(self._seen) >= _MOST_READ or digest in self._seen:
            why = "an index inside it names itself" if digest in self._seen else "too many indexes are inside its index"
            raise unusable(self.name, why, _CHECK_NAME)
        self._seen.add(digest)
        body, document = self.read(digest)
        return self.look(document, depth - 1) if kind(document) == "index" else (body, document)


def _entry_digest(entry: Mapping[str, Any], name: str) -> str:
    digest = entry.get("digest")
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise unusable(name, f"its index has the digest {str(digest)[:80]!r}, not a sha256 one")
    return digest


def _no_platform(name: str, wanted: Platform, platforms: Sequence[str]) -> ImageUnavailable:
    """Return the error for an image that does not exist for the platform."""
    what = f"`{name}` has no image for {wanted}"
    if not platforms:
        return ImageUnavailable(what, why="its index names no platform for any entry", hint=_CHECK_NAME)
    return ImageUnavailable(
        what,
        why=f"available platforms: {', '.join(platforms)[:2000]}",
        hint=(
            "choose an image for the machines that run it, or use this image on other machines: ",
            Command("hpcenv", "image", "pull", name, "--platform", platforms[0]),
            f' (in hpcenv.toml: platform = "{platforms[0]}")',
        ),
    )


def platform_name(platform: Mapping[str, Any]) -> str:
    """Return the platform of an index entry or a configuration, for messages."""
    parts = (platform.get("os"), platform.get("architecture"), platform.get("variant"))
    return printable("/".join(str(part)[:40] for part in parts if part))


def _platform_fits(platform: Mapping[str, Any], wanted: Platform) -> bool:
    return (
        platform.get("os") == wanted.os
        and platform.get("architecture") == wanted.architecture
        and (wanted.variant is None or platform.get("variant") == wanted.variant)
    )


def check_platform(config: Mapping[str, Any], wanted: Platform, name: str) -> None:
    """Raise `ImageUnavailable` if a configuration is for another platform; the variant may differ."""
    if not _platform_fits(config, replace(wanted, variant=None)):
        own = platform_name(config)
        why = f"it is an image for {own or 'an unnamed platform'}"
        raise _no_platform(name, wanted, (own,) if own else ()).changed(why=why)


def config_descriptor(manifest: Mapping[str, Any], name: str) -> str:
    """Return the digest of the image's configuration; raise `ImageUnavailable` if the manifest has no valid digest."""
    config = manifest.get("config")
    if not isinstance(config, dict) or not isinstance(config.get("digest"), str):
        raise unusable(name, "its manifest names no configuration")
    if config.get("mediaType") not in CONFIGS:
        raise _artifact(manifest, str(config.get("mediaType")), name)
    digest = config["digest"]
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise unusable(name, f"its configuration has the digest {str(digest)[:80]!r}, not a sha256 one")
    return digest


def _artifact(manifest: Mapping[str, Any], media: str, name: str) -> ImageUnavailable:
    """Return the error for a manifest that describes no image (image-spec 1.1, "Guidelines for Artifact Usage")."""
    if media.startswith("application/vnd.cncf.helm."):
        return unusable(name, "it is a Helm chart, not a container image", "take the name of an image from the chart")
    if media.startswith("application/vnd.sylabs.sif."):
        pull = Command("hpcenv", "image", "pull", name.replace("docker://", "oras://", 1))
        return unusable(name, "it is a SIF in a registry, not a container image", ("it needs no conversion: ", pull))
    stated = str(manifest.get("artifactType") or media)[:100]
    return unusable(name, f"it is an artifact of type {stated!r}, not a container image", _CHECK_NAME)


def unusable(name: str, why: str, hint: Hint | None = None) -> ImageUnavailable:
    """Return the error for an image that exists but cannot be used."""
    return ImageUnavailable(
        f"`{name}` is not an image that hpcenv can use",
        why=why,
        hint=hint or "push it again with a current docker, podman or skopeo",
    )


# --- the description -------------------------------------------------------------------


def chain_id(diff_ids: Sequence[str]) -> str:
    """Return the ChainID of the topmost layer.

    OCI image-spec 1.1, config.md, "Layer ChainID": ChainID(L0) = DiffID(L0), and
    ChainID(L0|...|Ln) = Digest(ChainID(L0|...|Ln-1) + " " + DiffID(Ln)).
    """
    chain = diff_ids[0]
    for diff_id in diff_ids[1:]:
        chain = f"sha256:{hashlib.sha256(f'{chain} {diff_id}'.encode()).hexdigest()}"
    return chain


def describe(documents: ImageDocuments, wanted: Platform) -> ResolvedImage:
    """Describe an image from its manifest and its configuration.

    Args:
        documents: the manifest and the configuration, with verified digests.
        wanted: the platform that the user requested.

    Raises:
        ImageUnavailable: the documents are damaged, are for another platform, or do not describe a container image.
    """
    name = documents.reference
    manifest = read_document(documents.manifest, origin=name, what="manifest")
    config = read_document(documents.config, origin=name, what="configuration")
    check_platform(config, wanted, name)
    layers = _layers(manifest, config, name)
    run_time = _run_time(config, name)
    created = config.get("created")
    requires = [e.partition("=")[2] for e in run_time["Env"] if e.startswith("NVIDIA_REQUIRE_CUDA=")]
    return ResolvedImage(
        reference=name,
        registry=documents.registry,
        repository=documents.repository,
        tag=documents.tag,
        index_digest=documents.index_digest,
        manifest_digest=digest_of(documents.manifest),
        config_digest=digest_of(documents.config),
        platform=str(wanted),
        layers=layers,
        rootfs_chain_id=chain_id([layer.diff_id for layer in layers]),
        env_digest=digest_of(canonical(run_time)),
        nvidia_require=requires[-1] if requires else None,
        created=created if isinstance(created, str) and created else None,
        config=config,
        platforms=documents.platforms or (platform_name(config),),
        digest_origin=documents.digest_origin,
        manifest=documents.manifest,
        config_bytes=documents.config,
        layout=documents.layout,
    )


def _layers(manifest: Mapping[str, Any], config: Mapping[str, Any], name: str) -> tuple[Layer, ...]:
    rootfs = config.get("rootfs")
    diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    blobs = manifest.get("layers")
    if not isinstance(diff_ids, list) or not isinstance(blobs, list) or not blobs:
        raise unusable(name, "it has no layers, so there is nothing to run", "build it again, with files in it")
    if len(blobs) > _MOST_LAYERS:
        raise unusable(name, f"it has {len(blobs)} layers; hpcenv takes at most {_MOST_LAYERS}")
    if len(diff_ids) != len(blobs):
        raise unusable(name, f"its manifest has {len(blobs)} layers, its configuration {len(diff_ids)}")
    return tuple(_layer(blob, diff_id, name) for blob, diff_id in zip(blobs, diff_ids, strict=True))


def _layer(blob: object, diff_id: object, name: str) -> Layer:
    entry = blob if isinstance(blob, dict) else {}
    digest, size, media = entry.get("digest"), entry.get("size"), entry.get("mediaType")
    for value in (digest, diff_id):
        if not isinstance(value, str) or not DIGEST.fullmatch(value):
            raise unusable(name, f"a layer has the digest {str(value)[:80]!r}, not a sha256 one")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise unusable(name, f"the layer {digest} has the size {str(size)[:40]!r}")
    if not isinstance(media, str) or not _LAYER.fullmatch(media):
        raise unusable(name, f"the layer {digest} is of type {str(media)[:100]!r}", _layer_hint(str(media)))
    return Layer(digest=str(digest), diff_id=str(diff_id), size=size, media_type=media)


def _layer_hint(media: str) -> str:
    if "encrypted" in media:
        return "the layer is encrypted; decrypt the image: skopeo copy --decryption-key KEY"
    if "foreign" in media:
        return "the layer is a Windows layer, which does not run here; choose an image for linux"
    return "hpcenv reads OCI's and docker's layers (tar, gzip, zstd); push the image again with docker or podman"


def _run_time(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the run-time settings.

    An absent, a null and an empty value have the same meaning, because builders use all three to say "not set".
    """
    settings = config.get("config") or {}
    if not isinstance(settings, dict):
        raise unusable(name, "its configuration has no settings table")
    found: dict[str, Any] = {}
    for key in ("Env", "Entrypoint", "Cmd"):
        value = settings.get(key) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise unusable(name, f"{key} in its configuration is not a list of strings")
        found[key] = sorted(value) if key == "Env" else value
    for key in ("WorkingDir", "User"):
        found[key] = str(settings.get(key) or "")
    return found


def canonical(value: object) -> bytes:
    """Return canonical JSON: sorted keys, no spaces, UTF-8."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")
