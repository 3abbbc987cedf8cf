"""Resolve the reference of an image in a registry to digests, and open the image's layers.

Runs on: LOGIN NODE.

A tag can name a different image tomorrow. So hpcenv locks digests, and checks that the received bytes have these
digests. `resolve` fetches the manifest (through the index of a multi-platform image) and the configuration, a few
kilobytes. `open_source` gives access to the layers, which `blobs.fetch_all` downloads.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hpcenv.errors import FileUnusable
from hpcenv.image.reference import Platform, Reference, RegistryName, refuse_floating
from hpcenv.image.registry import credentials, manifests
from hpcenv.image.registry.credentials import Search
from hpcenv.image.registry.manifests import ImageDocuments, ResolvedImage
from hpcenv.progress import OnEvent, ignore

if TYPE_CHECKING:
    from hpcenv.image.registry.client import Client, RegistryBlobs

__all__ = ["check_ca", "open_source", "resolve"]

_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
_DEFAULT_PLATFORM = Platform()


def resolve(
    reference: Reference,
    *,
    platform: Platform = _DEFAULT_PLATFORM,
    plain_http: bool = False,
    allow_floating: bool = False,
    timeout: float = 30.0,
    environ: Mapping[str, str] = _NO_VARIABLES,
    search: Search | None = None,
    ca_file: Path | None = None,
    on_event: OnEvent = ignore,
) -> ResolvedImage:
    """Ask the registry which image a reference names now, and check the digests of its answers.

    Args:
        reference: the image; if it has a tag and a digest, the digest counts.
        platform: selects one image of a multi-platform image.
        plain_http: whether to use http instead of https; only for registries that the user listed.
        allow_floating: whether to accept the tag `latest`, or a reference without a tag.
        timeout: seconds for one request with its retries; resolving needs at most four
            requests, and a login at most four more.
        environ: the user's environment, for credentials (see `credentials.find`).
        search: the credentials to use instead of the credentials found through `environ`.
        ca_file: a file of PEM certificates to trust instead of the system's; without it, the variable
            `REQUESTS_CA_BUNDLE` of this process is used.
        on_event: called before a request is sent again.

    Raises:
        SpecError: the reference has no tag, or the tag `latest`.
        ImageUnavailable: the image cannot be resolved, because of the image, the registry or the network.
        FileUnusable: `ca_file` cannot be read.
    """
    from hpcenv.image.registry.client import Client  # loads requests

    if reference.floats and not allow_floating:
        refuse_floating(reference)
    check_ca(ca_file)

    search = search or credentials.find(reference.registry, reference.repository, environ)
    client = Client(reference, search, plain_http=plain_http, ca_file=ca_file, timeout=timeout, on_event=on_event)
    with contextlib.closing(client):
        client.authenticate()
        return manifests.describe(_fetch_documents(client, reference, platform), platform)


def _fetch_documents(client: Client, reference: Reference, wanted: Platform) -> ImageDocuments:
    """Fetch the manifest and the configuration. If the image has an index, the index names the manifest."""
    digest, body, document = _fetch(client, reference, reference.digest or reference.tag or "latest")
    index_digest: str | None = None
    platforms: tuple[str, ...] = ()
    if manifests.kind(document) == "index":
        index_digest = digest
        chosen = manifests.choose(document, wanted, str(reference), lambda name: _fetch(client, reference, name)[1:])
        body, document, platforms = chosen.body, chosen.document, chosen.platforms
    if manifests.kind(document) != "manifest":
        raise manifests.no_manifest(document, str(reference))
    return ImageDocuments(
        reference=str(reference),
        registry=reference.registry,
        repository=reference.repository,
        tag=reference.tag,
        index_digest=index_digest,
        platforms=platforms,
        manifest=body,
        config=client.config(manifests.config_descriptor(document, str(reference))),
    )


def _fetch(client: Client, reference: Reference, name: str) -> tuple[str, bytes, Mapping[str, Any]]:
    digest, body = client.manifest(name)
    return digest, body, manifests.read_document(body, origin=reference.registry, what="manifest")


def open_source(
    reference: RegistryName,
    *,
    plain_http: bool = False,
    timeout: float = 30.0,
    environ: Mapping[str, str] = _NO_VARIABLES,
    search: Search | None = None,
    ca_file: Path | None = None,
) -> RegistryBlobs:
    """Give access to the layers of a repository, for `blobs.fetch_all`. The caller must close the result.

    This function sends no request. The registry gets the first request when a layer is fetched.

    Args:
        reference: the image; only its registry and repository are used.
        timeout: seconds until the registry's answer begins; a layer may take longer.
        plain_http, environ, search, ca_file: as for `resolve`.

    Raises:
        FileUnusable: `ca_file` cannot be read.
    """
    from hpcenv.image.registry.client import RegistryBlobs  # loads requests

    check_ca(ca_file)
    search = search or credentials.find(reference.registry, reference.repository, environ)
    return RegistryBlobs(reference, search, plain_http=plain_http, ca_file=ca_file, timeout=timeout)


def check_ca(ca_file: Path | None) -> None:
    """Raise `FileUnusable` for a bad CA file; the HTTP library's error would not name the file."""
    if ca_file is None:
        return

    try:
        ssl.create_default_context().load_verify_locations(cafile=ca_file)
    except OSError as error:  # includes ssl.SSLError
        reason = "it contains no certificates in PEM form" if isinstance(error, ssl.SSLError) else error.strerror
        raise FileUnusable(
            f"`{ca_file}` cannot be used as a CA file", why=reason, hint="name a file of PEM certificates"
        ) from None
