"""Resolve an image reference to digests, by asking its registry, and open its blobs.

Runs on: LOGIN NODE.

A tag is a name that moves; what hpcenv locks are digests of bytes that it has seen and
hashed itself. `resolve` fetches the manifest (through the index of a multi-arch image)
and the image's configuration, a few kilobytes; `open_source` gives the layers, which
`blobs.fetch_all` brings home.

How requests are sent and what a registry's refusals mean is in `registry_client`, which
loads an HTTP library and is imported on use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from hpcenv.adapters import credentials, manifests
from hpcenv.adapters.manifests import Layer, ResolvedImage, chain_id
from hpcenv.adapters.references import Platform, Reference, parse_platform, parse_reference, refuse_floating
from hpcenv.errors import FileUnusable

if TYPE_CHECKING:
    from hpcenv.adapters.registry_client import Client, RegistryBlobs

__all__ = ["Layer", "Reference", "ResolvedImage", "chain_id", "open_source", "parse_reference", "resolve"]

_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


def resolve(
    reference: str,
    *,
    platform: str = "linux/amd64",
    plain_http: bool = False,
    allow_floating: bool = False,
    timeout: float = 30.0,
    environ: Mapping[str, str] = _NO_VARIABLES,
    ca_file: Path | None = None,
) -> ResolvedImage:
    """Ask the registry what `reference` is, and verify every byte of the answer.

    Args:
        reference: `docker://host[:port]/path[:tag][@digest]`; with both, the digest counts.
        platform: `os/architecture[/variant]` to choose from a multi-arch image.
        plain_http: speak http; only for registries the user listed so.
        allow_floating: accept `latest` or no tag.
        timeout: seconds for one request with its retries; there are at most four, and as
            many for a login.
        environ: the user's environment, for credentials (see `credentials.find`).
        ca_file: certificates to trust instead of the system's, PEM; without it the
            process's `REQUESTS_CA_BUNDLE` counts.

    Raises:
        SpecError: the reference or platform makes no sense, or floats.
        ImageUnavailable: anything that the network, the registry or the image is to blame for.
        FileUnusable: `ca_file` cannot be read.
    """
    asked = parse_reference(reference)
    wanted = parse_platform(platform)
    if asked.digest is None and asked.tag in (None, "latest") and not allow_floating:
        refuse_floating(asked)
    _check_ca(ca_file)
    from hpcenv.adapters.registry_client import Client

    found = credentials.find(asked.registry, asked.repository, environ)
    client = Client(asked, found, plain_http=plain_http, ca_file=ca_file, timeout=timeout)
    with contextlib.closing(client):
        client.authenticate()
        return manifests.describe(_found(client, asked, wanted), wanted)


def _found(client: Client, asked: Reference, wanted: Platform) -> manifests.Found:
    """Fetch the manifest, through the index where there is one, and the configuration."""
    digest, body = client.manifest(asked.digest or asked.tag or "latest")
    document = manifests.read_document(body, origin=asked.registry, what="manifest")
    index_digest: str | None = None
    platforms: tuple[str, ...] = ()
    if manifests.kind(document) == "index":
        index_digest = digest
        digest, platforms = manifests.choose(document, wanted, str(asked))
        digest, body = client.manifest(digest)
        document = manifests.read_document(body, origin=asked.registry, what="manifest")
    if manifests.kind(document) != "manifest":
        raise manifests.unusable(str(asked), manifests.why_no_manifest(document))
    return manifests.Found(
        reference=str(asked),
        registry=asked.registry,
        repository=asked.repository,
        tag=asked.tag,
        index_digest=index_digest,
        platforms=platforms,
        manifest=body,
        config=client.config(manifests.config_descriptor(document, str(asked))),
    )


def open_source(
    resolved: ResolvedImage,
    *,
    plain_http: bool = False,
    timeout: float = 30.0,
    environ: Mapping[str, str] = _NO_VARIABLES,
    ca_file: Path | None = None,
) -> RegistryBlobs:
    """Open the blobs of an image that `resolve` gave, for `blobs.fetch_all`; close it after.

    Nothing is asked before the first blob is. Arguments as for `resolve`; `timeout` is for
    the registry's answer to begin, not for the blob.

    Raises:
        FileUnusable: `ca_file` cannot be read.
    """
    asked = parse_reference(resolved.reference)
    _check_ca(ca_file)
    from hpcenv.adapters.registry_client import RegistryBlobs

    found = credentials.find(asked.registry, asked.repository, environ)
    return RegistryBlobs(asked, found, plain_http=plain_http, ca_file=ca_file, timeout=timeout)


def _check_ca(ca_file: Path | None) -> None:
    """Refuse a CA file that is not one, here where it can be named."""
    if ca_file is None:
        return
    import ssl

    try:
        ssl.create_default_context().load_verify_locations(cafile=ca_file)
    except OSError as error:  # ssl.SSLError is one
        reason = "it holds no certificates (PEM)" if isinstance(error, ssl.SSLError) else error.strerror
        raise FileUnusable(
            f"`{ca_file}` cannot be used as a CA file", why=reason, hint="name a file of PEM certificates"
        ) from None
