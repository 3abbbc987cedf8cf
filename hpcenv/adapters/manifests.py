"""From the raw bytes of a manifest and a configuration to what an image is.

Runs on: LOGIN NODE. Pure. OCI image-spec 1.1 (2024-02) and Docker's Image Manifest V2,
Schema 2. The bytes come from registries, layouts and archives that nobody vouches for:
every field is checked for its type before it is used, and `HpcenvError` is all that
comes out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hpcenv.adapters.references import DIGEST, Platform
from hpcenv.errors import ImageUnavailable

__all__ = [
    "CONFIGS",
    "CONFIG_LIMIT",
    "INDEXES",
    "MANIFESTS",
    "MANIFEST_LIMIT",
    "PLAIN_LAYER",
    "Found",
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
    "platform_name",
    "printable",
    "read_document",
    "spell_platform",
    "unusable",
    "why_no_manifest",
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

# What no image has: a bound on what is kept in memory, far above any known image (docker
# itself stops at 127 layers).
_MOST_LAYERS = 4096


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: digest of the (compressed) blob and of the tar inside it."""

    digest: str
    diff_id: str
    size: int
    media_type: str


@dataclass(frozen=True, kw_only=True)
class ResolvedImage:
    """What a reference meant when it was asked, in digests of verified bytes.

    Attributes:
        reference: `docker://...` as asked, with registry and `library/` spelled out; a
            layout or archive as written.
        registry, repository: where it was found; empty for a layout or an archive.
        index_digest: of the multi-arch index; None when the reference names one image.
        manifest_digest: of the platform's manifest; pull by this one.
        config_digest: docker's image ID.
        rootfs_chain_id: identity of the file system (`chain_id` of all diff_ids).
        env_digest: of what the image sets at run time: sorted Env, Entrypoint, Cmd,
            WorkingDir and User, as canonical JSON.
        nvidia_require: `NVIDIA_REQUIRE_CUDA` of the image's environment.
        created: RFC 3339, as the image says.
        config: the whole image configuration.
        platforms: what the index offered, sorted; the image's own when there was none.
        digest_origin: who made the manifest: a `registry`, a `layout` (also in an
            archive), or hpcenv itself (`synthesised`, see `oci_layout`).
        manifest: the manifest's bytes; they have `manifest_digest`.
        config_bytes: the configuration's bytes; they have `config_digest`.
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


@dataclass(frozen=True, kw_only=True)
class Found:
    """The verified pieces that `describe` needs; fields as in `ResolvedImage`."""

    reference: str
    registry: str = ""
    repository: str = ""
    tag: str | None = None
    index_digest: str | None = None
    platforms: tuple[str, ...] = ()
    digest_origin: DigestOrigin = "registry"
    manifest: bytes = field(repr=False)
    config: bytes = field(repr=False)


def digest_of(data: bytes) -> str:
    """Return `sha256:` and the hexadecimal digest of `data`."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def read_document(body: bytes, *, origin: str, what: str) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        origin: whose answer it is, for the error.
        what: `manifest` or `configuration`.

    Raises:
        ImageUnavailable: it is not one.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ImageUnavailable(
            f"`{origin}` answered with something that is not an image {what}",
            why=f"the answer begins {body[:60]!r}",
            hint="check the host and port; a proxy or login page may have answered instead",
        )
    return document


# --- reading manifests -----------------------------------------------------------------


def kind(document: Mapping[str, Any]) -> str:
    """Return `index`, `manifest` or another word.

    image-spec 1.1 says of `mediaType` that it SHOULD be used; where it is missing, the
    two are told apart by the field that only one of them has.
    """
    media = document.get("mediaType")
    if media in INDEXES or (media is None and "manifests" in document):
        return "index"
    if media in MANIFESTS or (media is None and "config" in document):
        return "manifest"
    return "other"


def why_no_manifest(document: Mapping[str, Any]) -> str:
    """Say what a document is instead of an image's manifest."""
    if document.get("schemaVersion") == 1:
        return "its manifest is Docker's schema 1, which has no digests of the layers' contents"
    if kind(document) == "index":
        return "its index lists another index"
    return f"its manifest is of type {str(document.get('mediaType'))[:100]!r}"


def choose(index: Mapping[str, Any], wanted: Platform, name: str) -> tuple[str, tuple[str, ...]]:
    """Return the digest of the first manifest for the platform, and all platforms there are.

    image-spec 1.1, image-index.md: "If multiple manifests match a client or runtime's
    requirements, the first matching entry SHOULD be used."

    Raises:
        ImageUnavailable: there is none for that platform; the error lists the others.
    """
    entries = index.get("manifests")
    there: list[str] = []
    chosen: Mapping[str, Any] | None = None
    for entry in entries if isinstance(entries, list) else []:
        platform = entry.get("platform") if isinstance(entry, dict) else None
        if not isinstance(platform, dict) or platform.get("os") == "unknown":
            continue  # attestations carry unknown/unknown
        there.append(platform_name(platform))
        if chosen is None and _platform_fits(platform, wanted):
            chosen = entry
    platforms = tuple(sorted(set(there)))
    asked = spell_platform(wanted)
    if chosen is None:
        raise ImageUnavailable(
            f"`{name}` has no image for {asked}",
            why=f"platforms there are: {', '.join(platforms)[:2000] or 'none'}",
            hint="set platform to one of them, or choose another image",
        )
    digest = chosen.get("digest")
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise unusable(name, f"its index gives no sha256 digest for {asked}")
    return digest, platforms


