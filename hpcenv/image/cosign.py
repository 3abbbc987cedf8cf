"""Verify an image's signature that cosign made with a key.

Runs on: LOGIN NODE. Needs `openssl` 1.1.1 or newer, for Ed25519 keys 3.0; the program `cosign` is not needed.

Two forms, both without a transparency log (seen with cosign 2.5.0 of Debian 13 and 3.1.1 of Debian unstable,
2026-11-23):

- cosign 2 (`specs/SIGNATURE_SPEC.md` of sigstore/cosign): a manifest with the tag `sha256-HEX.sig`. Each layer is a
  small document that names the image's digest; an annotation has the signature over the document's bytes.
- cosign 3: a referrer of the image, a sigstore bundle 0.3. It has a DSSE envelope (secure-systems-lab/dsse, protocol.md
  1.0) with an in-toto statement that names the image's digest. An attestation has the same form; its predicate type is
  another one, and it is no signature of the image.

cosign 3 signs with an Ed25519 key by Ed25519ph (RFC 8032), which openssl knows since 3.2 only: such a signature is
refused. Decision record 0027 says why openssl.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpcenv import process
from hpcenv.errors import FileUnusable, SignatureInvalid
from hpcenv.image.reference import RegistryName
from hpcenv.image.registry import source
from hpcenv.image.registry.manifests import MANIFESTS, read_document
from hpcenv.image.registry.source import Access
from hpcenv.progress import Event, OnEvent
from hpcenv.records.files import read_file

if TYPE_CHECKING:
    from hpcenv.image.registry.client import Client

__all__ = ["CosignSignature", "require_signature"]

_SIMPLE = "application/vnd.dev.cosign.simplesigning.v1+json"
_SIMPLE_TYPE = "cosign container image signature"
_SIGNATURE = "dev.cosignproject.cosign/signature"
_BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_IN_TOTO = "application/vnd.in-toto+json"
_STATEMENT = "https://in-toto.io/Statement/v1"
_SIGNED = "https://sigstore.dev/cosign/sign/v1"
# cosign 3.1 lists its bundle under the type of the empty configuration, where the registry has no referrers API.
_LISTED_AS = ("", _BUNDLE, "application/vnd.oci.empty.v1+json")
# RFC 8410, section 4: the beginning of an Ed25519 public key.
_ED25519 = bytes.fromhex("302a300506032b6570032100")
_LONGEST_KEY = 64 << 10
_SECONDS = 30.0
# Everybody who may write to the repository can add signatures; each one costs two starts of a program.
_MOST = 100


@dataclass(frozen=True, kw_only=True)
class CosignSignature:
    """A valid signature: what it covers, and its form."""

    digest: str
    form: Literal["tag", "bundle"]


@dataclass(frozen=True, kw_only=True)
class _Claim:
    """A signature that is not verified yet.

    Attributes:
        message: the bytes that were signed.
        names: the digest that these bytes name, `sha256:HEX`; empty if they are no signature of an image.
    """

    form: Literal["tag", "bundle"]
    message: bytes
    signature: bytes
    names: str


def require_signature(
    name: RegistryName, digests: tuple[str, ...], key: Path, access: Access, *, on_event: OnEvent
) -> CosignSignature:
    """Return a valid signature of an image.

    Args:
        name: the image, for its registry and repository.
        digests: of its manifest, and of the index through which it was found; one of them must be signed.
        key: the public key, in PEM form.
        access: how to connect to the registry.
        on_event: gets the result.

    Raises:
        SignatureInvalid: the image has no signature of this key.
        FileUnusable: the key cannot be read, or is no public key.
        ToolMissing: there is no `openssl`.
        ImageUnavailable: the registry refuses it or cannot be reached.
    """
    content = _read_key(key)
    seen: list[str] = []
    with (
        contextlib.closing(source.open_client(name, access, on_event=on_event)) as client,
        tempfile.TemporaryDirectory(prefix="hpcenv-cosign-") as place,
    ):
        openssl = _OpenSsl(folder=Path(place), program=_find_openssl(), key=content, key_path=key)
        client.authenticate()
        for digest in digests:
            for claim in _claims(client, digest):
                if not openssl.verifies(claim):
                    prehashed = openssl.is_ed25519 and claim.form == "bundle"
                    more = ", or of cosign 3 with this kind of key (Ed25519ph), which hpcenv cannot verify"
                    seen.append(
                        f"one in the form of a {claim.form} is of another key, or damaged{more if prehashed else ''}"
                    )
                elif claim.names != digest:
                    seen.append(f"one in the form of a {claim.form} is valid, and not a signature of this image")
                else:
                    on_event(Event(phase="note", what=f"{digest} is signed with the key in {key.name}"))
                    return CosignSignature(digest=digest, form=claim.form)
    raise SignatureInvalid(
        f"`{name}` has no signature of the key `{key}`",
        why="\n".join(
            [f"the image is {' or '.join(digests)}", *(sorted(set(seen)) or ["the registry has no signature"])]
        ),
        hint="ask who publishes the image for the key and for a signature of this digest: cosign sign --key",
    )


# -- what the registry has ------------------------------------------------------------------


def _claims(client: Client, digest: str) -> Iterator[_Claim]:
    """Yield the signatures that a registry lists for a digest."""
    count = 0
    for form in (_of_tag, _of_bundles):
        for claim in form(client, digest):
            count += 1
            if count > _MOST:
                raise SignatureInvalid(f"more than {_MOST} signatures are in the registry for {digest}")
            yield claim


def _of_tag(client: Client, digest: str) -> Iterator[_Claim]:
    tag = f"{digest.replace(':', '-')}.sig"
    answer = client.call("GET", f"manifests/{tag}", accept=(200, 404), headers={"Accept": ", ".join(MANIFESTS)})
    if answer.status == 404:
        return
    layers = read_document(answer.body, origin=tag, what="manifest").get("layers")
    for layer in layers if isinstance(layers, list) else ():
        entry = layer if isinstance(layer, dict) else {}
        notes = entry.get("annotations")
        text = notes.get(_SIGNATURE) if isinstance(notes, dict) else None
        signature = _decoded(text)
        if entry.get("mediaType") == _SIMPLE and isinstance(entry.get("digest"), str) and signature:
            message = client.document(entry["digest"], "signature")
            yield _Claim(form="tag", message=message, signature=signature, names=_named_by_payload(message))


def _of_bundles(client: Client, digest: str) -> Iterator[_Claim]:
    from hpcenv.image.registry import referrers

    for one in referrers.list_referrers(client, digest)[:_MOST]:
        if one.artifact_type not in _LISTED_AS:
            continue
        document = referrers.read_referrer(client, one, digest)
        if document is None or document.get("artifactType") != _BUNDLE:
            continue
        for file in referrers.read_files(document):
            if file.media_type == _BUNDLE:
                yield from _of_envelope(client.document(file.spec.digest, "signature"))


def _of_envelope(body: bytes) -> Iterator[_Claim]:
    envelope = _json(body).get("dsseEnvelope")
    if not isinstance(envelope, dict) or envelope.get("payloadType") != _IN_TOTO:
        return
    payload, signatures = _decoded(envelope.get("payload")), envelope.get("signatures")
    for entry in signatures if isinstance(signatures, list) else ():
        signature = _decoded(entry.get("sig")) if isinstance(entry, dict) else b""
        if payload and signature:
            message = b"DSSEv1 %d %s %d %s" % (len(_IN_TOTO), _IN_TOTO.encode(), len(payload), payload)
            yield _Claim(form="bundle", message=message, signature=signature, names=_named_by_statement(payload))


def _named_by_payload(payload: bytes) -> str:
    critical = _json(payload).get("critical")
    image = critical.get("image") if isinstance(critical, dict) else None
    if not isinstance(critical, dict) or not isinstance(image, dict) or critical.get("type") != _SIMPLE_TYPE:
        return ""
    return str(image.get("docker-manifest-digest"))


def _named_by_statement(payload: bytes) -> str:
    statement = _json(payload)
    subjects = statement.get("subject")
    if statement.get("_type") != _STATEMENT or statement.get("predicateType") != _SIGNED:
        return ""
    if not isinstance(subjects, list) or len(subjects) != 1 or not isinstance(subjects[0], dict):
        return ""
    digest = subjects[0].get("digest")
    return f"sha256:{digest.get('sha256')}" if isinstance(digest, dict) else ""


def _json(body: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _decoded(text: object) -> bytes:
    try:
        return base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (ValueError, binascii.Error):
        return b""


# -- the key --------------------------------------------------------------------------------


def _read_key(path: Path) -> bytes:
    try:
        content = read_file(path, most=_LONGEST_KEY)
    except OSError as error:
        raise FileUnusable(f"cannot read the key `{path}`", why=error.strerror) from error
    if b"-----BEGIN PUBLIC KEY-----" not in content:
        why = "it does not begin with -----BEGIN PUBLIC KEY-----"
        raise FileUnusable(f"`{path}` is no public key", why=why, hint="name the file cosign.pub of a key pair")
    return content


def _find_openssl() -> str:
    return process.find_tool("openssl", needed_for="verify an image's signature", path=os.environ.get("PATH"))


@dataclass(frozen=True, kw_only=True)
class _OpenSsl:
    """The program that verifies: a key, a message and a signature go in as files of a private folder."""

    folder: Path
    program: str
    key: bytes
    key_path: Path

    def __post_init__(self) -> None:
        self._file("key").write_bytes(self.key)
        words = [self.program, "pkey", "-pubin", "-in", str(self._file("key")), "-noout"]
        if process.run(words, timeout=_SECONDS, accept=(0, 1)).status != 0:
            raise FileUnusable(f"`{self.key_path}` is no public key", why=f"{self.program} cannot read it")

    def _file(self, name: str) -> Path:
        return self.folder / name

    def verifies(self, claim: _Claim) -> bool:
        """Tell whether the key made this signature of this message."""
        self._file("message").write_bytes(claim.message)
        self._file("signature").write_bytes(claim.signature)
        key, message, signature = (str(self._file(name)) for name in ("key", "message", "signature"))
        if self.is_ed25519:
            words = ["pkeyutl", "-verify", "-pubin", "-inkey", key, "-rawin", "-in", message, "-sigfile", signature]
        else:
            # Keys of cosign on the curve P-256, other curves, and RSA with PKCS #1 v1.5, as in cosign.
            words = ["dgst", "-sha256", "-verify", key, "-signature", signature, message]
        return process.run([self.program, *words], timeout=_SECONDS, accept=(0, 1)).status == 0

    @property
    def is_ed25519(self) -> bool:
        """Whether the key is for Ed25519."""
        lines = self.key.decode("ascii", "replace").splitlines()
        return _decoded("".join(line.strip() for line in lines if not line.startswith("-"))).startswith(_ED25519)
