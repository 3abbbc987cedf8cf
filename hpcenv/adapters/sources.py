"""One door to images, wherever they are: a registry, a layout, an archive.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hpcenv.adapters import blobs, manifests, oci_layout, registry
from hpcenv.adapters.manifests import ResolvedImage
from hpcenv.adapters.oci_layout import LocalBlobs
from hpcenv.adapters.references import LocalImage, Reference, parse_platform
from hpcenv.errors import ImageUnavailable

if TYPE_CHECKING:
    from hpcenv.adapters.registry_client import RegistryBlobs

__all__ = ["Access", "open_source", "resolve", "resolve_kept"]


@dataclass(frozen=True, kw_only=True)
class Access:
    """How to speak to a registry; nothing of it concerns files.

    Attributes:
        plain_http: the registries that the user listed so, as written in references.
        ca_file: certificates to trust instead of the system's, PEM.
        environ: the user's environment, for credentials.
        timeout: seconds for an answer to begin.
    """

    plain_http: frozenset[str] = frozenset()
    ca_file: Path | None = None
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout: float = 30.0


def resolve(
    source: Reference | LocalImage, access: Access, *, platform: str = "linux/amd64", allow_floating: bool = False
) -> ResolvedImage:
    """Find out what `source` is in digests; see `registry.resolve` and `oci_layout.resolve`.

    Raises:
        SpecError, ImageUnavailable, FileUnusable: as there.
    """
    if isinstance(source, LocalImage):
        return oci_layout.resolve(source, platform=platform)
    return registry.resolve(
        str(source),
        platform=platform,
        plain_http=source.registry in access.plain_http,
        allow_floating=allow_floating,
        timeout=access.timeout,
        environ=access.environ,
        ca_file=access.ca_file,
    )


def resolve_kept(
    asked: Reference, folder: Path, *, manifest_digest: str, index_digest: str | None = None, platform: str
) -> ResolvedImage | None:
    """Find out the same from the manifest and configuration that an earlier call kept; ask nobody.

    Every byte is hashed again. None where one of the two is missing or damaged.

    Args:
        asked: what the user asked for.
        folder: of blobs, as `adapters/blobs.py` takes it.
        manifest_digest: of the platform's manifest.
        index_digest: of the index that `asked` names, where it names one.

    Raises:
        SpecError: the platform makes no sense.
        ImageUnavailable: what is kept is an image for another platform.
    """
    wanted = parse_platform(platform)
    manifest = _kept(folder, manifest_digest, manifests.MANIFEST_LIMIT)
    if manifest is None:
        return None
    try:
        document = manifests.read_document(manifest, origin=str(folder), what="manifest")
        if manifests.kind(document) != "manifest":
            return None
        config = _kept(folder, manifests.config_descriptor(document, str(asked)), manifests.CONFIG_LIMIT)
    except ImageUnavailable:
        return None  # it has its digest and is no image: the registry's answer says why
    if config is None:
        return None
    return manifests.describe(
        manifests.Found(
            reference=str(asked),
            registry=asked.registry,
            repository=asked.repository,
            tag=asked.tag,
            index_digest=index_digest,
            manifest=manifest,
            config=config,
        ),
        wanted,
    )


def _kept(folder: Path, digest: str, most: int) -> bytes | None:
    try:
        with open(blobs.blob_path(folder, digest), "rb") as file:
            data = file.read(most + 1)
    except OSError:
        return None
    return data if manifests.digest_of(data) == digest else None


def open_source(source: Reference | LocalImage, resolved: ResolvedImage, access: Access) -> LocalBlobs | RegistryBlobs:
    """Open the blobs of what `resolve` gave; a context manager.

    Raises:
        ImageUnavailable, FileUnusable: it is not there any more.
    """
    if isinstance(source, LocalImage):
        return oci_layout.open_source(source, resolved)
    return registry.open_source(
        resolved,
        plain_http=source.registry in access.plain_http,
        timeout=access.timeout,
        environ=access.environ,
        ca_file=access.ca_file,
    )
