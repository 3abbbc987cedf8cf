"""A SIF in a registry: pushed, fetched by its own digest, and refused if a byte of it is another one."""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import image_fakes
import pytest
from http_server import PushServed, sha
from layer_cases import base, write_layout

from hpcenv.errors import FileUnusable, ImageMismatch, ImageUnavailable, SpecError
from hpcenv.image.pull import BuiltImage, ConvertOptions, ImageRequest, pull
from hpcenv.image.reference import Platform, parse_layered, parse_sif_reference
from hpcenv.image.registry.blobs import BlobSpec
from hpcenv.image.registry.source import Access
from hpcenv.image.sif_registry import fetch_sif, push_sif, resolve_sif
from hpcenv.image.store.store import Store
from hpcenv.image.store.store_folder import open_store
from hpcenv.image.verify import read_tree_digest
from hpcenv.progress import Event
from hpcenv.project.store_config import StorePlace

APPTAINER = r"""#!{python} -IS
import sys
{build}
if sys.argv[1] == "--version":
    print("apptainer version 1.4.5")
else:
    build(sys.argv[1:], {folder!r} + "/salt", {folder!r} + "/builds")
"""


# As Apptainer writes it for hpcenv.
ZSTD_BUILD = image_fakes.BUILD.replace("-comp gzip", "-comp zstd")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> BuiltImage:
    """A SIF that was converted; a program plays Apptainer where mksquashfs is too old for hpcenv."""
    image_fakes.require_mksquashfs()
    folder = tmp_path_factory.mktemp("made")
    write_layout(folder / "lay", [base()])
    tools = folder / "tools"
    tools.mkdir()
    (tools / "salt").write_bytes(b"files")
    (tools / "apptainer").write_text(APPTAINER.format(python=sys.executable, build=ZSTD_BUILD, folder=str(tools)))
    (tools / "apptainer").chmod(0o755)
    request = ImageRequest(source=parse_layered(f"oci:{folder}/lay"), allow_floating=True)
    place = StorePlace(root=folder / "store")
    return pull(
        request,
        ConvertOptions(),
        place=place,
        environ={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
        on_event=lambda _: None,
    )


@pytest.fixture
def registry() -> Iterator[PushServed]:
    it = PushServed()
    yield it
    it.close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


def access(served: PushServed, **environ: str) -> Access:
    return Access(plain_http=(served.host,), environ={"HOME": "/none", **environ})


def push(served: PushServed, sif: Path, tag: str = "1", **environ: str) -> Any:
    target = parse_sif_reference(f"oras://{served.host}/lab/train:{tag}")
    return push_sif(sif, target, access(served, **environ), on_event=lambda _: None)


def fetch(served: PushServed, reference: str, store: Store, *, spec: BlobSpec | None = None) -> BuiltImage:
    wanted = parse_sif_reference(reference)
    if spec is None:
        spec = resolve_sif(wanted, access(served), allow_floating=False, on_event=lambda _: None).spec
    return fetch_sif(wanted, spec, access(served), platform=Platform(), store=store, on_event=lambda _: None)


def test_a_sif_keeps_its_identity(made: BuiltImage, registry: PushServed, store: Store) -> None:
    pushed = push(registry, made.path)
    assert (pushed.sha256, pushed.size, pushed.uploaded) == (made.record.sif.sha256, made.record.sif.size, True)
    media, manifest = registry.manifests["lab/train", "1"]
    document = json.loads(manifest)
    # apptainer 1.4 internal/pkg/client/oras/image.go has this as an example.
    assert media == document["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    assert document["config"]["mediaType"] == "application/vnd.sylabs.sif.config.v1+json"
    assert [layer["mediaType"] for layer in document["layers"]] == ["application/vnd.sylabs.sif.layer.v1.sif"]
    assert pushed.by_digest == f"oras://{registry.host}/lab/train@{sha(manifest)}"
    for reference in (pushed.reference, pushed.by_digest):
        fetched = fetch(registry, reference, store)
        assert fetched.path.read_bytes() == made.path.read_bytes()
        assert fetched.record.digest == f"sha256:{made.record.sif.sha256}"
        assert fetched.record.tree_sha256 == read_tree_digest(made.path)
    record = store.record(fetched.record.digest)
    assert record is not None
    assert record.references == (pushed.by_digest, pushed.reference)
    # The SIF is in the store once, under its own name only.
    assert os.listdir(store.blobs / "sha256") == os.listdir(store.tmp) == []


def test_what_the_registry_has_is_not_sent_again(made: BuiltImage, registry: PushServed) -> None:
    first = push(registry, made.path)
    registry.requests.clear()
    again = push(registry, made.path, "2")
    assert (again.uploaded, again.by_digest) == (False, first.by_digest)
    assert not any("uploads" in path for path, _ in registry.requests)


def test_one_changed_byte_is_refused(made: BuiltImage, registry: PushServed, store: Store) -> None:
    pushed = push(registry, made.path)
    key = ("lab/train", f"sha256:{pushed.sha256}")
    changed = bytearray(registry.blobs[key])
    changed[-5] ^= 1
    registry.blobs[key] = bytes(changed)
    with pytest.raises(ImageUnavailable, match="has not the expected bytes|wrong bytes|differ"):
        fetch(registry, pushed.reference, store)
    assert store.list_images() == ()
    # The registry's operator makes it consistent again under the tag: the lock still names the old SIF.
    (store.root.parent / "other.sif").write_bytes(changed)
    other = push(registry, store.root.parent / "other.sif")
    del registry.blobs[key]
    assert other.sha256 != pushed.sha256
    with pytest.raises(ImageUnavailable, match="does not have"):
        fetch(registry, pushed.reference, store, spec=BlobSpec(digest=key[1], size=pushed.size))


def test_a_changed_sif_in_the_store_is_fetched_again(made: BuiltImage, registry: PushServed, store: Store) -> None:
    pushed = push(registry, made.path)
    first = fetch(registry, pushed.reference, store)
    first.path.chmod(0o644)
    with open(first.path, "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"x")
    first.path.chmod(0o444)
    again = fetch(registry, pushed.reference, store)
    assert (again.reused, again.path.read_bytes() == made.path.read_bytes()) == (False, True)


def test_what_is_no_sif(made: BuiltImage, registry: PushServed, store: Store, tmp_path: Path) -> None:
    (tmp_path / "text.sif").write_text("no")
    with pytest.raises(ImageMismatch):
        push(registry, tmp_path / "text.sif")
    assert registry.blobs == {}
    registry.image()
    with pytest.raises(ImageUnavailable) as error:
        fetch(registry, f"oras://{registry.host}/lab/img:1", store)
    assert f"hpcenv image pull docker://{registry.host}/lab/img:1" in (error.value.hint or "")
    # A registry that names another file a SIF.
    pushed = push(registry, made.path)
    registry.blobs["lab/train", sha(b"no")] = b"no"
    document = json.loads(registry.manifests["lab/train", "1"][1])
    document["layers"][0] |= {"digest": sha(b"no"), "size": 2}
    registry.manifests["lab/train", "1"] = (document["mediaType"], json.dumps(document).encode())
    with pytest.raises(ImageMismatch):
        fetch(registry, pushed.reference, store)
    assert store.list_images() == ()


@pytest.mark.parametrize("text", ["oras://h:5/a", "oras://h:5/a@sha256:" + "0" * 64])
def test_a_push_needs_a_tag(made: BuiltImage, text: str) -> None:
    with pytest.raises(SpecError, match="cannot push to"):
        push_sif(made.path, parse_sif_reference(text), Access(), on_event=lambda _: None)


def test_a_floating_name_is_refused(registry: PushServed) -> None:
    for tag in ("", ":latest"):
        with pytest.raises(SpecError, match="names another image every few weeks"):
            resolve_sif(
                parse_sif_reference(f"oras://{registry.host}/lab/x{tag}"), access(registry), allow_floating=False,
                on_event=lambda _: None,
            )  # fmt: skip


def test_another_platform_is_refused(made: BuiltImage, registry: PushServed, store: Store) -> None:
    pushed = push(registry, made.path)
    wanted = parse_sif_reference(pushed.reference)
    spec = BlobSpec(digest=f"sha256:{pushed.sha256}", size=pushed.size)
    platform = Platform(architecture="arm64")
    with pytest.raises(ImageUnavailable, match="is for linux/amd64"):
        fetch_sif(wanted, spec, access(registry), platform=platform, store=store, on_event=lambda _: None)


# -- uploads --------------------------------------------------------------------------------


def test_an_upload_that_breaks_is_sent_again(made: BuiltImage, registry: PushServed) -> None:
    faults = [(503, {}, b""), (404, {}, b""), None]
    registry.upload = lambda handler: faults.pop(0) if handler.command == "PUT" and faults else None
    pushed = push(registry, made.path)
    assert pushed.uploaded
    assert registry.blobs["lab/train", f"sha256:{pushed.sha256}"] == made.path.read_bytes()


def test_a_refused_upload_says_what_the_registry_says(made: BuiltImage, registry: PushServed) -> None:
    text = b'{"errors":[{"code":"DENIED","message":"the quota of lab is used up"}]}'
    registry.upload = lambda handler: (403, {}, text) if handler.command == "POST" else None
    with pytest.raises(ImageUnavailable) as error:
        push(registry, made.path)
    assert "the quota of lab is used up" in (error.value.why or "")
    registry.upload = lambda handler: (413, {}, b"too large") if handler.command == "PUT" else None
    with pytest.raises(ImageUnavailable, match="status 413"):
        push(registry, made.path)


def test_a_file_that_changes_meanwhile_is_never_stored(made: BuiltImage, registry: PushServed, tmp_path: Path) -> None:
    path = tmp_path / "moving.sif"
    path.write_bytes(made.path.read_bytes())

    def change(handler: Any) -> None:
        if handler.command == "POST":
            with open(path, "r+b") as file:
                file.seek(-5, os.SEEK_END)
                file.write(b"x")

    registry.upload = change
    # The empty configuration goes first: its upload changes the file, whose digest is known by then.
    with pytest.raises(FileUnusable, match="changed while it was uploaded"):
        push(registry, path)
    assert all(len(body) < 10 for body in registry.blobs.values())


def test_the_progress_of_an_upload(made: BuiltImage, registry: PushServed) -> None:
    seen: list[Event] = []
    target = parse_sif_reference(f"oras://{registry.host}/lab/train:1")
    push_sif(made.path, target, access(registry), on_event=seen.append)
    pushes = [event for event in seen if event.phase == "push"]
    assert pushes[-1].done == pushes[-1].total == made.record.sif.size


# -- credentials ----------------------------------------------------------------------------


def with_login(folder: Path, host: str) -> str:
    auth = base64.b64encode(b"alice:secret").decode()
    (folder / "auth.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    return str(folder / "auth.json")


def require_login(served: PushServed) -> None:
    """Let the registry demand a password for each request."""

    def guarded(handler: Any) -> Any:
        if handler.headers.get("Authorization"):
            return None
        return 401, {"Www-Authenticate": 'Basic realm="x"'}, b""

    served.upload = guarded
    served.paths["/v2/"] = lambda handler: guarded(handler) or (200, {}, b"{}")


def test_an_upload_elsewhere_gets_no_credentials(made: BuiltImage, registry: PushServed, tmp_path: Path) -> None:
    storage = PushServed()
    try:
        require_login(registry)
        registry.location = lambda path: f"http://{storage.host}{path}"
        login = with_login(tmp_path, registry.host)
        # Another host without encryption is refused, also for a registry with plain http.
        with pytest.raises(ImageUnavailable, match="names an address that hpcenv does not use"):
            push(registry, made.path, REGISTRY_AUTH_FILE=login)
        assert storage.requests == []
    finally:
        storage.close()


def test_the_saved_login_goes_to_the_registry(made: BuiltImage, registry: PushServed, tmp_path: Path) -> None:
    require_login(registry)
    with pytest.raises(ImageUnavailable, match="denied"):
        push(registry, made.path)
    push(registry, made.path, REGISTRY_AUTH_FILE=with_login(tmp_path, registry.host))
    puts = [headers for path, headers in registry.requests if "digest=" in path]
    assert puts
    assert all(headers["Authorization"].startswith("Basic ") for headers in puts)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, Path]:
    folder = tmp_path_factory.mktemp("tls")
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    words += ["-keyout", str(folder / "key"), "-out", str(folder / "crt")]
    subprocess.run(words, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "crt", folder / "key")
    return context, folder / "crt"


def test_https_storage_gets_the_bytes_and_no_login(made: BuiltImage, tls: Any, tmp_path: Path) -> None:
    context, crt = tls
    registry, storage = PushServed(context), PushServed(context)
    try:
        require_login(registry)
        registry.location = lambda path: f"https://{storage.host}{path}"
        environ = {"HOME": "/none", "REGISTRY_AUTH_FILE": with_login(tmp_path, registry.host)}
        target = parse_sif_reference(f"oras://{registry.host}/lab/train:1")
        # The storage holds the blobs now, and the registry does not know of them.
        with pytest.raises(ImageUnavailable, match="status 400"):
            push_sif(made.path, target, Access(ca_file=crt, environ=environ), on_event=lambda _: None)
        assert storage.blobs["lab/train", f"sha256:{made.record.sif.sha256}"] == made.path.read_bytes()
        assert not any("Authorization" in headers for _, headers in storage.requests)
        # From https to http: refused.
        registry.location = lambda path: f"http://{storage.host}{path}"
        sent = len(storage.requests)
        with pytest.raises(ImageUnavailable, match="does not use"):
            push_sif(made.path, target, Access(ca_file=crt, environ=environ), on_event=lambda _: None)
        assert len(storage.requests) == sent
    finally:
        registry.close()
        storage.close()


@pytest.mark.parametrize("location", ["http://[", "https://[x/y"])
def test_an_address_for_the_bytes_that_is_none_is_refused(
    made: BuiltImage, registry: PushServed, tmp_path: Path, location: str
) -> None:
    registry.location = lambda path: location
    target = parse_sif_reference(f"oras://{registry.host}/lab/train:1")
    with pytest.raises(ImageUnavailable, match="named no usable address"):
        push_sif(
            made.path, target, Access(plain_http=(registry.host,), environ={"HOME": "/none"}), on_event=lambda _: None
        )


# -- the commands ---------------------------------------------------------------------------


def test_the_verbs(made: BuiltImage, registry: PushServed, tmp_path: Path, hpcenv: Any) -> None:
    environ = {"PATH": "/nonexistent", "HOME": str(tmp_path)}
    name = f"oras://{registry.host}/lab/train:1"
    done = hpcenv("image", "push", str(made.path), name, "--plain-http", cwd=tmp_path, environ=environ)
    assert done.status == 0, done.stderr
    by_digest = done.stdout.strip()
    assert by_digest.startswith(f"oras://{registry.host}/lab/train@sha256:")
    words = ("image", "pull", by_digest, "--plain-http", "--store", "s")
    done = hpcenv(*words, cwd=tmp_path, environ=environ)
    assert done.status == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == made.path.read_bytes()
    assert "fetched as a finished SIF, tree sha256:" in done.stderr
    assert hpcenv(*words, "--json", cwd=tmp_path, environ=environ).envelope["data"]["reused"]
    refused = hpcenv(*words, "--no-proof", cwd=tmp_path, environ=environ)
    assert (refused.status, "is a finished SIF" in refused.stderr) == (2, True)
    refused = hpcenv("image", "verify", name, cwd=tmp_path, environ=environ)
    assert "has nothing to convert or to compare with" in refused.stderr
    done = hpcenv("image", "push", str(made.path), name, cwd=tmp_path, environ=environ)
    assert f"hpcenv image push {made.path} {name} --plain-http {registry.host}" in done.stderr


@pytest.mark.parametrize(
    ("name", "says", "noted"),
    [("singularity", "singularity-ce version 4.5.1", True), ("singularity", "apptainer version 1.4.5", False)],
)
def test_a_sif_that_the_runtime_here_does_not_read_is_named(
    made: BuiltImage, registry: PushServed, tmp_path: Path, hpcenv: Any, name: str, says: str, noted: bool
) -> None:
    assert made.record.sif.compression == "zstd"
    pushed = push(registry, made.path)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / name).write_text(f"#!/bin/sh\necho {says}\n")
    (tools / name).chmod(0o755)
    words = ("image", "pull", pushed.by_digest, "--plain-http", "--store", "s")
    done = hpcenv(*words, cwd=tmp_path, environ={"PATH": str(tools), "HOME": str(tmp_path)})
    assert done.status == 0, done.stderr
    text = "SingularityCE, which starts containers here, does not read that; who pushed it can make one"
    assert (text in done.stderr) is noted


def test_the_reference() -> None:
    reference = parse_sif_reference("oras://ghcr.io/lab/train:1")
    assert str(reference) == "oras://ghcr.io/lab/train:1"
    assert str(replace(reference, tag=None, digest="sha256:" + "0" * 64)).endswith("@sha256:" + "0" * 64)
    for text in ("oras://", "oras://h:1/A", "docker://h:1/a"):
        with pytest.raises(SpecError):
            parse_sif_reference(text)