def spell_platform(platform: Platform) -> str:
    """Return `os/architecture[/variant]`."""
    return "/".join(part for part in platform if part)


def platform_name(platform: Mapping[str, Any]) -> str:
    """Spell the platform of an index's entry or of a configuration."""
    parts = (platform.get("os"), platform.get("architecture"), platform.get("variant"))
    return printable("/".join(str(part)[:40] for part in parts if part))


def printable(text: str) -> str:
    """Return an image's words fit for a terminal: no control characters, no lone surrogates."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _platform_fits(platform: Mapping[str, Any], wanted: Platform) -> bool:
    system, architecture, variant = wanted
    return (
        platform.get("os") == system
        and platform.get("architecture") == architecture
        and (variant is None or platform.get("variant") == variant)
    )


def check_platform(config: Mapping[str, Any], wanted: Platform, name: str) -> None:
    """Raise `ImageUnavailable` for the configuration of another platform."""
    if not _platform_fits(config, (wanted[0], wanted[1], None)):
        raise ImageUnavailable(
            f"`{name}` has no image for {spell_platform(wanted)}",
            why=f"it is an image for {platform_name(config) or 'an unnamed platform'}",
            hint="set platform to that, or choose another image",
        )


def config_descriptor(manifest: Mapping[str, Any], name: str) -> str:
    """Return the digest of the image's configuration; `ImageUnavailable` where there is none."""
    config = manifest.get("config")
    if not isinstance(config, dict) or not isinstance(config.get("digest"), str):
        raise unusable(name, "its manifest names no configuration")
    if config.get("mediaType") not in CONFIGS:
        raise unusable(name, f"it holds {str(config.get('mediaType'))[:100]!r}, not a container image")
    digest = config["digest"]
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise unusable(name, f"its configuration has the digest {str(digest)[:80]!r}, not a sha256 one")
    return digest


def unusable(name: str, why: str, hint: str | None = None) -> ImageUnavailable:
    """Return the error for an image that is there and cannot be used."""
    return ImageUnavailable(
        f"`{name}` is not an image that hpcenv can use",
        why=why,
        hint=hint or "push it again with a current docker, podman or skopeo",
    )


# --- what it means ---------------------------------------------------------------------


def chain_id(diff_ids: Sequence[str]) -> str:
    """Return the ChainID of the topmost layer.

    OCI image-spec 1.1, config.md, "Layer ChainID": ChainID(L0) = DiffID(L0), and
    ChainID(L0|...|Ln) = Digest(ChainID(L0|...|Ln-1) + " " + DiffID(Ln)).
    """
    chain = diff_ids[0]
    for diff_id in diff_ids[1:]:
        chain = f"sha256:{hashlib.sha256(f'{chain} {diff_id}'.encode()).hexdigest()}"
    return chain


def describe(found: Found, wanted: Platform) -> ResolvedImage:
    """Read a manifest and its configuration, both verified by digest before.

    Raises:
        ImageUnavailable: they are damaged, of another platform or of a kind that is no
            container image.
    """
    name = found.reference
    manifest = read_document(found.manifest, origin=name, what="manifest")
    config = read_document(found.config, origin=name, what="configuration")
    check_platform(config, wanted, name)
    layers = _layers(manifest, config, name)
    run_time = _run_time(config, name)
    created = config.get("created")
    requires = [e.partition("=")[2] for e in run_time["Env"] if e.startswith("NVIDIA_REQUIRE_CUDA=")]
    return ResolvedImage(
        reference=name,
        registry=found.registry,
        repository=found.repository,
        tag=found.tag,
        index_digest=found.index_digest,
        manifest_digest=digest_of(found.manifest),
        config_digest=digest_of(found.config),
        platform=spell_platform(wanted),
        layers=layers,
        rootfs_chain_id=chain_id([layer.diff_id for layer in layers]),
        env_digest=digest_of(canonical(run_time)),
        nvidia_require=requires[-1] if requires else None,
        created=created if isinstance(created, str) and created else None,
        config=config,
        platforms=found.platforms or (platform_name(config),),
        digest_origin=found.digest_origin,
        manifest=found.manifest,
        config_bytes=found.config,
    )


def _layers(manifest: Mapping[str, Any], config: Mapping[str, Any], name: str) -> tuple[Layer, ...]:
    rootfs = config.get("rootfs")
    diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    blobs = manifest.get("layers")
    if not isinstance(diff_ids, list) or not isinstance(blobs, list) or not blobs:
        raise unusable(name, "it has no layers")
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
        raise unusable(
            name,
            f"the layer {digest} is of type {str(media)[:100]!r}",
            "encrypted and foreign (Windows) layers cannot be converted",
        )
    return Layer(digest=str(digest), diff_id=str(diff_id), size=size, media_type=media)


def _run_time(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the run-time settings, with absent, null and empty made one.

    Builders differ in which of the three they write for "not set".
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
    """Return JSON with one possible spelling: sorted keys, no spaces, UTF-8."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")
