"""Write to a repository of a registry: blobs, and manifests that name them.

Runs on: LOGIN NODE. Loads `requests`.

OCI distribution-spec 1.1 (2024-02), "Pushing a blob monolithically: POST then PUT", as Apptainer does it
(go-containerregistry, `remote.Write`). The registry compares a blob with its digest before it stores it. hpcenv hashes
the bytes once more while it sends them, so a file that changes during an upload is named.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin, urlsplit

from hpcenv.errors import FileUnusable, ImageUnavailable
from hpcenv.image.registry.blobs import BlobSpec, Broken
from hpcenv.image.registry.client import Client
from hpcenv.image.registry.manifests import MANIFESTS, digest_of
from hpcenv.progress import Event, OnEvent, ignore

__all__ = ["EMPTY", "UploadedManifest", "push_blob", "push_bytes", "push_file", "push_manifest"]

# image-spec 1.1, manifest.md, "Guidance for an Empty Descriptor".
EMPTY = b"{}"
_CHUNK = 1024 * 1024
_EVENT_SECONDS = 0.2
# Seconds before the second and the third attempt; each attempt sends the blob from its beginning.
_PAUSES = (1.0, 4.0)
_LONGEST_PAUSE = 60.0


@dataclass(frozen=True, kw_only=True)
class UploadedManifest:
    """A manifest in a registry.

    Attributes:
        size: in bytes.
        indexed: the registry lists it as a referrer of its subject (`OCI-Subject` in the answer).
    """

    digest: str
    size: int
    indexed: bool


def push_bytes(client: Client, content: bytes) -> BlobSpec:
    """Upload a small blob from memory, unless the repository has it.

    Raises:
        ImageUnavailable: the registry refuses it or cannot be reached.
    """
    spec = BlobSpec(digest=digest_of(content), size=len(content))
    _push(client, spec, lambda: iter((content,)))
    return spec


def push_file(client: Client, spec: BlobSpec, path: Path, *, on_event: OnEvent = ignore) -> bool:
    """Upload a file as a blob, unless the repository has it; return whether it was uploaded.

    Raises:
        ImageUnavailable: the registry refuses it or cannot be reached.
        FileUnusable: the file cannot be read, or changes during the upload.
    """
    return push_blob(client, spec, path.name, lambda: _chunks_of(path), on_event=on_event)


def push_blob(
    client: Client, spec: BlobSpec, name: str, content: Callable[[], Iterator[bytes]], *, on_event: OnEvent = ignore
) -> bool:
    """Upload a blob, unless the repository has it; return whether it was uploaded.

    Args:
        client: of the repository.
        spec: the digest and the size.
        name: of the content, for messages.
        content: begins to read it.
        on_event: gets the progress.

    Raises:
        ImageUnavailable: the registry refuses it or cannot be reached.
        FileUnusable: the content is not what `spec` says.
    """
    return _push(client, spec, lambda: _checked(content(), name, spec, on_event))


def push_manifest(client: Client, name: str, body: bytes, media_type: str = MANIFESTS[0]) -> UploadedManifest:
    """Upload a manifest or index under a tag or under its digest; a tag that exists then names the new one.

    Raises:
        ImageUnavailable: the registry refuses it or cannot be reached.
    """
    answer = client.call("PUT", f"manifests/{name}", accept=(201,), headers={"Content-Type": media_type}, body=body)
    return UploadedManifest(digest=digest_of(body), size=len(body), indexed="OCI-Subject" in answer.headers)


def _push(client: Client, spec: BlobSpec, content: Callable[[], Iterator[bytes]]) -> bool:
    if client.call("HEAD", f"blobs/{spec.digest}", accept=(200, 404)).status == 200:
        return False
    for pause in (*_PAUSES, None):
        try:
            client.send_blob(_location(client, spec), content, spec.size)
            return True
        except Broken as broken:
            wait = max(pause or 0.0, broken.retry_after or 0.0)
            if pause is None or wait > _LONGEST_PAUSE:
                raise broken.error from None
            time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def _location(client: Client, spec: BlobSpec) -> str:
    """Begin an upload; return the address for the bytes."""
    answer = client.call("POST", "blobs/uploads/", accept=(202,), headers={"Content-Length": "0"})
    try:
        location = urljoin(answer.url, answer.headers.get("Location", ""))
        query = urlsplit(location).query
    except ValueError:
        location, query = answer.url, ""
    if location == answer.url:
        raise ImageUnavailable(
            f"`{urlsplit(answer.url).netloc}` accepted an upload and named no usable address for it",
            hint="check that the host is a registry, and that its proxy keeps the header Location",
        )
    # The digest is added as text: a parsed query would be written anew, and storages sign theirs.
    return f"{location}{'&' if query else '?'}digest={spec.digest}"


def _chunks_of(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except OSError as error:
        raise FileUnusable(f"cannot read `{path}`", why=error.strerror) from error


def _checked(content: Iterator[bytes], name: str, spec: BlobSpec, on_event: OnEvent) -> Iterator[bytes]:
    found, done, said = hashlib.sha256(), 0, 0.0
    for chunk in content:
        found.update(chunk)
        done += len(chunk)
        if done > spec.size or (done == spec.size and f"sha256:{found.hexdigest()}" != spec.digest):
            break  # the last bytes stay here: the registry never has a whole blob of this name
        yield chunk
        if time.monotonic() - said > _EVENT_SECONDS or done == spec.size:
            said = time.monotonic()
            on_event(Event(phase="push", what=name, done=done, total=spec.size, unit="bytes"))
    if done != spec.size or f"sha256:{found.hexdigest()}" != spec.digest:
        raise FileUnusable(f"`{name}` changed while it was uploaded", hint="try again when nothing writes to it")
