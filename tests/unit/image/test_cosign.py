"""Signatures that real cosigns made: found, verified, and told apart from what is not one. See tests/cosign/README.md."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_server import OCI, PushServed, sha

from hpcenv.errors import FileUnusable, SignatureInvalid
from hpcenv.image.cosign import CosignSignature, require_signature
from hpcenv.image.reference import parse_reference
from hpcenv.image.registry.source import Access

MADE = Path(__file__).resolve().parents[2] / "cosign"
DIGEST = "sha256:531bb809a382763ac11aa1dd883faac6eba797b8cf06c5db123c5068c74584a3"
OTHER = "sha256:" + "0" * 64


@pytest.fixture(autouse=True)
def openssl() -> None:
    if shutil.which("openssl") is None:
        pytest.skip("NOT CHECKED: no openssl on PATH")


@pytest.fixture
def registry() -> Iterator[PushServed]:
    it = PushServed(referrers=False)
    yield it
    it.close()


def hold(served: PushServed, name: str) -> dict[str, Any]:
    """Let the registry hold what a cosign left in one."""
    content: dict[str, Any] = json.loads((MADE / f"{name}.json").read_text())
    for key, text in content["manifests"].items():
        served.manifests["lab/img", key] = (json.loads(text)["mediaType"], text.encode())
    for key, text in content["blobs"].items():
        served.blobs["lab/img", key] = text.encode()
    return content


def verify(served: PushServed, key: str, *digests: str) -> CosignSignature:
    name = parse_reference(f"docker://{served.host}/lab/img:1")
    access = Access(plain_http=(served.host,), environ={"HOME": "/none"})
    return require_signature(name, digests or (DIGEST,), MADE / f"{key}.pub", access, on_event=lambda _: None)


@pytest.mark.parametrize(
    ("made", "key", "form"),
    [
        ("cosign-2", "a", "tag"), ("cosign-2-two-keys", "a", "tag"), ("cosign-2-two-keys", "b", "tag"),
        ("cosign-2-ed25519", "ed", "tag"), ("cosign-3", "a", "bundle"), ("cosign-3-two-keys", "a", "bundle"),
        ("cosign-3-two-keys", "b", "bundle"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("api", [False, True])
def test_a_signature_of_the_key(registry: PushServed, made: str, key: str, form: str, api: bool) -> None:
    hold(registry, made)
    registry.referrers = api
    assert verify(registry, key) == CosignSignature(digest=DIGEST, form=form)  # type: ignore[arg-type]
    # The index through which an image was found may be the signed one.
    assert verify(registry, key, OTHER, DIGEST).digest == DIGEST


@pytest.mark.parametrize(
    ("made", "key"), [("cosign-2", "b"), ("cosign-3", "b"), ("cosign-2", "ed"), ("cosign-3", "ed")]
)
def test_another_key_is_refused(registry: PushServed, made: str, key: str) -> None:
    hold(registry, made)
    with pytest.raises(SignatureInvalid) as error:
        verify(registry, key)
    assert "is of another key, or damaged" in (error.value.why or "")


def test_what_cannot_be_verified_is_refused_and_named(registry: PushServed) -> None:
    """cosign 3 signs by Ed25519ph, which the openssl of today's clusters does not have."""
    hold(registry, "cosign-3-ed25519")
    with pytest.raises(SignatureInvalid) as error:
        verify(registry, "ed")
    assert "Ed25519ph" in (error.value.why or "")


def test_no_signature_is_refused(registry: PushServed) -> None:
    for api in (False, True):
        registry.referrers = api
        with pytest.raises(SignatureInvalid) as error:
            verify(registry, "a")
        assert "the registry has no signature" in (error.value.why or "")


def test_an_attestation_is_no_signature(registry: PushServed) -> None:
    hold(registry, "cosign-3-attestation")
    with pytest.raises(SignatureInvalid) as error:
        verify(registry, "a")
    assert "is valid, and not a signature of this image" in (error.value.why or "")


