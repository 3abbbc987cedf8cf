"""One interface to images in a registry, a layout, or an archive.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hpcenv.errors import ImageUnavailable
from hpcenv.image.reference import LayeredImage, LocalImage, Platform, Reference, RegistryName
from hpcenv.image.registry import blobs, credentials, manifests, oci_layout
from hpcenv.image.registry import resolve as registry
from hpcenv.image.registry.credentials import Search
from hpcenv.image.registry.manifests import ImageDocuments, ResolvedImage
from hpcenv.image.registry.oci_layout import LocalBlobs
from hpcenv.progress import OnEvent, ignore

if TYPE_CHECKING:
    from hpcenv.image.registry.client import Client, RegistryBlobs

__all__ = ["Access", "open_blobs", "open_client", "open_source", "resolve", "resolve_stored"]

_NOT_SENT = (
    "a saved password is not sent to {0}, because only hpcenv.toml allows http for it; to send it: --plain-http {0}"
)


@dataclass(frozen=True, kw_only=True)
class Access:
    """How to connect to registries; it has no effect on images in files.

    Attributes:
        plain_http: registries that use http, by their names in references.
        without_password: registries in `plain_http` to which no saved password is sent, because hpcenv.toml lists them,
            but the user did not name them.
        ca_file: a file of PEM certificates to trust instead of the system's.
        environ: the user's environment, for credentials.
        timeout: seconds until an answer begins.
    """

    plain_http: tuple[str, ...] = ()
    without_password: tuple[str, ...] = ()
    ca_file: Path | None = None
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout: float = 30.0

    def credentials_for(self, reference: RegistryName) -> Search:
        """Return the user's credentials for a registry, if they may be sent to this registry."""
        if reference.registry in self.without_password:
            return Search(credential=None, notes=(_NOT_SENT.format(reference.registry),))
        return credentials.find(reference.registry, reference.repository, self.environ)


def resolve(
    source: LayeredImage,
    access: Access,
    *,
    platform: Platform,
    allow_floating: bool = False,
    on_event: OnEvent = ignore,
) -> ResolvedImage:
    """Resolve an image to digests; see `registry.resolve` and `oci_layout.resolve`.

    Raises:
        SpecError: the reference has no tag, or the tag `latest`.
        ImageUnavailable, FileUnusable: the image cannot be resolved.
    """
    if isinstance(source, LocalImage):
        return oci_layout.resolve(source, platform=platform)
    return registry.resolve(
        source,
        platform=platform,
        plain_http=source.registry in access.plain_http,
        allow_floating=allow_floating,
        timeout=access.timeout,
        search=access.credentials_for(source),
        ca_file=access.ca_file,
        on_event=on_event,
    )


def resolve_stored(
    reference: Reference, folder: Path, *, manifest_digest: str, index_digest: str | None = None, platform: Platform
) -> ResolvedImage | None:
    """Resolve an image from the manifest and configuration of an earlier call, without its registry.

    Manifest and configuration are hashed again. The result is None if the manifest or the configuration is missing or
    damaged.

    Args:
        reference: the image that the user requested.
        folder: the folder of blobs; `image/registry/blobs.py` defines its layout.
        manifest_digest: the digest of the platform's manifest.
        index_digest: the digest of the index that `reference` names; None if it names no index.
        platform: the platform that the user requested.

    Raises:
        ImageUnavailable: the stored image is for another platform.
    """
    manifest = _stored(folder, manifest_digest, manifests.MANIFEST_LIMIT)
    if manifest is None:
        return None
    try:
        document = manifests.read_document(manifest, origin=str(folder), what="manifest")
        if manifests.kind(document) != "manifest":
            return None
        config = _stored(folder, manifests.config_descriptor(document, str(reference)), manifests.CONFIG_LIMIT)
    except ImageUnavailable:
        return None  # the bytes are right but describe no image: the registry's answer will give the reason
    if config is None:
        return None
    documents = ImageDocuments(
        reference=str(reference),
        registry=reference.registry,
        repository=reference.repository,
        tag=reference.tag,
        index_digest=index_digest,
        manifest=manifest,
        config=config,
    )
    return manifests.describe(documents, platform)


def _stored(folder: Path, digest: str, limit: int) -> bytes | None:
    """Return a stored blob of at most `limit` bytes; None if it is missing or damaged."""
    try:
        with open(blobs.blob_path(folder, digest), "rb") as file:
            data = file.read(limit + 1)
    except OSError:
        return None
    return data if manifests.digest_of(data) == digest else None


def open_client(reference: RegistryName, access: Access, *, on_event: OnEvent = ignore) -> Client:
    """Return a connection to the repository of a reference; the caller closes it.

    Raises:
        FileUnusable: the file of certificates cannot be read.
    """
    from hpcenv.image.registry.client import Client  # loads requests

    registry.check_ca(access.ca_file)
    return Client(
        reference,
        access.credentials_for(reference),
        plain_http=reference.registry in access.plain_http,
        ca_file=access.ca_file,
        timeout=access.timeout,
        on_event=on_event,
    )


def open_blobs(reference: RegistryName, access: Access) -> RegistryBlobs:
    """Give access to the blobs of a repository, for `blobs.fetch_all`; a context manager.

    Raises:
        FileUnusable: the file of certificates cannot be read.
    """
    return registry.open_source(
        reference,
        plain_http=reference.registry in access.plain_http,
        timeout=access.timeout,
        search=access.credentials_for(reference),
        ca_file=access.ca_file,
    )


def open_source(source: LayeredImage, resolved: ResolvedImage, access: Access) -> LocalBlobs | RegistryBlobs:
    """Give access to the layers of a resolved image; a context manager.

    Raises:
        ImageUnavailable, FileUnusable: the files of the image have disappeared.
    """
    if isinstance(source, LocalImage):
        return oci_layout.open_source(source, resolved)
    return open_blobs(source, access)