def test_a_signature_of_another_image_under_this_tag(registry: PushServed) -> None:
    """Somebody who may write to the repository copies a valid signature to the tag of another image."""
    held = hold(registry, "cosign-2")
    manifest = held["manifests"][DIGEST.replace(":", "-") + ".sig"].encode()
    registry.manifests["lab/img", OTHER.replace(":", "-") + ".sig"] = (OCI + "manifest.v1+json", manifest)
    with pytest.raises(SignatureInvalid) as error:
        verify(registry, "a", OTHER)
    assert "is valid, and not a signature of this image" in (error.value.why or "")


def test_a_bundle_of_another_image_with_this_subject(registry: PushServed) -> None:
    held = hold(registry, "cosign-3")
    (name,) = (key for key in held["manifests"] if key.startswith("sha256:") and key != DIGEST)
    moved = json.loads(held["manifests"][name])
    moved["subject"]["digest"] = OTHER
    body = json.dumps(moved).encode()
    registry.manifests["lab/img", sha(body)] = (moved["mediaType"], body)
    registry.referrers = True
    with pytest.raises(SignatureInvalid) as error:
        verify(registry, "a", OTHER)
    assert "is valid, and not a signature of this image" in (error.value.why or "")


def test_a_changed_payload_is_refused(registry: PushServed) -> None:
    """The registry serves a consistent signature whose signed bytes were changed."""
    held = hold(registry, "cosign-2")
    tag = DIGEST.replace(":", "-") + ".sig"
    manifest = json.loads(held["manifests"][tag])
    (blob,) = held["blobs"].values()
    changed = blob.replace("null", "true").encode()
    registry.blobs["lab/img", sha(changed)] = changed
    manifest["layers"][0] |= {"digest": sha(changed), "size": len(changed)}
    registry.manifests["lab/img", tag] = (manifest["mediaType"], json.dumps(manifest).encode())
    with pytest.raises(SignatureInvalid):
        verify(registry, "a")

    held = hold(registry, "cosign-3")
    del registry.manifests["lab/img", tag]
    (name,) = (key for key in held["manifests"] if key.startswith("sha256:") and key != DIGEST)
    (blob,) = held["blobs"].values()
    bundle = json.loads(blob)
    payload = base64.b64decode(bundle["dsseEnvelope"]["payload"]).replace(b'"predicate":{}', b'"predicate":{"a":1}')
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
    changed = json.dumps(bundle).encode()
    registry.blobs["lab/img", sha(changed)] = changed
    manifest = json.loads(held["manifests"][name])
    manifest["layers"][0] |= {"digest": sha(changed), "size": len(changed)}
    body = json.dumps(manifest).encode()
    del registry.manifests["lab/img", name]
    registry.manifests["lab/img", sha(body)] = (manifest["mediaType"], body)
    registry.referrers = True
    with pytest.raises(SignatureInvalid) as error:
        verify(registry, "a")
    assert "is of another key, or damaged" in (error.value.why or "")


@pytest.mark.parametrize("content", ["", "[]", '{"layers": [1, {"annotations": {}}]}', '{"layers": {}}'])
def test_nonsense_under_the_tag(registry: PushServed, content: str) -> None:
    if content.startswith("{"):
        registry.manifests["lab/img", DIGEST.replace(":", "-") + ".sig"] = (OCI + "manifest.v1+json", content.encode())
    with pytest.raises(SignatureInvalid):
        verify(registry, "a")


def test_a_file_that_is_no_public_key(registry: PushServed, tmp_path: Path) -> None:
    name, access = parse_reference(f"docker://{registry.host}/lab/img:1"), Access(plain_http=(registry.host,))
    for text in (
        "-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\n",
        "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
    ):
        (tmp_path / "key").write_text(text)
        with pytest.raises(FileUnusable, match="is no public key"):
            require_signature(name, (DIGEST,), tmp_path / "key", access, on_event=lambda _: None)
    with pytest.raises(FileUnusable, match="cannot read the key"):
        require_signature(name, (DIGEST,), tmp_path / "missing", access, on_event=lambda _: None)
    assert registry.requests == []
